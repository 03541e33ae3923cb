"""The result of a run: a Comparison and its parts. Plain data."""
