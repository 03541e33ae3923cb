"""What a trace says of its run: tokens, batches, model, producer. Checked, since it comes from strangers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from llamadiff.system.errors import UserError
from llamadiff.trace.stated import MAX_DEPTH, brief, convert, is_shallow, parse_json, reason

SCHEMA = "llamadiff.trace/1"
KEY = "llamadiff"
CHECKED = "checked"  # the key of a producer under which a capture says who judged it
INPUTS = "inputs"  # and under which a capture has what llama.cpp's passes were given wrongly, in words
DEVICES, NAMED = "devices", "named"  # and what each of several devices computed; and the user's words for these
UNSURE_INPUTS = "inputs_unsure"  # and what may be wrong, where llama.cpp does not say enough to tell
REMEDY = "docs/trace-format.md has the keys"
MAX_ID = 1 << 31  # token ids and positions are 32-bit in llama.cpp
Id = Annotated[int, Meta(ge=0, lt=MAX_ID)]
Size = Annotated[int, Meta(ge=1, lt=MAX_ID)]


@dataclass(frozen=True)
class Info:
    """What a trace says of its run. Only ``tokens`` is required of a stranger's trace.

    ``batches``: how many tokens were run at a time, where it was not ``n_prefill`` of them and then one by one.
    ``sketch``: of a trace that keeps sketches of its tensors, what these are made of.
    """

    tokens: tuple[Id, ...]
    positions: tuple[Id, ...] = ()
    n_prefill: int = 0
    prompt: str | None = None
    producer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[Size, ...] = ()
    sketch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def edges(self) -> tuple[int, ...]:
        """The index of the token that each batch begins with, and how many tokens there are."""
        steps = range(self.n_prefill or len(self.tokens), len(self.tokens) + 1)
        return (0, *accumulate(self.batches)) if self.batches else (0, *steps)

    def head(self, n: int) -> Info:
        """What it says of its first ``n`` tokens."""
        kept = [edge for edge in (*self.edges, n) if edge <= n]
        batches = tuple(b - a for a, b in pairwise(dict.fromkeys(kept))) if self.batches else ()
        tokens, positions, n_prefill = self.tokens[:n], self.positions[:n], min(self.n_prefill, n)
        return replace(self, tokens=tokens, positions=positions, n_prefill=n_prefill, batches=batches)

    def to_json(self) -> str:
        said = asdict(self)
        for name in ("batches", "sketch"):
            if not said[name]:
                del said[name]
        return json.dumps({"schema": SCHEMA, **said})


class _Settings(Struct):
    type_k: str | None = None
    type_v: str | None = None
    flash_attn: bool | None = None


class _Producer(Struct):
    name: str = ""
    version: str = ""
    settings: _Settings | None = None
    weights_read: tuple[str, ...] = ()
    asked: Mapping[str, Any] | None = None
    checked: Mapping[str, Any] | None = None


class _Model(Struct):
    sha256: str = ""
    architecture: str = ""
    file: str = ""


class _About(Struct):
    """The types of what is said within ``producer`` and ``model``; anything else is kept there as it comes."""

    producer: _Producer | None = None
    model: _Model | None = None


def parse_info(path: Path, text: Any) -> Info:
    """What a trace's metadata says, from its JSON. Raises UserError for anything that it cannot mean."""
    if not isinstance(text, str):
        raise UserError(f"{path}: no {KEY!r} entry in __metadata__; it must hold the token ids (docs/trace-format.md)")
    try:
        data = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path}: the {KEY!r} metadata is not JSON ({reason(error)})") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else data
        raise UserError(f"{path}: schema is {brief(found)}; this version reads {SCHEMA!r}")
    where, data = f"{path}: metadata", _without_nulls(data)
    if deep := [name for name in ("producer", "model", "sketch") if not is_shallow(data.get(name), MAX_DEPTH)]:
        raise UserError(f"{where}: {deep[0]} is nested too deep; keep it to {MAX_DEPTH} levels")
    convert(data, _About, where, REMEDY)
    info = convert({"tokens": (), **data}, Info, where, REMEDY)
    count, total = len(info.tokens), sum(info.batches)
    if not count:
        raise UserError(f"{path}: the trace has no tokens")
    positions = info.positions if "positions" in data else tuple(range(count))
    if len(positions) != count:
        raise UserError(f"{path}: {len(positions)} positions for {count} tokens")
    if info.batches and total != count:
        raise UserError(f"{path}: batches of {total} tokens in all for {count} tokens")
    n_prefill = info.n_prefill if "n_prefill" in data else _prefill_of(info.batches) or count
    if not 0 < n_prefill <= count:
        raise UserError(f"{path}: n_prefill = {n_prefill} for {count} tokens; it must be 1 to {count}")
    return replace(info, positions=positions, n_prefill=n_prefill)


def _prefill_of(batches: tuple[int, ...]) -> int:
    """The tokens before the last batches of one: what decode steps look like."""
    steps = sum(1 for _ in takewhile(lambda size: size == 1, reversed(batches[1:])))
    return sum(batches[: len(batches) - steps])


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    """Null says no more than a missing key: left out, also within objects one level down."""
    kept = {key: value for key, value in data.items() if value is not None}
    return {
        key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        for key, value in kept.items()
    }
