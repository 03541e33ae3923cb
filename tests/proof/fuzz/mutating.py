"""Valid data made invalid in one to three places: the same for the same seed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

NUMBERS = ("0", "-1", "1e400", "-1e400", "1e-400", "nan", "inf", "9" * 30, "9" * 5000, "1" * 100_000, "0x10", "1_0",
           "\u0663", "\u00b2", "4294967296", "18446744073709551616", "9223372036854775807", "2147483648", "1.5",
           "true", "null", "--1", "1e", ".", "65", "0" * 70, "[[[[", "{")  # fmt: skip
TEXTS = ("", "\x00", "\ud800", "\u202e", "\u0130", "\U0001f600", "\x1b[2J", "a" * 70, "\u0660", "{i}", "{i}" * 30, "..",
         "../../x", "/", "\\", "'", '"', "\n", "]", "[" * 2000, "{" * 2000, "*" * 50, "l_out-99999", "embd@0",
         "embd@-9999999999", "weights/", "weights/blk.0.attn_q.weight", "l_out-0@1", "-" * 300, "%s")  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1.5, 1e308, float("inf"), float("nan"), 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**30, "",
    "x", [], {}, [0], [1] * 65, [[]], {"a": 1}, "\ud800", "9" * 50, [None], [-1], [1.0], [True], 16384, -(1 << 63),
)  # fmt: skip
WHOLE = (0, 1, 2, 3, 7, 63, 64, 255, 256, 65535, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
         1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 8)  # fmt: skip


def times(rng: Random) -> range:
    return range(rng.choice((1, 1, 1, 2, 3)))


def data(rng: Random, whole: bytes, spans: Sequence[tuple[int, int]] = ()) -> bytes:
    """Bytes with some replaced, cut, put in, doubled or swapped; ``spans`` (place, size) are fields worth hitting."""
    changed = bytearray(whole)
    for _ in times(rng):
        if not changed:
            break
        place, size = rng.choice(spans) if spans and rng.random() < 0.7 else (rng.randrange(len(changed)), 1)
        place = min(place, len(changed) - 1)
        rng.choice(_BYTES)(rng, changed, place, size)
    return bytes(changed)


def _flip(rng: Random, changed: bytearray, place: int, size: int) -> None:
    place = min(place + rng.randrange(max(size, 1)), len(changed) - 1)
    changed[place] = rng.choice((changed[place] ^ (1 << rng.randrange(8)), 0, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _whole(rng: Random, changed: bytearray, place: int, size: int) -> None:
    width = size if size in (1, 2, 4, 8) else rng.choice((1, 2, 4, 8))
    number = (
        rng.choice(WHOLE)
        if rng.random() < 0.7
        else int.from_bytes(changed[place : place + width], "little") + rng.choice((-1, 1, 2))
    )
    changed[place : place + width] = (number % (1 << 8 * width)).to_bytes(width, "little")


def _cut(rng: Random, changed: bytearray, place: int, size: int) -> None:
    del changed[place : rng.choice((place + size, len(changed), place + 8))]


def _put(rng: Random, changed: bytearray, place: int, size: int) -> None:
    changed[place:place] = rng.choice((b"\0", b"\xff" * 8, bytes(changed[place : place + 64]), rng.randbytes(20)))


def _swap(rng: Random, changed: bytearray, place: int, size: int) -> None:
    other = rng.randrange(len(changed))
    a, b = bytes(changed[place : place + size]), bytes(changed[other : other + size])
    if len(a) == len(b):
        changed[place : place + size], changed[other : other + size] = b, a


_BYTES: Sequence[Callable[[Random, bytearray, int, int], None]] = (
    _flip,
    _flip,
    _whole,
    _whole,
    _whole,
    _cut,
    _put,
    _swap,
)


def text(rng: Random, whole: str) -> str:
    """Text with a number, a word, a line or a character replaced, cut out, doubled or put in."""
    for _ in times(rng):
        whole = rng.choice(_TEXT)(rng, whole)
    return whole


def _match(rng: Random, whole: str, pattern: str) -> tuple[int, int]:
    found = [match.span() for match in re.finditer(pattern, whole[:5000])]
    return rng.choice(found) if found else (0, 0)


def _number(rng: Random, whole: str) -> str:
    start, end = _match(rng, whole, r"[0-9.eE+-]*[0-9]")
    return whole[:start] + rng.choice(NUMBERS) + whole[end:]


def _word(rng: Random, whole: str) -> str:
    start, end = _match(rng, whole, r"[A-Za-z_]\w*")
    other = _match(rng, whole, r"[A-Za-z_]\w*")
    return whole[:start] + rng.choice((*TEXTS, whole[slice(*other)])) + whole[end:]


def _character(rng: Random, whole: str) -> str:
    place = rng.randrange(len(whole) + 1)
    return whole[:place] + rng.choice((*TEXTS, *NUMBERS, *"[]{}()'\"=,:#\\ \n\r\t")) + whole[place + rng.randrange(2) :]


def _line(rng: Random, whole: str) -> str:
    lines = whole.splitlines(keepends=True) or [""]
    place = rng.randrange(len(lines))
    lines[place : place + 1] = [lines[place]] * rng.choice((0, 2, 2, 300 if len(whole) < 5000 else 2))
    return "".join(lines)


def _end(rng: Random, whole: str) -> str:
    return whole[: rng.randrange(len(whole) + 1)]


_TEXT = (_number, _number, _number, _word, _word, _character, _line, _end)


def value(rng: Random, whole: Any) -> Any:
    """A JSON value with a part of it replaced, left out, doubled or wrapped."""
    for _ in times(rng):
        whole = _changed(rng, whole)
    return whole


def _changed(rng: Random, whole: Any) -> Any:
    if isinstance(whole, (dict, list)) and whole and rng.random() < 0.85:
        keys = list(whole) if isinstance(whole, dict) else list(range(len(whole)))
        key, copy = rng.choice(keys), whole.copy()
        if rng.random() < 0.12:
            del copy[key]
        elif isinstance(copy, dict) and rng.random() < 0.12:
            copy[rng.choice((*TEXTS, *map(str, keys)))] = copy.pop(key)
        else:
            copy[key] = _changed(rng, copy[key])
        return copy
    if isinstance(whole, str) and rng.random() < 0.4:
        return text(rng, whole)
    return rng.choice((*VALUES, [whole], {"x": whole}, [whole, whole], str(whole), nested(rng.choice((20, 300)))))


def nested(levels: int) -> Any:
    """A list in a list in a list."""
    inner: Any = 1
    for _ in range(levels):
        inner = [inner]
    return inner


def json_text(rng: Random, whole: Any) -> str:
    """A JSON text of which the value, or the text, is changed."""
    changed = json.dumps(value(rng, whole) if rng.random() < 0.8 else whole)
    return text(rng, changed) if rng.random() < 0.3 else changed
