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
QUICK = {"gpt-2", "llama-spm", "phi-3", "bert-bge"}


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """vocabulary("gpt-2"): the path of such a file."""
    folder = vocabularies.folder(tmp_path_factory)
    return lambda name: folder / f"ggml-vocab-{name}.gguf"


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


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.quick] * (name in QUICK)) for name in RIGHT])
def test_the_engine_does_as_llama_cpp_does(vocabulary, name):
    path = vocabulary(name)
    invalid = (
        b"\xff",
        b"a\xe4\xb8b",
        b"\xf0\x9f\x98",
        b"\x80",
        b"a\xc3",
        b"\xc3\xa9\xff",
        b"\xc0\x80",
        b"\xed\xa0\x80",
    )
    texts = texts_for(read(path), 5000, seed=41) + [data.decode("utf-8", "surrogateescape") for data in invalid]
    assert parting(path, texts) == []


@pytest.mark.parametrize("pre", PRE)
@pytest.mark.quick
def test_every_expression_cuts_as_llama_cpp_does(vocabulary, tmp_path, pre):
    path = vocabularies.with_pre(vocabulary("gpt-2"), tmp_path / "pre.gguf", pre)
    assert parting(path, texts_for(read(path), 600, seed=42)) == []


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.quick] * (name in QUICK)) for name in RIGHT])
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

SHOWN = [  # a mistake, a vocabulary, a text that shows it
    ("bos-missing", "llama-spm", "a"),
    ("bos-twice", "llama-spm", "a"),
    ("bos-added", "gpt-2", "a"),
    ("eos-added", "llama-spm", "a"),
    ("special-as-text", "llama-spm", "<s>"),
    ("special-after-words", "llama-bpe", "<|eot_id|>"),
    ("special-eats-right", "llama-spm", "<s> a"),
    ("special-eats-left", "llama-spm", "a <s>"),
    ("special-last-missing", "phi-3", "[PAD32063]"),
    ("user-defined-missing", "mpt", "a  b"),
    ("types-believed", "qwen2", "</s>"),
    ("space-prefix-missing", "llama-spm", "a"),
    ("space-prefix-added", "gpt-2", "a"),
    ("space-prefix-once", "llama-spm", "a<s>a"),
    ("spaces-not-escaped", "llama-spm", "a b"),
    ("bytes-unknown", "llama-spm", "\x01"),
    ("bytes-lower-case", "llama-spm", "\n"),
    ("characters-bytes", "llama-spm", "\u2009"),
    ("unknown-other", "bert-bge", "\u0c24"),
    ("nfc", "gpt-2", "e\u0301"),
    ("nfkc", "gpt-2", "ﬁ"),
    ("lower-case", "gpt-2", "K"),
    ("stripped", "gpt-2", " a"),
    ("spaces-merged", "gpt-2", "a  b"),
    ("crlf", "gpt-2", "\r\n"),
    ("cut-at-nul", "gpt-2", "a\0b"),
    ("latin-1", "gpt-2", "é"),
    ("truncated", "gpt-2", "a b " * 300),
    ("merges-by-length", "gpt-2", "→"),
    ("merges-by-id", "llama-spm", " a"),
    ("merges-reversed", "gpt-2", "→"),
    ("merges-from-right", "gpt-2", "$$$"),
    ("merge-lost", "gpt-2", " t"),
    ("greedy", "gpt-2", '>."'),
    ("scores-half", "nomic-bert-moe", "Ⅷ8247"),
    ("viterbi", "llama-spm", "\xa0\xa0"),
    ("equal-first", "llama-spm", "2"),
    ("pre-gpt-2", "llama-bpe", ">M"),
    ("pre-default", "qwen2", "'s"),
    ("digits-single", "llama-bpe", "11"),
    ("digits-all", "llama-bpe", "6417"),
    ("contractions-lower", "qwen2", "'Di"),
    ("letters-ascii", "llama-bpe", "\U0001043d'd"),
    ("letters-words", "gpt-2", "_."),
    ("spaces-ascii", "gpt-2", " \xa0a"),
    ("lookahead-missing", "gpt-2", "  i"),
    ("signs-end-lines", "llama-bpe", ";\n"),
    ("ignore-merges-forgotten", "llama-bpe", "しない"),
    ("alphabet-soft-hyphen", "gpt-2", "ロ"),
    ("utf-16-units", "gpt-2", "😀"),
    ("cesu-8", "gpt-2", "😀"),
    ("bom-dropped", "gpt-2", "\ufeffa"),
    ("controls-dropped", "gpt-2", "a\x01"),
    ("invalid-dropped", "gpt-2", "a\udcff"),
    ("quotes-straight", "gpt-2", "’"),
    ("no-break-spaces", "gpt-2", "\xa0"),
    ("escapes", "gpt-2", "\\n"),
    ("line-by-line", "gpt-2", "\n\n"),
    ("accents-kept", "bert-bge", "é"),
    ("case-kept", "bert-bge", "K"),
    ("hashes", "bert-bge", "tokenizer"),
    ("words-of-100", "bert-bge", "a" * 101),
    ("chinese-joined", "bert-bge", "一二"),
    ("unknown-each", "nomic-bert-moe", "\u0f57\u0f57"),
    ("spaces-kept", "nomic-bert-moe", "a  b"),
    ("charsmap-ignored", "nomic-bert-moe", "\x01"),
    ("off-by-one", "gpt-2", "a"),
    ("ids-16-bits", "llama-bpe", "a"),
]
LONG = {"truncated", "words-of-100"}  # of which no short text can tell


@pytest.mark.parametrize(("mistake", "name", "text"), SHOWN, ids=[row[0] for row in SHOWN])
@pytest.mark.quick
def test_a_mistake_shows(vocabulary, mistake, name, text):
    right, wrong = Engine(read(vocabulary(name))), Engine(read(vocabulary(name)), [mistake])
    assert wrong.encode(text) != right.encode(text)
    assert len(text) <= 12 or mistake in LONG


@pytest.mark.parametrize("name", sorted({name for _, name, _ in SHOWN}))
@pytest.mark.quick
def test_llama_cpp_makes_none_of_them(vocabulary, name):
    assert parting(vocabulary(name), [text for _, other, text in SHOWN if other == name]) == []


SHOWN_BACK = [  # a mistake, a vocabulary, ids that show it: those of a text, from one to another
    ("utf8-each", "gpt-2", "😀", 0, None),
    ("first-space-dropped", "llama-spm", "a b", 1, None),
    ("spaces-dropped", "gpt-2", "a b", 0, None),
    ("mark-left", "llama-spm", "a b", 0, None),
    ("alphabet-left", "gpt-2", "a b", 0, None),
    ("joined-by-spaces", "gpt-2", "a b", 0, None),
    ("special-dropped", "llama-spm", "a", 0, None),
    ("special-spaced", "llama-spm", "a", 0, None),
    ("special-decoded", "deepseek-llm", "a", 0, None),
    ("byte-names", "llama-spm", "\n", 0, None),
    ("cleaned-up", "bert-bge", "it is .", 0, None),
    ("invalid-dropped", "llama-spm", "\udcff", 0, None),
    ("invalid-replaced", "llama-spm", "\udcff", 0, None),
    ("end-lost", "llama-spm", "😀", 0, -1),
    ("line-added", "gpt-2", "a", 0, None),
    ("latin-1", "gpt-2", "é", 0, None),
    ("cut-at-nul", "gpt-2", "\0", 0, None),
    ("unknown-marked", "llama-spm", "<unk>", 0, None),
    ("hashes", "bert-bge", "tokenizer", 0, None),
]


@pytest.mark.parametrize(("mistake", "name", "text", "start", "stop"), SHOWN_BACK, ids=[row[0] for row in SHOWN_BACK])
@pytest.mark.quick
def test_a_mistake_shows_on_the_way_back(vocabulary, mistake, name, text, start, stop):
    right, wrong = Engine(read(vocabulary(name))), Engine(read(vocabulary(name)), [mistake])
    ids = right.encode(text)[start:stop]
    assert wrong.decode(ids) != right.decode(ids)
    if mistake != "utf8-each":
        assert "".join(wrong.decode(ids)) != "".join(right.decode(ids))


def test_every_mistake_is_shown():
    assert [row[0] for row in SHOWN] == [*ENCODING]
    assert [row[0] for row in SHOWN_BACK] == [*DECODING]
