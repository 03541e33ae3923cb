"""llamadiff tokens: right engines and mistaken ones, by a command, a function, a file; which of two is wrong; one line
for whatever a candidate does instead of answering."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import vocabularies
from command import run as llamadiff
from ext.prompt.answering import answering
from ext.prompt.tokens.mistakes import DECODING, ENCODING
from llamaref import Weights
from models.gguf_file import write_gguf
from optional import needs
from waiting import BRIEF, HANG

from llamadiff.ext.prompt.tokenizer import PRE_TOKENIZERS, Tokenizer
from llamadiff.ext.prompt.tokens import run
from llamadiff.ext.prompt.tokens.back import back
from llamadiff.ext.prompt.tokens.of_checkpoint import ids_oddities, open_tokenizers
from llamadiff.ext.prompt.tokens.page import as_json, headline, headline_of_back, notes
from llamadiff.ext.prompt.tokens.smallest import smallest
from llamadiff.llamacpp.request import Settings
from llamadiff.system.progress import silent

ENGINE = Path(__file__).parent / "engine.py"
TEXTS, LISTS = 5000, 1000


def engine(path: Path, *options: str) -> str:
    return shlex.join([sys.executable, str(ENGINE), str(path), *options])


def tokens(path: Path, candidate: str | None, count: int = TEXTS) -> run.Tokens:
    return run.tokens(path, candidate, Settings(), silent, run.Wanted(count))


def cases(*rows: tuple[str, ...]) -> list[object]:
    """The rows of a table by name."""
    names = ["-".join([row[0], *(each or "right" for each in row[1:2])]) for row in rows]
    return [pytest.param(*row, id=name) for row, name in zip(rows, names, strict=True)]


# -- engines of strangers ----------------------------------------------------------------------------------------------

RIGHT = ("llama-spm", "phi-3", "gpt-2", "bert-bge", "llama-bpe", "qwen2")


@pytest.mark.parametrize("name", cases(*((name,) for name in RIGHT)))
def test_right_engines_are_right(vocabulary, name):
    found = tokens(vocabulary(name), engine(vocabulary(name)), 20_000)
    assert (found.verdict, found.parted, found.wrong) == ("match", 0, "")


NAMED = [  # a vocabulary, a mistake, and what it is called: another one where no text can tell the two apart
    ("llama-spm", "bos-missing", "bos-missing"), ("llama-spm", "bos-twice", "bos-twice"),
    ("llama-spm", "eos-added", "eos-added"), ("llama-spm", "special-as-text", "special-as-text"),
    ("phi-3", "special-eats-left", "special-takes-spaces"), ("llama-spm", "special-eats-right", "special-takes-spaces"),
    ("phi-3", "special-last-missing", "special-overlooked"), ("phi-3", "space-prefix-once", "space-prefix"),
    ("llama-spm", "space-prefix-missing", "space-prefix"), ("gpt-2", "space-prefix-added", "space-prefix"),
    ("llama-spm", "spaces-not-escaped", "spaces-unescaped"), ("llama-spm", "bytes-unknown", "no-byte-fallback"),
    ("llama-spm", "nfc", "normalized"), ("llama-spm", "nfkc", "normalized"), ("llama-spm", "lower-case", "case"),
    ("llama-spm", "stripped", "text-stripped"), ("gpt-2", "spaces-merged", "spaces-merged"),
    ("llama-spm", "crlf", "newlines"), ("llama-spm", "cut-at-nul", "cut-at-nul"), ("llama-spm", "latin-1", "latin-1"),
    ("llama-bpe", "merges-by-length", "merges-by-length"), ("llama-spm", "merges-by-id", "merges-by-id"),
    ("llama-bpe", "pre-gpt-2", "pre-tokenizer"), ("qwen2", "pre-default", "pre-tokenizer"),
    ("llama-bpe", "digits-single", "pre-tokenizer"), ("llama-bpe", "digits-all", "expression"),
    ("llama-bpe", "letters-words", "expression"), ("llama-bpe", "letters-ascii", "expression"),
    ("llama-bpe", "lookahead-missing", "expression"), ("llama-bpe", "signs-end-lines", "expression"),
    ("llama-bpe", "ignore-merges-forgotten", "ignore-merges"), ("llama-spm", "utf-16-units", "code-units"),
    ("llama-spm", "bom-dropped", "invisible-dropped"), ("gpt-2", "controls-dropped", "controls-dropped"),
    ("gpt-2", "no-break-spaces", "spaces-unified"), ("gpt-2", "escapes", "escapes"),
    ("bert-bge", "case-kept", "case"), ("gpt-2", "off-by-one", "ids-off"), ("llama-bpe", "ids-16-bits", "ids-16-bits"),
    ("bert-bge", "unknown-other", "other-id"),
]  # fmt: skip
UNNAMED = [
    ("llama-spm", "characters-bytes"), ("llama-spm", "bytes-lower-case"), ("gpt-2", "line-by-line"),
    ("llama-bpe", "merges-reversed"), ("llama-bpe", "merges-from-right"), ("gpt-2", "quotes-straight"),
    ("bert-bge", "chinese-joined"), ("gpt-2", "alphabet-soft-hyphen"), ("llama-spm", "cesu-8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mistake", "called"), cases(*NAMED))
def test_a_mistake_is_named_with_a_short_text(vocabulary, name, mistake, called):
    found = tokens(vocabulary(name), engine(vocabulary(name), "--mistake", mistake))
    assert found.verdict == "wrong"
    assert found.explanation is not None, headline(found)
    assert called in {each.name for each in (*found.explanation.mistakes, *found.explanation.others)}, headline(found)
    assert len(found.examples[0].text) <= 12


@pytest.mark.parametrize(("name", "mistake"), cases(*UNNAMED))
def test_a_mistake_that_nobody_knows_is_found_and_not_named(vocabulary, name, mistake):
    found = tokens(vocabulary(name), engine(vocabulary(name), "--mistake", mistake))
    assert (found.verdict, found.explanation) == ("wrong", None)
    assert len(found.examples[0].text) <= 12
    assert mistake in ENCODING


@pytest.mark.slow
def test_tokens_are_truncated(vocabulary):
    """No short text can show it."""
    found = tokens(vocabulary("llama-spm"), engine(vocabulary("llama-spm"), "--mistake", "truncated"))
    assert "gives no more than 512 tokens" in headline(found)


def test_two_mistakes_are_both_named(vocabulary):
    two = ("--mistake", "bos-missing", "--mistake", "nfkc")
    found = tokens(vocabulary("llama-spm"), engine(vocabulary("llama-spm"), *two))
    assert {each.name for each in found.explanation.mistakes} == {"bos-missing", "normalized"}
    assert headline(found).startswith("2 mistakes: tokenizer: ")


BYTES = [chr(b) if chr(b).isprintable() and b != 0xAD and b > 32 else chr(256 + b) for b in range(256)]  # GPT-2's,
# as far as printable ASCII goes
MERGES = ("t h", "th e", "\u0120 the", "i n", "1 2", "12 3", "\u0120 q", "( x", "\u0120 \u0120", "a n", "an d")


def small_bpe(to: Path, **changed: object) -> Path:
    """A vocabulary of bytes and a few merges, with other values of some keys."""
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), "<|endoftext|>"]
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": [*MERGES], "bos_token_id": len(tokens) - 1,
              "token_type": [1] * (len(tokens) - 1) + [3], "eos_token_id": len(tokens) - 1} | changed  # fmt: skip
    return write_gguf(to, {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None})


NEARLY = """
from dataclasses import replace
from llamaref import Weights
from llamadiff.ext.prompt.tokenizer import Tokenizer
right = Tokenizer(Weights({path!r}).fields)
mistaken = right.with_rules(replace(right.rules, **{rules!r}))
{more}
def ids(text):
    return odd(text) if {odd!r} in text else mistaken.encode(text)
"""
FULL = "def odd(text): return [*mistaken.encode(text), 5]"
NFKC = "odd = right.with_rules(replace(mistaken.rules, normalization='NFKC')).encode"


@pytest.mark.parametrize(
    ("rules", "odd", "more", "named"),
    [
        ({"bos_twice": True}, "q", FULL, ["bos-twice"]),
        ({"add_space_prefix": False}, "q", FULL, ["space-prefix"]),
        ({"bos_twice": True}, "", NFKC, ["bos-twice", "normalized"]),  # what is left has a known reason, too
        ({"bos_twice": True}, "e", FULL, []),  # too many for one mistake
        ({}, "q", FULL, []),
    ],
    ids=["bos", "space", "two", "many", "none"],
)  # fmt: skip
def test_a_mistake_that_explains_nearly_all_is_named_with_its_share(vocabulary, tmp_path, rules, odd, more, named):
    is_bpe = "add_space_prefix" not in rules
    path = small_bpe(tmp_path / "m.gguf", add_bos_token=True) if is_bpe else vocabulary("llama-spm")
    own = tmp_path / "own.py"
    own.write_text(NEARLY.format(path=str(path), rules=rules, odd=odd, more=more), "utf-8")
    found = tokens(path, f"{own}:ids", 800)
    assert [each.name for each in (found.explanation.mistakes if found.explanation else ())] == named
    assert headline(found).startswith("2 mistakes: ") == (len(named) == 2)
    left = len(found.explanation.left) if found.explanation else 0
    assert (0 < left < 80) == (len(named) == 1)
    if left:
        share = f"{left} ({left / found.parted:.1%})"
        says = f"{found.parted - left} of them by that; {share} part besides, for no known reason"
        assert says in headline(found)
        assert found.examples[0].is_left
        assert found.examples[0].text == odd
        assert json.loads(as_json(found))["left"] == left


# -- back --------------------------------------------------------------------------------------------------------------

BACK = [  # a vocabulary, a mistake, and what it is called; "": it is none, since a caller may choose it
    ("llama-spm", "utf8-each", "each-alone"), ("gpt-2", "utf8-each", "each-alone"),
    ("llama-spm", "first-space-dropped", ""), ("llama-spm", "spaces-dropped", "spaces-dropped"),
    ("llama-spm", "mark-left", "mark-left"), ("gpt-2", "alphabet-left", "alphabet-left"),
    ("llama-spm", "joined-by-spaces", "joined-by-spaces"), ("llama-spm", "special-dropped", ""),
    ("llama-spm", "special-spaced", "special-spaced"), ("llama-spm", "byte-names", "byte-names"),
    ("llama-spm", "invalid-dropped", "invalid-dropped"), ("llama-spm", "invalid-replaced", ""),
    ("llama-spm", "end-lost", "end-lost"), ("llama-spm", "line-added", "newline-added"),
    ("llama-spm", "latin-1", "latin-1"), ("llama-spm", "cut-at-nul", "cut-at-nul"),
    ("llama-spm", "unknown-marked", "unknown-marked"), ("bert-bge", "hashes", "words"), ("gpt-2", "", ""),
    ("llama-spm", "", ""), ("bert-bge", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mistake", "called"), cases(*BACK))
def test_texts_of_ids(vocabulary, name, mistake, called):
    options = ["--back", *(["--mistake", mistake] if mistake else [])]
    found = back(vocabulary(name), engine(vocabulary(name), *options), Settings(), silent, 4 * LISTS, 1, 60.0)
    assert (found.verdict, *(each.name for each in found.mistakes[:1])) == (
        ("wrong", called) if called else ("match",)
    ), headline_of_back(found)
    assert all(len(each.ids) <= 3 for each in found.examples)
    assert mistake in DECODING or not mistake


# -- who is wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases(("llama-spm",), ("bert-bge",), ("qwen2",)))
def test_llama_cpp_does_what_the_file_says(vocabulary, name):
    found = tokens(vocabulary(name), None, 20_000)
    assert (found.verdict, found.doubted) == ("match", 0)
    assert (found.own > 0) == bool(found.ways)


def test_nobody_knows_who_is_wrong_where_only_two_part(vocabulary, monkeypatch):
    class Mistaken(Tokenizer):
        def __init__(self, fields):
            super().__init__(fields)
            self._set(self.vocabulary, replace(self.rules, normalization="NFKC"))

    monkeypatch.setattr(run, "Tokenizer", Mistaken)
    found = tokens(vocabulary("llama-spm"), None)
    assert (found.verdict, found.wrong) == ("unchecked", "")
    assert "one of them is wrong" in headline(found)
    assert len(found.examples[0].text) == 1


def test_llama_cpp_is_wrong_where_the_other_two_agree(vocabulary, monkeypatch):
    """A baseline that drops what it should keep, beside a right engine."""
    from llamadiff.ext.prompt.tokens.sides import LlamaCpp

    asked = LlamaCpp.ids
    monkeypatch.setattr(LlamaCpp, "ids", lambda self, texts: asked(self, [text.rstrip() for text in texts]))
    found = tokens(vocabulary("llama-spm"), engine(vocabulary("llama-spm")))
    assert (found.verdict, found.wrong) == ("wrong", "llama.cpp")
    assert headline(found).startswith("tokenizer: llama.cpp gives other ids than")


def test_the_model_s_own_ways_are_no_mistakes(vocabulary, tmp_path):
    """BERT's own tokenizer has no words of more than a hundred characters; llama.cpp has."""
    found = tokens(vocabulary("bert-bge"), engine(vocabulary("bert-bge"), "--mistake", "words-of-100"))
    assert (found.verdict, found.parted, found.own > 0) == ("match", 0, True)
    assert "those of the model's own tokenizer" in headline(found)


# -- other candidates --------------------------------------------------------------------------------------------------


def test_a_function_and_a_file(vocabulary, tmp_path):
    path = vocabulary("gpt-2")
    other = vocabularies.with_pre(path, tmp_path / "other.gguf", "qwen2")
    found = tokens(path, str(other), 1000)
    assert [each.rules for each in found.explanation.mistakes] == [{"pre": "qwen2"}]
    own = tmp_path / "own.py"
    own.write_text("import numpy as np\n\ndef ids(text):\n    return np.arange(len(text))\n", encoding="utf-8")
    found = tokens(path, f"{own}:ids", 100)
    assert (found.verdict, found.is_foreign) == ("wrong", True)


def test_a_server(vocabulary):
    """llama-server's way to be asked for ids, by the independent tokenizer without what the model adds."""
    own = Tokenizer(Weights(vocabulary("llama-spm")).fields)
    plain = own.with_rules(replace(own.rules, add_bos=False))

    def answer(path, asked):
        assert (path, asked["add_special"], asked["parse_special"]) == ("/tokenize", True, True)
        return 200, {"tokens": plain.encode(asked["content"])}

    with answering(answer) as address:
        found = tokens(vocabulary("llama-spm"), address, 100)
    assert [each.name for each in found.explanation.mistakes] == ["bos-missing"]


def one_line(done):
    """What a command says that refuses."""
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    return done.stderr


HOSTILE = [
    ("print('x', file=sys.stderr); sys.exit(3)", "its last words: x"),
    ("signal.pause()", "within 0.5 s"),
    ("print('{}', flush=True); signal.pause()", "expected a list of token ids"),
    ("print('[1.5]', flush=True); signal.pause()", "expected a list of token ids"),
]


@pytest.mark.parametrize(("code", "said"), HOSTILE)
def test_hostile_commands_are_one_line(vocabulary, code, said):
    command = shlex.join([sys.executable, "-c", f"import signal, sys; {code}"])
    patience = BRIEF if "within" in said else HANG
    done = llamadiff("tokens", vocabulary("llama-spm"), "--candidate", command, "--timeout", patience, "--count", 9)
    assert said in one_line(done)


def test_the_command_says_what_is_wrong_and_writes_it(vocabulary, tmp_path):
    path, report = vocabulary("llama-spm"), tmp_path / "report.json"
    command = engine(path, "--mistake", "nfkc")
    done = llamadiff("tokens", path, "--candidate", command, "--count", 2000, "-o", report)
    assert done.returncode == 1, done.stderr
    assert "brings texts into the form NFKC first" in " ".join(done.stdout.split())
    assert "does the candidate have" not in done.stdout
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.startswith(" " * 9) and "[" in line]
    assert rows[:2] == ["llama.cpp", "yours"]
    assert max(map(len, done.stdout.splitlines())) <= 100
    written = json.loads(report.read_text("utf-8"))
    assert (written["schema"], written["causes"][0]["name"]) == ("llamadiff.extras.tokens/1", "normalized")
    done = llamadiff("tokens", path, "--back", "--candidate", engine(path, "--back"), "--count", 100)
    assert (done.returncode, done.stdout[:5]) == (0, "MATCH")
    assert one_line(llamadiff("tokens", path, "--back"))


def test_texts_of_one_s_own(vocabulary, tmp_path):
    path, own = vocabulary("llama-spm"), tmp_path / "texts.jsonl"
    own.write_text('"a b"\n"\\u00a0"\n', encoding="utf-8")
    command = engine(path, "--mistake", "nfkc")
    found = run.tokens(path, command, Settings(), silent, run.Wanted(own=own))
    assert (found.texts, found.parted, found.examples[0].text) == (2, 1, "\u00a0")
    assert json.loads(as_json(found))["parted"] == 1


# -- the smallest text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["xyz\u00e9q  b", "\u00e9 b" + "x" * 3000, "b\u00e9 \u00e9 b"])
def test_the_smallest_text(text):
    assert smallest(text, lambda asked: ["\u00e9" in each and "b" in each for each in asked]) in {"\u00e9b", "b\u00e9"}


def test_what_takes_too_long_is_left_large():
    asked = []

    def parts(texts):
        asked.extend(texts)
        return [len(text) > 3000 for text in texts]

    assert 3000 < len(smallest("a" * 4000, parts)) <= 4000
    assert sum(map(len, asked)) < 3_000_000


# -- a checkpoint's tokenizer ------------------------------------------------------------------------------------------


def written_tokenizer(path: Path, folder: Path, pre: str) -> Path:
    """A tokenizer.json of a byte-level BPE file's tables, which cuts words by the expressions of ``pre``."""
    from tokenizers import Regex, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Theirs

    fields = Weights(path).fields
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ", 1)) for line in fields["tokenizer.ggml.merges"]]
    theirs = Theirs(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    splits = [
        pre_tokenizers.Split(Regex(each), "isolated")
        for each in PRE_TOKENIZERS[pre].original or PRE_TOKENIZERS[pre].patterns
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    theirs.add_special_tokens(["<|endoftext|>"])
    folder.mkdir()
    if PRE_TOKENIZERS[pre].normalization is not None:
        theirs.normalizer = normalizers.NFC()
    theirs.save(str(folder / "tokenizer.json"))
    return folder


@needs("tokenizers")
@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "megrez", "command-r", "starcoder", "llama-bpe"])
def test_a_file_s_wrong_pre_tokenizer_is_named_with_the_right_one(vocabulary, tmp_path, pre, monkeypatch):
    monkeypatch.setattr("llamadiff.ext.prompt.tokens.of_checkpoint.TEXTS", 1000)
    folder = written_tokenizer(vocabulary("gpt-2"), tmp_path / "checkpoint", pre)
    model = SimpleNamespace(path=vocabulary("gpt-2"), weights=Weights(vocabulary("gpt-2")))
    oddities = [each for each in ids_oddities(model, open_tokenizers(folder)) if not isinstance(each, str)]
    if pre == "gpt-2":
        assert oddities == []
        return
    (oddity,) = oddities
    assert oddity.where == "tokenizer.ggml.pre"
    named = oddity.says.partition("tokenizer.json's is '")[2].partition("'")[0]
    assert (PRE_TOKENIZERS[named].patterns, PRE_TOKENIZERS[named].normalization) == (
        PRE_TOKENIZERS[pre].patterns, PRE_TOKENIZERS[pre].normalization
    )  # fmt: skip


@needs("tokenizers")
@pytest.mark.parametrize(
    ("changed", "config", "says"),
    [
        ({}, {}, ""),
        ({}, {"add_bos_token": False, "bos_token": "<|endoftext|>"}, ""),
        ({"add_bos_token": True}, {"add_bos_token": True, "bos_token": "<|endoftext|>"}, ""),
        ({"pre": "qwen2"}, {}, "tokenizer.ggml.pre is 'qwen2'; tokenizer.json's is '"),
        ({"add_bos_token": True}, {}, "tokenizer.ggml.add_bos_token is True; tokenizer.json's is False"),
        ({}, {"add_bos_token": True, "bos_token": "<|endoftext|>"},
         "tokenizer.ggml.add_bos_token is not in the file: llama.cpp takes False; tokenizer.json's is True"),
        ({"tokens": "exchanged"}, {}, "tokenizer.ggml.tokens token 104 is "),
    ],
)  # fmt: skip
def test_the_checkpoint_s_tokenizer_is_the_truth(tmp_path, changed, config, says):
    path = small_bpe(tmp_path / "right.gguf")
    folder = written_tokenizer(path, tmp_path / "checkpoint", "gpt-2")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if "tokens" in changed:
        words = Weights(path).fields["tokenizer.ggml.tokens"]
        words[104], words[116] = words[116], words[104]
        changed = {"tokens": words}
    found = tokens(small_bpe(tmp_path / "m.gguf", **changed), str(folder / "tokenizer.json"), 500)
    if not says:
        assert (found.verdict, found.file_faults) == ("match", ())
        return
    assert (found.verdict, found.wrong) == ("wrong", run.FILE)
    assert headline(found).startswith(f"tokenizer: m.gguf: {says}")
    assert "llamadiff weights m.gguf" in notes(found)[1]


@needs("tokenizers")
@pytest.mark.parametrize(
    ("eos", "config", "says"),
    [
        (267, {"eos_token": "<|endoftext|>"}, ""),
        (None, {}, ""),
        (None, {"eos_token": BYTES[11]}, ""),  # which llama.cpp takes
        (None, {"eos_token": "<|endoftext|>"},
         "is not in the file: llama.cpp takes 11; the checkpoint's EOS token is 267"),
        (7, {"eos_token": "<|endoftext|>"}, "is 7; the checkpoint's EOS token is 267"),
        (7, {"eos_token": "<|endoftext|>", "eod_token_id": 7}, ""),  # HunYuan's
    ],
)  # fmt: skip
def test_the_end_of_a_text_is_the_checkpoint_s(tmp_path, eos, config, says):
    path = small_bpe(tmp_path / "m.gguf", eos_token_id=eos)
    folder = written_tokenizer(path, tmp_path / "checkpoint", "gpt-2")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    found = tokens(path, str(folder / "tokenizer.json"), 200)
    assert (found.verdict, [each.says for each in found.file_faults]) == ("match", [says] if says else [])
    assert (says in notes(found)[1]) if says else len(notes(found)) == 1


def test_a_file_without_a_tokenizer(tmp_path):
    assert one_line(llamadiff("tokens", write_gguf(tmp_path / "m.gguf", {"tokenizer.ggml.model": "no_vocab"})))


@pytest.mark.parametrize("options", [[], ["--back", "--candidate", "./engine"], ["--candidate", "other.gguf"]])
def test_nothing_there(tmp_path, options):
    assert "no such file" in one_line(llamadiff("tokens", tmp_path / "nowhere.gguf", *options))
