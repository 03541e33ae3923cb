"""Tokens back to text, as a server streams them: bytes are held back while they may become a character."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from ext.prompt.tokens.characters import alphabet, as_bytes
from ext.prompt.tokens.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary

BYTES = {character: byte for byte, character in enumerate(alphabet())}
ERRORS = {"invalid-dropped": "ignore", "invalid-replaced": "replace", "utf8-each": "replace"}


class Back:
    """Each token's text."""

    def __init__(self, vocabulary: Vocabulary, has: Any) -> None:
        self.v, self.has = vocabulary, has
        self.errors = next((how for mistake, how in ERRORS.items() if has(mistake)), "surrogateescape")

    def __call__(self, ids: Sequence[int]) -> list[str]:
        has, texts = self.has, list[str]()
        decoder = getincrementaldecoder("latin-1" if has("latin-1") else "utf-8")(self.errors)
        for number, i in enumerate(ids):
            data = self.piece(i)
            if has("cut-at-nul"):
                data = data.split(b"\0")[0]
            if has("spaces-dropped") or (has("first-space-dropped") and not number):
                data = data.removeprefix(b" ")
            if has("cleaned-up") and data[:1] == b" " and data[1:2] in {b"?", b"!", b".", b","}:
                data = data[1:]
            if has("joined-by-spaces") and number:
                data = b" " + data
            ends = number == len(ids) - 1 and not has("end-lost")
            texts.append(decoder.decode(data, ends or has("utf8-each")))
        if has("line-added") and texts:
            texts[-1] += "\n"
        return texts

    def piece(self, i: int) -> bytes:
        """A token's bytes."""
        text, kind = self.v.texts[i], self.v.kinds[i]
        if kind in {CONTROL, UNKNOWN, USER_DEFINED}:
            return self._special(text, kind)
        if kind == BYTE and not self.has("byte-names"):
            return bytes([int(text[3:5], 16)])
        if kind not in {NORMAL, BYTE}:
            return b""
        if self.v.model == "gpt2":
            return as_bytes(text) if self.has("alphabet-left") else b"".join(_byte(c, text) for c in text)
        if self.v.model == "bert" and self.has("hashes"):
            text = f" {text}"
        return as_bytes(text if self.has("mark-left") else text.replace("▁", " "))

    def _special(self, text: str, kind: int) -> bytes:
        """The bytes of what is no part of a text; of what a user defined as well."""
        if self.has("special-decoded") and self.v.model == "gpt2":
            return bytes(BYTES[c] for c in text if c in BYTES)
        if kind == UNKNOWN and self.has("unknown-marked"):
            text = " ⁇ "
        if kind != USER_DEFINED:
            text = "" if self.has("special-dropped") else f" {text} " if self.has("special-spaced") else text
        return as_bytes(text)


def _byte(c: str, text: str) -> bytes:
    """A character's byte; llama.cpp says so where it has none, with the whole token's text."""
    return bytes([BYTES[c]]) if c in BYTES else f"[UNK_BYTE_0x{as_bytes(c).hex()}{text}]".encode()
