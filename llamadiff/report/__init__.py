"""Comparison -> what people and programs read. No renderer computes a number."""
