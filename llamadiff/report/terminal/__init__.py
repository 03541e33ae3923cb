"""Comparison -> a terminal."""
