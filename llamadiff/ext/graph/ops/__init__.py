"""One module for each family of ops."""
