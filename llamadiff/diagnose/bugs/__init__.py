"""Known bugs on the taps of the reference engine, one file a family."""
