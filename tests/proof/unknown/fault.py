"""What a fault is: an engine's function that is replaced, and the report that it is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Fault:
    name: str
    put: Callable[[Any], None]  # makes an engine wrong
    model: str
    first: str  # the first tap of llamadiff's order whose values part
    source: str  # repository and number of the report
    wrong: str
    batches: tuple[int, ...]


class Faults(list[Fault]):
    """A decorator of the functions that make an engine wrong."""

    def __call__(self, model: str, first: str, source: str, batches: Any = (10, 1, 1, 1), *, of: str = "") -> Any:
        """``of``: what the function is in place of; it is given the engine, the right one, and what that is given."""

        def keep(f: Callable[..., Any]) -> None:
            put = (lambda engine: _replace(engine, of, f)) if of else f
            self.append(Fault(f.__name__, put, model, first, source, f.__doc__ or "", batches))

        return keep


def _replace(engine: Any, of: str, f: Callable[..., Any]) -> None:
    where = getattr(engine, "op", engine)
    right = getattr(where, of)
    if "m" not in signature(right).parameters:
        setattr(where, of, lambda *a: f(engine, right, *a))
    else:  # an op that is given the net
        setattr(where, of, lambda m, *a: f(m, lambda *b: right(m, *b), *a))


def bf16(x: np.ndarray) -> np.ndarray:
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
