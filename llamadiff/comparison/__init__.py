"""The verbs, and their result."""
