"""What quantization costs: two files of one model, how far apart, which tensors, and what bytes would recover."""
