"""Tests of what shows a Comparison, and comparisons that are made up for them."""
