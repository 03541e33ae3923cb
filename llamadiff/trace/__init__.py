"""The trace file and the words in it: taps, metadata, tokens as text."""
