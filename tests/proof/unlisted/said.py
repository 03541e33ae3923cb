"""What a sentence says of a parameter: its words read again, and held to the value that was put in.

Nothing here is shared with what writes the sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

Reader = Callable[[Any], bool]


def says(parameter: str, value: Any, sentences: Iterable[str]) -> bool:
    """Whether one of the sentences says that the parameter has this value."""
    words, holds = PARAMETERS[parameter]
    found = [match.groups() for sentence in sentences if (match := re.fullmatch(words, sentence))]
    return any(holds(value, *groups) for groups in found)


def near(value: float, said: str) -> bool:
    return float(said) == pytest.approx(value, rel=2e-3)


def numbers(text: str) -> list[int]:
    """``0, 3 to 7 and 9``."""
    runs = re.findall(r"(\d+)(?: to (\d+))?", text)
    return [n for first, last in runs for n in range(int(first), int(last or first) + 1)]


def positions(text: str) -> list[float]:
    """``0 to 7, then 0 to 3, then 4 times 7``."""
    out: list[float] = []
    for part in text.split(", then "):
        if match := re.fullmatch(r"(-?\d+) to (-?\d+)", part):
            out += range(int(match[1]), int(match[2]) + 1)
        elif match := re.fullmatch(r"(\d+) times (-?[\d.]+)", part):
            out += int(match[1]) * [float(match[2])]
        else:
            out += [float(part)]
    return out


def terms(text: str) -> dict[str, float]:
    """``0.9 attn_out-0 + embd``."""
    found = re.findall(r"(?:(-?[\d.e-]+) )?([a-z_A-Z]\S*)(?: \+ |$)", text)
    return {name: float(count or 1) for count, name in found}


def same_terms(value: dict[str, float], text: str) -> bool:
    found = terms(text)
    return found.keys() == value.keys() and all(abs(found[name] - value[name]) < 2e-3 for name in value)


def _pairs(text: str) -> list[int] | None:
    """The pair whose frequency each of 32 pairs has: an order in words."""
    match = re.fullmatch(r"the pairs are rolled: each is (\d+) places? (later|earlier)", text)
    by = int(match[1]) * (1 if match[2] == "later" else -1) if match else 0
    return [int(i) for i in np.roll(np.arange(32), by)] if match else None


# parameter -> the words that say it, and whether what they say is the value
PARAMETERS: dict[str, tuple[str, Callable[..., bool]]] = {
    "sentence": (r"(.*)", lambda value, said: said == value),
    "zeros below": (  # somewhere between two values of the cache
        r"it reads zeros for the values of ([KV]) that are below (\S+)",
        lambda value, side, said: value[0] == side and float(said) == pytest.approx(value[1], rel=0.01),
    ),
    "mean square at least": (r"each row's mean square counts as at least (\S+)", near),
    "channels summed": (
        r"its mean square is of channels (\d+) to (\d+) alone, divided by (\d+)",
        lambda value, *said: tuple(map(int, said)) == value,
    ),
    "power": (r"each row is divided by its mean square to the power (\S+), where 0.5 is right", near),
    "times": (r"it is applied twice, weight and all", lambda value: value == 2),
    "weight plus": (r"its weight is the file's plus (\S+)", near),
    "weight is one in": (
        r"its weight is 1 in channels (\d+) to (\d+)",
        lambda value, *said: tuple(map(int, said)) == value,
    ),
    "weight rolled by": (
        r"its weight is in another order: the channels are rolled: each is (\d+) places? later",
        lambda value, said: int(said) == value,
    ),
    "rows of a weight": (
        r"it multiplies by rows (\d+) to (\d+) of (\S+)",
        lambda value, a, b, name: (int(a), int(b), name) == value,
    ),
    "positions": (r"the rows are rotated by the positions (.*)", lambda value, said: positions(said) == value),
    "frequencies of pairs": (r"by their frequencies (.*)", lambda value, said: _pairs(said) == value),
    "frequencies times": (
        r"the frequencies of pairs (\d+) to (\d+) are (\S+) times what they should be",
        lambda value, a, b, factor: (int(a), int(b)) == value[:2] and near(value[2], factor),
    ),
    "frequencies in": (r"its frequencies are rounded to (\S+)", lambda value, said: said == value),
    "positions of head": (
        r"the rows of head (\d+) are rotated by the positions (.*)",
        lambda value, head, said: (int(head), positions(said)) == value,
    ),
    "second of": (
        r"the (first|second) value of each pair is made of the other one's new value",
        lambda value, which: which == "second",
    ),
    "lengths of pairs": (
        r"pairs (\d+) to (\d+) come out (\S+) times as long as they should",
        lambda value, a, b, factor: (int(a), int(b)) == value[:2] and near(value[2], factor),
    ),
    "scales of heads": (
        r"scores are multiplied by (.*) in heads 0 to 3, where \S+ is right",
        lambda value, said: [float(n) for n in said.split(", ")] == pytest.approx(value, rel=2e-3),
    ),
    "sum leaves out": (
        r"its sum leaves out each query's own key, where there is another key",
        lambda value: value == "own",
    ),
    "sum plus": (r"its sum is (\S+) too large, where the largest term is 1", near),
    "unseen": (
        r"key (\d+) is not seen by queries (.*)",
        lambda value, key, queries: (int(key), numbers(queries)) == value,
    ),
    "cut below": (
        r"keys whose scaled score is more than (\S+) below the row's largest get nothing",
        lambda value, said: 0.8 * value <= float(said) <= 1.2 * value,
    ),
    "V heads": (
        r"heads 0 to 3 read the V heads (.*), where 0, 0, 1, 1 are right",
        lambda value, said: [int(n) for n in said.split(", ")] == value,
    ),
    "value left out": (
        r"the value of each query's own key is not added, where there is another key",
        lambda value: value == "own",
    ),
    "V row": (
        r"in place of V's row (\d+) it reads row (\d+)",
        lambda value, *said: tuple(map(int, said)) == value,
    ),
    "V rows of layer": (
        r"in place of V's rows (.*) it reads layer (\d+)'s",
        lambda value, rows, layer: (numbers(rows), int(layer)) == value,
    ),
    "not rescaled in blocks of": (
        r"what was summed is not rescaled where the largest score grows, from one block of (\d+) keys to the next",
        lambda value, said: int(said) == value,
    ),
    "wrong where gate <=": (
        r"where ffn_gate-0 <= (\S+), silu\(ffn_gate-0\) is another function, off by up to \S+",
        lambda value, said: -2.2 <= float(said) <= value,
    ),
    "where gate < 0": (
        r"where ffn_gate-0 <= (\S+), it is (\S+) \* up",
        lambda value, bound, said: -0.1 <= float(bound) <= 0 and said == value,
    ),
    "gate at most": (r"its gate is cut off above (\S+)", near),
    "terms": (r"(?:from token 1 on )?it is (.*), where .* is right", same_terms),
    "terms in": (
        r"in channels (\d+) to (\d+) it is (.*), where .* is right",
        lambda value, a, b, said: (int(a), int(b)) == value[0] and same_terms(value[1], said),
    ),
    "rows of ids": (
        r"it looks up (.*)",
        lambda value, said: {int(b): int(a) for a, b in re.findall(r"row (\d+) for id (\d+)", said)} == value,
    ),
    "ranks": (
        r"it chooses the experts of ranks (.*), where 1 and 2 are right",
        lambda value, said: numbers(said) == value,
    ),
    "sum plus a constant": (r"weights are divided by their sum plus (\S+)", near),
    "zero channels": (
        r"channels (\d+) to (\d+) are all zero",
        lambda value, *said: tuple(map(int, said)) == value,
    ),
    "inputs left out": (
        r"its sums leave out inputs (\d+) to (\d+)",
        lambda value, *said: tuple(map(int, said)) == value,
    ),
    "tiles transposed": (r"\S+ is transposed in tiles of (\d+)", lambda value, said: int(said) == value),
    "halves of heads": (
        r"each head's channels are in halves \(i, i\+(\d+)\) where pairs .* are right, by (\d+) heads of \d+ .*",
        lambda value, half, heads: (int(heads), 2 * int(half)) == value,
    ),
    "inputs in another order": (
        r"its inputs are in another order: of each block of (\d+), (.*)",
        lambda value, size, order: (int(size), numbers(order)) == value,
    ),
}  # fmt: skip
