"""What a wrong op did, read back from what it gave: true sentences for errors that no known bug describes."""
