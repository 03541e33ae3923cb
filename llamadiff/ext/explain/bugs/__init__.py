"""Known bugs, one file a family."""
