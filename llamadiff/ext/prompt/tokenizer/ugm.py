"""SentencePiece's unigram model: of all ways to make a text of tokens, the one of the highest sum of scores.

Kudo 2018 (arXiv 1804.10959), Viterbi's search as in sentencepiece/src/unigram_model.cc, EncodeOptimized.
"""

from __future__ import annotations

import math

import numpy as np

from llamadiff.ext.prompt.tokenizer.charsmap import Charsmap
from llamadiff.ext.prompt.tokenizer.rules import Rules
from llamadiff.ext.prompt.tokenizer.unicode_text import utf8
from llamadiff.ext.prompt.tokenizer.vocabulary import NORMAL, UNUSED, USER_DEFINED, Vocabulary

PENALTY = 10  # of an unknown character, below the least score: unigram_model.cc, kUnkPenalty
PREFIX = -1  # a text that begins tokens and is none


class Ugm:
    """The text between special tokens to ids."""

    def __init__(self, vocabulary: Vocabulary, rules: Rules) -> None:
        self.rules, self.texts = rules, vocabulary.texts
        self.charsmap = Charsmap(vocabulary.fields.get("tokenizer.ggml.precompiled_charsmap"))
        kinds = vocabulary.kinds if rules.retyped else vocabulary.stated_kinds
        self.scores = [
            0.0 if kind == USER_DEFINED else score for kind, score in zip(kinds, vocabulary.scores, strict=False)
        ]
        normal = [score for kind, score in zip(kinds, self.scores, strict=False) if kind == NORMAL]
        self.worst = float(np.float32(min(normal, default=0.0)) - np.float32(PENALTY))
        self.unknown = -2 if rules.unknown is None else rules.unknown
        self.bytes = vocabulary.byte_ids if rules.byte_fallback else {}
        self.known: dict[str, int] = {}
        pieces = [i for i, kind in enumerate(kinds[: len(self.texts)]) if kind in {NORMAL, USER_DEFINED, UNUSED}]
        for i in pieces if rules.equal_tokens == "last" else reversed(pieces):
            self.known[self.texts[i]] = i
        for text in list(self.known):
            for end in range(len(text) - 1, 0, -1):
                if text[:end] in self.known:
                    break
                self.known[text[:end]] = PREFIX

    def clean(self, text: str) -> str:
        """As the charsmap has it, its spaces escaped and, if the rules say so, added and merged."""
        space, text = "▁" if self.rules.escape_spaces else " ", self.charsmap(text)
        before = self.rules.add_space_prefix and not self.rules.treat_whitespace_as_suffix
        after = self.rules.add_space_prefix and self.rules.treat_whitespace_as_suffix
        if self.rules.remove_extra_whitespaces:
            text = "".join(space + word for word in text.split(" ") if word)
        else:
            text = (space if before and text.strip(" ") else "") + text.replace(" ", space)
        return text + space if after else text

    def words(self, text: str) -> list[str]:
        """The text itself: any token may stand anywhere in it."""
        return [text]

    def ids(self, text: str) -> list[int]:
        """The tokens of a text; unknown characters in a row are one."""
        found: list[int] = []
        for i, part in self._best(self.clean(text)):
            if i != self.unknown:
                found.append(i)
            elif self.bytes:
                found += (self.bytes[byte] for byte in utf8(part) if byte in self.bytes)
            elif not found or found[-1] != i:
                found.append(i)
        return found

    def _best(self, text: str) -> list[tuple[int, str]]:
        end, known, scores = len(text), self.known, self.scores
        sums, last = (
            [0.0] + [-math.inf] * end,
            [(self.unknown, 0)] * (end + 1),
        )  # by place: the best sum, its last token
        for start in range(end):
            here, single = sums[start], False
            for stop in range(start + 1, end + 1):
                i = known.get(text[start:stop])
                if i is None:
                    break
                if i >= 0:
                    single |= stop == start + 1
                    if here + scores[i] > sums[stop]:
                        sums[stop], last[stop] = here + scores[i], (i, start)
            if not single and here + self.worst > sums[start + 1]:
                sums[start + 1], last[start + 1] = here + self.worst, (self.unknown, start)
        way: list[tuple[int, str]] = []
        while end:
            i, start = last[end]
            way.append((i, text[start:end]))
            end = start
        return way[::-1]
