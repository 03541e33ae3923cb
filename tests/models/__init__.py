"""Models with random weights, of architectures and types that real files have, made by llama.cpp itself."""
