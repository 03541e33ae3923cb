"""Reads the rows that llama.cpp's process tells of, and keeps K and V of all tokens beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.rows.choose import chosen
from llamadiff.llamacpp.passes import NoCheck
from llamadiff.llamacpp.readers import TapReader, Tell, tap_values
from llamadiff.llamacpp.request import Request
from llamadiff.trace import taps
from llamadiff.trace.metadata import Info

Array = NDArray[Any]


class RowReader(TapReader):
    """The taps of chosen tokens as a trace."""

    inputs = NoCheck()  # a mask or a position that is wrong shows in the rows themselves

    def __init__(self, request: Request, tell: Tell, keys_of: Mapping[str, str], asked: frozenset[str]) -> None:
        """``keys_of``: tap -> that of the cache, which keeps it of all tokens; ``asked``: the taps that are wanted."""
        super().__init__(request, tell)
        self.keys_of, self.asked = keys_of, asked

    @cached_property
    def rows_wanted(self) -> Array:
        return np.array(chosen(self.request.rows, self.total))

    def _tap(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        name = answer["tap"]
        tap, values = taps.parse(name), tap_values(self, answer, data)
        assert tap is not None
        self._keep(name, values, answer)
        first, last = np.searchsorted(self.rows_wanted, (answer["start"], answer["start"] + answer["rows"]))
        if first == last or name not in self.asked:
            return
        if not answer["alone"]:
            values = values.take(self.rows_wanted[first:last] - answer["start"], tap.row_axis)
        shape = list(values.shape)
        shape[tap.row_axis] = len(self.rows_wanted)
        self.writer.add(name, values, tap.row_axis, tuple(shape), int(first))

    def _keep(self, name: str, values: Array, answer: Mapping[str, Any]) -> None:
        """Rows that the cache keeps: in float16 as it does, or as they are, where it keeps them in blocks."""
        kept = self.keys_of.get(name)
        if kept is None:
            return
        side = "type_k" if kept.startswith("kv_k") else "type_v"
        kind = self.began["instead"].get(side, getattr(self.request.settings, side))
        values = values.astype(np.float16) if kind == "F16" else values
        self.writer.add(kept, values, 0, (self.total, *values.shape[1:]), answer["start"])

    def info(self) -> Info:
        info, rows = super().info(), [int(row) for row in self.rows_wanted]
        tokens, positions = ([side[row] for row in rows] for side in (info.tokens, info.positions))
        said = {**info.producer, "rows": {"of": len(info.tokens), "chosen": self.request.rows}}
        prompt = sum(row < info.n_prefill for row in rows)
        return Info(tuple(tokens), tuple(positions), prompt, info.prompt, said, info.model)

    @property
    def path(self) -> Path:
        assert self.request.output is not None
        return Path(self.request.output)
