"""Nodes of llama.cpp's graph as its process described them: what they read, and how they lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from llamadiff.ext.graph.repro import Memory
from llamadiff.llamacpp.sent_tensor import NUMPY_TYPES, SentTensor
from llamadiff.llamacpp.tensors import DEVICE


@dataclass(frozen=True)
class Node(SentTensor):
    """A tensor that an op makes of its ``sources``; ``base``: the one that it is a view of."""

    sources: tuple[Node, ...] = ()
    base: Node | None = None

    @property
    def op(self) -> str:
        return str(self.said["op"])

    @property
    def tap(self) -> str | None:
        """The tap that it is, of a node that was told as one."""
        tap = self.said.get("tap")
        return tap if isinstance(tap, str) else None

    @property
    def parameters(self) -> bytes:
        return bytes.fromhex(self.said["params"])

    @property
    def address(self) -> int:
        """What tells one tensor of a graph from another."""
        return int(self.said["at"])

    @property
    def memory(self) -> int:
        return int(self.said["memory"])

    @property
    def on_device(self) -> bool:
        """Whether its values are a device's."""
        return self.said.get("where") == DEVICE

    def place_of(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Where a value is in the whole tensor, of which this may be a part."""
        axis, first = self.said.get("begins", (0, 0))
        return tuple(at + first * (len(index) - 1 - axis == i) for i, at in enumerate(index))

    @property
    def is_plain(self) -> bool:
        """Whether values lie one after the other, and NumPy can read them."""
        steps = [1, *self.said["ne"][:-1]]
        size = np.dtype(NUMPY_TYPES.get(self.type, "u1")).itemsize
        return self.type in NUMPY_TYPES and list(self.said["nb"]) == [int(n) * size for n in np.cumprod(steps)]

    @property
    def place(self) -> bytes:
        """Where a view begins and how it steps, in values of its base: offset, then [ne3, ne2, ne1, ne0]'s strides."""
        size = np.dtype(NUMPY_TYPES[self.type]).itemsize
        steps = np.array([self.said["view"][1] if self.said["view"] else 0, *reversed(self.said["nb"])], np.int64)
        return (steps // size).tobytes()

    def is_view_of_its_source(self) -> bool:
        """Whether a node that computes nothing points where its offset says, into another's memory."""
        return bool(self.said["looks"])

    def steps_rightly(self) -> bool:
        """Whether a node that is its source's values in another order steps through them as its op says.

        A view of a part says itself how it steps.
        """
        sizes, steps, source = self.said["ne"], self.said["nb"], self.sources[0].said
        if self.op in ("PERMUTE", "TRANSPOSE"):
            parameters = np.frombuffer(self.parameters, f"{self.order}i4")
            axes = parameters[:4].tolist() if self.op == "PERMUTE" else [1, 0, 2, 3]
            pairs = [(source["ne"][i], source["nb"][i], sizes[axis], steps[axis]) for i, axis in enumerate(axes)]
            return sorted(axes) == [0, 1, 2, 3] and all((n, nb) == (ne, at) for n, nb, ne, at in pairs)
        if self.op == "RESHAPE":
            row = self.said["memory"] // max(1, prod(sizes[1:]))
            whole = [row, *(row * prod(sizes[1:axis]) for axis in (2, 3))]
            return bool(prod(sizes) == prod(source["ne"]) and steps[1:] == whole)
        return True

    def in_memory(self) -> Memory:
        """What is saved of a node beside its values: how ggml holds its op and its sources."""
        held = [source.said for source in self.sources[: len(self.said["places"])]]
        return Memory(
            self.said["word"], self._line(held), tuple(self.said["places"]), tuple(each["type"] for each in held),
            tuple(tuple(each["ne"]) for each in held), tuple(tuple(each["nb"]) for each in held),
        )  # fmt: skip

    def _line(self, held: list[Mapping[str, Any]]) -> str:
        """Numbers as tests/test-backend-ops.cpp reads them: op, type, sizes, parameters, sources; then a name."""
        said, parameters = self.said, np.frombuffer(self.parameters, f"{self.order}i4")
        numbers = [said["code"], said["number"], *said["ne"], len(parameters), *parameters.tolist(), len(held)]
        for number, source in zip(said["numbers"], held, strict=True):
            numbers += [number, *source["ne"], *source["nb"]]
        return " ".join([*map(str, numbers), self.name.replace(" ", "_") or "-"]) + "\n"
