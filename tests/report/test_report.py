"""The JSON report against its schema, and the command line's contract: exit codes, files, pure JSON."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import jsonschema
import numpy as np
import pytest
from command import in_process_of_its_own, run
from llamaref import Engine
from optional import needs_slices
from places import REPORT_SCHEMA
from traces import TOKENS, save

from llamadiff import compare
from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import Run
from llamadiff.report.json import to_full_json, to_json, to_object
from llamadiff.trace.metadata import Info
from llamadiff.verbs.verbs import diff
from report.made_up import REPORTS


@pytest.mark.parametrize("name", sorted(REPORTS.keys() - {"hostile", "wrong tokens"}))  # of no model, of no tap
def test_reports_fit_the_schema(name):
    jsonschema.validate(json.loads(to_full_json(REPORTS[name])), REPORT_SCHEMA)


def test_a_real_report_fits_the_schema(small_model, faulty):
    for asked, candidate in ((Run(tokens=TOKENS, n_predict=2), None), (TOKENS, faulty)):
        result = compare(small_model(), asked, candidate=candidate)
        jsonschema.validate(json.loads(to_json(result)), REPORT_SCHEMA)


def test_a_report_without_a_model_fits_the_schema(small_model, tmp_path):
    trace = save(record(Engine(small_model()), TOKENS, "mine"), tmp_path / "t.safetensors")
    jsonschema.validate(to_object(diff(trace, trace)), REPORT_SCHEMA)


def test_numbers_that_are_not_finite_are_null(small_model, tmp_path):
    right = record(Engine(small_model()), TOKENS, "mine")
    right.stored("ffn_up-0")[1, 2] = np.nan
    report = to_object(compare(small_model(), TOKENS, candidate=right))
    jsonschema.validate(report, REPORT_SCHEMA)
    row = next(row for row in report["taps"] if row["tap"] == "ffn_up-0")
    assert row["local"]["nmse"] is None
    assert row["candidate"]["nan"] == 1
    assert report["first_divergence"]["index"] == [1, 2]
    assert report["first_divergence"]["candidate"] is None


def test_match_exits_0_and_json_is_pure(small_model):
    done = in_process_of_its_own("compare", small_model(), "--tokens", "1,17,5,80", "--n-predict", "2", "-o", "json:-")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["verdict"] == "match"
    assert [token["id"] for token in report["tokens"]][:4] == [1, 17, 5, 80]
    assert len(report["tokens"]) == 6


@needs_slices("explain")
def test_wrong_exits_1_and_names_the_tap(small_model, faulty, tmp_path):
    files = ("-o", f"json:{tmp_path / 'r.json'}", "-o", f"csv:{tmp_path / 'r.csv'}", "-o", f"{tmp_path / 'kept'}/")
    done = run("compare", small_model(), "--tokens", "1 17 5 80", "--candidate", faulty, *files)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("WRONG  RoPE, layers 0, 1: rotates (i, i+32)")
    assert json.loads((tmp_path / "r.json").read_text("utf-8"))["wrong"][0] == "Qcur_rope-0"
    with (tmp_path / "r.csv").open(encoding="utf-8") as file:
        assert next(row["tap"] for row in csv.DictReader(file) if row["verdict"] == "wrong") == "Qcur_rope-0"
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"baseline.safetensors", "engine.safetensors"}


@pytest.mark.parametrize(("fail_on", "code"), [("wrong", 1), ("noise", 1), ("never", 0)])
def test_fail_on(fail_on, code, small_model, faulty):
    arguments = ("--tokens", "1,17,5,80", "--candidate", faulty, "--fail-on", fail_on, "-o", "json:-")
    assert run("compare", small_model(), *arguments).returncode == code


def test_capture_then_diff_and_check(small_model, faulty, tmp_path):
    trace = tmp_path / "b.safetensors"
    assert run("capture", small_model(), "--tokens", "1,17,5,80", "-o", trace).returncode == 0
    assert run("check", trace, "--model", small_model()).returncode == 0
    assert run("diff", trace, faulty, "--model", small_model()).returncode == 1
    assert run("diff", trace, faulty).returncode == 2


def test_taps_lists_names_and_shapes(small_model):
    done = run("taps", small_model("moe"), "--n-tokens", "5")
    assert done.returncode == 0
    assert any(line.split()[:3] == ["*", "Qcur_rope-i", "[5,"] for line in done.stdout.splitlines())
    assert "ffn_moe_topk-i" in done.stdout


@pytest.mark.parametrize(
    ("name", "kinds"),
    {
        "gemma2": {"layers 0, 2": "attention to the last 3 keys", "layer 1": "attention to all keys"},
        "deepseek2": {"layer 0": "ffn_gate, ffn_up, ffn_swiglu", "layer 1": "ffn_moe_logits, ffn_moe_probs,"},
        "qwen3": {},
    }.items(),
)
def test_taps_lists_each_kind_of_layer_with_its_layers(name, kinds, small_model):
    lines = [" ".join(line.split()) for line in run("taps", small_model(name), "--n-tokens", "5").stdout.splitlines()]
    titles = [line for line in lines if line.startswith("layer")]
    assert [
        title.startswith(f"{which} {what}") for title, (which, what) in zip(titles, kinds.items(), strict=True)
    ] == [True] * len(kinds)
    assert sum(line.startswith("* l_out-i") for line in lines) == (1 if name != "deepseek2" else 2)
    assert sum(line.startswith("* embd") for line in lines) == 1


def test_doctor_says_what_is_there():
    done = run("doctor")
    for words in (
        "llamadiff   ",
        "C compiler",
        "extra sweep",
        "llama-cpp-python",
        "built with",
        "tensor layout",
        "quantized decode, repacked",
    ):
        assert words in done.stdout
    assert done.stderr == ""


def test_help_imports_nothing_heavy():
    heavy = ("numpy", "rich.console", "pandas", "gguf", "jinja2")
    code = f"import sys, llamadiff.cli; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8")
    assert run.stdout == "[]\n"


@needs_slices("explain")
def test_demo_shows_both(tmp_path):
    done = in_process_of_its_own("demo", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("MATCH ")
    assert "\nWRONG  RoPE, layers 0-2: rotates (i, i+32)" in done.stdout


def test_an_info_survives_json():
    info = Info((1, 2), (0, 1), 1, 'a "prompt"\n', {"name": "x"}, {})
    assert json.loads(info.to_json())["prompt"] == 'a "prompt"\n'
