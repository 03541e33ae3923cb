"""The shipped model's tokenizer: SentencePiece-like, as llama.cpp's llm_tokenizer_spm (src/llama-vocab.cpp) runs it."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gguf import TokenType

UNK, BOS, EOS, FIRST_BYTE = 0, 1, 2, 3
FIRST_PIECE = FIRST_BYTE + 256
SPACE = "\u2581"
# Pieces never reach across words: a run of letters, or one other character, with the space before it.
WORD = re.compile(f"{SPACE}?(?:[A-Za-z]+|[^A-Za-z{SPACE}])|{SPACE}")


def split_words(text: str) -> list[str]:
    """Splits text into the words inside which pieces may merge, spaces written as in the vocabulary."""
    return WORD.findall(SPACE + text.replace(" ", SPACE))


def merge_parts(parts: Sequence[str], ranks: Mapping[str, int]) -> list[str]:
    """Joins the adjacent pair of the lowest rank, the leftmost on a tie, until no pair is a piece."""
    merged = list(parts)
    while pairs := [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(merged)) if a + b in ranks]:
        _, at = min(pairs)
        merged[at : at + 2] = [merged[at] + merged[at + 1]]
    return merged


def learn_merges(words: Mapping[str, int], count: int) -> dict[str, int]:
    """Ranks `count` merged pieces by how often their two parts are adjacent in the counted words."""
    ranks: dict[str, int] = {}
    splits = {word: list(word) for word in words}
    while len(ranks) < count:
        pairs: Counter[str] = Counter()
        for word, parts in splits.items():
            for a, b in pairwise(parts):
                pairs[a + b] += words[word]
        ranks[min(pairs, key=lambda piece: (-pairs[piece], piece))] = len(ranks)
        splits = {word: merge_parts(parts, ranks) for word, parts in splits.items()}
    return ranks


@dataclass(frozen=True)
class Vocabulary:
    """The merged pieces by rank, then the single characters; after them the text falls back to bytes."""

    ranks: dict[str, int]
    characters: tuple[str, ...]

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> "Vocabulary":
        """Learns as many pieces from the texts as bring the vocabulary to `size` tokens."""
        words = Counter(word for text in texts for word in split_words(text) if word != "\n")
        characters = tuple(sorted({character for word in words for character in word}))
        return cls(learn_merges(words, size - FIRST_PIECE - len(characters)), characters)

    def tokens(self) -> list[tuple[str, float, TokenType]]:
        """Lists the text, score and type of every token in the order of their ids."""
        special = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
        raw_bytes = [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
        pieces = [*self.ranks, *self.characters]
        scored = [(piece, -float(rank), TokenType.NORMAL) for rank, piece in enumerate(pieces)]
        return [(text, 0.0, kind) for text, kind in special + raw_bytes] + scored

    def encode(self, text: str) -> list[int]:
        """Tokenizes text as llama.cpp does, without BOS or EOS."""
        return [token for word in split_words(text) for token in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        return [token for part in merge_parts(word, self.ranks) for token in self._encode_part(part)]

    def _encode_part(self, part: str) -> list[int]:
        if part in self.ranks:
            return [FIRST_PIECE + self.ranks[part]]
        if part in self.characters:
            return [FIRST_PIECE + len(self.ranks) + self.characters.index(part)]
        return [FIRST_BYTE + byte for byte in part.encode()]
