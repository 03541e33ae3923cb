"""The tokenizer that is written by hand: it is llama.cpp's equal, and each mistake that it can make shows."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest
import vocabularies
from ext.prompt.tokens.engine import DECODING, ENCODING, Engine
from ext.prompt.tokens.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary
from ext.prompt.tokens.words import PRE
from llama_tokens import LlamaTokens
from places import ROOT
from random_texts import RandomTexts

ENGINE = ROOT / "tests/ext/prompt/tokens/engine.py"
RIGHT = ("gpt-2", "llama-bpe", "qwen2", "llama-spm", "phi-3", "bert-bge", "nomic-bert-moe", "deepseek-llm",
         "deepseek-coder", "falcon", "mpt", "starcoder", "refact", "command-r", "qwen35")  # fmt: skip
INVALID = (b"\xff", b"a\xe4\xb8b", b"\xf0\x9f\x98", b"\x80", b"a\xc3", b"\xc3\xa9\xff", b"\xc0\x80", b"\xed\xa0\x80")


@cache
def read(path):
    return Vocabulary(path)


def texts_for(tokens, count, seed):
    special = [text for text, kind in zip(tokens.texts, tokens.types, strict=True)
               if kind in {CONTROL, UNKNOWN, USER_DEFINED}]  # fmt: skip
    return [*RandomTexts(tokens.texts, special, seed)(count)]


def parting(path, texts):
    """The texts of which llama.cpp makes other ids, with both."""
    ids = map(Engine(read(path)).encode, texts)
    return [each for each in zip(texts, ids, LlamaTokens(path).encoded(texts), strict=True) if each[1] != each[2]]


# -- the right one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RIGHT)
def test_the_engine_does_as_llama_cpp_does(vocabulary, name):
    path = vocabulary(name)
    texts = texts_for(read(path), 5000, seed=41) + [data.decode("utf-8", "surrogateescape") for data in INVALID]
    assert parting(path, texts) == []


@pytest.mark.parametrize("pre", PRE)
def test_every_expression_cuts_as_llama_cpp_does(vocabulary, tmp_path, pre):
    path = vocabularies.with_pre(vocabulary("gpt-2"), tmp_path / "pre.gguf", pre)
    assert parting(path, texts_for(read(path), 600, seed=42)) == []


@pytest.mark.parametrize("name", RIGHT)
def test_the_engine_gives_the_same_text_back(vocabulary, name):
    path = vocabulary(name)
    engine, pieces = Engine(read(path)), LlamaTokens(path).pieces()
    assert [*map(engine.decode.piece, range(len(pieces)))] == pieces
    for ids in map(engine.encode, texts_for(read(path), 500, seed=43)):
        texts = engine.decode(ids)
        assert len(texts) == len(ids)
        assert "".join(texts).encode("utf-8", "surrogateescape") == b"".join(pieces[i] for i in ids)


def test_texts_wait_for_whole_characters(vocabulary):
    engine = Engine(read(vocabulary("llama-spm")))
    ids = [3 + byte for byte in b"\xf0\x9f\x98\x80\xe4\xb8"]  # <0x00> is token 3
    assert engine.decode(ids) == ["", "", "", "😀", "", "\udce4\udcb8"]


def test_the_engine_answers_line_by_line(vocabulary):
    command = [sys.executable, str(ENGINE), str(vocabulary("llama-spm")), "--mistake", "bos-twice"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as running:
        for text, ids in (("a", [1, 1, 263]), ("\udcff", [1, 1, 29871, 258])):
            running.stdin.write(json.dumps(text) + "\n")
            running.stdin.flush()
            assert json.loads(running.stdout.readline()) == ids
        running.stdin.close()
    done = subprocess.run(
        [*command[:3], "--back", "--mistake", "bos-twice"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "no such mistake: bos-twice\n")


# -- its mistakes ------------------------------------------------------------------------------------------------------

LONG = {"truncated", "words-of-100"}  # of which no short text can tell


@pytest.mark.parametrize("mistake", ENCODING)
def test_a_mistake_shows(vocabulary, mistake):
    name, text, _ = ENCODING[mistake]
    right, wrong = Engine(read(vocabulary(name))), Engine(read(vocabulary(name)), [mistake])
    assert wrong.encode(text) != right.encode(text)
    assert len(text) <= 12 or mistake in LONG


@pytest.mark.parametrize("name", sorted({name for name, *_ in ENCODING.values()}))
def test_llama_cpp_makes_none_of_them(vocabulary, name):
    assert parting(vocabulary(name), [text for other, text, _ in ENCODING.values() if other == name]) == []


@pytest.mark.parametrize("mistake", DECODING)
def test_a_mistake_shows_on_the_way_back(vocabulary, mistake):
    name, text, part, _ = DECODING[mistake]
    right, wrong = Engine(read(vocabulary(name))), Engine(read(vocabulary(name)), [mistake])
    ids = right.encode(text)[part]
    assert wrong.decode(ids) != right.decode(ids)
    if mistake != "utf8-each":
        assert "".join(wrong.decode(ids)) != "".join(right.decode(ids))
