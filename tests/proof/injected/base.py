"""What an injection is, the run it is for, and how faulty engines are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from faulty import with_maths
from llamaref import Engine, ops
from llamaref.config import Rope

Array = Any
Build = Callable[[Path], Engine]

TOKENS = (1, 17, 5, 80, 42, 9, 33, 64, 5, 2, 71, 28)
DECODE = 4  # the last tokens, of injections that only go wrong in decode steps
PREFILL = len(TOKENS) - DECODE
DENSE = ("llama", "qwen2", "qwen3")
EVERY = (*DENSE, "stablelm", "moe")


@dataclass(frozen=True)
class Injection:
    """A known mistake (``cause``) as somebody's engine would make it, on small models and types of weights.

    ``words`` are the taps it falsifies, first the one to be named, at ``layer`` (or outside the layers).
    ``decode``: how many of the last tokens are decode steps. A ``choice`` is legal: what it falsifies cancels.
    ``says``: of a way of computing that is no mistake, what the report says of each tap that it changes.
    """

    name: str
    cause: str
    words: tuple[str, ...]
    build: Build
    models: tuple[str, ...] = ("llama",)
    kinds: tuple[str, ...] = ("F16", "Q8_0")
    decode: int = 0
    layer: int = 0
    choice: bool = False
    says: str = ""

    @property
    def harmless(self) -> bool:
        return bool(self.says)


class Run:
    """What a fault may know: the engine, the layer it is in, and every tap that has passed."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.layer = engine, 0
        self.seen: dict[str, Array] = {}

    def __getitem__(self, word: str) -> Array:
        """A tap of this layer, or of none."""
        return self.seen[word] if word in self.seen else self.seen[f"{word}-{self.layer}"]

    @property
    def layer_input(self) -> Array:
        return self.seen["embd" if self.layer == 0 else f"l_out-{self.layer - 1}"]

    def weight(self, stem: str) -> Array:
        return self.engine.w.vector(f"blk.{self.layer}.{stem}.weight")


Fault = Callable[[Array, Run], Array]


class _Altering:
    """A tap before another one: it changes what passes."""

    def __init__(self, inner: Any, engine: Engine, faults: dict[str, Fault]) -> None:
        self.inner, self.run, self.faults = inner, Run(engine), faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, name: str, x: Array) -> Array:
        word, _, layer = name.partition("-")
        self.run.layer = int(layer or 0)
        if word in self.faults:
            x = np.asarray(self.faults[word](x, self.run), x.dtype)
        self.run.seen[name] = x
        return self.inner(name, x)


def altered(**faults: Fault) -> Build:
    """An engine whose ops give something else: word -> fault(right result, run)."""

    class Altered(Engine):
        def forward(self, tokens: Any, positions: Any = None, cache: Any = None, tap: Any = None) -> Array:
            return super().forward(tokens, positions, cache, _Altering(tap, self, faults))

    return Altered


def altered_at(words: Iterable[str], fault: Fault) -> Build:
    """The same fault at several words."""
    return altered(**dict.fromkeys(words, fault))


def with_linear(stems: Iterable[str], fault: Callable[[Engine, Array, str], Array]) -> Build:
    """An engine whose products with these weights are fault(engine, x, name)."""

    class Linear(Engine):
        def linear(self, x: Array, name: str, tap: Any) -> Array:
            return fault(self, x, name) if name.rpartition(".")[2] in stems else super().linear(x, name, tap)

    return Linear


def product(engine: Engine, x: Array, name: str) -> Array:
    """x @ W.T, without a bias."""
    return engine.w.product(f"{name}.weight", x)


def bias(engine: Engine, name: str) -> Array:
    """The bias of a product; 0 if there is none."""
    return engine.w.vector(f"{name}.bias") if f"{name}.bias" in engine.w else np.float32(0)


def rotating(fault: Callable[[Callable[..., Array], Array, Array, Array], Array]) -> Build:
    """An engine that rotates heads by fault(right rotation, x, cos, sin), whatever the layout."""

    def faulty(right: Callable[..., Array]) -> Callable[..., Array]:
        return lambda x, cos, sin: np.asarray(fault(right, x, cos, sin), x.dtype)

    return with_maths(rope_pairs=faulty(ops.rope_pairs), rope_halves=faulty(ops.rope_halves))


def with_rope(change: Callable[[Rope], Rope]) -> Build:
    """An engine that takes RoPE's settings for others."""
    return with_maths(
        rope_angles=lambda rope, positions, factors=None: ops.rope_angles(change(rope), positions, factors)
    )


def to_halves(x: Array) -> Array:
    """Values of each head [..., dim] from neighbours (2i, 2i+1) to halves (i, i + dim / 2)."""
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)


def to_pairs(x: Array) -> Array:
    """Values of each head [..., dim] from halves (i, i + dim / 2) to neighbours (2i, 2i+1)."""
    return x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape)


def round_f16(x: Array) -> Array:
    """Through float16."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float16).astype(np.float32)


def round_bf16(x: Array) -> Array:
    """Through bfloat16, nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


def rms(x: Array, eps: float) -> Array:
    """RMSNorm without a weight."""
    wide = np.asarray(x, np.float64)
    return wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
