"""A tokenizer written by hand from llama.cpp's sources, as engines have; with mistakes, if it is given names of some.

    python engine.py FILE.gguf [--back] [--mistake NAME]...

A JSON string a line in, a list of ids a line out; lone surrogates are invalid UTF-8 (PEP 383). With --back a list of
ids in and a list of texts out, one for each token, "" while inside a character. It does as llama.cpp does, also where
the models' original tokenizers do otherwise. It shares no code with llamadiff, and none with reference/.
"""

from __future__ import annotations

import argparse
import json
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import regex

sys.path[:0] = [str(Path(__file__).parents[3])]

from ext.prompt.tokens.back import Back  # noqa: E402
from ext.prompt.tokens.bpe import Bpe  # noqa: E402
from ext.prompt.tokens.characters import as_bytes, halved, in_units  # noqa: E402
from ext.prompt.tokens.mistakes import DECODING, ENCODING  # noqa: E402
from ext.prompt.tokens.spm import Spm  # noqa: E402
from ext.prompt.tokens.ugm import Ugm  # noqa: E402
from ext.prompt.tokens.vocabulary import Tables, Vocabulary  # noqa: E402
from ext.prompt.tokens.wpm import Wpm  # noqa: E402

KINDS = {"llama": Spm, "gpt2": Bpe, "bert": Wpm, "t5": Ugm}
WHITE = b" \t\n\v\f\r"
UNSTRIPPED = {"<s>", "<unk>", "<|endoftext|>"}  # all other special tokens of Phi-3 eat white space behind them


class Engine:
    """Texts to ids and back, by a file's vocabulary."""

    def __init__(self, vocabulary: Vocabulary, mistakes: Sequence[str] = ()) -> None:
        self.v, self.has = vocabulary, frozenset(mistakes).__contains__
        self.tables = Tables(vocabulary, self.has)
        self.ids_of = KINDS[vocabulary.model](self.tables, self.has)
        self.decode = Back(vocabulary, self.has)

    def encode(self, text: str) -> list[int]:
        """A text's ids."""
        v, has, ids = self.v, self.has, list[int]()
        if (v.adds_bos or has("bos-added")) and not has("bos-missing"):
            ids += [v.bos] * (2 if has("bos-twice") else 1)
        data = self._bytes(text)
        for line in data.splitlines(keepends=True) if has("line-by-line") else [data]:
            ids += self._ids(line)
        if v.model == "bert":
            ids.append(v.sep)
        elif v.adds_eos or has("eos-added"):
            ids.append(v.eos)
        ids = ids[:512] if has("truncated") else ids
        return [i + 1 if has("off-by-one") else i & 0xFFFF if has("ids-16-bits") else i for i in ids]

    def _bytes(self, text: str) -> bytes:  # noqa: PLR0912 - a mistake is an if
        has = self.has
        for form in ("NFC", "NFKC"):
            if has(form.lower()):
                text = unicodedata.normalize(form, text)
        if has("lower-case"):
            text = text.lower()
        if has("stripped"):
            text = text.strip()
        if has("spaces-merged"):
            text = regex.sub(" +", " ", text.strip(" "))
        if has("crlf"):
            text = text.replace("\r\n", "\n")
        if has("cut-at-nul"):
            text = text.split("\0")[0]
        if has("bom-dropped"):
            text = text.removeprefix("\ufeff")
        if has("controls-dropped"):
            text = "".join(c for c in text if c in "\t\n\r" or unicodedata.category(c) not in {"Cc", "Cf"})
        if has("quotes-straight"):
            text = text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'})
        if has("no-break-spaces"):
            text = text.replace("\xa0", " ")
        if has("escapes"):
            text = text.replace("\\n", "\n")
        if has("utf-16-units"):
            text = in_units(text)
        data = as_bytes(halved(text) if has("cesu-8") else text)
        if has("latin-1"):
            data = data.decode("latin-1").encode()
        return data.decode("utf-8", "ignore").encode() if has("invalid-dropped") else data

    def _ids(self, data: bytes) -> Iterator[int]:
        """A text's ids, without what is added around it."""
        first = after_special = True
        for part in [data] if self.has("special-after-words") else self._parts(data):
            if isinstance(part, int):
                yield part
                after_special = True
            else:
                yield from self.ids_of(self._prefixed(part, first, after_special))
                first = after_special = False

    def _parts(self, data: bytes) -> list[int | bytes]:
        """A text cut at special tokens, the longest first."""
        parts: list[int | bytes] = [data] if data else []
        for text, i in self.tables.special:
            if text in data:
                parts = [*self._cut(text, i, parts)]
        return parts

    def _cut(self, text: bytes, i: int, parts: list[int | bytes]) -> Iterator[int | bytes]:
        strips = self.has("special-eats-right") or (self.v.is_phi_3 and self.v.texts[i] not in UNSTRIPPED)
        for part in parts:
            if isinstance(part, int):
                yield part
                continue
            rest = part
            while text in rest:
                left, _, rest = rest.partition(text)
                if left := left.rstrip(WHITE) if self.has("special-eats-left") else left:
                    yield left
                yield i
                rest = rest.lstrip(WHITE) if strips else rest
            if rest:
                yield rest

    def _prefixed(self, data: bytes, first: bool, after_special: bool) -> bytes:
        """With the space that SentencePiece's BPE puts before a text."""
        if self.has("space-prefix-added"):
            return b" " + data if first else data
        if self.v.model != "llama" or not self.v.get("add_space_prefix", True) or self.has("space-prefix-missing"):
            return data
        return b" " + data if (first if self.has("space-prefix-once") else after_special) else data


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("file")
    words.add_argument("--back", action="store_true")
    words.add_argument("--mistake", action="append", default=[])
    given = words.parse_args()
    if unknown := {*given.mistake} - {*(DECODING if given.back else ENCODING)}:
        raise SystemExit(f"no such mistake: {', '.join(sorted(unknown))}")
    engine = Engine(Vocabulary(given.file), given.mistake)
    answer: Callable[[Any], Any] = engine.decode if given.back else engine.encode
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
