"""A tokenizer against llama.cpp's and an independent one: on many texts, the smallest on which they part, and why."""
