"""Words in, exit code out."""
