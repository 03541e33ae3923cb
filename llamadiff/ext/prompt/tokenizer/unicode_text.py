"""Texts that are bytes: what becomes of invalid UTF-8."""

from __future__ import annotations

import re
from typing import Literal

BYTES = re.compile("[\udc80-\udcff]")  # how Python spells bytes that are no UTF-8: PEP 383
SURROGATES = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # no text has them; each is the three bytes it would be


def utf8(text: str) -> bytes:
    """The bytes of a text; those that Python escaped are themselves again."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        whole = SURROGATES.sub(
            lambda found: found[0].encode("utf-8", "surrogatepass").decode("ascii", "surrogateescape"), text
        )
        return whole.encode("utf-8", "surrogateescape")


def valid(text: str, invalid: Literal["each", "part", "keep", "drop"]) -> str:
    """The same text where it is valid, else with U+FFFD for each byte, or for each maximal part (Unicode, D93b)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        data = utf8(text)
        if invalid in {"part", "drop"}:
            return data.decode("utf-8", "replace" if invalid == "part" else "ignore")
        text = data.decode("utf-8", "surrogateescape")
        return text if invalid == "keep" else BYTES.sub("\ufffd", text)
    return text


def by_lead(data: bytes) -> list[str]:
    """Characters as their first bytes say how long they are, whatever follows: llama.cpp's unicode_len_utf8."""
    found, at = list[str](), 0
    while at < len(data):
        end = at + (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4)[data[at] >> 4]
        found.append(data[at:end].decode("utf-8", "surrogateescape"))
        at = end
    return found
