"""Special tokens are cut out of a text before anything else is done to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from llamadiff.ext.prompt.tokenizer.rules import Rules
from llamadiff.ext.prompt.tokenizer.unicode_text import utf8

ASCII_SPACE = " \t\n\v\f\r"


class Specials:
    """The texts of special tokens, to be found in others."""

    def __init__(self, tokens: Mapping[str, int], rules: Rules) -> None:
        self.tokens, self.rules = tokens, rules
        lengths: dict[str, set[int]] = {}
        for text in tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self.lengths = {first: sorted(each, reverse=True) for first, each in lengths.items()}
        self.first = re.compile(f"[{re.escape(''.join(lengths))}]") if lengths else None

    def split(self, text: str) -> Iterator[str | int]:
        """The text between special tokens, and their ids, in order; empty texts are left out."""
        spans = self.found(text) if self.first is not None and self.first.search(text) else ()
        at, stripped = 0, False
        for start, end in spans:
            i = self.tokens[text[start:end]]
            before = self._stripped(text[at:start], stripped, i in self.rules.strip_left)
            if before:
                yield before
            yield i
            at, stripped = end, i in self.rules.strip_right
        rest = self._stripped(text[at:], stripped, False)
        if rest:
            yield rest

    def found(self, text: str) -> Iterable[tuple[int, int]]:
        """Where special tokens lie: from the left, at each place the longest; or the longest of all first."""
        if self.rules.special_search == "leftmost":
            return self._leftmost(text)
        every = sorted(self._every(text), key=lambda span: (-len(utf8(text[slice(*span)])), span[0]))
        taken: list[tuple[int, int]] = []
        covered = bytearray(len(text))
        for start, end in every:
            if not any(covered[start:end]):
                covered[start:end] = b"\1" * (end - start)
                taken.append((start, end))
        return sorted(taken)

    def _leftmost(self, text: str) -> Iterator[tuple[int, int]]:
        at = 0
        for start, end in self._every(text):
            if start >= at:
                yield start, end
                at = end

    def _every(self, text: str) -> Iterator[tuple[int, int]]:
        """All places, from the left, at each the longest first."""
        assert self.first is not None
        for match in self.first.finditer(text):
            start = match.start()
            for length in self.lengths[match[0]]:
                if text[start : start + length] in self.tokens and start + length <= len(text):
                    yield start, start + length

    def _stripped(self, text: str, left: bool, right: bool) -> str:
        space = None if self.rules.strip_unicode else ASCII_SPACE
        text = text.lstrip(space) if left else text
        return text.rstrip(space) if right else text
