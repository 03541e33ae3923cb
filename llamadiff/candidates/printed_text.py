"""Text dumps, as people print them: ``[12] = 0.581001``, ``12: 0.58``, or one number a line."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular

Array = NDArray[Any]

MAX_LINE = 1000  # bytes
FIRST = 1000  # lines that are looked at before anything is run
MAX_BYTES = 1 << 30
_EXPECTED = "expected lines such as [12] = 0.581"


def check(path: Path) -> None:
    """Raise UserError if one of the first lines is no value: that is said before anything is run."""
    for _ in islice(_values(path), FIRST):
        pass


def read_values(path: Path, most: int) -> tuple[Array, Array]:
    """Values of a text dump, up to ``most`` of them, and their indices.

    Lines that are empty or begin with # are left out. Raises UserError naming the first line that is no value.
    """
    indices, values = array("q"), array("d")
    for index, value in _values(path):
        indices.append(len(values) if index is None else index)
        values.append(value)
        if len(values) > most:
            raise UserError(f"{path}: more than {most} values, which is all that the tensor of this name has")
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite
        return np.array(values, np.float64).astype(np.float32), np.array(indices, np.int64)


def _values(path: Path) -> Iterator[tuple[int | None, float]]:
    """The index, where there is one, and the value of each line."""
    check_regular(path, "a text file of numbers")
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path}: {path.stat().st_size >> 20} MiB of text; write .npy or a trace instead")
    try:
        with path.open("rb") as file:
            for line_number in count(1):
                line = file.readline(MAX_LINE + 1)
                if not line:
                    return
                if len(line) > MAX_LINE:
                    raise UserError(f"{path}:{line_number}: a line of more than {MAX_LINE} bytes; {_EXPECTED}")
                stripped = line.decode(errors="replace").strip()
                if stripped and not stripped.startswith("#"):
                    yield _parsed(f"{path}:{line_number}", stripped)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _parsed(where: str, text: str) -> tuple[int | None, float]:
    """The index, where there is one, and the value of a line. Raises UserError if it has no value."""
    left, sign, right = text.partition("=") if "=" in text else text.partition(":")
    value = number((right if sign else left).strip().removesuffix(",").rstrip())
    index = whole(left.strip().removeprefix("[").removesuffix("]").strip()) if sign else None
    if value is None or (sign and index is None):
        raise UserError(f"{where}: {text[:40]!r} is no value; {_EXPECTED}")
    return index, value


MAX_NUMBER = 400  # characters: the largest float64, written out, has 316
MAX_WHOLE = 18  # digits: what fits into 64 bits
_DIGITS = frozenset("0123456789")
_DECIMAL = _DIGITS | frozenset("+-.eE")
_NOT_FINITE = frozenset({"nan", "inf", "infinity"})


def number(word: str) -> float | None:
    """A decimal number, nan or inf; None for anything else. What float64 cannot hold is infinite."""
    if not 0 < len(word) <= MAX_NUMBER:
        return None
    if not _DECIMAL.issuperset(word) and word.lstrip("+-").lower() not in _NOT_FINITE:
        return None
    try:
        return float(word)
    except ValueError:
        return None


def whole(word: str) -> int | None:
    """A whole number without a sign; None for anything else."""
    return int(word) if 0 < len(word) <= MAX_WHOLE and _DIGITS.issuperset(word) else None
