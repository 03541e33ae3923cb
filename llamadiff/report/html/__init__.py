"""Comparison -> one page of HTML, opened from disk: words from a template, pictures by its script."""
