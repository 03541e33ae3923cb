"""Byte-level BPE as GPT-2 does it, and BPE of characters: words, then merges by their place in the file's list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

from llamaref.errors import ModelError

from llamadiff.ext.prompt.tokenizer.merging import longest, merged
from llamadiff.ext.prompt.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from llamadiff.ext.prompt.tokenizer.rules import Rules
from llamadiff.ext.prompt.tokenizer.unicode_text import utf8
from llamadiff.ext.prompt.tokenizer.vocabulary import Vocabulary

WORDS = 1 << 17  # that are kept: a text has the same ones again and again


def _alphabet() -> dict[int, str]:
    """GPT-2's character for each byte (src/encoder.py there, bytes_to_unicode): itself, or one from U+0100 on."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = (byte for byte in range(256) if byte not in shown)
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


ALPHABET = _alphabet()
BYTE_OF = {character: byte for byte, character in ALPHABET.items()}


class Bpe:
    """The text between special tokens to ids."""

    def __init__(self, vocabulary: Vocabulary, rules: Rules) -> None:
        if rules.pre not in PRE_TOKENIZERS:
            raise ModelError(f"pre = {rules.pre!r}: no such pre-tokenizer")
        self.rules, self.pre = rules, PRE_TOKENIZERS[rules.pre]
        if rules.patterns is not None:
            self.pre = replace(self.pre, patterns=rules.patterns, original=None)
        self.known = vocabulary.ids if rules.equal_tokens == "last" else vocabulary.first_ids
        self.bytes = vocabulary.byte_ids if rules.byte_fallback else {}
        self.unknown = () if rules.unknown is None else (rules.unknown,)
        ranks = vocabulary.merges
        by: Mapping[str, Callable[[tuple[str, str]], float | None]] = {
            "rank": ranks.get,
            "length": lambda pair: -len(pair[0] + pair[1]) if pair in ranks else None,
            "id": lambda pair: self.known.get(pair[0] + pair[1]) if pair in ranks else None,
        }
        self._rank, self._most = by[rules.merge_by], vocabulary.longest
        self.word = lru_cache(WORDS)(self._word)

    def words(self, text: str) -> list[str]:
        """The words that merges do not cross."""
        return self.pre.words(text, self.rules.original_words)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        return [i for word in self.words(text) for i in self.word(word)]

    def _word(self, word: str) -> tuple[int, ...]:
        if self.rules.byte_level:
            word = utf8(word).decode("latin-1").translate(ALPHABET)
        if self.rules.ignore_merges:
            whole = self.known.get(word)
            if whole is not None:
                return (whole,)
        found: list[int] = []
        parts = longest(word, self.known, self._most) if self.rules.longest_match else merged(word, self._rank)
        for part in parts:
            i = self.known.get(part)
            found += (i,) if i is not None else self._fallback(part)
        return tuple(found)

    def _fallback(self, part: str) -> tuple[int, ...]:
        """Of a part that is no token: its characters' or bytes' tokens; a byte without one is left out."""
        if not self.rules.byte_fallback:
            return self.unknown
        if self.rules.byte_level:
            return tuple(self.known[each] for each in part if each.isascii() and each in self.known)
        return tuple(self.bytes[byte] for byte in utf8(part) if byte in self.bytes)
