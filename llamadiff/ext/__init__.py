"""Slices: one capability each, found by their folders (plugins.py). The core runs without any of them."""
