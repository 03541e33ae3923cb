"""The columns of the page's map: one for each tap of a layer, in the order in which layers compute them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llamadiff.comparison.rows import Row, kind_of


def columns_of(rows: Sequence[Row]) -> tuple[list[str], list[int]]:
    """The columns' labels, and for each row the number of its column; taps outside the layers have -1."""
    keys = _keys(rows)
    order = _merged([[key for key, row in zip(keys, rows, strict=True) if row.layer == layer]
                     for layer in dict.fromkeys(row.layer for row in rows if row.layer is not None)])  # fmt: skip
    places = {key: number for number, key in enumerate(order)}
    return order, [places[key] if row.layer is not None else -1 for key, row in zip(keys, rows, strict=True)]


def _keys(rows: Sequence[Row]) -> list[str]:
    """What each row is called; a number tells those of one layer apart that are called alike."""
    seen: Counter[tuple[int | None, str]] = Counter()
    keys = []
    for row in rows:
        name = kind_of(row)
        seen[row.layer, name] += 1
        count = seen[row.layer, name]
        keys.append(name if count == 1 else f"{name} {count}")
    return keys


def _merged(sequences: Sequence[Sequence[str]]) -> list[str]:
    """All names, each after the one that it first came after."""
    order: list[str] = []
    for names in sequences:
        at = 0
        for name in names:
            if name in order:
                at = order.index(name) + 1
            else:
                order.insert(at, name)
                at += 1
    return order
