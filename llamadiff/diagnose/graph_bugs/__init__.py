"""Known bugs as changes of single nodes of a recorded graph: one file for each kind of op."""
