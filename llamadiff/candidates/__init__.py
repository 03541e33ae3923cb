"""Where a candidate comes from: one file a kind, each of which ends in the same trace."""

TRACES = (".safetensors", ".npz")  # endings of files that need no --candidate, and that a cmd: may add to {out}
