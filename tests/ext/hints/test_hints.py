"""What was given by mistake: what a file is and where it belongs, near names, a command's words; the rest is let by."""

from __future__ import annotations

import json
import shlex
import zipfile

import numpy as np
import pytest
from command import run
from safetensors.numpy import save_file

from llamadiff.ext.hints import slice_
from llamadiff.ext.hints.file_kinds import cut_off
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.trace.metadata import KEY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One file of each kind."""
    place = tmp_path_factory.mktemp("kinds")
    values = np.zeros((3, 4), np.float32)
    (place / "m.gguf").write_bytes(b"GGUF" + bytes(60))
    np.save(place / "embd.npy", values)
    np.savez(place / "taps.npz", embd=values)
    with zipfile.ZipFile(place / "w.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    (place / "saved.pt").write_bytes((place / "w.bin").read_bytes())
    for name in ("ckpt", "dump", "traces", "mixed"):
        (place / name).mkdir()
    save_file({"model.norm.weight": values}, place / "ckpt" / "model.safetensors")
    (place / "ckpt" / "config.json").write_text("{}", encoding="utf-8")
    values.tofile(place / "dump" / "embd.f32")
    stated = {KEY: json.dumps({"schema": "llamadiff.trace/1", "tokens": [1, 2, 3]})}
    save_file({"embd": values}, place / "mine.safetensors", stated)
    save_file({"embd": values}, place / "bare.safetensors")
    save_file({"embd": values}, place / "traces" / "a.safetensors", stated)
    save_file({"embd": values}, place / "mixed" / "a.safetensors", stated)
    (place / "mixed" / "m.gguf").write_bytes(b"GGUF")
    (place / "notes.txt").write_text("hello, you", encoding="utf-8")
    (place / "engine.py").write_text("print('l_out-0')\n", encoding="utf-8")
    (place / "raw.bin").write_bytes(bytes(64))
    (place / "a.answers.json").write_text('{"schema": "llamadiff.answers/1"}', encoding="utf-8")
    (place / "empty.safetensors").touch()
    (place / "short.gguf").write_bytes(b"GGU")
    (place / "run.nodes").write_text('{"schema": "llamadiff.nodes/1", "asked": {}}\n', encoding="utf-8")
    (place / "report.json").write_text('{\n"schema": "llamadiff.report/1"}', encoding="utf-8")
    (place / "checked.json").write_text('{"a.st": {"schema": "llamadiff.report/1"}}', encoding="utf-8")
    save_file({"found": values}, place / "op.safetensors", {"llamadiff.op": "{}"})
    whole = (place / "mine.safetensors").read_bytes()
    (place / "trace.npz").write_bytes(whole)
    (place / "cut.safetensors").write_bytes(whole[:-20])
    (place / "header.safetensors").write_bytes(whole[:30])
    return place


FILES = {
    (
        "saved.pt",
        "trace",
    ): "is tensors that torch.save wrote, no trace; llamadiff compare MODEL --tokens 1,2,3 --candidate",
    ("saved.pt", "model"): "is a pickle, no GGUF file",
    ("m.gguf", "trace"): "is a GGUF model, no trace; give it as --model",
    ("embd.npy", "trace"): "is one NumPy array (.npy), which does not say its tap and tokens",
    ("embd.npy", "model"): "is one NumPy array (.npy), no GGUF file; arrays are given as a directory",
    ("taps.npz", "trace"): "is a NumPy archive (.npz), no trace; llamadiff compare MODEL --tokens 1,2,3 --candidate",
    ("w.bin", "trace"): "is a pickle, which can run code and is not opened; save the tensors instead",
    ("w.bin", "model"): "is a pickle, no GGUF file; of its checkpoint, llama.cpp's convert_hf_to_gguf.py",
    ("ckpt", "model"): "is a checkpoint's directory, no GGUF file; llama.cpp's convert_hf_to_gguf.py",
    ("ckpt", "trace"): "is a checkpoint's directory, not what one computed; --candidate transformers:",
    ("ckpt/model.safetensors", "model"): "is a checkpoint's weights, no GGUF file; llama.cpp's convert_hf_to_gguf.py",
    ("ckpt/model.safetensors", "trace"): "is a checkpoint's weights, not what one computed",
    ("mine.safetensors", "model"): "is a trace, no GGUF file; llamadiff compare MODEL ",
    ("bare.safetensors", "model"): "is bare tensors (.safetensors), no GGUF file; llamadiff compare MODEL --tokens",
    ("mine.safetensors", "recorded run"): "is a trace, no run that capture --nodes recorded; llamadiff compare MODEL",
    ("mine.safetensors", "saved op"): "is a trace, no op that backend --keep saved; llamadiff compare MODEL",
    ("mine.safetensors", "weights"): "is a trace, no model's weights; llamadiff compare MODEL",
    ("mine.safetensors", "TOML"): "is a trace, no TOML file",
    ("run.nodes", "model"): "is a run that capture --nodes recorded, no GGUF file; llamadiff backend MODEL --recorded",
    ("run.nodes", "trace"): "is a run that capture --nodes recorded, no trace; llamadiff backend MODEL --recorded",
    ("op.safetensors", "trace"): "is an op that backend --keep saved, no trace; llamadiff replay",
    ("report.json", "trace"): "is a report of llamadiff's, no trace; give what it is a report of",
    ("checked.json", "trace"): "is a report of llamadiff's, no trace",
    ("empty.safetensors", "trace"): "is empty, no trace; it was not written to its end",
    ("short.gguf", "model"): "is a file of less than 8 bytes, no GGUF file",
    ("engine.py", "model"): 'is a program, no GGUF file; --candidate "cmd: ',
    ("engine.py", "TOML"): 'is a program, no TOML file; --candidate "cmd: ',
    ("mine.safetensors", "engine"): "is a trace, no engine's command, and none of its files; llamadiff compare MODEL",
    (
        "traces",
        "saved op",
    ): "is a directory of traces, of which none is taken; for saved ops give them: llamadiff",
    ("notes.txt", "trace"): "is a text file, no trace",
    ("notes.txt", "model"): "is a text file, no GGUF file",
    ("traces", "model"): "is a directory of traces, no GGUF file; llamadiff check",
    ("ckpt/model.safetensors", "checkpoint"): "is a checkpoint's weights, no directory of a checkpoint; give",
    ("*.safetensors", "trace"): "no such file; a shell expands *.safetensors where it stands without quotes",
    ("dump", "trace"): "is a directory of arrays, no trace; llamadiff compare MODEL --tokens 1,2,3 --candidate",
    ("traces", "trace"): "is a directory of traces, of which one is to be given here",
    ("cut.safetensors", "trace"): "is cut off, ",
    ("header.safetensors", "trace"): "is cut off, 30 of ",
    ("mien.safetensors", "trace"): "no such file; ",
}


@pytest.mark.parametrize(("name", "place"), FILES, ids=lambda each: each.replace("/", "-"))
def test_a_file_in_the_wrong_place_is_named_by_what_it_is(name, place, folder):
    said = slice_.mistake(folder / name, place)
    assert said.startswith(f"{folder / name}: {FILES[name, place]}")
    assert "{" not in said.replace("{name: x", "").replace("{tokens} {out}", "")
    assert len(said) < 1000


def test_how_much_is_cut_off_is_counted(folder):
    size = (folder / "mine.safetensors").stat().st_size
    assert cut_off(folder / "cut.safetensors") == f"{size - 20} of {size} bytes"
    assert cut_off(folder / "mine.safetensors") == cut_off(folder / "notes.txt") == ""


@pytest.mark.parametrize(
    ("name", "place"),
    [("m.gguf", "model"), ("mixed", "model"), ("mine.safetensors", "trace"), ("bare.safetensors", "trace"),
     ("raw.bin", "trace"), ("run.nodes", "recorded run"), ("op.safetensors", "saved op"), ("notes.txt", "TOML"),
     ("ckpt", "checkpoint"), ("ckpt", "weights"), ("m.gguf", "weights"), ("nothing", "trace"), ("x" * 5000, "trace"),
     *((name, "candidate") for name in
       ("mine.safetensors", "bare.safetensors", "taps.npz", "dump", "notes.txt", "a.answers.json", "m.gguf"))],
)  # fmt: skip
def test_nothing_is_said_of_what_belongs_there_or_is_not_known(name, place, folder):
    assert slice_.mistake(folder / name, place) is None


CANDIDATES = {
    "": "--candidate is empty",
    "cmd: ./e {tokens} {out} && true": "&& would go to the command as a word; give cmd: sh -c './e {tokens} {out} && t",
    "cmd: ./e {tokens} | tee {out}": "| would go",
    "cmd: cd x; ./e {tokens} {out}": "; would go",
    "cmd: ./e '{tokens}' > {out}": "> would go to the command as a word; give cmd: sh -c '...'",
    "cmd: ./e {token} {out}": "{token} stands for nothing; did you mean {tokens}? known are {model}, {tokens}, ",
    "cmd: ./e --m={modle} {tokens} {out}": "did you mean {model}?",
    "cmd: ./e {ids} {out}": "did you mean {tokens}?",
    "./mini {tokens} {out}": 'put cmd: before it: --candidate "cmd: ./mini {tokens} {out}"',
    "localhost:8080": "for a server give --candidate http://localhost:8080",
    "transformer:bf16": "did you mean transformers:bf16?",
    "{folder}/embd.npy": "is one NumPy array",
    "{folder}/ckpt": "is a model of Hugging Face, not what one computed; --candidate transformers:",
    "{folder}/run.nodes": "is a run that capture --nodes recorded, no trace; llamadiff backend MODEL --recorded",
    "{folder}/op.safetensors": "is an op that backend --keep saved, no trace",
    "{folder}/report.json": "is a report of llamadiff's, no trace; give what it is a report of",
    "{folder}/engine.py": 'is a program, no trace; --candidate "cmd: python {folder}/engine.py {tokens} {out}" runs',
    "{folder}/trace.npz": "is a trace, no NumPy archive; call it trace.safetensors",
    "cmd: {folder}/engine.py {tokens} {out}": "is not executable; give cmd: python {folder}/engine.py ...",
    "{folder}/mien.safetensors": "mine.safetensors is there",
}


@pytest.mark.parametrize("spec", CANDIDATES)
def test_a_candidate_that_is_none_is_told_what_to_be(spec, folder):
    said = CANDIDATES[spec].replace("{folder}", str(folder))
    assert said in slice_.mistake(spec.replace("{folder}", str(folder)), "candidate")


@pytest.mark.parametrize(
    "spec",
    ["cmd: ./e --tokens {tokens} --dump {out}", "cmd: sh -c 'a && b > {out}'", 'cmd: ./e --sep="|" "&&" {tokens} {out}',
     "cmd: sh -c './e ${token} {out}'", "cmd: awk '{print}' {out}", "cmd: python -c \"f'{token} x'\" {out}", "cmd: 'a",
     "llama.cpp:kv=q8_0", "transformers:dir", "http://x:80", "other.gguf", "engine.py:run", "C:/x/y", "x" * 5000],
)  # fmt: skip
def test_a_candidate_that_may_be_right_is_let_by(spec, folder):
    assert slice_.mistake(spec, "candidate") is None


REFUSED = {
    ("diff", "m.gguf", "mine.safetensors"): "m.gguf: is a GGUF model, no trace",
    ("check", "embd.npy"): "embd.npy: is one NumPy array",
    ("compare", "mine.safetensors", "m.gguf"): "m.gguf: is a model, which comes first: llamadiff compare m.gguf mine.s",
    ("compare", "ckpt/model.safetensors", "Once"): "is a checkpoint's weights, no GGUF file",
    ("compare", "m.gguf", "Once", "--candidate", "cmd: ./e {token} {out}"): "{token} stands for nothing",
    ("compare", "m.gguf", "localhost:8080"): "looks like a server; give --candidate http://localhost:8080 and a prompt",
    ("compare", "m.gguf", "mine.safetensor"): "mine.safetensor: no such trace; mine.safetensors is there",
    ("m.gguf", "Once upon"): "m.gguf: is no command; llamadiff compare m.gguf 'Once upon'",
    ("compare",): 'compare: MODEL is missing: a .gguf file; such as llamadiff compare model.gguf "Once upon a time" (',
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_commands_say_it_in_one_line(words, folder, monkeypatch):
    monkeypatch.chdir(folder)
    done = run(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert REFUSED[words] in done.stderr


# What a command line says of values that cannot be meant, before anything is run.
VALUES = {
    "compare m.gguf mine": "mine: mine.safetensors is here; did you mean it?",
    "compare m.gguf mine.safetensors --only embd": "--only embd: limits what is recorded, and mine.safetensors is",
    "compare m.gguf Once --candidate mine.safetensors --only 0": "--only 0: limits what is recorded, and mine.safeten",
    "compare m.gguf run.nodes": "run.nodes: is a run that capture --nodes recorded, no trace; llamadiff backend MODEL",
    "compare m.gguf Once --candidate m.gguf": "m.gguf: is given twice, as MODEL and as --candidate, and is right",
    "compare m.gguf Once --tolerance report.json": "--tolerance report.json: is a report of llamadiff's, no TOML file",
    "compare m.gguf Once mine.safetensors": "compare: mine.safetensors is a trace; beside a prompt it is given as --c",
    "check mine.safetensors --candidate ./mine.safetensors": "./mine.safetensors: is given twice, as PATHS and as --c",
    "check traces --model traces": "--model traces: is a directory of traces, no GGUF file; llamadiff check traces",
    "check traces --candidate cmd: ./engine": "--candidate cmd: has no command; all of it stands in quotes: --candidat",
    "check --candidate traces": "PATHS is missing: recorded traces, or their directories; traces is such: give it bef",
    "check traces -o json:notes.txt": "-o notes.txt: is a text file, and no report of llamadiff's; give another name,",
    "check traces -o json:raw.bin": "-o raw.bin: is there, and is no report of llamadiff's; give another name, or --fo",
    "diff mine.safetensors m.gguf": "m.gguf: is a GGUF model, no trace; give it as --model m.gguf",
    "capture m.gguf Once -o new.npz": "-o new.npz: what this writes is a trace, no .npz; give new.safetensors",
    "capture m.gguf Once -o new.json": "-o new.json: what this writes is a trace, no .json; give new.safetensors",
    "capture m.gguf Once --nodes -o new.safetensors": "-o new.safetensors: what --nodes writes is no .safetensors; giv",
    "backend m.gguf --recorded mine.safetensors": "--recorded mine.safetensors: is a trace, no run that capture --node",
    "backend m.gguf Once --keep notes.txt": "notes.txt: is a file; --keep takes a directory, which is made if it",
    "replay run.nodes": "run.nodes: is a run that capture --nodes recorded, no op that backend --keep saved",
    "taps mine.safetensors": "mine.safetensors: is a trace, no GGUF file; llamadiff compare MODEL mine.safetensors",
    "weights m.gguf mine.safetensors": "mine.safetensors: is a trace, no model's weights; llamadiff compare MODEL mine",
    "weights mine.safetensors m.gguf": "m.gguf: is a model, which comes first: llamadiff weights m.gguf mine.safetenso",
    "loss m.gguf mine.safetensors Once": "mine.safetensors: is a trace, no GGUF file; llamadiff compare MODEL mine",
    "check traces --model nothing.gguf": "--model nothing.gguf: no such file",
    "tokens m.gguf --candidate mine.safetensors": "--candidate mine.safetensors: is a trace, no engine's command",
    "compare m.gguf m": "m: m.gguf is here; did you mean it?",
    "compare m.gguf Once --map hf": "--map hf: translates a candidate's names, and there is no --candidate; leave it",
    "compare m.gguf Once --map hf --candidate llama.cpp:kv=f16": "--map hf: translates a candidate's names, and llama",
    "compare m.gguf Once --llama-cpp lora=mine.safetensors:0.5": "--llama-cpp lora=mine.safetensors: is a trace, no GG",
    "capture m.gguf Once --nodes --sketch -o new.nodes": "--sketch: is of a trace, and --nodes records another file",
    "sweep m.gguf": "m.gguf: is a GGUF model, no TOML file",
}


@pytest.mark.parametrize("line", VALUES)
def test_what_cannot_be_meant_is_said_before_anything_runs(line, folder, monkeypatch):
    monkeypatch.chdir(folder)
    done = run(*shlex.split(line))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"llamadiff: {VALUES[line]}")


@pytest.mark.parametrize("ending", ["json", "csv", "md", "html", "xml"])
def test_a_report_is_written_over_a_report_and_over_nothing_else(ending, folder, tmp_path, monkeypatch):
    """Of GitHub's file of summaries it writes the end."""
    path = tmp_path / f"r.{ending}"
    words = "diff", folder / "mine.safetensors", folder / "traces" / "a.safetensors", "-o", path
    assert "no report" not in run(*words).stderr
    before = path.read_bytes()
    assert "no report" not in run(*words).stderr
    path.write_bytes(b"mine\n" + before)
    assert "no report of llamadiff's; give another name" in run(*words).stderr
    assert path.read_bytes() == b"mine\n" + before
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    assert "no report" not in run(*words).stderr
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    path.write_bytes(b"")
    assert "no report" not in run(*words).stderr


@pytest.mark.parametrize("line", ["compare --help", "check traces -o notes.txt -h", "taps mine.safetensors --help"])
def test_help_is_help(line, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert run(*line.split()).returncode == 0


EMPTY = {
    ("compare", "m.gguf", "Once", "--candidate", ""): "--candidate",
    ("compare", "m.gguf", "Once", "--candidate="): "--candidate",
    ("compare", "m.gguf", "mine.safetensors", "--map", ""): "--map",
    ("compare", "m.gguf", "Once", "--only", "embd", "--only", ""): "--only",
    ("compare", "", "Once"): "MODEL",
    ("check", "traces", ""): "PATHS",
    ("diff", "mine.safetensors", ""): "CANDIDATE",
    ("weights", "m.gguf", ""): "OTHER",
    ("tokens", "m.gguf", "--candidate", ""): "--candidate",
    ("template", "m.gguf", "--candidate", ""): "--candidate",
}


@pytest.mark.parametrize("words", EMPTY, ids=" ".join)
def test_no_value_of_a_command_is_empty(words, folder, monkeypatch):
    """An empty path is the directory that one is in: what lies there would be compared."""
    monkeypatch.chdir(folder)
    done = run(*words)
    said = f"llamadiff: {EMPTY[words]} is empty (is a variable unset?); give a value, or leave it out\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_kept_traces_are_not_overwritten(folder, monkeypatch):
    """Without --force; nothing is run before that is known."""
    monkeypatch.chdir(folder)
    (folder / "dump" / "baseline.safetensors").write_bytes(b"mine")
    done = run("compare", "m.gguf", "mine.safetensors", "-o", "dump/")
    said = "llamadiff: dump/baseline.safetensors: is there already; give another name, or --force to overwrite it\n"
    assert (done.returncode, done.stderr) == (2, said)
    assert "is there already" not in run("compare", "m.gguf", "mine.safetensors", "-o", "dump/", "--force").stderr


def test_no_texts_are_no_match(tmp_path):
    texts = tmp_path / "empty.txt"
    texts.write_bytes(b"")
    done = run("tokens", shipped_model(), "--texts", texts)
    assert (done.returncode, done.stderr) == (2, f"llamadiff: {texts}: has no texts; give texts, one a line\n")
