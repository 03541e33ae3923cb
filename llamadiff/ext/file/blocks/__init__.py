"""Blocks of quantized values: where their fields lie, and how people misread them."""
