"""Tokenizers: many texts, the smallest on which two part, and which change to the independent one makes another."""
