"""The model that ships with llamadiff."""
