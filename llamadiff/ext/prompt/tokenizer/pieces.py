"""Ids back to text: the bytes of each token, and what is taken away from them together."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llamadiff.ext.prompt.tokenizer.bpe import BYTE_OF
from llamadiff.ext.prompt.tokenizer.rules import Rules
from llamadiff.ext.prompt.tokenizer.rwkv import unescaped
from llamadiff.ext.prompt.tokenizer.vocabulary import BYTE, CONTROL, NORMAL, SPECIAL, UNKNOWN, Vocabulary


class Pieces:
    """The bytes of tokens, as llama_token_to_piece gives them."""

    def __init__(self, vocabulary: Vocabulary, rules: Rules) -> None:
        self.texts, self.rules = vocabulary.texts, rules
        self.kinds: Sequence[int] = vocabulary.kinds if rules.retyped else vocabulary.stated_kinds

    def of(self, i: int, special: bool) -> bytes:
        """The bytes of a token; none of one that is not to be shown, or that does not exist."""
        i -= self.rules.offset
        if not 0 <= i < len(self.texts):
            return b""
        kind, text = self.kinds[i], self.texts[i]
        if kind in {CONTROL, UNKNOWN} and not special:
            return b""
        if kind in SPECIAL and self.rules.kind != "rwkv":
            return text.encode()
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        return self._plain(text) if kind == NORMAL or self.rules.kind == "rwkv" else b""

    def _plain(self, text: str) -> bytes:
        if self.rules.kind == "rwkv":
            return unescaped(text)
        if self.rules.kind != "bpe" or self.rules.escape_spaces:
            return text.replace("▁", " ").encode()
        if not self.rules.byte_level:
            return text.encode()
        return b"".join(bytes([BYTE_OF[c]]) if c in BYTE_OF else self._foreign(c, text) for c in text)

    @staticmethod
    def _foreign(character: str, text: str) -> bytes:
        """A character that is no byte in GPT-2's alphabet, as llama.cpp shows it (llama_decode_text)."""
        return f"[UNK_BYTE_0x{character.encode().hex()}{text}]".encode()


def cleaned(text: bytes) -> bytes:
    """Without the spaces before punctuation, around a lone apostrophe, and before four contractions.

    Hugging Face's clean_up_tokenization, as far as llama_vocab::impl::detokenize does it.
    """
    text = re.sub(rb" ([?!.,])", rb"\1", text)
    return re.sub(rb" ('(?:s|m|re|ve))", rb"\1", text.replace(b" ' ", b"'"))
