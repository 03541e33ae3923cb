"""WordPiece as BERT does it: a clean text, words, and the longest tokens that make a word up.

Sources: google-research/bert, tokenization.py (BasicTokenizer, WordpieceTokenizer). GGUF files have "▁" at the start of
what begins a word, and nothing where BERT's files have "##" (gguf converters).
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

import regex

from llamadiff.ext.prompt.tokenizer.rules import Rules
from llamadiff.ext.prompt.tokenizer.vocabulary import Vocabulary

WORDS = 1 << 17
SPACE, LINES, MARKS = regex.compile(r"\s"), regex.compile(r"[\t\n\r]"), regex.compile(r"\p{M}")
CONTROL = regex.compile(r"[\0\ufffd\p{Cc}\p{Cf}\p{Co}\p{Cs}]")
# Words of one character: punctuation, all signs of ASCII, Chinese characters; as BERT's Rust port has them, which lacks
# U+2B820 to U+2B91F (normalizers/bert.rs)
ALONE = regex.compile(
    r"([\p{P}!-/:-@\[-`{-~\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    r"\U0002b920-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f])"
)


class Wpm:
    """The text between special tokens to ids."""

    def __init__(self, vocabulary: Vocabulary, rules: Rules) -> None:
        self.rules, self.texts = rules, vocabulary.texts
        self.known = vocabulary.ids if rules.equal_tokens == "last" else vocabulary.first_ids
        self.longest = vocabulary.longest
        self.unknown = () if rules.unknown is None else (rules.unknown,)
        self.word = lru_cache(WORDS)(self._word)

    def clean(self, text: str) -> str:
        """Without control characters and accents, and in small letters, as the rules have it."""
        if not text.isascii():
            if self.rules.accents == "strip":  # Mn alone are accents there
                text = "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")
            elif self.rules.accents == "first":  # llama.cpp, unicode_cpts_normalize_nfd
                text = MARKS.sub("", "".join(unicodedata.normalize("NFD", c)[0] for c in text))
        if self.rules.controls_first:
            text = CONTROL.sub("", LINES.sub(" ", text))
        text = CONTROL.sub("", SPACE.sub(" ", text))
        if not self.rules.lowercase:
            return text
        return text.lower() if text.isascii() else "".join(map(str.lower, text))

    def words(self, text: str) -> list[str]:
        """The words that tokens do not cross."""
        return [word for word in ALONE.sub(r" \1 ", self.clean(text)).split(" ") if word]

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        return [i for word in self.words(text) for i in self.word(word)]

    def _word(self, word: str) -> tuple[int, ...]:
        """The longest token that begins the word, then the longest that goes on; unknown if there comes to be none."""
        if 0 < self.rules.longest_word < len(word):
            return self.unknown
        found, at, text = [], 0, "▁" + word
        while at < len(text):
            marked = self.rules.own_marks and text[at] == "▁"
            for end in range(min(len(text), at + self.longest), at + (marked and not at), -1):
                i = self.known.get(text[at:end]) if not (marked and at) else None
                if i is not None:
                    break
            else:
                return self.unknown
            found.append(i)
            at = end
        return tuple(found)
