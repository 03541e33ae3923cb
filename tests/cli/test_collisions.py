"""No command writes over a file that it reads: refused in one line before any work, whatever the file is called."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from llamaref import Engine
from optional import needs_slices
from safetensors.numpy import save_file
from traces import save

import llamadiff
from llamadiff import UserError
from llamadiff.candidates.reference import record
from llamadiff.cli.app import app
from llamadiff.engines.run_spec import Run
from llamadiff.llamacpp.child import Child
from llamadiff.report.formats import formats
from llamadiff.system.collisions import refuse_collisions, saved_files
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import compared_files
from llamadiff.verbs.verbs import record as capture

TOKENS = (1, 17, 5)
IDS = ("--tokens", "1,17,5")


@pytest.fixture
def place(small_model, tmp_path, monkeypatch) -> Path:
    """A directory with one file of each kind that commands read; llama.cpp may not be asked for anything."""
    trace = record(Engine(small_model()), TOKENS, "mine")
    (tmp_path / "m.gguf").symlink_to(small_model())
    for name in ("a", "b", "d/baseline", "e/engine"):
        save(trace, tmp_path / f"{name}.safetensors")
    (tmp_path / "f.toml").write_text('[[rule]]\nmatch = 1e-9\ntap = "none"\n', encoding="utf-8")
    (tmp_path / "map.toml").write_text('[embd]\nname = "embd"\n', encoding="utf-8")
    (tmp_path / "ids").write_text("1,17,5", encoding="utf-8")
    (tmp_path / "engine.py").write_text("raise SystemExit(3)", encoding="utf-8")
    (tmp_path / "dump").mkdir()
    np.save(tmp_path / "dump" / "embd.npy", trace["embd"])
    (tmp_path / "dump" / "l_out-0.json").write_text('{"shape": [3, 256]}', encoding="utf-8")
    trace["l_out-0"].tofile(tmp_path / "dump" / "l_out-0.f32")
    (tmp_path / "dump" / "tokens").write_text("1 17 5", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Child, "ask", lambda *_: pytest.fail("llama.cpp was run"))
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What is typed -> the file that would be lost.
COLLISIONS = {
    "compare -o DIR, baseline": (("compare", "m.gguf", "--candidate", "d/baseline.safetensors", "-o", "d/"),
                                 "d/baseline.safetensors"),
    "compare -o DIR, engine": (("compare", "m.gguf", "--candidate", "e/engine.safetensors", "-o", "e/"),
                               "e/engine.safetensors"),
    "compare -o json, candidate": (("compare", "m.gguf", "--candidate", "a.safetensors", "-o", "json:a.safetensors"),
                                 "a.safetensors"),
    "compare -o csv, tolerance": (("compare", "m.gguf", *IDS, "--tolerance", "f.toml", "-o", "csv:f.toml"), "f.toml"),
    "compare -o csv, ids": (("compare", "m.gguf", "--tokens", "@ids", "-o", "csv:ids"), "ids"),
    "compare -o json, map": (
        ("compare", "m.gguf", *IDS, "--candidate", "a.safetensors", "--map", "map.toml", "-o", "json:map.toml"),
        "map.toml"),
    "compare -o json, an array": (("compare", "m.gguf", "--candidate", "dump", "-o", "json:dump/embd.npy"),
                                "dump/embd.npy"),
    "compare -o json, a sidecar": (("compare", "m.gguf", "--candidate", "dump", "-o", "json:dump/l_out-0.json"),
                                 "dump/l_out-0.json"),
    "compare -o csv, a dump's ids": (("compare", "m.gguf", "--candidate", "dump", "-o", "csv:dump/tokens"),
                                   "dump/tokens"),
    "compare -o json, a command": (
        ("compare", "m.gguf", *IDS, "--candidate", f"cmd: {shlex.quote(sys.executable)} engine.py {{out}}",
         "-o", "json:engine.py"),
        "engine.py"),
    "compare -o csv, a command's file": (
        ("compare", "m.gguf", *IDS, "--candidate", "cmd: ./x --from=a.safetensors {out}", "-o", "csv:a.safetensors"),
        "a.safetensors"),
    "compare -o DIR beside a command": (
        ("compare", "m.gguf", *IDS, "--candidate", "cmd: ./x d {out}", "-o", "d/"), "d/baseline.safetensors"),
    "compare -o json, transformers": (
        ("compare", "m.gguf", *IDS, "--candidate", "transformers:dump", "-o", "json:dump/tokens"), "dump/tokens"),
    "compare -o json, what --save keeps": (
        ("compare", "m.gguf", *IDS, "-o", "e/", "-o", "json:e/engine.safetensors"), "e/engine.safetensors"),
    "compare one file twice": (("compare", "m.gguf", *IDS, "-o", "json:r.txt", "-o", "csv:./r.txt"), "r.txt"),
    "standard output twice": (("diff", "a.safetensors", "b.safetensors", "-o", "json:-", "-o", "csv:-"),
                              "standard output"),
    "capture -o ids": (("capture", "m.gguf", "--tokens", "@ids", "-o", "ids"), "ids"),
    "diff -o json, baseline": (("diff", "a.safetensors", "b.safetensors", "-o", "json:a.safetensors"), "a.safetensors"),
    "diff -o json, candidate": (("diff", "a.safetensors", "b.safetensors", "-o", "json:b.safetensors"),
                                "b.safetensors"),
    "diff -o csv, candidate": (("diff", "a.safetensors", "b.safetensors", "-o", "csv:b.safetensors"), "b.safetensors"),
    "check -o json, trace": (("check", "a.safetensors", "--model", "m.gguf", "-o", "json:a.safetensors"),
                             "a.safetensors"),
    "check -o json, a trace of several": (("check", "d", "e", "--model", "m.gguf", "-o", "json:e/engine.safetensors"),
                                        "e/engine.safetensors"),
    "backend -o json, tolerance": (("backend", "m.gguf", *IDS, "--tolerance", "f.toml", "-o", "json:f.toml"), "f.toml"),
    "backend -o csv, ids": (("backend", "m.gguf", "--tokens", "@ids", "-o", "csv:ids"), "ids"),
}  # fmt: skip


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as refused:
        app([*map(str, arguments)], standalone_mode=False)
    return str(refused.value)


@needs_slices("explain", "pytorch")
@pytest.mark.parametrize("name", COLLISIONS)
def test_a_file_that_is_read_is_not_written(name, place):
    arguments, lost = COLLISIONS[name]
    before = contents(place)
    said = refusal(*arguments)
    assert lost in said
    assert "give another" in said
    assert "\n" not in said
    assert contents(place) == before


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("linked", ["output", "input"])
def test_links_are_seen_through(link, linked, place):
    link(place / "a.safetensors", place / "linked.safetensors")
    names = ("a.safetensors", "linked.safetensors")
    read, written = names if linked == "output" else names[::-1]
    before = contents(place)
    assert "the candidate" in refusal("diff", "b.safetensors", read, "-o", f"json:{written}")
    assert "the candidate" in refusal("compare", "m.gguf", "--candidate", f"dump/../{read}", "-o", f"csv:{written}")
    assert contents(place) == before


def test_links_of_directories_are_seen_through(place):
    (place / "linked").symlink_to(place / "d")
    said = refusal("compare", "m.gguf", "--candidate", "d/baseline.safetensors", "-o", "linked/")
    assert "linked/baseline.safetensors is the candidate" in said
    (place / "gone.json").symlink_to(place / "r.json")  # leads to nothing yet
    said = refusal("diff", "a.safetensors", "b.safetensors", "-o", "json:r.json", "-o", "csv:gone.json")
    assert "gone.json is what -o writes" in said


@needs_slices("graph")
def test_what_backend_keeps_overwrites_nothing_that_it_reads(place):
    (place / "kept").mkdir()
    (place / "kept" / "0-00012.safetensors").symlink_to(place / "f.toml")
    said = refusal("backend", "m.gguf", *IDS, "--tolerance", "f.toml", "--keep", "kept")
    assert "kept/0-00012.safetensors" in said


def test_the_python_interface_refuses_too(place):
    before, model = contents(place), "m.gguf"
    for candidate in ("d/baseline.safetensors", Path("d/baseline.safetensors"), Trace.open("d/baseline.safetensors")):
        with pytest.raises(UserError, match=r"d/baseline\.safetensors is the candidate"):
            llamadiff.compare(model, candidate=candidate, save="d")
    with pytest.raises(UserError, match=r"m\.gguf is the model"):
        capture(model, Run(tokens=TOKENS), Path("m.gguf"))
    assert contents(place) == before


@pytest.mark.parametrize("names", [("r.json", "r.csv"), ("/dev/null", "/dev/null"), ("r.json", "-"), ("dump/r.json",)])
def test_outputs_of_their_own_are_written(names, place):
    options = [word for form, name in zip(("json", "csv"), names, strict=False) for word in ("-o", f"{form}:{name}")]
    for _ in range(2):  # the second time they are there
        assert app(["diff", "a.safetensors", "b.safetensors", *options], standalone_mode=False) == 0
    assert [
        name for name in names if name.endswith("json") and not (place / name).read_text("utf-8").startswith("{")
    ] == []


@pytest.mark.parametrize("ending", {ending: 0 for form in formats() for ending in form.endings})
def test_a_report_in_a_dump_is_no_part_of_it(ending, place):
    (place / "dump" / f"r{ending}").write_text("{}", encoding="utf-8")
    (place / "d" / f"r{ending}").write_text("{}", encoding="utf-8")
    for spec in ("dump", "cmd: ./x d {out}"):
        folder = "dump" if spec == "dump" else "d"
        refuse_collisions(compared_files("m.gguf", spec), [("-o", f"{folder}/r{ending}"), *saved_files("new")])


# -- the candidate is read before anything is run or written --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.safetensors", b"\0garbage", "x.safetensors: not a readable trace"),
        ("x.npz", b"garbage", "x.npz: not a plain .npz"),
        ("x/embd.npy", b"garbage", "embd.npy: not a plain .npy"),
        ("x/tokens", b"one two", "expected token ids"),
        ("x/embd.txt", b"0.1\nhello\n", "embd.txt:2"),
    ],
)
@pytest.mark.parametrize("ids", [IDS, ("once upon a time",), ()])
def test_a_candidate_that_cannot_be_read_is_said_first(ids, name, content, words, place):
    (place / "x").mkdir()
    (place / name).write_bytes(content)
    spec = "x" if name.startswith("x/") else name
    assert words in refusal("compare", "m.gguf", *ids, "--candidate", spec, "-o", "kept/")
    assert not (place / "kept").exists()


def test_a_shape_that_does_not_fit_is_said_first(place):
    np.save(place / "dump" / "embd.npy", np.zeros((256, 3), np.float32))
    assert "embd has shape [256, 3]" in refusal("compare", "m.gguf", "--candidate", "dump", "-o", "kept/")
    assert not (place / "kept").exists()


def test_a_candidate_that_states_no_tokens_says_where_it_could(place):
    trace = Trace.open("a.safetensors")
    save_file({name: np.array(trace[name]) for name in trace}, place / "x.safetensors")
    said = refusal("compare", "m.gguf", "--candidate", "x.safetensors")
    assert "x.safetensors: no 'llamadiff' entry in __metadata__" in said
    assert "--tokens" in said
    (place / "dump" / "tokens").unlink()
    assert "dump/tokens would hold them" in refusal("compare", "m.gguf", "--candidate", "dump")
    assert "no such file, and no built-in map" in refusal("compare", "m.gguf", *IDS, "--candidate", "a.safetensors",
                                                          "--map", "no.toml")  # fmt: skip


def test_names_that_differ_in_case_alone_are_one_file_where_case_is_folded(tmp_path: Path) -> None:
    """As it is on macOS and on Windows: here a link makes the other name of the directory its own, too."""
    folder = tmp_path / "folder"
    folder.mkdir()
    both = [("-o", folder / "Out.json"), ("--save", folder / "out.json")]
    refuse_collisions([], both)
    (tmp_path / "FOLDER").symlink_to(folder)
    with pytest.raises(UserError, match="is what -o writes too"):
        refuse_collisions([], both)


def test_a_file_that_is_not_there_may_be_in_the_root():
    refuse_collisions([("the model", Path(Path.cwd().anchor) / "no-such-model.gguf")], [("-o", Path("r.json"))])
