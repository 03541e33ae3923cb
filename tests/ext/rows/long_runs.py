"""Runs of the stranger's engine at length: what is wrong of one, and what llamadiff says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from ext.rows.long_engine import Array, Engine, write
from ext.rows.long_mistakes import CHUNK, LONG, Change
from ext.rows.long_models import rows_of, tokens_of, write_long_model

from llamadiff.engines.run_spec import How, Run
from llamadiff.result.comparison import Comparison
from llamadiff.verbs.verbs import compare

ORDER = [
    "embd", "attn_norm", "Qcur_proj", "Kcur_proj", "Vcur_proj", "Qcur_normed", "Kcur_normed", "Qcur_rope", "Kcur_rope",
    "kv_k", "kv_v", "kqv_out", "attn_out", "attn_post_norm", "ffn_inp", "ffn_norm", "ffn_gate", "ffn_up", "ffn_swiglu",
    "ffn_out", "ffn_post_norm", "l_out", "result_norm", "result_output",
]  # fmt: skip
PARTED = 1e-11  # NMSE of a row, from where on two runs have parted


@dataclass(frozen=True)
class Judged:
    """A run: the first tap that parts from the right engine's, and the first token there; what is said of it."""

    tap: str
    token: int
    result: Comparison
    rows: list[int]

    @property
    def first_token(self) -> int | None:
        """The first token that is wrong at the first tap that is said to be."""
        row = self.result.first_divergence
        if row is None or row.local is None:
            return None
        wrong = np.flatnonzero(~(np.array(row.local.per_token) <= row.local.noise_limit))
        return self.rows[int(wrong[0])] if len(wrong) else None


class Runs:
    """Models in a folder, and right runs of them, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = cache(self._model)
        self.right = cache(self._right)

    def _model(self, name: str, smaller: bool) -> Path:
        where = self.folder / ("smaller" if smaller else "usual")
        where.mkdir(exist_ok=True)
        return write_long_model(where, name, smaller)

    def _right(self, name: str, length: int) -> dict[str, Array]:
        return Engine(self.model(name, length == LONG), CHUNK[length]).run(tokens_of(name, length), rows_of(length))

    def judged(self, change: Change, length: int, asked: str = "auto", rows: Sequence[int] = ()) -> Judged:
        """A changed engine's run, of which some rows were written, if not these; and which of them were asked for."""
        model, tokens, rows = self.model(change.model, length == LONG), tokens_of(change.model, length), [*rows]
        rows = rows or rows_of(length)
        engine = Engine(model, CHUNK[length])
        engine.everything = change.first == "result_output"
        change.put(engine)
        with np.errstate(all="ignore"):
            taps = engine.run(tokens, rows)
        stated = {"type_k": "F32", "type_v": "F32", **engine.stated}
        trace = write(self.folder / "trace.safetensors", tokens, rows, taps, **stated)
        result = compare(model, Run(tokens=tokens), trace, How(rows=asked))
        if not change.first:
            return Judged("", 0, result, rows)
        right = (
            Engine(model, CHUNK[length]).run(tokens, rows)
            if rows != rows_of(length)
            else self.right(change.model, length)
        )
        return Judged(*first_apart(taps, right, rows), result, rows)


def first_apart(wrong: dict[str, Array], right: dict[str, Array], rows: list[int]) -> tuple[str, int]:
    """The first tap, in order, of which a token has parted; and that token."""
    for tap in sorted(right, key=_place):
        sides = (
            np.nan_to_num(each[tap].astype(np.float64), nan=1e9, posinf=1e9, neginf=-1e9) for each in (wrong, right)
        )
        a, b = (side.reshape(len(side), -1) for side in sides)
        apart = np.flatnonzero(np.square(a - b).sum(axis=1) > PARTED * np.square(b).sum(axis=1))
        if len(apart):
            return tap, int(apart[0]) if tap.startswith("kv_") else rows[int(apart[0])]
    raise AssertionError("nothing has parted from the right engine")


def _place(tap: str) -> tuple[int, int]:
    word, _, layer = tap.partition("-")
    return -1 if word == "embd" else int(layer) if layer else 99, ORDER.index(word)
