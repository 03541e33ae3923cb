"""Random texts for tokenizers: scripts, numbers, white space, emoji, marks, special tokens, the vocabulary's own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial

SCRIPTS = (  # first and last character; all of them in Unicode 14
    (0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x17F), (0x391, 0x3CE), (0x410, 0x44F), (0x531, 0x556), (0x5D0, 0x5EA),
    (0x620, 0x652), (0x904, 0x94D), (0x985, 0x9CD), (0xA05, 0xA4D), (0xB85, 0xBCD), (0xC05, 0xC4D), (0xE01, 0xE3A),
    (0xE81, 0xEBD), (0xF40, 0xF69), (0x10D0, 0x10F0), (0x1100, 0x1112), (0x1200, 0x1248), (0x13A0, 0x13F4),
    (0x1780, 0x17B3), (0x1820, 0x1842), (0x1E00, 0x1EFF), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x4FFF),
    (0xAC00, 0xAE00), (0xFF01, 0xFF5E), (0x10400, 0x1044F), (0x20000, 0x20100), (0x1D400, 0x1D454),
)  # fmt: skip
SPACES = "    \t\n\r\v\f\x85\xa0\u1680\u2003\u2009\u2028\u2029\u202f\u205f\u3000"
DIGITS = "0123456789" * 3 + "²½Ⅷ٣४๕①〇𝟗"
SIGNS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡§«»–—‘’“”…€№™→∑√░▁●、。「」！？·،؟।"
MARKS = "\u0300\u0301\u0308\u0323\u0338\u0489\u064b\u093c\u0e31\u20dd\ufe0f\U000e0101"
EMOJI = "😀👍🏽👩‍💻👨‍👩‍👧‍👦🇩🇪🏴‍☠️❤️1️⃣🫶⚕️"
ODD = "\0\x01\x1b\x1c\x1f\x7f\u200b\u200d\u2060\ufeff\ufffd\ufffe\ue000\u00ad\u0378\u2fff"
SUFFIXES = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "'x", "’s", "''", "'")


class RandomTexts:
    """Texts that suit a vocabulary, the same ones for the same seed."""

    def __init__(self, tokens: Sequence[str], special: Sequence[str], seed: int = 0) -> None:
        self.tokens, self.special, self.random = tokens, special or [""], random.Random(seed)

    def __call__(self, count: int) -> Iterator[str]:
        """So many texts: the empty one, very long ones, and short ones."""
        yield from ("", " ", "a" * 4000, "ab" * 1000 + "\n" * 500, " " * 700, "1" * 1000, "é" * 900, "漢" * 500)[:count]
        for _ in range(count - 8):
            yield "".join(self.part() for _ in range(self.random.randint(1, 7)))

    def part(self) -> str:
        """A word, white space, a number ... or tokens."""
        shares = (30, 20, 10, 10, 4, 4, 3, 2, 4, 13)
        makers = (
            self.word, partial(self.some, SPACES, 3), partial(self.some, DIGITS, 7), partial(self.some, SIGNS, 3),
            partial(self.random.choice, SUFFIXES), lambda: self.random.choice("aeon") + self.some(MARKS, 2),
            partial(self.some, EMOJI, 3), partial(self.random.choice, ODD), partial(self.random.choice, self.special),
            lambda: self.random.choice(self.tokens).replace(self.random.choice("▁Ġ"), " "),
        )  # fmt: skip
        return self.random.choices(makers, shares)[0]()

    def word(self) -> str:
        """Some characters of one script."""
        first, last = self.random.choice(SCRIPTS)
        return "".join(chr(self.random.randint(first, last)) for _ in range(self.random.randint(1, 6)))

    def some(self, characters: str, most: int) -> str:
        """A few of these characters, some of them more than once in a row."""
        return "".join(
            self.random.choice(characters) * self.random.choice((1, 1, 2)) for _ in range(self.random.randint(1, most))
        )
