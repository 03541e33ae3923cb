"""How a right engine does things in its own way: its roundings, its legal choices."""
