"""A checkpoint's tokenizer.model, SentencePiece's protobuf, as the metadata that a GGUF file of it states.

sentencepiece_model.proto: field 1 is a piece (its text, score and type), 2 how it was trained, 3 how texts are
normalised.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamadiff.ext.prompt.tokenizer import CONTROL, KINDS, UNUSED, USER_DEFINED
from llamadiff.system.errors import UserError
from llamadiff.system.input import read_bytes

MOST = 1 << 26  # bytes: vocabularies of a quarter of a million pieces take a fifteenth of it
MOST_ADDED = 1 << 16
MODELS = {"ugm": 1, "spm": 2}  # TrainerSpec.model_type of our kinds: UNIGRAM, BPE
DEFAULT_IDS = {"unknown": (40, 0), "bos": (41, 1), "eos": (42, 2)}  # their fields in TrainerSpec, and proto's defaults
RANKS = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")  # tiktoken's file, which some checkpoints call tokenizer.model, too

Message = Mapping[int, Any]  # of each field's number its last value: a whole number, or bytes
Added = Mapping[int, Mapping[str, Any]]  # tokens of tokenizer_config.json, by id: content, special


def metadata_of(path: Path, added: Added) -> dict[str, Any]:
    """What it says under GGUF's keys, with the tokens that are added to it; nothing of a tiktoken file.

    Raises UserError for what is neither, and for a kind of model that llama.cpp does not have.
    """
    data = read_bytes(path, MOST, "a SentencePiece model")
    if RANKS.match(data):
        return {}
    try:
        return _metadata(data, added)
    except (ValueError, TypeError, AttributeError, struct.error) as error:
        raise UserError(f"{path}: is no SentencePiece model ({error}); download it anew") from None


def _metadata(data: bytes, added: Added) -> dict[str, Any]:
    pieces, specs = list[tuple[str, float, int]](), {2: b"", 3: b""}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(dict(_fields(value))))
        elif number in specs:
            specs[number] += value  # a message that comes twice is merged
    trained, normal = (dict(_fields(each)) for each in specs.values())
    if not pieces:
        raise ValueError("it has no pieces")
    kind = trained.get(3, 1)
    model = next((name for name, each in KINDS.items() if MODELS.get(each) == kind), None)
    if model is None:
        raise ValueError(f"its model_type is {kind}; llama.cpp knows 1, unigram, and 2, BPE")
    rows = _with_added(pieces, added)
    ids = {f"{name}_token_id": trained.get(*where) for name, where in DEFAULT_IDS.items()}
    stated = {
        "model": model, "tokens": [text for text, _, _ in rows], "scores": [score for _, score, _ in rows],
        "token_type": [kind for _, _, kind in rows], "add_space_prefix": bool(normal.get(3, 1)),
        "remove_extra_whitespaces": bool(normal.get(4, 1)), "add_bos_token": False, "add_eos_token": False,
        **{key: i for key, i in ids.items() if i < len(rows)},  # -1, as 64 bits, is none
    }  # fmt: skip
    if normal.get(2):
        stated["precompiled_charsmap"] = list(normal[2])
    return {f"tokenizer.ggml.{key}": value for key, value in stated.items()}


def _piece(message: Message) -> tuple[str, float, int]:
    (score,) = struct.unpack("<f", message.get(2, bytes(4)))
    return message.get(1, b"").decode(), score, int(message.get(3, 1))  # the types are llama_token_type's


def _with_added(pieces: Sequence[tuple[str, float, int]], added: Added) -> list[tuple[str, float, int]]:
    count = max([len(pieces), *(i + 1 for i in added)])
    if count > len(pieces) + MOST_ADDED:
        raise ValueError(f"token {count - 1} is added to {len(pieces)} pieces")
    rows = [*pieces, *((f"[PAD{i}]", 0.0, UNUSED) for i in range(len(pieces), count))]
    for i, token in added.items():
        rows[i] = token["content"], rows[i][1], kind_of(token)
    return [(spaced(text) if kind == USER_DEFINED else text, score, kind) for text, score, kind in rows]


def kind_of(token: Mapping[str, Any]) -> int:
    """What an added token is, as GGUF numbers it."""
    return CONTROL if token.get("special") is True else USER_DEFINED


def spaced(text: str) -> str:
    """A token of the user's as GGUF files have it: it is looked for before a text's spaces are escaped."""
    return text.replace("▁", " ")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: numbers, and values. Raises ValueError for what is no message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
                yield key >> 3, value
                continue
            case 1 | 5 as wire:
                size = 8 if wire == 1 else 4
            case 2:
                size, at = _varint(data, at)
            case wire:
                raise ValueError(f"a field of the unknown type {wire}")
        if at + size > len(data):
            raise ValueError("it ends within a field")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A whole number of seven bits a byte, low ones first, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends within a number")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")
