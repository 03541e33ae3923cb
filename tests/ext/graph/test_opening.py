"""Which engine runs a file: where the reference engine cannot, every command goes through llama.cpp's graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import run
from models.small import write_model
from optional import needs_slices
from places import TESTS
from safetensors.numpy import load_file, save_file

from llamadiff import Trace, check, compare, diff
from llamadiff.engines.run_spec import How, Run
from llamadiff.engines.select import runnable
from llamadiff.report.json import to_object
from llamadiff.system.errors import UserError
from llamadiff.trace.metadata import KEY
from llamadiff.verbs.verbs import record

TOKENS = (1, 5, 9, 30, 17, 22, 64)
ZOO = TESTS / "tools" / "zoo" / "zoo.py"
MISSING = "tensor blk.0.ffn_norm.weight is missing from the file"


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """StableLM with a parallel residual: an architecture that the engine knows, in a form that it does not."""
    path, extra = tmp_path_factory.mktemp("m") / "p.gguf", {"attention.layer_norm_epsilon": 1e-5}
    return write_model(path, "stablelm", "Q8_0", layer_norm=True, extra=extra, drop=("ffn_norm",))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of an architecture, as ``make zoo`` makes it."""
    folder = tmp_path_factory.mktemp("zoo")

    def get(arch: str) -> Path:
        path = folder / f"{arch}.gguf"
        if not path.exists():
            subprocess.run([sys.executable, str(ZOO), arch, "--only-write", str(path)], check=True, capture_output=True)
        return path

    return get


def test_what_the_engine_refuses_goes_through_the_graph_which_is_said(parallel: Path) -> None:
    result = compare(parallel, TOKENS)
    assert (result.verdict, result.engine.name, result.engine.because) == ("match", "graph", MISSING)
    assert to_object(result)["engine"] == {"name": "graph", "because": MISSING}
    out = " ".join(run("compare", parallel, "--tokens", "1,2").stdout.split())
    assert (
        f"llama.cpp's graph, each node computed in NumPy: the reference engine does not run this file ({MISSING})"
        in out
    )
    with pytest.raises(UserError, match=f"{MISSING}; without --engine numpy, llama.cpp's own graph"):
        compare(parallel, TOKENS, how=How(engine="numpy"))
    for engine in (None, "graph"):
        with pytest.raises(UserError, match="--engine numpy:f64"):
            compare(parallel, TOKENS, how=How(precision="f64", engine=engine))


def test_taps_of_a_graph_to_write_first_are_marked(parallel: Path) -> None:
    marked = [line.split()[1] for line in run("taps", parallel).stdout.splitlines() if line.startswith("*  ")]
    assert {"embd", "attn_norm-i", "Qcur_rope-i", "l_out-i", "result_output"} <= set(marked)


def test_a_graphs_own_values_are_called_the_engines(parallel: Path) -> None:
    assert "rms llama.cpp  engine" in run("compare", parallel, "--tokens", "1,2").stdout


def test_which_engine_judged_is_said_of_every_candidate(small_model, tmp_path: Path) -> None:
    path = small_model()
    trace = record(path, Run(tokens=TOKENS), tmp_path / "t.safetensors")
    assert compare(path, candidate=trace).engine.name == diff(trace, trace, path).engine.name == "numpy"
    assert compare(path, candidate=trace, how=How(engine="graph")).engine.name == "graph"
    assert diff(trace, trace).engine is None
    shown = run("compare", path, "--candidate", tmp_path / "t.safetensors", "--full").stdout
    assert "judged   by the reference engine, in NumPy" in shown


@needs_slices("explain")
def test_traces_are_recorded_checked_and_diagnosed(parallel: Path, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.safetensors", tmp_path / "wrong.safetensors"
    done = run("capture", parallel, "--tokens", "1,5,9,30", "--n-predict", "2", "-o", right)
    assert (done.returncode, done.stdout) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["right.safetensors"]
    assert run("check", right, "--model", parallel).stdout.startswith("MATCH")
    trace = Trace.open(right)
    assert len(trace.info.tokens) == 6
    assert check(trace, parallel).engine.because == MISSING
    assert diff(right, right, parallel).verdict == "match"
    arrays = {name: np.array(trace[name]) for name in trace}
    arrays["ffn_out-1"] *= np.float32(1.5)
    arrays["l_out-1"] = arrays["l_out-1"] + arrays["ffn_out-1"] / 3
    save_file(arrays, wrong, {KEY: trace.info.to_json()})
    assert diff(right, wrong, parallel).first_divergence.tap == "ffn_out-1"
    done = run("diff", right, wrong, "--model", parallel)
    assert done.returncode == 1
    assert "ffn_out-1" in done.stdout


def test_taps_and_layers_are_what_was_asked_for(parallel: Path, tmp_path: Path) -> None:
    def asked(**words: object) -> set[str]:
        return {row.tap for row in compare(parallel, Run(tokens=TOKENS, **words)).rows}

    assert asked(patterns=("l_out-*", "result_*")) == {"l_out-0", "l_out-1", "result_norm", "result_output"}
    assert asked(patterns=("l_out-*",), layers=range(1, 2)) == {"l_out-1"}
    output = tmp_path / "t.safetensors"
    assert set(record(parallel, Run(tokens=TOKENS, patterns=("l_out-*",)), output)) == {"l_out-0", "l_out-1"}
    assert "ffn_out-0" not in record(parallel, Run(tokens=TOKENS, layers=range(1, 2)), output)
    for ask in (lambda **words: compare(parallel, Run(tokens=TOKENS, **words)),
                lambda **words: record(parallel, Run(tokens=TOKENS, **words), output)):  # fmt: skip
        with pytest.raises(UserError, match=r"no tap fits --only l_in-\*; llamadiff taps p.gguf lists them"):
            ask(patterns=("l_in-*",))
        with pytest.raises(UserError, match="--only 2-2: the model has layers 0 to 1"):
            ask(layers=range(2, 3))


def test_both_sides_are_saved(parallel: Path, tmp_path: Path) -> None:
    assert compare(parallel, TOKENS, save=tmp_path / "kept").verdict == "match"
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["baseline.safetensors", "engine.safetensors"]
    sides = [load_file(tmp_path / "kept" / f"{side}.safetensors") for side in ("baseline", "engine")]
    assert set(sides[0]) == set(sides[1]) == {tap.name for tap in runnable(parallel, 7).taps}
    assert Trace.open(tmp_path / "kept" / "engine.safetensors").info.producer["name"] == "llama.cpp's graph"


@pytest.mark.parametrize("arch", ["glm5-next", "minimax-01"])
def test_what_steps_compute_otherwise_is_no_error(arch: str, other: Callable[[str], Path], tmp_path: Path) -> None:
    """Rows of hidden keys that a sparse attention chooses; decays that count from the start of a pass."""
    for n_predict in (0, 2):
        trace = record(other(arch), Run(tokens=TOKENS, n_predict=n_predict), tmp_path / "t.safetensors")
        result = compare(other(arch), candidate=trace)
        assert result.verdict in ("match", "noise"), result.summary
        assert {"l_out-0", "l_out-1", "result_output"} <= {row.tap for row in result.rows}
        for tap in ("attn_out-1", "ffn_out-0"):
            arrays = {name: np.array(trace[name]) for name in trace}
            arrays[tap] *= np.float32(1.01)
            wrong = compare(other(arch), candidate=Trace(trace.info, arrays, trace.dtypes))
            assert wrong.first_divergence is not None
            assert wrong.first_divergence.tap == tap


def test_a_decoder_without_a_cache_takes_no_steps(other: Callable[[str], Path], tmp_path: Path) -> None:
    path, output = other("llama-embed"), tmp_path / "t.safetensors"
    assert compare(path, candidate=record(path, Run(tokens=TOKENS), output)).verdict == "match"
    with pytest.raises(UserError, match="keeps nothing between passes; ask for no decode steps"):
        record(path, Run(tokens=TOKENS, n_predict=1), output)


def test_two_traces_alone_are_lined_up_by_all_their_names(other: Callable[[str], Path], tmp_path: Path) -> None:
    """Also by names of llama.cpp's that are no words of the vocabulary."""
    trace = record(other("falcon"), Run(tokens=TOKENS), tmp_path / "t.safetensors")
    assert {row.tap for row in diff(trace, trace).rows} == set(trace)
    arrays = {name: np.array(trace[name]) for name in trace}
    arrays["norm_w-0"] += np.float32(0.1)
    apart = diff(trace, Trace(trace.info, arrays, trace.dtypes))
    assert [row.tap for row in apart.rows if row.verdict != "match"] == ["norm_w-0"]
