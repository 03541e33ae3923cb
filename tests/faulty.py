"""Ten of the injected bugs, which tests of everything else take; and the reference engine with other maths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llamaref import Engine, ops
from proof.injected import BUGS as INJECTED

BUGS = tuple(
    INJECTED[name]
    for name in (
        "rope: other layout", "rope: base 500000", "norm: epsilon times 10", "bias: none on V", "norm: none of Q and K",
        "heads tiled in scores", "gate and up swapped", "no residual", "mask shows the next", "norm: none at the end",
    )
)  # fmt: skip


def with_maths(**changed: Any) -> Callable[[Path], Engine]:
    """An engine whose maths differs in the functions given; a softmax is so for long prompts, too."""
    of_many = {"causal_softmax_of_many": changed["causal_softmax"]} if "causal_softmax" in changed else {}
    return lambda path: Engine(path, maths=SimpleNamespace(**{**vars(ops), **of_many, **changed}))
