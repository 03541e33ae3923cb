"""What a trace says of its run: tokens, batches, model, producer. Checked, since it comes from strangers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any

from llamadiff.system.errors import UserError
from llamadiff.trace.stated import MAX_DEPTH, brief, is_shallow, parse_json, reason

SCHEMA = "llamadiff.trace/1"
KEY = "llamadiff"
CHECKED = "checked"  # the key of a producer under which a capture says who judged it
INPUTS = "inputs"  # and under which a capture has what llama.cpp's passes were given wrongly, in words
MAX_ID = 1 << 31  # token ids and positions are 32-bit in llama.cpp


@dataclass(frozen=True)
class Info:
    """What a trace says of its run. Only ``tokens`` is required of a stranger's trace.

    ``batches``: how many tokens were run at a time, where it was not ``n_prefill`` of them and then one by one.
    ``sketch``: of a trace that keeps sketches of its tensors, what these are made of.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...] = ()
    n_prefill: int = 0
    prompt: str | None = None
    producer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = ()
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
    data = _without_nulls(data)
    _check_kinds(path, data)
    tokens = tuple(data.get("tokens", ()))
    if not tokens:
        raise UserError(f"{path}: the trace has no tokens")
    positions = tuple(data.get("positions", range(len(tokens))))
    if len(positions) != len(tokens):
        raise UserError(f"{path}: {len(positions)} positions for {len(tokens)} tokens")
    batches = tuple(data.get("batches", ()))
    if batches and sum(batches) != len(tokens):
        raise UserError(f"{path}: batches of {sum(batches)} tokens in all for {len(tokens)} tokens")
    n_prefill = data.get("n_prefill", _prefill_of(batches) or len(tokens))
    if not 0 < n_prefill <= len(tokens):
        raise UserError(f"{path}: n_prefill = {n_prefill} for {len(tokens)} tokens; it must be 1 to {len(tokens)}")
    about = data.get("producer", {}), data.get("model", {})
    return Info(tokens, positions, n_prefill, data.get("prompt"), *about, batches, data.get("sketch", {}))


def _prefill_of(batches: tuple[int, ...]) -> int:
    """The tokens before the last batches of one: what decode steps look like."""
    steps = sum(1 for _ in takewhile(lambda size: size == 1, reversed(batches[1:])))
    return sum(batches[: len(batches) - steps])


def _check_kinds(path: Path, data: dict[str, Any]) -> None:
    for place, (fits, words) in _KINDS.items():
        value: Any = data
        for key in place.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None and not fits(value):
            raise UserError(f"{path}: {place} in the metadata is {brief(value)}; it must be {words}")


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    """Null says no more than a missing key: left out, also within objects one level down."""
    kept = {key: value for key, value in data.items() if value is not None}
    return {
        key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        for key, value in kept.items()
    }


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int  # True is none


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < MAX_ID for item in value)


def _are_sizes(value: Any) -> bool:
    return _are_ids(value) and 0 not in value


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and is_shallow(value, MAX_DEPTH)


# What the metadata may say, by place: how it is tested, and in words. Anything else is kept as it comes.
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "tokens": (_are_ids, "a list of whole numbers"),
    "positions": (_are_ids, "a list of whole numbers"),
    "n_prefill": (_is_count, "a whole number"),
    "batches": (_are_sizes, "a list of whole numbers from 1 on"),
    "prompt": (_is_text, "text"),
    "sketch": (_is_object, "an object"),
    "model": (_is_object, "an object"),
    "model.sha256": (_is_text, "text"),
    "model.architecture": (_is_text, "text"),
    "model.file": (_is_text, "text"),
    "producer": (_is_object, "an object"),
    "producer.name": (_is_text, "text"),
    "producer.version": (_is_text, "text"),
    "producer.settings": (_is_object, "an object"),
    "producer.settings.type_k": (_is_text, "text"),
    "producer.settings.type_v": (_is_text, "text"),
    "producer.settings.flash_attn": (_is_flag, "true or false"),
    "producer.weights_read": (_are_texts, "a list of names"),
    "producer.asked": (_is_object, "an object"),
    "producer.checked": (_is_object, "an object"),
}
