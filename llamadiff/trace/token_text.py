"""Token ids as text, from the vocabulary in the GGUF file: for reports, so that they need no llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

_WHOLE = (3, 4)  # token types: control, user-defined; found in a text before it is taken apart
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The texts of a model's tokens; ids the file has no text for give None."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        tokens = fields.get("tokenizer.ggml.tokens")
        self._tokens: Sequence[Any] = tokens if isinstance(tokens, list) else []
        self._byte_level = fields.get("tokenizer.ggml.model") == "gpt2"
        self._in_pieces = fields.get("tokenizer.ggml.model") == "llama"
        types = fields.get("tokenizer.ggml.token_type")
        self._types: Sequence[Any] = types if isinstance(types, list) else []
        self._prefixed = fields.get("tokenizer.ggml.add_space_prefix") is not False

    def text(self, token: int) -> str | None:
        """What a token stands for, as the reader would type it (bytes that are no UTF-8 shown as replacements)."""
        piece = self.bytes_of(token)
        return piece.decode("utf-8", "replace") if piece is not None else None

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes that a token stands for."""
        if not 0 <= token < len(self._tokens):
            return None
        piece = str(self._tokens[token])
        if self._byte_level:
            return _from_byte_level(piece)
        byte = _BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode("utf-8", "replace")

    @cached_property
    def by_bytes(self) -> Mapping[bytes, int]:
        """The token that bytes stand for, where it is one alone; those that spell single bytes give way to others."""
        found: dict[bytes, int] = {}
        twice = set()
        spelling = {token for token, piece in enumerate(self._tokens) if _BYTE.fullmatch(str(piece))}
        for token in sorted(range(len(self._tokens)), key=lambda token: token in spelling):
            piece = self.bytes_of(token) or b""
            if found.setdefault(piece, token) != token and token not in spelling:
                twice.add(piece)
        return {piece: token for piece, token in found.items() if piece not in twice}

    @cached_property
    def _whole(self) -> list[str]:
        pairs = zip(self._tokens, self._types, strict=False)
        return [str(piece) for piece, kind in pairs if kind in _WHOLE and piece]

    @cached_property
    def _known_texts(self) -> set[str]:
        return set(map(str, self._tokens))

    def missing_from(self, text: str) -> tuple[str, ...]:
        """The characters of a text that have no token of their own, nor tokens for their bytes, in order.

        Only of a vocabulary that llama.cpp goes through as SentencePiece does (llama-vocab.cpp: byte_to_token).
        """
        if not self._in_pieces:
            return ()
        for piece in self._whole:
            text = text.replace(piece, "")
        known = self._known_texts
        characters = dict.fromkeys(("\u2581" * self._prefixed + text).replace(" ", "\u2581"))
        return tuple(c for c in characters if c not in known and not _bytes_of(c) <= known)


def _bytes_of(character: str) -> set[str]:
    """The tokens that spell a character."""
    return {f"<0x{byte:02X}>" for byte in character.encode("utf-8", "surrogatepass")}


def _from_byte_level(piece: str) -> bytes:
    """Undo GPT-2's mapping of bytes to printable characters; special tokens are plain text already."""
    table = _byte_table()
    if any(character not in table for character in piece):
        return piece.encode("utf-8", "replace")
    return bytes(table[character] for character in piece)


@cache
def _byte_table() -> dict[str, int]:
    """Character -> byte: printable Latin-1 is itself, the rest U+0100 onwards in order (GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}
