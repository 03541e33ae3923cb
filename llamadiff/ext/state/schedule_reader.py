"""Reads what steps come to: logits of every token, batch by batch, and what their passes were given wrongly."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.state.inputs import Inputs
from llamadiff.llamacpp.readers import RunReader, Tell
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.steps import NEW

Array = NDArray[Any]
REFUSED = "llama_decode failed with code -"  # what a batch cannot be; a positive one is want of room


class ScheduleReader(RunReader):
    """``logits`` of contexts one after the other; ``faults`` are of the first one's passes."""

    def __init__(self, request: Request, tell: Tell) -> None:
        super().__init__(request, tell)
        self.logits: list[list[Array]] = []
        self.first = self.inputs = Inputs()
        self.is_refused = False

    def refuses(self, said: str) -> bool:
        """Whether llama.cpp would not go on in the first context, though nothing that it was asked for is amiss."""
        if REFUSED not in said or len(self.logits) != 1:
            return False
        named = re.search(r"sequence (\d+)", said)
        self.first.refused(said[said.index(REFUSED) :], int(named[1]) if named else None)
        self.is_refused = True
        return True

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
