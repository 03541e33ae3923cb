"""Checkpoints made with transformers, a converter of the tests' own, and the mistakes that it can make."""
