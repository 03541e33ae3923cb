"""Text for a terminal: foreign characters escaped, numbers in few cells."""

from __future__ import annotations

import math
from collections.abc import Iterator
from unicodedata import category

from rich.cells import cell_len

_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\\": r"\\"}
_MARKS = ("Mn", "Me")


def escape_line(text: str, limit: int = 200, *, ascii_only: bool = False, plain: str = "") -> str:
    r"""Text from a file on one line of a terminal: what could act on the terminal, or could not be seen, is escaped.

    Escaped are control, format (bidi), private and unassigned characters, lone surrogates, blanks other than the
    space, and zero-width characters that do not belong to a letter; the backslash too, so that ``\n`` is always a
    newline, unless it is ``plain``, as where it separates the parts of a path. What takes more than ``limit`` cells is
    cut, between characters, and ends in an ellipsis.
    """
    ellipsis = "..." if ascii_only else "\u2026"
    pieces: list[str] = []
    ends: list[int] = []  # cells used after each piece
    used = 0
    for piece in _pieces(text, ascii_only, plain):
        used += cell_len(piece)
        if used > limit:
            while ends and ends[-1] + len(ellipsis) > limit:
                pieces.pop(), ends.pop()
            return "".join(pieces) + ellipsis[:limit]
        pieces.append(piece)
        ends.append(used)
    return "".join(pieces)


def quote(text: str, limit: int = 24, *, ascii_only: bool = False) -> str:
    """Shown text in double quotes, for texts whose blanks matter."""
    return '"' + escape_line(text, limit, ascii_only=ascii_only).replace('"', r"\"") + '"'


def _pieces(text: str, ascii_only: bool, plain: str) -> Iterator[str]:
    """Each character as itself or as its escape."""
    marks = 2  # how many combining marks stand since the last letter; none may start a text
    for character in text:
        kind = category(character)
        if kind[0] == "L":
            marks = 0
        elif kind in _MARKS:
            marks += 1
        else:
            marks = 2
        may_stand = character.isascii() or not ascii_only
        is_seen = character in plain or (may_stand and _visible(character, kind, marks))
        yield character if is_seen else _escape(character)


def _visible(character: str, kind: str, marks: int) -> bool:
    if character == " ":
        return True
    if character == "\\" or kind[0] in "CZ" or _joins_others(ord(character)):
        return False
    return marks <= 2 if kind in _MARKS else cell_len(character) > 0


def _joins_others(code: int) -> bool:
    """Variation selectors, flag letters and skin tones: terminals differ in how many cells these take."""
    return (
        0xFE00 <= code <= 0xFE0F
        or 0xE0100 <= code <= 0xE01EF
        or 0x1F1E6 <= code <= 0x1F1FF
        or 0x1F3FB <= code <= 0x1F3FF
    )


def _escape(character: str) -> str:
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def tiny(value: float | None, cells: int = 7) -> str:
    """An error such as an NMSE, always with its exponent: ``5.9e-14``."""
    if value is None or not math.isfinite(value) or value == 0:
        return number(value)
    long = f"{value:.1e}"
    return long if len(long) <= cells else f"{value:.0e}"


def number(value: float | None, cells: int = 7) -> str:
    """Three significant digits, fewer where they take more than ``cells``: ``12.3``, ``0.0412``, ``-4.1e-5``."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    whole = 1000 <= abs(value) < 99999
    written = [
        f"{value:.0f}" if whole else "",
        *(_short(format(value, form)) for form in ("#.3g", ".1e", "#.2g", ".0e")),
    ]
    return next((text for text in written if 0 < len(text) <= cells), written[-1])


def times(ratio: float | None) -> str:
    """A ratio in five cells: ``1.0x``, ``<0.1x``, ``230x``, ``3e11x``."""
    if ratio is None or not math.isfinite(ratio):
        return number(ratio)
    if 0 < ratio < 0.05:
        return "<0.1x"
    return f"{ratio:.1f}x" if ratio < 99.95 else f"{ratio:.0f}x" if ratio < 9999 else _short(f"{ratio:.0e}") + "x"


def _short(text: str) -> str:
    """1.2e-05 -> 1.2e-5, 12. -> 12."""
    mantissa, _, exponent = text.partition("e")
    return mantissa.rstrip(".") + (f"e{int(exponent)}" if exponent else "")
