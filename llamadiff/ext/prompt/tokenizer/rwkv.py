"""RWKV's World tokenizer: at each place the longest token, in bytes (BlinkDL/RWKV-LM, rwkv_tokenizer.py)."""

from __future__ import annotations

import re

from llamadiff.ext.prompt.tokenizer.rules import Rules
from llamadiff.ext.prompt.tokenizer.unicode_text import utf8
from llamadiff.ext.prompt.tokenizer.vocabulary import Vocabulary

ESCAPES = re.compile(rb"\\(?:x([0-9a-f]{2})|(.))", re.DOTALL)
NAMED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def unescaped(text: str) -> bytes:
    """The bytes of a token, which files keep as Python would print them."""
    return ESCAPES.sub(lambda m: bytes.fromhex(m[1].decode()) if m[1] else NAMED.get(m[2], m[2]), text.encode())


class Rwkv:
    """The text between special tokens to ids."""

    def __init__(self, vocabulary: Vocabulary, rules: Rules) -> None:
        texts = [*enumerate(map(unescaped, vocabulary.texts))]
        self.known = {text: i for i, text in (texts if rules.equal_tokens == "last" else reversed(texts))}
        self.lengths: dict[int, list[int]] = {}
        for text in self.known:
            self.lengths.setdefault(text[0], []).append(len(text))
        self.lengths = {first: sorted(set(lengths), reverse=True) for first, lengths in self.lengths.items()}
        self.unknown = () if rules.unknown is None else (rules.unknown,)

    def words(self, text: str) -> list[str]:
        """The text itself: any token may stand anywhere in it."""
        return [text]

    def ids(self, text: str) -> list[int]:
        """The tokens of a text; a byte that begins none is unknown."""
        data, at, found = utf8(text), 0, []
        while at < len(data):
            for length in self.lengths.get(data[at], ()):
                i = self.known.get(data[at : at + length])
                if i is not None and at + length <= len(data):
                    found.append(i)
                    break
            else:
                found += self.unknown
                length = 1
            at += length
        return found
