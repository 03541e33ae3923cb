"""A checkpoint with tokenizer.model alone: SentencePiece's protobuf is read, and held against the file's tokenizer."""

from __future__ import annotations

import json
import struct

import pytest
from llamaref import Weights

from llamadiff import UserError
from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.prompt.tokenizer import rules_of
from llamadiff.ext.prompt.tokens.of_checkpoint import ids_oddities, open_tokenizers, tokenizer_oddities

UNIGRAM, BPE, WORD = 1, 2, 3


def varint(number):
    """Seven bits a byte, the low ones first; a negative number has 64."""
    number &= (1 << 64) - 1
    low = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(each | 0x80 for each in low[:-1]), low[-1]])


def field(number, value):
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def model(pieces, *, kind=BPE, trained=b"", normal=b""):
    """A ModelProto of (text, score, type)s."""
    made = [field(1, field(1, text.encode()) + field(2, score) + field(3, kind)) for text, score, kind in pieces]
    return b"".join(made) + field(2, field(3, kind) + trained) + field(3, field(1, b"made") + normal)


def pieces_of(path):
    fields = Weights(path).fields
    columns = [fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")]
    return [*zip(*columns, strict=True)]


def found(path, folder):
    """Of a file beside a checkpoint: oddities by their keys, and what was said of others."""
    tokenizers, file = open_tokenizers(folder), ModelFile(path)
    every = [*tokenizer_oddities(file, tokenizers), *ids_oddities(file, tokenizers)]
    told = {each.where: each.says for each in every if not isinstance(each, str)}
    return told, [each for each in every if isinstance(each, str)]


PLAIN = field(3, 1) + field(4, 0)  # a space first, and several stay


@pytest.mark.parametrize("name", ["llama-spm", "nomic-bert-moe"])
def test_the_same_tokenizer(vocabulary, tmp_path, name):
    path = vocabulary(name)
    fields = Weights(path).fields
    normal = field(3, 1) + field(4, int(fields.get("tokenizer.ggml.remove_extra_whitespaces", False)))
    table = fields.get("tokenizer.ggml.precompiled_charsmap")
    normal += field(2, bytes(each & 0xFF for each in table)) if table else b""
    ids = [(n, fields.get(f"tokenizer.ggml.{key}_token_id", n)) for n, key in enumerate(("unknown", "bos", "eos"))]
    data = model(
        pieces_of(path), kind=UNIGRAM if table else BPE, normal=normal,
        trained=b"".join(field(40 + n, i) for n, i in ids) + field(43, -1),
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(data)
    assert found(path, tmp_path) == ({}, [])


MISTAKES = {  # what is other in tokenizer.model, the key that is named, and what is said of it
    "score": ("tokenizer.ggml.scores", "token 300 has -41; tokenizer.model has -7"),
    "text": ("tokenizer.ggml.tokens", "(2 of 32000 are other)"),
    "special": ("tokenizer.ggml.token_type", "token 300 'et' is special in tokenizer.model, normal here"),
    "prefix": (
        "tokenizer.ggml.add_space_prefix",
        "is not in the file: llama.cpp takes True; tokenizer.model's is False",
    ),
    "bos": ("tokenizer.ggml.bos_token_id", "is 1; the checkpoint's BOS token is 5"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(vocabulary, tmp_path, mistake, monkeypatch):
    monkeypatch.setattr("llamadiff.ext.prompt.tokens.of_checkpoint.TEXTS", 600)
    path = vocabulary("llama-spm")
    pieces, normal, trained = pieces_of(path), PLAIN, b""
    text, _, _ = pieces[300]
    if mistake == "score":
        pieces[300] = text, -7.0, 1
    elif mistake == "text":
        pieces[300], pieces[301] = pieces[301], pieces[300]
    elif mistake == "special":
        pieces[300] = text, -41.0, 3
    elif mistake == "prefix":
        normal = field(3, 0) + field(4, 0)
    else:
        trained = field(41, 5)
    (tmp_path / "tokenizer.model").write_bytes(model(pieces, normal=normal, trained=trained))
    key, says = MISTAKES[mistake]
    told, _ = found(path, tmp_path)
    assert says in told[key], told


def test_added_tokens_and_flags_of_the_configuration(vocabulary, tmp_path):
    """Phi-3's file has more tokens than its tokenizer.model, and some eat the white space after them."""
    path = vocabulary("phi-3")
    pieces, eaters = pieces_of(path), rules_of(Weights(path).fields).strip_right
    added = {
        str(i): {"content": text, "special": kind == 3, "rstrip": i in eaters}
        for i, (text, _, kind) in enumerate(pieces) if i >= 32000 or i in eaters
    }  # fmt: skip
    config = {"added_tokens_decoder": added, "add_prefix_space": True}
    (tmp_path / "tokenizer.model").write_bytes(model(pieces[:32000], normal=PLAIN, trained=field(42, 32000)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    told, notes = found(path, tmp_path)
    assert told == {}
    assert all("no key of a file can mend" in note for note in notes)
    added["32001"]["content"] = "<|other|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    told, _ = found(path, tmp_path)
    assert "tokenizer.model has '<|other|>'" in told["tokenizer.ggml.tokens"]


def test_a_text_that_is_changed_first_is_said(vocabulary, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model(pieces_of(vocabulary("llama-spm")), normal=field(3, 1)))
    _, notes = found(vocabulary("llama-spm"), tmp_path)
    assert "tokenizer.model normalises texts first" in notes[0]


def test_tokens_of_the_user_s_have_spaces(vocabulary, tmp_path):
    pieces = [*pieces_of(vocabulary("llama-spm")), ("▁▁", 0.0, 4)]
    (tmp_path / "tokenizer.model").write_bytes(model(pieces, normal=PLAIN))
    assert open_tokenizers(tmp_path).words[len(pieces) - 1] == "  "


def test_tiktoken_s_file_is_no_model(vocabulary, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    told, notes = found(vocabulary("llama-spm"), tmp_path)
    assert told == {}
    assert notes == [
        "ids of the two tokenizers were not compared: there is no tokenizer.json, and no tokenizer.model of "
        "SentencePiece's"
    ]


PIECE = field(1, field(1, b"a"))
HOSTILE = {
    "nothing": (b"", "it has no pieces"),
    "no message": (b"\xff" * 20, "a number of more than ten bytes"),
    "cut": (PIECE[:-1], "it ends within a field"),
    "cut in a number": (b"\x80", "it ends within a number"),
    "endless": (b"\x0a" + varint(1 << 62), "it ends within a field"),
    "a number for a piece": (field(1, 5), "is no SentencePiece model"),
    "a number for a text": (field(1, field(1, 5)), "is no SentencePiece model"),
    "a number for a score": (field(1, field(2, 5)), "is no SentencePiece model"),
    "no text": (field(1, field(1, b"\xff")), "is no SentencePiece model"),
    "words": (PIECE + field(2, field(3, WORD)), "its model_type is 3"),
    "group": (b"\x0b", "a field of the unknown type 3"),
    "too many bytes": (bytes((1 << 20) + 1), "more than 1 MiB"),
    "a token far behind": (PIECE, "token 16000000 is added to 1 pieces",
                           '{"added_tokens_decoder": {"16000000": {"content": "a"}}}'),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_none_is_one_line(name, tmp_path, monkeypatch):
    data, said, *config = HOSTILE[name]
    monkeypatch.setattr("llamadiff.ext.prompt.tokens.sentencepiece.MOST", 1 << 20)
    (tmp_path / "tokenizer.model").write_bytes(data)
    (tmp_path / "tokenizer_config.json").write_text(*config or ["{}"], encoding="utf-8")
    with pytest.raises(UserError) as caught:
        open_tokenizers(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
