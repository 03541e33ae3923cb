"""What computes the right values: the reference engine, or llama.cpp's own graph."""
