"""The runs of the gallery: depths, counts of wrong taps, noise, what cannot be told, decode steps, a graph alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from llamaref import Engine, ops
from models.small import write_model

import llamadiff
from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How, Run
from llamadiff.result.comparison import Comparison
from llamadiff.system.progress import silent
from llamadiff.verbs import demo

TOKENS = tuple(range(3, 15))


def model_of(layers: int) -> Path:
    """A small model that is as deep as that."""
    folder = Path(tempfile.gettempdir()) / "llamadiff-gallery"
    folder.mkdir(exist_ok=True)
    path = folder / f"l{layers}.gguf"
    return path if path.exists() else write_model(path, layers=layers)


class _Rotated:
    """RoPE that rotates the other pairs in some layers; a layer rotates twice, Q and then K."""

    def __init__(self, layers: Collection[int]) -> None:
        self.layers, self.calls = layers, 0

    def __call__(self, *arguments: Any) -> Any:
        layer, self.calls = self.calls // 2, self.calls + 1
        return (ops.rope_halves if layer in self.layers else ops.rope_pairs)(*arguments)


def rotated(layers: int, wrong: Collection[int], spoiled: Collection[str] = ()) -> Comparison:
    """A run whose RoPE is wrong in some layers, and whose ``spoiled`` taps hold other values."""
    model = model_of(layers)
    maths = SimpleNamespace(**{**vars(ops), "rope_pairs": _Rotated(wrong)})
    trace = record(Engine(model, maths=maths), list(TOKENS), "my-engine")
    for name in spoiled:
        trace.stored(name)[...] *= np.float32(1.1)
    return llamadiff.compare(model, TOKENS, candidate=trace)


def unknown() -> Comparison:
    """A bug that nobody has had yet."""

    def bent(gate: Any, up: Any) -> Any:
        return ops.swiglu(gate, up) * np.where(gate < -0.05, 1.4 + 0.3 * np.sin(40 * gate), 1)

    model = model_of(24)
    trace = record(Engine(model, maths=SimpleNamespace(**{**vars(ops), "swiglu": bent})), list(TOKENS), "my-engine")
    return llamadiff.compare(model, TOKENS, candidate=trace)


def noise() -> Comparison:
    """All that a right engine computes, kept in 16 bits."""
    model = model_of(24)
    trace = record(Engine(model), list(TOKENS), "my-engine")
    for values in map(trace.stored, trace):
        values[...] = values.astype(np.float16)
    return llamadiff.compare(model, TOKENS, candidate=trace)


def unchecked() -> Comparison:
    """Two traces that differ, without the model."""
    model = model_of(24)
    maths = SimpleNamespace(**{**vars(ops), "rope_pairs": _Rotated([11])})
    return llamadiff.diff(
        record(Engine(model), list(TOKENS), "right"), record(Engine(model, maths=maths), list(TOKENS), "my-engine")
    )


def graph_only() -> Comparison:
    """llama.cpp's graph, node by node, as of an architecture that the reference engine does not know."""
    return llamadiff.compare(model_of(24), TOKENS, how=How(engine="graph"))


CASES: dict[str, Callable[[], Comparison]] = {
    "right-3": lambda: demo.run(silent)[0],
    "wrong-3": lambda: demo.run(silent)[1],
    "right-24": lambda: llamadiff.compare(model_of(24), TOKENS),
    "one-24": lambda: rotated(24, (), ["ffn_up-11"]),
    "rope-24": lambda: rotated(24, [11]),
    "every-24": lambda: rotated(24, range(24)),
    "one-80": lambda: rotated(80, [47]),
    "every-80": lambda: rotated(80, range(80)),
    "thirty-80": lambda: rotated(80, range(0, 30, 2)),
    "unknown-24": unknown,
    "several-24": lambda: rotated(24, [5], ["ffn_up-9", "kqv_out-17", "attn_norm-20"]),
    "right-80": lambda: llamadiff.compare(model_of(80), TOKENS),
    "noise-24": noise,
    "unchecked-24": unchecked,
    "decode-24": lambda: llamadiff.compare(model_of(24), Run(tokens=TOKENS, n_predict=3)),
    "graph": graph_only,
}
