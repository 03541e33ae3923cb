"""The smallest text on which two tokenizers still part, out of one on which they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", str, tuple[int, ...])
LONGEST = 4000  # characters of a text that is made smaller
MOST = 2_000_000  # characters that are asked about
PLAIN = ("a", "1", ".", " ")  # what a character is replaced by, if they still part then


def smallest(text: str, parts: Callable[[Sequence[str]], Sequence[bool]]) -> str:
    """The text without all that can be left out, its characters as plain as can be.

    Zeller and Hildebrandt 2002, ddmin; every round is asked at once. What costs too much is left as it is.
    """
    if parts([text[:LONGEST]])[0]:
        text = text[:LONGEST]
    search = Search[str](parts)
    before = None
    while text != before:
        before = text
        text = search.shortest(text)
        for at in range(len(text)):
            text = search.first(_plainer(text, at)) or text
    return text


class Search(Generic[T]):
    """Asks of texts, or of token ids, whether two tokenizers part, until so much was asked about."""

    def __init__(self, parts: Callable[[Sequence[T]], Sequence[bool]]) -> None:
        self.parts: Callable[[Sequence[T]], Sequence[bool]] = parts
        self.left = MOST

    def shortest(self, text: T) -> T:
        """Cut as long as anything can be left out."""
        pieces = 2
        while text:
            size = max(1, -(-len(text) // pieces))
            starts = range(0, len(text), size)
            alone = self.first([text[at : at + size] for at in starts if size < len(text)])
            rest = self.first([text[:at] + text[at + size :] for at in starts]) if alone is None else None
            if alone is not None:
                text, pieces = alone, 2
            elif rest is not None:
                text, pieces = rest, max(pieces - 1, 2)
            elif size == 1 or self.left <= 0:
                return text
            else:
                pieces = min(2 * pieces, len(text))
        return text

    def first(self, tries: Sequence[T]) -> T | None:
        """The first of some that parts."""
        self.left -= sum(map(len, tries))
        if not tries or self.left <= 0:
            return None
        return next((each for each, parted in zip(tries, self.parts(tries), strict=True) if parted), None)


def _plainer(text: str, at: int) -> list[str]:
    others = PLAIN[: PLAIN.index(text[at])] if text[at] in PLAIN else PLAIN
    return [text[:at] + other + text[at + 1 :] for other in others]
