"""SentencePiece's Unigram: of all ways through a text the one with the best sum of scores."""

import struct
from collections.abc import Iterator
from typing import Any

from ext.prompt.tokens.characters import characters
from ext.prompt.tokens.joining import longest
from ext.prompt.tokens.spm import SIZES
from ext.prompt.tokens.vocabulary import NORMAL, SPACE, UNUSED, USER_DEFINED, Tables


class Ugm:
    """A text's ids."""

    def __init__(self, tables: Tables, has: Any) -> None:
        self.tables, self.has, v = tables, has, tables.vocabulary
        charsmap = bytes(each & 0xFF for each in v.get("precompiled_charsmap", ()))
        size = int.from_bytes(charsmap[:4], "little")
        self.trie, self.replacements = struct.unpack(f"<{size // 4}I", charsmap[4 : 4 + size]), charsmap[4 + size :]
        self.by_bytes = {text: i for text, i in tables.by_bytes.items() if v.kinds[i] in {NORMAL, USER_DEFINED, UNUSED}}
        self.scores = [0.0 if k == USER_DEFINED else s for k, s in zip(v.kinds, tables.scores, strict=True)]
        self.worst = min(s for k, s in zip(v.kinds, tables.scores, strict=True) if k == NORMAL) - 10

    def __call__(self, data: bytes) -> Iterator[int]:
        data, unknown = self._normalized(data), self.tables.unknown
        if self.has("greedy"):
            pieces = longest(data, self.by_bytes, self.tables.most)
            yield from (self.by_bytes.get(piece, unknown) for piece in pieces)
            return
        last = None
        for i in self._likeliest(data):
            if i != unknown or last != unknown or self.has("unknown-each"):
                yield i
            last = i

    def _likeliest(self, data: bytes) -> list[int]:
        unknown = self.tables.unknown
        best = [(0.0, 0, unknown)] + [(float("-inf"), 0, unknown)] * len(data)
        at = 0
        while at < len(data):
            score = best[at][0]
            step = min(SIZES[data[at] >> 4], len(data) - at)
            for end in range(at + 1, min(len(data), at + self.tables.most) + 1):
                i = self.by_bytes.get(data[at:end])
                if i is not None and score + self.scores[i] > best[end][0]:
                    best[end] = (score + self.scores[i], at, i)
            if data[at : at + step] not in self.by_bytes and score + self.worst > best[at + step][0]:
                best[at + step] = (score + self.worst, at, unknown)
            at += step
        ids = list[int]()
        while at:
            _, at, i = best[at]
            ids.append(i)
        return ids[::-1]

    def _normalized(self, data: bytes) -> bytes:
        """By the file's table of characters; white space is U+2581, one for several, and one in front."""
        get, has = self.tables.vocabulary.get, self.has
        merges = get("remove_extra_whitespaces", False) and not has("spaces-kept")
        prefixes = get("add_space_prefix", False) and not has("space-prefix-missing")
        space = b" " if has("spaces-not-escaped") else SPACE
        made, at, in_word, prefixed = b"", 0, False, False
        while at < len(data):
            piece, size = self._mapped(data, at)
            at += size
            for byte in piece:
                if byte == 0x20:
                    in_word = False
                    made += b"" if merges else space
                    continue
                if not in_word and ((prefixes and not prefixed) or merges):
                    made, prefixed = made + space, True
                in_word = True
                made += bytes([byte])
        return made

    def _mapped(self, data: bytes, at: int) -> tuple[bytes, int]:
        """What the longest piece here becomes, and how long that piece is."""
        found, size = self._found(data, at)
        if size:
            return self.replacements[found : self.replacements.index(b"\0", found)], size
        character, size = next(characters(data[at : at + 4]))
        return (character.encode() if character == "\ufffd" else data[at : at + size]), size

    def _found(self, data: bytes, at: int) -> tuple[int, int]:
        """Where SentencePiece's double array has the replacement of the longest piece here, and that piece's size."""
        found, size, trie = 0, 0, self.trie
        if not trie or self.has("charsmap-ignored"):
            return found, size
        node = _children(trie[0])
        for length, byte in enumerate(data[at:], 1):
            node ^= byte
            if not byte or trie[node] & 0x800000FF != byte:
                break
            ends = trie[node] >> 8 & 1
            node ^= _children(trie[node])
            if ends:
                found, size = trie[node] & 0x7FFFFFFF, length
        return found, size


def _children(unit: int) -> int:
    return unit >> 10 << ((unit & 0x200) >> 6)
