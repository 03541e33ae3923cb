"""Parses numbers in foreign text: one scan, and a cap on their length."""

from __future__ import annotations

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
