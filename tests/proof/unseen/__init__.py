"""Known bugs in architectures that the reference engine's tests never show: injected by an engine of the tests' own."""
