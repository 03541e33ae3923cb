"""The reference's tokenizer: expected ids of real vocabularies, llama.cpp's ids, and what each rule changes."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import vocabularies
from llama_tokens import LlamaTokens
from llamaref import ModelError, Weights
from models.gguf_file import write_gguf
from random_texts import RandomTexts

from llamadiff.ext.prompt.tokenizer import PRE_TOKENIZERS, Rules, Tokenizer, as_original
from llamadiff.ext.prompt.tokens.of_checkpoint import _tables

PRES = {id(pre): name for name, pre in reversed(PRE_TOKENIZERS.items()) if name != "whitespace"}  # one name of each


def rows(*table):
    """The rows of a table that begin with a vocabulary."""
    return [pytest.param(*row, id=f"{row[0]}-{n}") for n, row in enumerate(table)]


@cache
def tokenizer_of(path):
    return Tokenizer(Weights(path).fields)


def texts_for(tokenizer, count, seed=0):
    tables = tokenizer.vocabulary
    special = [text for text, kind in zip(tables.texts, tables.kinds, strict=True) if kind in {2, 3, 4}]
    return [*RandomTexts(tables.texts, special, seed)(count)]


def parting(tokenizer, path, texts, special=True):
    """The texts of which llama.cpp makes other ids, with both."""
    theirs = LlamaTokens(path).encoded(texts, special)
    return [(text, ours, ids) for text, ids in zip(texts, theirs, strict=True)
            if (ours := tokenizer.encode(text, special)) != ids]  # fmt: skip


# -- real vocabularies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", vocabularies.WITH_TEXTS)
def test_expected_ids(vocabulary, name):
    tokenizer = tokenizer_of(vocabulary(name))
    plain = tokenizer.with_rules(dataclasses.replace(tokenizer.rules, add_bos=False, add_eos=False))
    texts = vocabularies.expected(vocabulary(name))
    assert len(texts) >= 46
    assert [(text, plain.encode(text, special=False)) for text, _ in texts] == texts


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", vocabularies.NAMES)
def test_llama_cpp_agrees(vocabulary, name, count):
    path = vocabulary(name)
    tokenizer = tokenizer_of(path)
    texts = texts_for(tokenizer, count, seed=count > 2000)
    assert parting(tokenizer, path, texts) == []
    assert parting(tokenizer, path, texts[:500], special=False) == []


@pytest.mark.parametrize("name", vocabularies.NAMES)
def test_llama_cpp_gives_the_same_text_back(vocabulary, name):
    tokenizer, llama = tokenizer_of(vocabulary(name)), LlamaTokens(vocabulary(name))
    every = range(len(tokenizer.vocabulary))
    ids = [tokenizer.encode(text) for text in texts_for(tokenizer, 400, seed=2)]
    for special in (True, False):
        assert [*tokenizer.pieces(every, special)] == llama.pieces(special)
        assert [tokenizer.decode(each, special) for each in ids] == llama.decoded(ids, special)


@pytest.mark.parametrize("pre", PRES.values())
def test_llama_cpp_cuts_words_the_same(vocabulary, tmp_path, pre):
    path = vocabularies.with_pre(vocabulary("gpt-2"), tmp_path / "pre.gguf", pre)
    tokenizer = Tokenizer(Weights(path).fields)
    assert parting(tokenizer, path, texts_for(tokenizer, 600, seed=3)) == []


@pytest.mark.parametrize("pre", sorted({*PRES.values()} - {"superbpe"}))  # whose regex counts all digits at each
def test_long_words_take_no_long_time(pre):
    """Of a regex that looks at all of a word at each of its characters, superbpe's, this takes half an hour."""
    for part in ("1", "A", "é", " ", "a ", "x\u0301", "漢", "'"):
        words = PRE_TOKENIZERS[pre].words(part * 200_000)
        assert len("".join(words)) in (0, 200_000 * len(part))


# -- where llama.cpp is not the tokenizer that the model was trained with ----------------------------------------------

ORIGINAL = [  # a vocabulary, a text, the original's tokens, llama.cpp's
    ("deepseek-llm", "\xa0\xa0\u3000", "Âł|Âł|ãĢĢ", "ÂłÂł|ãĢĢ"),
    ("qwen2", "e\u0308", "Ã«", "e|Ì|Ī"),
    ("qwen2", "</s>", "</|s|>", "</s>"),
    ("command-r", "a\u0308", "Ã¤", "a|Ì|Ī"),
    ("mpt", "a\u0308", "Ã¤", "a|Ì|Ī"),
    ("bert-bge", "가", "▁ᄀ|ᅡ", "▁ᄀ"),
    ("bert-bge", "का", "▁क|ा", "▁क"),
    ("bert-bge", "a\vb", "▁ab", "▁a|▁b"),
    ("bert-bge", "a▁b", "[UNK]", "▁a|▁b"),
    ("bert-bge", "a" * 101, "[UNK]", None),
    ("phi-3", "<|end|>\u3000a", "<|end|>|▁a", "<|end|>|▁|\u3000|a"),
    ("llama-spm", b"\xe4ab".decode("utf-8", "surrogateescape"), "▁|\ufffd|ab", "▁|<0xE4>|<0x61>|<0x62>"),
]


@pytest.mark.parametrize(("name", "text", "right", "theirs"), rows(*ORIGINAL))
def test_the_original_is_known_where_llama_cpp_differs(vocabulary, name, text, right, theirs):
    own = tokenizer_of(vocabulary(name))
    own = own.with_rules(dataclasses.replace(own.rules, add_bos=False, add_eos=False))
    shown = lambda ids: "|".join(own.vocabulary.texts[i] for i in ids)  # noqa: E731
    ids = LlamaTokens(vocabulary(name)).encoded([text], add=False)[0]
    assert shown(own.with_rules(as_original(own.rules)).encode(text)) == right != shown(ids)
    assert theirs is None or shown(ids) == theirs == shown(own.encode(text))


WORDS = [  # a pre-tokenizer, a text, the original's words, llama.cpp's
    ("youtu", "сХ", "с|Х", "сХ"),
    ("gpt-4o", "сХ", "с|Х", "сХ"),
    ("gpt-4o", "ab\u0301c", "ab\u0301c", "ab|\u0301c"),
    ("tekken", "a\ufe0f", "a\ufe0f", "a|\ufe0f"),
    ("granite-embed-multi-97m", "сХ", "с|Х", "сХ"),
    ("kimi-k2", "éA", "é|A", "éA"),
    ("tiny_aya", "a  1", "a|  |1", "a| | |1"),
    ("afmoe", "a  1", "a|  |1", "a| | |1"),
    ("deepseek-coder", "\u2029Y", "\u2029|Y", "\u2029Y"),
    ("llama-bpe", "'\u017fa", "'\u017f|a", "'\u017fa"),
]


@pytest.mark.parametrize(("pre", "text", "right", "theirs"), WORDS)
def test_words_of_the_original(pre, text, right, theirs):
    words = PRE_TOKENIZERS[pre].words
    assert ("|".join(words(text, original=True)), "|".join(words(text))) == (right, theirs)


# -- each rule changes something ---------------------------------------------------------------------------------------

MISTAKES = [  # a vocabulary, a rule, a text that shows it
    ("llama-spm", {"add_bos": False}, "a"),
    ("llama-spm", {"add_eos": True}, "a"),
    ("llama-spm", {"bos_twice": True}, "a"),
    ("llama-spm", {"parse_special": False}, "</s>"),
    ("llama-spm", {"add_space_prefix": False}, "a"),
    ("phi-3", {"prefixed": "start"}, "<s>a"),
    ("phi-3", {"prefixed": "first"}, "a<s>a"),
    ("llama-bpe", {"patterns": (r"\p{L}",)}, "ab"),
    ("llama-spm", {"longest_match": True}, "aaa"),
    ("llama-bpe", {"longest_match": True}, "aaab"),
    ("llama-spm", {"overlooked": frozenset({1})}, "<s>"),
    ("llama-spm", {"escape_spaces": False}, "a b"),
    ("llama-spm", {"byte_fallback": False}, "\x01"),
    ("llama-spm", {"normalization": "NFC"}, "e\u0301"),
    ("llama-spm", {"normalization": "NFKC"}, "ﬁ"),
    ("llama-spm", {"merge_by": "length"}, "invalidating"),
    ("llama-spm", {"merge_by": "id"}, " \xa0"),
    ("llama-spm", {"invalid": "each"}, "\udcff"),
    ("llama-spm", {"invalid": "drop"}, "\udcff"),
    ("gpt-2", {"invalid": "part"}, "\udce4\udcb8"),
    ("llama-spm", {"offset": 1}, "a"),
    ("llama-bpe", {"ignore_merges": False}, "64455iyordu\xa0"),
    ("llama-bpe", {"pre": "gpt-2"}, "1234"),
    ("llama-bpe", {"merge_by": "length"}, "'LL"),
    ("llama-bpe", {"byte_level": False}, "é"),
    ("llama-bpe", {"special_first": False}, "<|eot_id|>"),
    ("llama-bpe", {"lowercase": True}, "A"),
    ("llama-spm", {"lowercase": True}, "A"),
    ("nomic-bert-moe", {"lowercase": True}, "A"),
    ("llama-bpe", {"strip_left": frozenset({128009})}, "a <|eot_id|>"),
    ("llama-bpe", {"bos": 128009}, ""),
    ("qwen2", {"retyped": False}, "</s>"),
    ("phi-3", {"strip_right": frozenset()}, "<|end|>\n"),
    ("phi-3", {"strip_unicode": True}, "<|end|>\u3000"),
    ("nomic-bert-moe", {"remove_extra_whitespaces": False}, "a  b"),
    ("nomic-bert-moe", {"treat_whitespace_as_suffix": True, "remove_extra_whitespaces": False}, "a"),
    ("nomic-bert-moe", {"unknown": 4}, "\u0f4b"),
    ("bert-bge", {"lowercase": False}, "A"),
    ("bert-bge", {"accents": "keep"}, "é"),
    ("bert-bge", {"accents": "strip"}, "가"),
    ("bert-bge", {"longest_word": 3}, "word"),
    ("bert-bge", {"own_marks": True}, "a▁b"),
    ("bert-bge", {"controls_first": True}, "a\vb"),
]
SHOWN_ELSEWHERE = {"kind", "original_words", "eos", "special_search", "equal_tokens", "clean_spaces"}


@pytest.mark.parametrize(("name", "mistake", "text"), rows(*MISTAKES))
def test_a_mistake_shows(vocabulary, name, mistake, text):
    tokenizer = tokenizer_of(vocabulary(name))
    mistaken = tokenizer.with_rules(dataclasses.replace(tokenizer.rules, **mistake))
    assert mistaken.encode(text) != tokenizer.encode(text)


def test_every_rule_is_shown():
    shown = {rule for _, mistake, _ in MISTAKES for rule in mistake} | SHOWN_ELSEWHERE
    assert shown == {field.name for field in dataclasses.fields(Rules)}


# -- small vocabularies ------------------------------------------------------------------------------------------------


def fields_of(model, tokens, kinds=None, **more):
    kinds = kinds or [1] * len(tokens)
    named = {"model": model, "tokens": tokens, "token_type": kinds, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in named.items()}


def test_overlapping_special_tokens_are_found_from_the_left_or_by_length():
    fields = fields_of("gpt2", [*"abcd", "ab", "bcd"], [1] * 4 + [4] * 2, merges=[], bos_token_id=0, eos_token_id=0)
    own = Tokenizer(fields)
    assert own.encode("abcd") == [0, 5]
    assert own.with_rules(as_original(own.rules)).encode("abcd") == [4, 2, 3]


def test_the_last_of_equal_tokens_is_meant_unless_the_rules_say_otherwise():
    own = Tokenizer(fields_of("gpt2", ["a", "b", "a"], merges=[]))
    first = own.with_rules(dataclasses.replace(own.rules, equal_tokens="first"))
    assert (own.encode("a"), first.encode("a")) == ([2], [0])


def test_decoded_text_loses_spaces_where_the_rules_say_so():
    own = Tokenizer(fields_of("bert", ["▁it", "▁'", "▁s", "▁.", "▁a"], unknown_token_id=0))
    assert own.decode([4, 0, 3]) == b" a it."
    assert own.with_rules(dataclasses.replace(own.rules, clean_spaces=False)).decode([4, 0, 3]) == b" a it ."


BYTES = [f"\\x{byte:02x}" for byte in range(128, 256)]
RWKV = ["<s>", *BYTES, *map(chr, range(32, 91)), "\\n", "\\t", "AB", "ABC", "CD", "\\xe4\\xb8"]


def test_rwkv_agrees_with_llama_cpp(tmp_path):
    path = write_gguf(tmp_path / "rwkv.gguf", fields_of("rwkv", RWKV, [3] + [1] * (len(RWKV) - 1), unknown_token_id=0))
    own, llama = Tokenizer(Weights(path).fields), LlamaTokens(path)
    texts = ["ABCD", "ABAB\n\tCD", "一AB", "<s>A", "é 漢", "\udcff", ""]
    ids = llama.encoded(texts)
    assert [own.encode(text) for text in texts] == ids
    assert [own.decode(each) for each in ids] == llama.decoded(ids)


def test_white_space_may_be_no_word(tmp_path):
    fields = fields_of("whitespace", [*"abé", "ab"], merges=["a b"], pre="whitespace", bos_token_id=0, eos_token_id=0)
    path = write_gguf(tmp_path / "whitespace.gguf", fields)
    own = Tokenizer(Weights(path).fields)
    texts = ["ab ab\u3000é\n", "a b", "  "]
    assert [own.encode(text) for text in texts] == LlamaTokens(path).encoded(texts)


INVALID = (b"\xff", b"a\xe4\xb8b", b"\xe4ab", b"\xf0\x9f\x98", b"\x80a\x90a\xa0a\xb0a", b"a\xc3",
           b"\xc3\xa9\xff")  # fmt: skip


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "bert-bge", "nomic-bert-moe", "llama-spm"])
def test_invalid_utf8(vocabulary, name):
    texts = [data.decode("utf-8", "surrogateescape") for data in INVALID]
    assert parting(tokenizer_of(vocabulary(name)), vocabulary(name), texts) == []


def test_surrogates_are_bytes(vocabulary):
    own = tokenizer_of(vocabulary("llama-spm"))
    assert own.encode("\udcc3\udca9") == own.encode("é")
    assert own.decode(own.encode("\ud800"))[-3:] == b"\xed\xa0\x80"


WRONG = [
    (fields_of("plamo2", ["a"]), "model = 'plamo2': the tokenizers that can be run are bert, "),
    (fields_of("gpt2", ["a"], pre="gpt2"), "pre = 'gpt2': no such pre-tokenizer is known; the nearest is gpt-2"),
    (fields_of("llama", []), "tokens is missing"),
    (fields_of("llama", ["a", "b"], [1]), "token_type has 1 values for 2 tokens"),
    (fields_of("t5", ["a"], precompiled_charsmap=[9, 0, 0, 0, 1]), "precompiled_charsmap: a trie of 9 bytes in 5"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG)
def test_what_is_not_known_is_said(fields, words):
    with pytest.raises(ModelError, match="tokenizer.ggml." + re.escape(words)):
        Tokenizer(fields)


def test_word_pieces_are_those_that_the_converter_writes():
    """Words have a space before them, what goes on after one has lost its two signs; special ones stay."""
    theirs = SimpleNamespace(words={0: "[CLS]", 1: "on", 2: "##ly"}, kinds={}, path=Path("tokenizer.json"))
    assert list(_tables(["[CLS]", "\u2581on", "ly"], theirs, True)) == []
    assert [each.where for each in _tables(["[CLS]", "\u2581on", "\u2581ly"], theirs, True)] == [
        "tokenizer.ggml.tokens"
    ]
