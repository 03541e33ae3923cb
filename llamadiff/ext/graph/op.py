"""An op of ggml in NumPy: its operands, parameters and result; and the table of the functions that compute ops.

Arrays have ggml's four axes, outermost first, [ne3, ne2, ne1, ne0], after any number of batch axes. Every function
works on the last four and broadcasts over the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff import plugins
from llamadiff.ext.graph import ops
from llamadiff.ext.graph.stored import kept_as
from llamadiff.numerics import metrics
from llamadiff.numerics.arithmetic import round_to
from llamadiff.numerics.policies import F32, NATIVE, operands, rounding_type
from llamadiff.numerics.types import HALVES

Array = NDArray[Any]


@dataclass(frozen=True)
class Operand:
    """One source of an op: its values, ggml's name of its type (``f32``, ``q8_0``, ``i32``) and its own name.

    ``decode`` makes floats of rows of a weight as the file keeps them, where that is not to be done as its type says.
    ``minima`` of a weight's blocks [.., out, in / 32] multiply what Q8_1 adds to the sums of activations.
    """

    values: Array
    kind: str = "f32"
    name: str = ""
    decode: Callable[[Array], Array] | None = None
    minima: Array | None = None


@dataclass(frozen=True)
class Op:
    """One node of a graph, as it is computed.

    ``name`` is ggml's name of the op (of the unary op or GLU itself, where it is one); ``shape`` [ne3, ne2, ne1, ne0]
    and ``kind`` are the result's; ``params`` are the bytes of op_params; a missing source is None. ``exact``: in
    float32 throughout; else rounded where ggml's CPU kernels round, and where CPUs differ, as ``kernel`` says: a number
    that the op's function knows. ``q8``: how the CPU rounds to eight bits (cpu.Q8_WAYS).
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    params: bytes
    sources: tuple[Operand | None, ...]
    exact: bool = False
    kernel: int = 0
    q8: str = ""

    @cached_property
    def ints(self) -> Array:
        """The parameters as int32."""
        return np.frombuffer(self.params, np.int32)

    @cached_property
    def floats(self) -> Array:
        """The parameters as float32."""
        return np.frombuffer(self.params, np.float32)

    def x(self, place: int = 0) -> Array:
        """The values of a source that must be there."""
        source = self.sources[place]
        assert source is not None
        return source.values

    def alike(self, *places: int) -> list[Array]:
        """The values of sources, each with the batch axes that they have together."""
        found = [self.x(place) for place in places]
        batch = np.broadcast_shapes(*(x.shape[:-4] for x in found))
        return [np.broadcast_to(x, (*batch, *x.shape[-4:])) for x in found]

    def source_kind(self, place: int = 0) -> str:
        """ggml's name of a source's type."""
        source = self.sources[place]
        assert source is not None
        return source.kind

    def rounds_to(self, kind: str) -> str:
        """What this op rounds activations to before a product with weights of a type."""
        return rounding_type(self._policy, kind.upper(), {"q8": self.q8})

    def rounded(self, x: Array, kind: str) -> tuple[Array, ...]:
        """Activations so rounded; behind them what Q8_1 adds to the sums of their blocks."""
        return operands(self._policy, kind.upper(), {"q8": self.q8}, x)

    @property
    def _policy(self) -> str:
        return F32 if self.exact else NATIVE

    def optional(self, place: int) -> Array | None:
        """The values of a source that may be missing."""
        source = self.sources[place] if place < len(self.sources) else None
        return None if source is None else source.values


Function = Callable[[Op], Array]


def _one_kernel(n: Op) -> tuple[int, ...]:
    return (0,)


def _no_rounding(n: Op) -> float:
    return 0.0


@dataclass(frozen=True)
class Kernels:
    """How ggml computes an op that it rounds: its kernels by number, and the NMSE of roundings in an unknown order."""

    numbers: Callable[[Op], tuple[int, ...]] = _one_kernel
    unfollowed: Callable[[Op], float] = _no_rounding


# Ops that nothing can be said of: a program's own functions, and what training alone needs.
UNJUDGED = frozenset({
    "MAP_CUSTOM1", "MAP_CUSTOM2", "MAP_CUSTOM3", "CUSTOM", "REPEAT_BACK", "SILU_BACK", "RMS_NORM_BACK",
    "GET_ROWS_BACK", "SOFT_MAX_BACK", "IM2COL_BACK", "POOL_2D_BACK", "FLASH_ATTN_BACK", "CROSS_ENTROPY_LOSS_BACK",
    "OPT_STEP_ADAMW", "OPT_STEP_SGD",
})  # fmt: skip
_OPS: dict[str, Function] = {}
ROUNDING: dict[str, Kernels] = {}  # ops that ggml computes with roundings of its own, and exactly in some kernels
_STORED: dict[str, Function] = {}  # ops whose results may have another type -> what gives them in float32
_OFF = 2.0**-20  # how far off a float32 may be before it is rounded to 16 bits, of itself


def op(*names: str, rounds: bool | Kernels = False, stored: bool = False) -> Callable[[Function], Function]:
    """Register the function that computes these ops; ``rounds``: it heeds ``Op.exact``.

    ``stored``: ggml has it in other types too, where it computes in float32 and rounds what comes of it.
    """

    def register(function: Function) -> Function:
        _OPS.update(dict.fromkeys(names, in_its_type(function) if stored else function))
        if stored:
            _STORED.update(dict.fromkeys(names, function))
        if rounds:
            ROUNDING.update(dict.fromkeys(names, rounds if isinstance(rounds, Kernels) else Kernels()))
        return function

    return register


def in_its_type(function: Function) -> Function:
    """The same, with results as their type keeps them."""

    def kept(n: Op) -> Array:
        y = function(n)
        return y if n.kind == "f32" else kept_as(y, n.kind, q8=n.q8)

    return kept


def arithmetics(n: Op) -> Iterator[Op]:
    """An op in every way in which ggml may compute it."""
    if n.name in ROUNDING:
        yield from (replace(n, exact=False, kernel=kernel) for kernel in ROUNDING[n.name].numbers(n))
    yield replace(n, exact=True)


def rounded_for(n: Op) -> set[str]:
    """The types that an op rounds for: of what it multiplies, or of what it stores."""
    kinds = [n.kind] if n.name not in ROUNDING else [source.kind for source in n.sources if source is not None]
    return {kind.upper() for kind in kinds}


def unfollowed(n: Op) -> float:
    """NMSE of what ggml rounds within an op in an order that is not known: of its own result, at most."""
    return (ROUNDING[n.name].unfollowed(n) if n.name in ROUNDING else 0.0) + _between(n)


def _between(n: Op) -> float:
    """NMSE of results that lie so near the middle of two numbers of 16 bits that a float32's last digits choose."""
    kind = n.kind.upper()
    if n.name not in _STORED or kind not in HALVES:
        return 0.0
    y = _STORED[n.name](n).astype(np.float32)
    below, above = (round_to(y * np.float32(1 + off), kind).astype(np.float64) for off in (-_OFF, _OFF))
    seen = np.isfinite(below) & np.isfinite(above)
    apart, size = (np.square(values[seen]).sum() for values in (above - below, y.astype(np.float64)))
    return metrics.ratio(float(apart), float(size))


@cache
def function_of(name: str) -> Function | None:
    """The function that computes an op; None if there is none."""
    own = (f"{ops.__name__}.{family.name}" for family in iter_modules(ops.__path__))
    for family in (*own, *(name for names in plugins.ask_all(lambda each: each.ops()) for name in names)):
        import_module(family)
    return _OPS.get(name)


def compute(n: Op) -> Array:
    """What an op gives, which has a function."""
    function = function_of(n.name)
    assert function is not None, n.name
    return function(n)
