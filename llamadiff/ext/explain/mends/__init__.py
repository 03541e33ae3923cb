"""The right code of each kind of op, in C, Rust and Python: what ``llamadiff explain`` shows beside a bug."""
