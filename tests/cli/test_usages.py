"""What newcomers type: each is answered in a line that says what is wrong with it, or is taken as it is meant."""

from __future__ import annotations

import numpy as np
import pytest
from command import run
from llamaref import Engine
from optional import needs_slices
from traces import save

from llamadiff import UserError, compare
from llamadiff.candidates.reference import record
from llamadiff.cli.reports import _target
from llamadiff.engines.run_spec import Run
from llamadiff.llamacpp.child import _with_log
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.report.formats import formats

TOKENS = (1, 17, 5)


@pytest.fixture(scope="module")
def folder(small_model, tmp_path_factory):
    """A model, a trace of it, and arrays that do not say their shapes."""
    place = tmp_path_factory.mktemp("usages")
    (place / "m.gguf").symlink_to(small_model())
    trace = record(Engine(small_model()), TOKENS, "mine")
    save(trace, place / "mine.safetensors")
    (place / "raw").mkdir()
    np.asarray(trace["Kcur_proj-0"][:1], np.float32).tofile(place / "raw" / "Kcur_proj-0.f32")
    (place / "t.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    (place / "engine.py").write_text("def render(x): return ''\n", encoding="utf-8")
    return place


IDS = ("--tokens", "1,17,5")
REFUSED = {
    ("compare", "m.gguf", *IDS, "--only", "99"): "--only 99: the model has layers 0 to 1",
    ("compare", "m.gguf", *IDS, "--only", "2-99"): "--only 2-99: the model has layers 0 to 1",
    ("compare", "m.gguf", "mine.safetensors", "-o", "foo:r.csv"): "-o foo:r.csv: expected a name that ends in .json, ",
    ("compare", "m.gguf", *IDS, "--candidate", "raw"): "raw: Kcur_proj-0 has shape [128]; it needs [3, 128] (token kv",
    (
        "compare",
        "m.gguf",
        "mine.safetensors",
        "--tokens",
        "1,17",
    ): "to run those that mine.safetensors states, ",
}
OF_SLICES = {
    ("replay", "nothing"): ("replay", "nothing: no such file; llamadiff backend --keep DIR saves ops\n"),
    ("tokens", str(shipped_model()), "--candidate", "./nope"): (
        "prompt",
        "./nope: cannot be run (No such file or directory)\n",
    ),
    ("template", "t.jinja", "--candidate", "engine.py"): ("prompt", "for a function give engine.py:FUNCTION\n"),
    ("loss", "m.gguf", "m.gguf", *IDS): ("loss", "m.gguf: is the same file as m.gguf; give another .gguf of the model"),
}


@pytest.mark.parametrize(
    ("words", "said"),
    [*REFUSED.items(), *(pytest.param(words, said, marks=needs_slices(name))
                         for words, (name, said) in OF_SLICES.items())],
)  # fmt: skip
def test_a_mistake_is_answered_in_one_line(words, said, folder, monkeypatch):
    monkeypatch.chdir(folder)
    done = run(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


@pytest.mark.parametrize(
    ("text", "name", "file"),
    [("csv:r.txt", "csv", "r.txt"), ("CSV:r.txt", "csv", "r.txt"), ("R.CSV", "csv", "R.CSV"), ("-o.json", "json", None),
     ("C:/x/r.json", "json", "C:/x/r.json"), ("a/b:c.json", "json", "a/b:c.json"), ("r:.json", "json", "r:.json"),
     pytest.param("md:r", "markdown", "r", marks=needs_slices("page")),
     pytest.param("xml:r", "junit", "r", marks=needs_slices("page"))],
)  # fmt: skip
def test_a_format_is_named_by_its_word_or_its_ending(text, name, file):
    form, target = _target(text, formats())
    assert (form.name, target) == (name, file or text)


@pytest.mark.parametrize("text", ["foo:r.json", "mdd:r.md", "r.jsonx", "json"])
def test_no_file_is_called_after_a_format_that_there_is_not(text):
    with pytest.raises(UserError, match="expected a name that ends in"):
        _target(text, formats())


def test_a_trace_is_judged_by_all_that_it_holds(folder, monkeypatch):
    monkeypatch.chdir(folder)
    limited = compare("m.gguf", Run(tokens=TOKENS, patterns=["embd"]), "mine.safetensors")
    assert "--only limits what llama.cpp records; all 4" in limited.next_steps[-1]
    assert "taps of mine.safetensors were judged" in limited.next_steps[-1]
    assert "--only" not in run("compare", "m.gguf", "mine.safetensors").stdout


def test_a_trace_beside_itself_is_said_to_be_that(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "copy.safetensors").write_bytes((folder / "mine.safetensors").read_bytes())
    said = "both are one and the same file, mine.safetensors: give the other side's trace"
    assert said in " ".join(run("diff", "mine.safetensors", "./mine.safetensors").stdout.split())
    assert "the same file" not in run("diff", "mine.safetensors", "copy.safetensors").stdout


def test_two_traces_of_one_engine_are_called_by_their_files(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "two.safetensors").write_bytes((folder / "mine.safetensors").read_bytes())
    (folder / "sub").mkdir()
    (folder / "sub" / "mine.safetensors").write_bytes((folder / "mine.safetensors").read_bytes())
    assert "no model: mine and two, 3 tokens" in run("diff", "mine.safetensors", "two.safetensors").stdout
    assert "no model: mine and mine, 3 tokens" in run("diff", "mine.safetensors", "sub/mine.safetensors").stdout


@pytest.mark.parametrize(
    ("log", "said"),
    [("load_backend: loaded CPU backend from /x/libggml-cpu.so\n", "it failed"), ("", "it failed"),
     ("ggml_cuda_init: found 1 CUDA devices:\n", "it failed"), ("ggml_vulkan: No devices found.\n", "it failed"),
     ("load_backend: loaded CPU backend\nno such type\n", "it failed (it said: no such type)"),
     ("error: bad magic\nload_backend: loaded CPU backend\n", "it failed (it said: bad magic)")],
)  # fmt: skip
def test_of_a_log_only_what_explains_is_quoted(log, said):
    assert _with_log("it failed", log) == said
