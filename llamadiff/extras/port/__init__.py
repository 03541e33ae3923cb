"""A checkpoint's own code against llama.cpp's graph of the file that was made of it."""
