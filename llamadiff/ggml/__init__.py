"""ggml's ops in NumPy, and graphs of them: for whatever llama.cpp can run."""
