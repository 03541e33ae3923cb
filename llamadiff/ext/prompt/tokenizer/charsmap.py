"""SentencePiece's normalisation, which a file keeps as a table: the longest match at each place is replaced.

The table is a little-endian uint32 n, n bytes of a trie, and texts that end in a zero byte. The trie is a double array
of darts-clone (include/darts.h there), 32 bits a unit:

    bit   31 | 30 ... 10 | 9         | 8    | 7 ... 0
          leaf's value's | extension | has  | label
          sign   offset  | of offset | leaf |

A unit's children lie at its place XOR its offset XOR the label (shifted by 8 where bit 9 is set); label 0 is the leaf,
whose lower 31 bits are where the text starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llamaref.errors import ModelError

from llamadiff.ext.prompt.tokenizer.unicode_text import BYTES, utf8

LABEL, LEAF, VALUE = 1 << 31 | 0xFF, 1 << 8, (1 << 31) - 1


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)


class Charsmap:
    """Texts as the table of a file normalises them; none: as they are. A byte that is no UTF-8 becomes U+FFFD.

    Raises ModelError for a damaged table.
    """

    def __init__(self, table: Sequence[int] | None) -> None:
        data = np.asarray(table if table is not None else [], np.int64).astype(np.uint8).tobytes()
        size = int.from_bytes(data[:4], "little")
        if data and (size % 4 or 4 + size >= len(data) or data[-1]):
            raise ModelError(f"tokenizer.ggml.precompiled_charsmap: a trie of {size} bytes in {len(data)}")
        self.units: list[int] = np.frombuffer(data[4 : 4 + size], "<u4").tolist()
        self.texts = data[4 + size :]

    def __call__(self, text: str) -> str:
        if not self.units:
            return BYTES.sub("\ufffd", text)
        data, found, skipped = utf8(text), [], 0
        at = 0
        for character in text:
            size = 1 if character.isascii() else len(character.encode("utf-8", "surrogateescape"))
            if skipped:  # a match has it
                skipped -= size
            else:
                replacement, length = self._longest(data, at)
                found.append(replacement if length else data[at : at + size])
                skipped = max(length - size, 0)
            at += size
        return BYTES.sub("\ufffd", b"".join(found).decode("utf-8", "surrogateescape"))

    def _longest(self, data: bytes, start: int) -> tuple[bytes, int]:
        """What the longest match at a place becomes, and its length; 0 where nothing matches."""
        units, match, length = self.units, 0, 0
        node = _offset(units[0])
        try:
            for at in range(start, len(data)):
                label = data[at]
                node ^= label
                unit = units[node]
                if unit & LABEL != label or not label:
                    break
                node ^= _offset(unit)
                if unit & LEAF:
                    match, length = units[node] & VALUE, at + 1 - start
            if not length:
                return b"", 0
            return self.texts[match : self.texts.index(0, match)], length
        except (IndexError, ValueError):
            raise ModelError("tokenizer.ggml.precompiled_charsmap: its trie leads out of the table") from None
