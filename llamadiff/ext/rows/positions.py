"""A result about rows, said of the tokens that they are: row 80 of those that were looked at is token 2,049."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from llamadiff.ext.rows.choose import in_words
from llamadiff.judge.finding import Local
from llamadiff.result.comparison import Comparison
from llamadiff.result.rows import Row
from llamadiff.trace import taps

_NAMED = re.compile(r"\b(tokens?) (\d+\b(?! more)(?:(?:, | and | to )\d+\b(?! more))*)")
_PLACE = re.compile(r"\b(\w+(?:-\d+)?)\[(\d+(?:, \d+)*)\]")
_SAID = ("rows", "preflight", "diagnosis", "notes", "headline", "proof", "next_steps", "reasons", "profile", "manner")


def in_tokens(result: Comparison, positions: Sequence[int], note: str) -> Comparison:
    """The same with every token by its place in the prompt, in words and as a number; ``note``: which were judged."""
    said = {name: _renamed(getattr(result, name), positions) for name in _SAID}
    rows = tuple(_placed(row, positions) for row in said.pop("rows"))
    said |= {name: (*said[name], note) for name in ("notes", "proof")}
    return replace(result, rows=rows, **said)


def _renamed(value: Any, positions: Sequence[int]) -> Any:
    """Plain data, with other numbers behind the word token."""
    if isinstance(value, str):
        said = _NAMED.sub(lambda found: f"{found[1]} {_counted(found[2], positions)}", value)
        return _PLACE.sub(lambda found: _indexed(found[0], found[1], found[2], positions), said)
    if isinstance(value, (tuple, list)):
        return type(value)(_renamed(each, positions) for each in value)
    if isinstance(value, Mapping):
        return {key: _renamed(each, positions) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        there = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        other = {name: _renamed(each, positions) for name, each in there.items() if not isinstance(each, (int, float))}
        return replace(value, **{name: each for name, each in other.items() if each is not there[name]})
    return value


def _counted(numbers: str, positions: Sequence[int]) -> str:
    return re.sub(r"\d+", lambda found: _place(int(found[0]), positions), numbers)


def _indexed(said: str, name: str, index: str, positions: Sequence[int]) -> str:
    """A place in a tap, by the tap's token."""
    tap, numbers = taps.parse(name), index.split(", ")
    if tap is None or len(numbers) <= tap.row_axis:
        return said
    numbers[tap.row_axis] = _place(int(numbers[tap.row_axis]), positions)
    return f"{name}[{', '.join(numbers)}]"


def _place(row: int, positions: Sequence[int]) -> str:
    return str(positions[row]) if row < len(positions) else str(row)


def _placed(row: Row, positions: Sequence[int]) -> Row:
    return replace(
        row, local=_local(row.tap, row.local, positions), baseline_local=_local(row.tap, row.baseline_local, positions)
    )  # fmt: skip


def _local(name: str, local: Local | None, positions: Sequence[int]) -> Local | None:
    tap = taps.parse(name)
    if local is None or local.token is None or tap is None:
        return local
    index = list(local.index)
    if len(index) > tap.row_axis:
        index[tap.row_axis] = positions[index[tap.row_axis]]
    opened = tuple(positions[row] for row in local.open_tokens)
    return replace(local, token=positions[local.token], index=tuple(index), open_tokens=opened)


def looked_at(positions: Sequence[int], total: int, by_chance: int) -> str:
    """Which tokens were judged, and what that can miss."""
    said = f"of {total:,} tokens {len(positions)} were judged, with K and V of all: {in_words(positions, 12)}"
    if not by_chance:
        return f"{said}; what is wrong in others alone is not seen"
    share = 1 - 0.01 ** (1 / by_chance)
    return f"{said}; what is wrong in fewer than {share:.0%} of the others may not be seen"
