"""Reads what steps come to: logits of every token, batch by batch, and what their passes were given wrongly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.llamacpp.inputs import Inputs
from llamadiff.llamacpp.readers import RunReader, Tell
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.steps import NEW

Array = NDArray[Any]


class ScheduleReader(RunReader):
    """``logits`` of contexts one after the other; ``faults`` are of the first one's passes."""

    def __init__(self, request: Request, tell: Tell) -> None:
        super().__init__(request, tell)
        self.logits: list[list[Array]] = []
        self.first: Inputs = self.inputs

    def _step(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        if self.request.way.steps[answer["step"]].call == NEW:
            self.logits.append([])
            if len(self.logits) > 1:  # what is alone is judged by itself
                self.__dict__["inputs"] = Inputs()
        super()._step(answer, data)

    def _logits(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        self.logits[-1].append(np.frombuffer(data[0], f"{self.order}f4").reshape(answer["logits"]).copy())

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(self.first.faults)

    def of_context(self, number: int) -> Array:
        """Logits of all tokens of a context, in their order."""
        return np.concatenate(self.logits[number])
