"""Where a prompt comes from: the command line, a file, standard input, a chat template with or without its BOS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run
from models.tokenized import with_tokenizer
from optional import needs_slices

from llamadiff.cli.inputs import RunOptions, prompt_or_trace
from llamadiff.trace.reader import Trace


def lettered(path: Path, adds_bos: bool | None = None) -> Path:
    """A small model that tokenizes letters, and has a chat template that writes the BOS."""
    return with_tokenizer(path, "{{ bos_token }}{{ messages[0].content }} there", adds_bos)


def tokens_of(folder: Path, *args: object, given: bytes = b"") -> str:
    """The texts of the tokens that a capture has run, in one."""
    done = run("capture", folder / "m.gguf", *args, "--force", "-o", folder / "t.safetensors", given=given)
    assert done.returncode == 0, done.stderr
    texts = ["<unk>", "<s>", "</s>", " ", *"abcdefghijklmnopqrstuvwxyz", "\n"]
    return "".join(texts[token] for token in Trace.open(folder / "t.safetensors").info.tokens)


def test_a_prompt_is_read_from_a_file_and_from_standard_input(tmp_path):
    lettered(tmp_path / "m.gguf")
    (tmp_path / "p.txt").write_text("hello\nthere\n", encoding="utf-8")
    assert tokens_of(tmp_path, f"@{tmp_path / 'p.txt'}") == "<s> hello\nthere"
    assert tokens_of(tmp_path, "-", given=b"good day\n\n") == "<s> good day\n"


@pytest.mark.parametrize(
    ("words", "given", "message"),
    [
        (("-",), b"\n", "-: is empty"),
        (("-",), b"\xff\xfe", "standard input: is not text; expected a prompt as UTF-8 text"),
        (("@no.txt",), b"", "no.txt: cannot be read"),
        (("@/dev/zero",), b"", "/dev/zero: is a device, no regular file"),
    ],
)
def test_what_is_no_prompt_is_refused(words, given, message, tmp_path):
    lettered(tmp_path / "m.gguf")
    done = run("compare", tmp_path / "m.gguf", *words, given=given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"llamadiff: {message}")
    assert done.stderr.count("\n") == 1


def test_the_prompt_file_is_not_overwritten(tmp_path):
    lettered(tmp_path / "m.gguf")
    (tmp_path / "p.txt").write_text("hello", encoding="utf-8")
    done = run("compare", tmp_path / "m.gguf", f"@{tmp_path / 'p.txt'}", "-o", f"json:{tmp_path / 'p.txt'}")
    assert done.returncode == 2
    assert "is the prompt file" in done.stderr
    assert (tmp_path / "p.txt").read_text("utf-8") == "hello"


@needs_slices("prompt")
def test_a_templates_bos_stays_where_the_tokenizer_adds_none(tmp_path):
    lettered(tmp_path / "m.gguf")
    assert tokens_of(tmp_path, "hello", "--chat") == "<s> hello there"
    lettered(tmp_path / "m.gguf", adds_bos=False)
    assert tokens_of(tmp_path, "hello", "--chat").replace("<s> ", "<s>") == "<s>hello there"
    assert tokens_of(tmp_path, "hello") == " hello"


@needs_slices("prompt")
def test_the_report_shows_the_prompt_that_was_tokenized(tmp_path):
    path = lettered(tmp_path / "m.gguf")
    report = json.loads(run("compare", path, "hello", "--chat", "-o", "json:-").stdout)
    assert report["prompt"] == "hello there"


@needs_slices("hints")
@pytest.mark.parametrize("prompt", ["mine.safetensor", "min.safetensors.", "mine.npy"])
def test_a_misspelt_trace_is_no_prompt(prompt, small_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.safetensors", "mine.npz"):
        (tmp_path / name).touch()
    done = run("compare", small_model(), prompt)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{prompt}: no such trace; mine." in done.stderr


@pytest.mark.parametrize(("prompt", "says"), [("dump/", "is a directory here"), ("engine.log", "is a file here")])
def test_what_is_there_is_no_prompt(prompt, says, small_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump").mkdir()
    (tmp_path / "engine.log").touch()
    done = run("compare", small_model(), prompt)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{prompt}: {says}; give --candidate {prompt} (" in done.stderr
    assert done.stderr.count("\n") == 1


@needs_slices("file", "graph", "loss", "state")
@pytest.mark.parametrize("command", ["backend", "capture", "compare", "loss", "variants"])
@pytest.mark.parametrize("prompt", ["dumps/", "out/run1.log", "mine.st", "./my dumps/run 1.npz", "here"])
def test_what_looks_like_a_path_is_no_prompt(prompt, command, small_model, tmp_path, monkeypatch):
    """A CI whose engine wrote nothing would be green."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    other = {"loss": [small_model("llama", "Q8_0")], "capture": ["-o", "t.safetensors"]}
    done = run(command, small_model(), *other.get(command, []), prompt)
    assert (done.returncode, done.stdout) == (2, "")
    says = "is a file here" if prompt == "here" else "looks like a path, and nothing is there"
    assert f"{prompt}: {says}; give " in done.stderr
    assert done.stderr.count("\n") == 1


@needs_slices("graph", "state")
@pytest.mark.parametrize("command", ["backend", "compare", "variants"])
def test_each_report_shows_what_was_run(command, tmp_path):
    options = ("--only", "threads=1") if command == "variants" else ()
    done = run(command, lettered(tmp_path / "m.gguf"), "once upon a time", *options)
    assert '"once upon a time"' in "".join(done.stdout.splitlines(keepends=True)[:9])


@pytest.mark.parametrize(
    "prompt", ["mine", "safetensors", "Once upon a mine.safetensor", "e.g.", "x" * 9999 + ".", "I like /usr/bin."]
)
def test_a_text_is_a_prompt(prompt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.safetensors").touch()
    assert RunOptions(prompt).run().prompt == prompt
    assert prompt_or_trace(Path("m.gguf"), prompt, None) == (prompt, None)
