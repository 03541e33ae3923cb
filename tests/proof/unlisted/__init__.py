"""Mistakes that no known bug describes, put into an engine of the tests' own; what is read back is held to them."""
