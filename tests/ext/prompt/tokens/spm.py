"""SentencePiece's BPE: characters merge into the token of the highest score, bytes stand for what is no token."""

from collections.abc import Iterator
from typing import Any

from ext.prompt.tokens.joining import likeliest, longest, merged
from ext.prompt.tokens.vocabulary import SPACE, Tables

SIZES = (
    1,
    1,
    1,
    1,
    1,
    1,
    1,
    1,
    1,
    1,
    1,
    1,
    2,
    2,
    3,
    4,
)  # of a character by its first byte's high half, whatever follows


class Spm:
    """A text's ids."""

    def __init__(self, tables: Tables, has: Any) -> None:
        self.tables, self.has = tables, has

    def __call__(self, data: bytes) -> Iterator[int]:
        tables, has = self.tables, self.has
        if not has("spaces-not-escaped"):
            data = data.replace(b" ", SPACE)
        symbols = [*self._symbols(data)]
        if has("greedy"):
            pieces = longest(data, tables.by_bytes, tables.most)
        elif has("viterbi"):
            pieces = likeliest(symbols, tables.by_bytes, tables.scores, tables.most)
        else:
            pieces = merged(symbols, self._rank, -1 if has("merges-from-right") else 1)
        for piece in pieces:
            i = tables.by_bytes.get(piece)
            yield from [i] if i is not None else self._bytes(piece)

    def _symbols(self, data: bytes) -> Iterator[bytes]:
        at = 0
        while at < len(data):
            size = SIZES[data[at] >> 4]
            symbol = data[at : at + size]
            at += size
            is_cut = self.has("characters-bytes") and not symbol.isascii() and symbol != SPACE
            yield from (bytes([byte]) for byte in symbol) if is_cut else [symbol]

    def _rank(self, left: bytes, right: bytes) -> float | None:
        i = self.tables.by_bytes.get(left + right)
        if i is None:
            return None
        if self.has("merges-by-length"):
            return -len(left + right)
        if self.has("merges-by-id"):
            return i
        return self.tables.scores[i] if self.has("merges-reversed") else -self.tables.scores[i]

    def _bytes(self, piece: bytes) -> list[int]:
        """The tokens of bytes."""
        tables, unknown = self.tables, self.tables.unknown
        if self.has("bytes-unknown"):
            return [unknown]
        form = "<0x{:02x}>" if self.has("bytes-lower-case") else "<0x{:02X}>"
        return [tables.ids.get(form.format(byte), tables.by_bytes.get(bytes([byte]), unknown)) for byte in piece]
