"""Texts that tokenizers disagree about: a small corpus, the vocabulary's own tokens, and mixtures made of both."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from llamadiff.ext.prompt.tokenizer import SPECIAL
from llamadiff.trace.token_text import Vocabulary

# The same words in many scripts, and what they have that others lack.
SCRIPTS = """All human beings are born free
Все люди рождаются свободными
Όλοι οι άνθρωποι γεννιούνται ελεύθεροι
Бүх хүн төрж мэндлэхдээ
Բոլոր մարդիկ ծնվում են ազատ
ყველა ადამიანი იბადება თავისუფალი
כל בני האדם נולדו בני חורין
يولد جميع الناس أحرارًا
تمام انسان آزاد پیدا ہوتے ہیں
ܟܠ ܒܪܢܫܐ
ދިވެހި
सभी मनुष्यों को गौरव
সমস্ত মানুষ স্বাধীনভাবে
ਸਾਰੇ ਮਨੁੱਖ
બધા માનવીઓ
ସମସ୍ତ ମନୁଷ୍ୟ
மனிதப் பிறவியினர் சகலரும்
ప్రతిపత్తిస్వత్వముల
ಎಲ್ಲಾ ಮಾನವರೂ
മനുഷ്യരെല്ലാവരും
සියලු මනුෂ්‍යයෝ
มนุษย์ทั้งหลายเกิดมามีอิสระ
ມະນຸດທຸກຄົນ
འགྲོ་བ་མིའི་རིགས
လူတိုင်းသည်
ሰብዓዊ ፍጡራን ሁሉ
មនុស្សទាំងអស់
人人生而自由，在尊严和权利上一律平等。
すべての人間は、生まれながらにして自由であり
모든 인간은 태어날 때부터 자유로우며
ᏂᎦᏓ ᎠᏂᏴᏫ
ᐃᓅᔪᓕᒫᑦ
ꦱꦧꦼꦤ꧀
Tất cả mọi người sinh ra
Þykkvibær ætli ðað
İstanbul ılık ığ
Straße GROẞ ﬁﬂ
Ĝi ŝanĝiĝas ĉiutage""".splitlines()
MARKUP = """Hello, world!
don't
I'LL we've
it's'd 'S 'T
o’clock it’s
1 12 123 1234 12345 1234567890
3.14159
1,000,000.00
1e-9 0x1F
a1b22c333
²³¹ ½⅓ Ⅳ ٠١٢٣٤٥ ०१२३
x = y**2;  // z
for (int i = 0; i < n; i++) {
<div class="a">b</div>
{"k": [1, 2, null]}
https://a.b/c?d=e&f=%20#g
C:\\a\\b /usr/bin/env
CamelCaseWords ALLCAPS snake_case kebab-case
a@b.c #tag @user $12.50 €3 £4 ¥5
...…—–“”‘’«»!?!?((()))====----~~~~____***bold***
café Ünïcödé
Σας ß ǅ 𝒜𝓫𝔠 𓀀𒀀
🙂 a🙂b 👩\u200d👩\u200d👧 👍🏽 🇩🇪🇫🇷 ❤\ufe0f 1\ufe0f\u20e3
<s> </s> a<s>b <unk> [INST] x [/INST] <think>
<|endoftext|> a <|im_start|> b <|im_end|>""".splitlines()
OTHERS = (
    "", "a", " a", "  a", "a ", "\n", "\n\n", "a\n\nb", "\t\tx", "\r\n", "a\r\nb\rc", "    four", "\n x", " \n",
    "def f(x):\n    return x  # y\n", "cafe\u0301", "a\u0300\u0301\u0302", "\u0301a", "\u0130\u0131", "Å\u212b",
    "ｆｕｌｌ　ｗ",
    "\u1e9b\u0323", "각\u1100\u1161", "\u00a0", "a\u00a0b", "\u2003\u2009\u3000", "\u200b\u200c\u200d\ufeff", "\ufeffa",
    "\x0b\x0c\x1c\x85\u2028\u2029", "\x00", "a\x00b", "\x7f\x1b[0m", "\ufffd", "\ue000", "\U0010ffff", "\u2581",
    "a\u2581b",
    "Ġ", "\\n", " ".join(["word"] * 600), "a" * 300, "ab" * 200, " " * 70, "\n" * 40, "1" * 100, "语" * 120, "!" * 90,
)  # fmt: skip
CORPUS = (*OTHERS, *SCRIPTS, *MARKUP)
INVALID = ("\udcff", "a\udce4\udcb8b", "\udce4ab", "\udcf0\udc9f\udc98", "\udc80", "a\udcc3")  # bytes: PEP 383

# Of each class one character a time: what pre-tokenizers' expressions tell apart.
CLASSES = (
    "abcxyz", "ABCXYZ", "éüñ", "ÉÜÑ", "жщя", "ЖЩЯ", "ʰʲ", "ǅǈ", "你好语", "あカン", "한글", "كتب", "मनु",
    "\u0301\u0323\u094d\u20e3", "0123456789", "0123456789", "٣४", "²½", "'", "’", ".,;:!?", "-_", "()[]{}<>", "/\\|",
    "@#$%&*", "+=^~`", "€£", "…—“", "    ", "    ", "\t", "\n", "\r", "\u00a0\u3000", "\u200d\ufe0f", "🙂👍🇩",
)  # fmt: skip
CONTRACTIONS = ("'s", "'T", "'re", "'VE", "'m", "'ll", "'D", "’s")
LONGEST_RUN, MOST_RUNS, LONGEST_CUT = 5, 6, 20
OWN = 4000  # of the vocabulary's tokens that are texts themselves
MOST_SPECIAL = 100  # of the first, and of the last


def texts_for(fields: Mapping[str, Any], seed: int = 1, takes_bytes: bool = False) -> Iterator[str]:
    """Texts without end for a GGUF file's tokenizer, each once. ``takes_bytes``: some are invalid UTF-8.

    None has a character that the file has no tokens for, of which llama.cpp dies.
    """
    seen, lacking = set[str](), Vocabulary(fields).missing_from
    for text in _Making(fields, seed).texts(takes_bytes):
        if text not in seen and not lacking(text):
            seen.add(text)
            yield text


class _Making:
    """Texts of a vocabulary's tokens and of characters, the same ones for the same seed."""

    def __init__(self, fields: Mapping[str, Any], seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311
        self.text_of = Vocabulary(fields).text
        stored, kinds = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
        texts: list[str] = list(map(str, stored)) if isinstance(stored, list) else []
        special = {n for n, kind in enumerate(kinds) if kind in SPECIAL} if isinstance(kinds, list) else set()
        named = [text for n, text in enumerate(texts) if n in special and text]
        self.special = named[:MOST_SPECIAL] + named[MOST_SPECIAL:][-MOST_SPECIAL:]
        self.tokens = [n for n, text in enumerate(texts) if n not in special and not text.startswith("<0x")]

    def texts(self, takes_bytes: bool) -> Iterator[str]:
        """The corpus, special tokens, tokens, and then mixtures for ever."""
        yield from CORPUS
        yield from INVALID if takes_bytes else ()
        for text in self.special:
            yield from (text, f"a {text} b", f"a{text}b", f"{text}\n\n{text}")
        for token in self.random.sample(self.tokens, min(OWN, len(self.tokens))):
            yield self._shown(token)
        while True:
            kind = self.random.random()
            if self.tokens and kind < 0.3:
                yield "".join(self._token() for _ in range(self.random.randint(2, 3)))
            elif kind < 0.4:
                yield self._cut(self.random.choice(CORPUS)) + self._mixture()
            else:
                yield self._mixture()

    def _token(self) -> str:
        return self._shown(self.random.choice(self.tokens)) if self.tokens else "a"

    def _shown(self, token: int) -> str:
        """A token as a text has it, without what is part of a character."""
        return (self.text_of(token) or "").replace("\ufffd", "")

    def _mixture(self) -> str:
        """Runs of characters, each of one class, as expressions cut them; some tokens between."""
        return "".join(self._run() for _ in range(self.random.randint(1, MOST_RUNS)))

    def _run(self) -> str:
        kind = self.random.random()
        if kind < 0.08:
            return self.random.choice(CONTRACTIONS)
        if kind < 0.14:
            return self._token()
        if kind < 0.17 and self.special:
            return self.random.choice(self.special)
        return "".join(self.random.choices(self.random.choice(CLASSES), k=self.random.randint(1, LONGEST_RUN)))

    def _cut(self, text: str) -> str:
        first = self.random.randint(0, len(text))
        return text[first : first + self.random.randint(0, LONGEST_CUT)]
