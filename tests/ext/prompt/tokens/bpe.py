"""Byte-level BPE: a text is cut into words, and a word's bytes merge in the order in which merges were learned."""

from collections.abc import Iterator
from typing import Any

import regex
from ext.prompt.tokens.characters import alphabet, as_bytes, as_text
from ext.prompt.tokens.joining import longest, merged
from ext.prompt.tokens.vocabulary import Tables
from ext.prompt.tokens.words import PRE, cut, edited


class Bpe:
    """A text's ids."""

    def __init__(self, tables: Tables, has: Any) -> None:
        self.tables, self.has, v = tables, has, tables.vocabulary
        pre = "gpt-2" if has("pre-gpt-2") else "default" if has("pre-default") else v.pre
        self.patterns = [regex.compile(edited(each, has), regex.V1) for each in PRE[pre]]
        self.alphabet = alphabet(gap=not has("alphabet-soft-hyphen"))
        self.ignores_merges = v.pre == "llama-bpe" and not has("ignore-merges-forgotten")
        self.ranks = dict[tuple[str, str], int]()
        for rank, merge in enumerate(v.merges):
            if rank or not has("merge-lost"):
                left, _, right = merge.partition(" ")
                self.ranks.setdefault((left, right), rank)
        self.seen = dict[str, list[int]]()

    def __call__(self, data: bytes) -> Iterator[int]:
        words = [as_text(data)]
        for pattern in self.patterns:
            words = [word for each in words for word in cut(pattern, each)]
        for word in words:
            if word not in self.seen:
                self.seen[word] = self._ids(word)
            yield from self.seen[word]

    def _ids(self, text: str) -> list[int]:
        tables = self.tables
        if self.has("special-after-words"):
            for special, i in tables.special:
                if special == as_bytes(text):
                    return [i]
        word = "".join(self.alphabet[byte] for byte in text.encode("utf-8", "surrogatepass"))
        if self.ignores_merges and word in tables.ids:
            return [tables.ids[word]]
        if self.has("greedy"):
            pieces = longest(word, tables.ids, tables.most)
        else:
            pieces = merged([*word], self._rank, -1 if self.has("merges-from-right") else 1)
        tokens = [token for piece in pieces for token in ([piece] if piece in tables.ids else piece)]
        return [tables.ids[token] for token in tokens if token in tables.ids]

    def _rank(self, left: str, right: str) -> int | None:
        if self.has("merges-by-id"):
            return self.tables.ids.get(left + right)
        rank = self.ranks.get((left, right))
        if rank is None:
            return None
        return -rank if self.has("merges-reversed") else -len(left + right) if self.has("merges-by-length") else rank
