"""An op's inputs in a few words."""

from __future__ import annotations

from llamadiff.ext.graph.op import Op


def inputs_of(op: Op) -> str:
    """Types and shapes, ggml's first axis first: ``q6_K[256,512] f32[256,5]``."""
    return " ".join(f"{s.kind}{list(reversed(s.values.shape))}".replace(" ", "") for s in op.sources if s is not None)
