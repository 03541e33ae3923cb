"""BERT's WordPiece: a text is cleaned and cut into words, and of each the longest tokens are taken."""

import unicodedata
from collections.abc import Iterator
from typing import Any

import regex
from ext.prompt.tokens.characters import as_text
from ext.prompt.tokens.vocabulary import Tables

IS_WHITE = regex.compile(r"\s").match
CHINESE = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
           (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))  # fmt: skip


class Wpm:
    """A text's ids."""

    def __init__(self, tables: Tables, has: Any) -> None:
        self.tables, self.has = tables, has
        self.lowers = tables.vocabulary.get("normalizer.lowercase", True) and not has("case-kept")
        self.strips = tables.vocabulary.get("normalizer.strip_accents", True) and not has("accents-kept")

    def __call__(self, data: bytes) -> Iterator[int]:
        for word in self._words(as_text(data)):
            ids = self._pieces(word)
            yield from [self.tables.unknown] if ids is None else ids

    def _words(self, text: str) -> list[str]:
        """Cut at white space, and around signs and Chinese characters; accents and upper case taken away."""
        words = [""]
        for character in text:
            c = unicodedata.normalize("NFD", character)[0] if self.strips else character
            kind = unicodedata.category(c)
            if IS_WHITE(c):
                words.append("")
            elif c not in "\0\ufffd" and kind not in {"Cc", "Cf", "Co", "Cs"} and not (self.strips and kind[0] == "M"):
                c = c.lower()[0] if self.lowers else c
                words[-1:] = [words[-1], c, ""] if self._stands_alone(c, kind) else [words[-1] + c]
        return [word for word in words if word]

    def _stands_alone(self, c: str, kind: str) -> bool:
        is_chinese = any(low <= ord(c) <= high for low, high in CHINESE) and not self.has("chinese-joined")
        return is_chinese or kind[0] == "P" or (c < "\x7f" and kind[0] == "S")

    def _pieces(self, word: str) -> list[int] | None:
        """The longest tokens of a word; None where a part of it is none."""
        table, ids, rest = self.tables.ids, list[int](), f"▁{word}"
        if self.has("words-of-100") and len(word) > 100:
            return None
        while rest:
            before = "##" if ids and self.has("hashes") else ""
            sizes = range(min(len(rest), self.tables.most), 0, -1)
            size = next((size for size in sizes if before + rest[:size] in table), 0)
            if not size:
                return None
            ids.append(table[before + rest[:size]])
            rest = rest[size:]
        return ids
