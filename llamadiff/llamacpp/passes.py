"""What a slice may add to a run of llama.cpp: who carries it out, who tells of its passes' inputs, who checks those.

The first two are in llama.cpp's process, which is told their names, ``module:name``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from llamadiff.llamacpp.steps import Step
    from llamadiff.llamacpp.tensors import Tensor


class Listener(Protocol):
    """What tells of the inputs of passes; it is made with the Feed that it tells them to."""

    def begin(self) -> None:
        """A pass begins, or a context."""

    def tell(self, node: Tensor, start: int, rows: int) -> None:
        """What a node is given, before it runs."""


class NoListener:
    """Tells nothing."""

    def __init__(self, *_: object) -> None: ...

    def begin(self) -> None: ...

    def tell(self, node: Tensor, start: int, rows: int) -> None: ...


class PassCheck(Protocol):
    """What is known of a context's history, and the ``faults`` of passes that were given something else."""

    faults: list[str]
    unsure: list[str]  # what may be a fault, where llama.cpp does not say enough to tell

    def set_window(self, length: int | None) -> None:
        """Some of the model's layers may have a window of this length; None: llama.cpp does not say."""

    def do(self, step: Step) -> None:
        """A step, before what comes of it is told."""

    def run(self, places: Sequence[int]) -> None:
        """These tokens of the batch are run together."""

    def check_node(self, answer: Mapping[str, Any], data: Sequence[Any], order: str) -> None:
        """What a Listener told of a node."""


class NoCheck:
    """Finds no fault."""

    def __init__(self) -> None:
        self.faults, self.unsure = list[str](), list[str]()

    def set_window(self, length: int | None) -> None: ...

    def do(self, step: Step) -> None: ...

    def run(self, places: Sequence[int]) -> None: ...

    def check_node(self, answer: Mapping[str, Any], data: Sequence[Any], order: str) -> None: ...
