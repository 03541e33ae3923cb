"""The verbs (compare, diff, check, record) and their result, a Comparison."""
