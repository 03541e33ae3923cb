"""llama.cpp as the baseline: the only place that imports llama_cpp, and only in a child process."""
