"""The model that ships with llamadiff, and how it is made."""
