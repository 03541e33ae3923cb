"""SentencePiece's BPE: characters that are merged by the scores of what they make (src/bpe_model.cc there)."""

from __future__ import annotations

from collections.abc import Callable

from llamadiff.ext.prompt.tokenizer.merging import longest, merged
from llamadiff.ext.prompt.tokenizer.rules import Rules
from llamadiff.ext.prompt.tokenizer.unicode_text import BYTES, by_lead, utf8
from llamadiff.ext.prompt.tokenizer.vocabulary import Vocabulary


class Spm:
    """Pieces of a text between special tokens, with its spaces escaped, to ids."""

    def __init__(self, vocabulary: Vocabulary, rules: Rules) -> None:
        self.known = vocabulary.ids if rules.equal_tokens == "last" else vocabulary.first_ids
        self.bytes = vocabulary.byte_ids if rules.byte_fallback else {}
        self.unknown = () if rules.unknown is None else (rules.unknown,)
        self._most = vocabulary.longest if rules.longest_match else 0
        self._rank: Callable[[int, str], float] = {
            "rank": lambda i, _: -vocabulary.scores[i], "id": lambda i, _: i, "length": lambda _, text: -len(text),
        }[rules.merge_by]  # fmt: skip

    def words(self, text: str) -> list[str]:
        """The text itself: any token may stand anywhere in it."""
        return [text]

    def ids(self, text: str) -> list[int]:
        """The tokens of a text; a character that is none becomes those of its bytes, or the unknown one."""
        found: list[int] = []
        symbols = text if text.isascii() or not BYTES.search(text) else by_lead(utf8(text))
        for part in longest(text, self.known, self._most) if self._most else merged(symbols, self._rank_of):
            i = self.known.get(part)
            found += (i,) if i is not None else self._fallback(part)
        return found

    def _rank_of(self, pair: tuple[str, str]) -> float | None:
        i = self.known.get(text := pair[0] + pair[1])
        return None if i is None else self._rank(i, text)

    def _fallback(self, text: str) -> tuple[int, ...]:
        known = tuple(self.bytes[byte] for byte in utf8(text) if byte in self.bytes)
        return known or self.unknown
