"""The verbs: compare, diff, check, capture, backend, variants."""
