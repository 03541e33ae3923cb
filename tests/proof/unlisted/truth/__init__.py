"""Checks of the sentences that are read back, by kind of op."""
