"""Saved ops, run again in ggml."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import run
from sent import own_rounding

from llamadiff.ext.graph.check import distance
from llamadiff.ext.graph.op import compute
from llamadiff.ext.graph.readers import check_nodes
from llamadiff.ext.graph.repro import load, memory_of, save
from llamadiff.ext.replay import run as one_op
from llamadiff.ext.replay.report import line_of, to_markdown
from llamadiff.ext.replay.run import run_ops
from llamadiff.llamacpp.quantizing import EightBits
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.numerics.cpu import UNKNOWN
from llamadiff.report.formats import About
from llamadiff.report.terminal.escape import number as shown_number

TOKENS = (1, 5, 9, 30, 17, 22)


NOT_ALONE = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}


def saved(model: Path, folder: Path, **settings: object) -> list[Path]:
    """Every node of a run as --keep would save it, but those that compute nothing."""
    folder.mkdir()
    check_nodes(Request(str(model), tokens=TOKENS, output=str(folder / "o.json"), nodes=True, keep=str(folder),
                        keep_nodes=("*",), settings=Settings(**settings)))  # fmt: skip
    return [path for path in sorted(folder.glob("*.safetensors")) if load(path)[0].name not in NOT_ALONE]


WRITES = {"llama": "SET_ROWS", "moe": "SET_ROWS", "mamba2": "CPY", "gemma2": "SET_ROWS"}


@pytest.mark.parametrize("kind", WRITES)
def test_saved_ops_run_again_in_ggml(kind, small_model, tmp_path):
    model = small_model(kind, "Q8_0")
    paths = saved(model, tmp_path / "plain")
    paths += saved(model, tmp_path / "flash", flash_attn=True, type_k="Q8_0", type_v="Q8_0")
    found = run_ops(paths, Settings())
    assert [(run.name, run.op, run.error) for run in found if run.verdict != "match"] == []
    assert len({run.op for run in found}) > 5
    assert WRITES[kind] in {run.op for run in found}


def test_products_by_blocks_with_minima_are_right_alone(small_model, tmp_path):
    """Beside rounded activations their blocks keep a rounded sum, which the minima multiply."""
    paths = [path for path in saved(small_model("llama", "Q5_1"), tmp_path / "ops") if load(path)[0].name == "MUL_MAT"]
    found = [run for run in run_ops(paths[:3], Settings()) if "q5_1" in run.inputs]
    assert [run.verdict for run in found] == ["match"] * 3
    op, _, gave, _ = load(paths[0])
    weights, *others = op.sources
    less = replace(op, q8=own_rounding().way, sources=(replace(weights, minima=None), *others))
    assert distance(less, compute(less), gave) > 100 * found[0].limit


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_what_is_written_into_a_source_is_what_the_op_wrote(kind, small_model, tmp_path):
    """Run again on other values it gives other ones, and what it does not write stays as it was."""
    paths = [path for path in saved(small_model(kind), tmp_path / "ops") if load(path)[0].name == WRITES[kind]]
    path = next(path for path in paths if np.any(load(path)[0].x()))
    op, expected, found, name = load(path)
    values, *others = op.sources
    other = replace(op, sources=(replace(values, values=-values.values), *others))
    save(path, other, expected, found, name, memory_of(path)[0])
    run_again = run_ops([path], Settings())[0]
    assert (run_again.error, run_again.verdict) == (0.0, "match")
    assert run_again.recorded > 0.1


def test_a_saved_op_is_judged_by_what_this_build_gives(small_model, tmp_path):
    norm = next(path for path in saved(small_model(), tmp_path / "ops") if load(path)[0].name == "RMS_NORM")
    op, expected, found, name = load(norm)
    numbers = norm.with_suffix(".txt").read_text("utf-8").split()
    assert numbers[2:6] == [str(size) for size in reversed(op.shape)]
    save(tmp_path / "wrong.safetensors", op, expected, 2 * found, name, memory_of(norm)[0])
    done = run("replay", tmp_path / "wrong.safetensors")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("MATCH  norm-0: RMS_NORM f32[")
    assert done.stdout.endswith("; 1.0e+00 where it was saved\n")
    assert one_op._judged(norm, op, 2 * found, found, name, "CPU", own_rounding()).verdict == "wrong"


@pytest.mark.parametrize("stated", [UNKNOWN, "of its own", None])
def test_an_op_is_judged_as_the_ggml_rounds_that_runs_it_now(stated, small_model, tmp_path):
    """Whatever was saved with it; where that ggml cannot be asked, it is not judged."""
    paths = saved(small_model("llama", "Q8_0"), tmp_path / "ops")
    path = next(path for path in paths if load(path)[0].name == "MUL_MAT" and load(path)[0].source_kind() == "q8_0")
    op, expected, found, name = load(path)
    other = tmp_path / "other.safetensors"
    save(other, replace(op, q8=stated), expected, found, name, memory_of(path)[0])
    assert load(other)[0].q8 == UNKNOWN
    assert run_ops([other], Settings())[0].verdict == "match"
    for q8, verdict in (
        (own_rounding(), "wrong"),
        (EightBits(UNKNOWN), "unchecked"),
        (EightBits(own_rounding().way), "unchecked"),
    ):
        judged = one_op._judged(other, load(other)[0], found * np.float32(1.001), found, name, "CPU", q8)
        assert judged.verdict == verdict
        assert ("not judged, since how this ggml rounds" in line_of(judged)) == (verdict == "unchecked")
        title = to_markdown([judged], About()).splitlines()[0]
        assert title.startswith("### " + verdict.upper())


def test_runs_of_ops_are_a_block_for_an_issue(small_model, tmp_path):
    path = next(path for path in saved(small_model(), tmp_path / "ops") if load(path)[0].name == "RMS_NORM")
    done = run("replay", path, "-o", "markdown:-")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("### MATCH: 1 of 1 saved ops right on CPU")
    assert f"llamadiff replay {path} -o markdown:-\n" in done.stdout
    op, _, found, name = load(path)
    spoiled = found.copy()
    spoiled[0, 0, 1, 3] += 7
    runs = [one_op._judged(path, op, now, found, name, "CPU", own_rounding()) for now in (found, spoiled)]
    text = to_markdown(runs, About())
    assert text.startswith(f"### WRONG: `RMS_NORM` `{runs[1].inputs}` on CPU\n")
    right = found[0, 0, 1, 3]
    assert f"`[0, 0, 1, 3]` is {shown_number(right + 7)}, {shown_number(right)} is right |" in text
    assert text.index("**WRONG**") < text.index("| match |")
    assert text.count(path.with_suffix(".txt").read_text("utf-8").strip()) == 1
    assert run("replay", path, "-o", f"markdown:{path}").returncode == 2


def test_runs_of_ops_as_json(small_model, tmp_path):
    path = next(path for path in saved(small_model(), tmp_path / "ops") if load(path)[0].name == "RMS_NORM")
    report = json.loads(run("replay", path, "-o", "json:-").stdout)
    assert (report["schema"], report["verdict"]) == ("llamadiff.replay/1", "match")
    assert report["summary"].startswith("MATCH  norm-0: RMS_NORM f32[")
    assert [(op["path"], op["verdict"], op["device"]) for op in report["ops"]] == [(str(path), "match", "CPU")]


def test_nodes_are_saved_though_they_are_right(small_model, tmp_path):
    model, keep = small_model(), tmp_path / "kept"
    done = run("backend", model, "--tokens", "1,5,9", "--keep", keep, "--node", "norm-0", "--node", "SOFT_MAX")
    assert done.returncode == 0, done.stderr
    names = {(load(path)[3], load(path)[0].name) for path in keep.glob("*.safetensors")}
    assert {name for name, op in names if op != "SOFT_MAX"} == {"norm-0"}
    assert len(names) > 2
    for words, said in (
        (("--keep", keep, "--node", "nothing"), "--node nothing: no node or op of that name; llamadiff graph MODEL"),
        (("--node", "norm-0"), "--node norm-0: says what else is saved; give --keep DIR with it"),
    ):
        done = run("backend", model, "--tokens", "1,5,9", *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert said in done.stderr


def test_what_is_no_saved_op_is_refused(small_model, tmp_path):
    paths = saved(small_model(), tmp_path / "ops")
    (tmp_path / "o.bin").write_bytes(bytes(100))
    done = run("replay", tmp_path / "o.bin")
    assert (done.returncode, "not an op that was saved with --keep" in done.stderr) == (2, True)
    op, expected, found, name = load(paths[0])
    save(tmp_path / "old.safetensors", op, expected, found, name)
    done = run("replay", tmp_path / "old.safetensors")
    assert (done.returncode, "does not say how ggml held this op" in done.stderr) == (2, True)
