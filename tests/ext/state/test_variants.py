"""llama.cpp against itself: every way of running it comes to the same, or a line says what became of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from builds import HEADERS, other_library
from command import run
from optional import lacks
from waiting import HANG

from llamadiff import UserError
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.state import variants as module
from llamadiff.ext.state.report import as_json, print_variants
from llamadiff.ext.state.result import Variant
from llamadiff.ext.state.variants import Variants, run_variants, variants_of
from llamadiff.ext.state.variation import varied
from llamadiff.llamacpp.request import Request, Settings, Way
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.numerics import tolerances
from llamadiff.report.terminal.report import make_console
from llamadiff.system.errors import DiedError
from llamadiff.trace.taps import LOGITS
from llamadiff.verbs.verbs import compare

TOKENS = (1, 17, 5, 40, 2, 9, 33)
WAYS = (
    "batch=1", "batch=3", "ubatch=2", "used=on", "sequences=3", "interleaved=3", "freed=on", "forked=on", "restored=on",
    "chunked=2", "drafted=2", "shifted=on", "reused=off", "callback=off", "threads=2",
)  # fmt: skip
SETTINGS = ("flash_attn=on", "kv=f16", "type_k=bf16", "kv=q8_0,flash_attn=on", "repack=on")
FEW = ("batch=3", "restored=on", "callback=off", "kv=f16", "kv=q8_0,flash_attn=on")
faulty_build = pytest.mark.skipif(
    lacks("cc") or not HEADERS.is_dir(), reason="no cc here (apt install gcc), or no headers of llama.cpp"
)


def found(model: Path, *names: str, patience: float = HANG, how: How = How(), n_predict: int = 0) -> Variants:  # noqa: B008
    return run_variants(model, Run(tokens=TOKENS, n_predict=n_predict), how, names, patience)


def printed(result: Variants, tmp_path: Path) -> str:
    with (tmp_path / "table").open("w", encoding="utf-8") as file:
        print_variants(result, make_console(file, 80), ("m 1.gguf", "--tokens", "1,17"))
    return (tmp_path / "table").read_text("utf-8")


@pytest.mark.parametrize("names", [FEW, (*WAYS, *SETTINGS)], ids=["few", "all"])
def test_every_way_and_setting_is_right(names, small_model, tmp_path):
    result = found(small_model(), *names)
    assert [row.name for row in result.rows] == ["default", *names]
    assert [row.failed for row in result.rows] == [""] * len(result.rows)
    assert [row.wrong for row in result.rows] == [()] * len(result.rows)
    kl = {row.name: row.logits.kl for row in result.rows}
    assert kl["default"] == kl["callback=off"] == 0
    assert max(kl[name] for name in {*WAYS} & {*names}) < 1e-6 < kl["kv=q8_0,flash_attn=on"] < 1e-2
    leaves = {row.name: row.leaves for row in result.rows}
    assert leaves["default"] is leaves["callback=off"] is None
    assert leaves["kv=f16"] == "kq-0"
    assert {row.name: row.judged for row in result.rows}["callback=off"] == 1
    lines = printed(result, tmp_path).splitlines()
    assert max(len(line) for line in lines if not line.startswith("next")) <= 80  # a command is not broken
    assert lines[3].split()[:3] == ["variant", "wrong", "differs"]
    assert [line.split()[0] for line in lines[4 : 4 + len(result.rows)]] == [row.name for row in result.rows]


def test_variants_have_the_reports_of_several_runs(small_model, tmp_path):
    files = {form: tmp_path / f"report.{form}" for form in ("html", "markdown", "junit")}
    options = [word for form, file in files.items() for word in (f"--{form}", file)]
    only = ("--only", "kv=f16", "--only", "device=nowhere")
    done = run("variants", small_model(), "--tokens", "1,5,9", *only, *options)
    assert done.returncode == 2, done.stderr  # what was asked for was refused
    assert "same" in next(line for line in done.stdout.splitlines() if line.startswith("kv=f16")).split()
    for form, file in files.items():
        assert all(name in file.read_text("utf-8") for name in ("default", "kv=f16", "device=nowhere")), form
    assert "data-tap" in files["html"].read_text("utf-8")


@pytest.mark.parametrize("kind", ["mamba2", "moe", "gemma2"])
def test_ways_of_other_architectures_are_right(kind, small_model):
    names = (
        "sequences=3",
        "ubatch=2",
        "used=on",
        "interleaved=4",
        "freed=on",
        "forked=on",
        "restored=on",
        "shifted=on",
    )
    result = found(small_model(kind), *names, n_predict=2)
    assert len(result.tokens) == len(TOKENS) + 2  # what was generated is run too
    assert [(row.failed, row.wrong) for row in result.rows] == [("", ())] * 9
    assert max(row.logits.kl for row in result.rows) < 1e-6


def test_what_is_tried_fits_the_prompt():
    tried = [*variants_of(Request("m", tokens=TOKENS))]
    assert {"batch=1", "batch=4", "ubatch=4", "kv=q4_0,flash_attn=on", "repack=on", "sequences=3"} <= {*tried}
    assert "batch=7" not in tried
    assert {"batch=1", "ubatch=1", "chunked=1"} <= {*variants_of(Request("m", tokens=(1, 2)))}
    assert not [name for name in variants_of(Request("m", tokens=(1,))) if "batch" in name]


def test_a_change_is_of_the_settings_or_of_the_way():
    request = varied(Request("m", tokens=TOKENS, n_predict=3), "llama.cpp:type_k=q8_0, batch=3,used=on,dir=/x")
    assert (request.settings.type_k, request.settings.type_v, request.settings.llama_cpp) == ("Q8_0", "F32", "/x")
    assert (request.batches, request.n_prefill, request.n_predict) == ((3, 3, 1), 3, 0)
    assert [step.call for step in request.way.steps] == ["new", "decode", "clear", "decode", "decode", "decode"]
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


@pytest.mark.parametrize(
    ("spec", "computed"),
    [("kv=f16", ()), ("batch=3", (3, 3, 1)), ("ubatch=3", (3, 3, 1)), ("ubatch=7", ()),
     ("batch=4,ubatch=3", (3, 1, 3))],
)  # fmt: skip
def test_a_trace_says_how_many_tokens_were_computed_at_a_time(spec, computed):
    assert varied(Request("m", tokens=TOKENS), f"llama.cpp:{spec}").computed_batches == computed


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("speed=9", "llama.cpp:speed=9: expected KEY=VALUE, with a key of kv, type_k,"),
        ("kv", "llama.cpp:kv: expected KEY=VALUE"),
        ("kv=q9", "llama.cpp:kv=q9: expected one of f32, f16, bf16, q8_0"),
        ("flash_attn=maybe", "llama.cpp:flash_attn=maybe: expected on or off"),
        ("batch=0", "llama.cpp:batch=0: expected a whole number from 1 to "),
        ("threads=²", ": expected a whole number from 0 to 512"),
        ("sequences=3,ubatch=2", "sequences=3,ubatch=2: sequences has batches of its own; leave out batch and ubatch"),
        ("forked=on,freed=on", "forked=on,freed=on: freed and forked are two ways; give one"),
        ("interleaved=1", "llama.cpp:interleaved=1: expected a whole number from 2 to 8"),
        ("kv=q8_0,shifted=on", "kv=q8_0,shifted=on: rows of Q8_0 that move are rounded once more"),
    ],
)
def test_what_is_no_setting_is_said_before_anything_runs(spec, said, tmp_path):
    done = run("compare", tmp_path / "none.gguf", "--tokens", "1", "--candidate", f"llama.cpp:{spec}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


def test_a_candidate_opens_one_in_full(small_model):
    result = compare(small_model(), Run(tokens=TOKENS), "llama.cpp:kv=q8_0,flash_attn=on")
    assert result.verdict == "match"
    assert result.candidate["settings"]["type_k"] == "Q8_0"
    assert len({row.layer for row in result.rows}) > 2


# -- what goes wrong is a line, and the others go on -------------------------------------------------------------------


def test_a_wrong_op_is_counted_and_named(small_model, monkeypatch, tmp_path):
    real = module.capture_run

    def spoiled(engine, request, *more):
        opened, trace = real(engine, request, *more)
        if request.settings.flash_attn:
            trace = replace_tap(trace, "ffn_out-1", 1.5 * np.asarray(trace["ffn_out-1"]))
        return opened, trace

    monkeypatch.setattr(module, "capture_run", spoiled)
    result = found(small_model(), "flash_attn=on", "threads=2")
    assert [row.verdict == "wrong" for row in result.rows] == [False, True, False]
    assert result.rows[1].wrong == ("ffn_out-1", "l_out-1")
    text = printed(result, tmp_path)
    assert "llama.cpp's matrix product by ffn_down.weight, layer 1: it is 1.5 times what" in " ".join(text.split())
    line = "llamadiff compare 'm 1.gguf' --tokens 1,17 --candidate llama.cpp:flash_attn=on\n"
    assert f"WRONG  1 of 3 variants are wrong\nnext   one in full: {line}" in text


def replace_tap(trace, name, values):
    arrays = {tap: values if tap == name else np.asarray(trace[tap]) for tap in trace}
    return replace_arrays(trace, arrays)


def replace_arrays(trace, arrays):
    from llamadiff.trace.reader import Trace

    kinds = {name: "F32" if array.dtype == np.float32 else "I32" for name, array in arrays.items()}
    return Trace(replace(trace.info), arrays, kinds)


def test_what_died_and_what_is_refused_are_counted_as_that(small_model, monkeypatch, tmp_path):
    """Neither wrong nor right; what a run was given wrongly is in the column of what is wrong."""
    real = module.capture_run

    def ends(engine, request, *more):
        if request.settings.repack:
            raise DiedError(f"{request.model}: llama.cpp died of SIGILL: it said nothing")
        if request.settings.type_k == "Q4_0":
            raise UserError(f"{request.model}: llama.cpp cannot make a context")
        opened, trace = real(engine, request, *more)
        given = {"inputs": ["token 2 does not see position 1"]} if request.settings.flash_attn else {}
        return opened, trace.under(replace(trace.info, producer={**trace.info.producer, **given}))

    monkeypatch.setattr(module, "capture_run", ends)
    result = found(small_model(), "repack=on", "kv=q4_0", "threads=2", "flash_attn=on")
    assert [row.verdict for row in result.rows] == ["match", "unchecked", "unchecked", "match", "wrong"]
    assert (result.verdict, result.rows[4].wrong) == ("wrong", ("inputs",))
    text = printed(result, tmp_path)
    assert next(line for line in text.splitlines() if line.startswith("flash_attn=on")).split()[1] == "1"
    assert "WRONG  1 of 3 variants are wrong; 1 died: repack=on; 1 refused: kv=q4_0\n" in text
    assert "token 2 does not see position 1" in text
    right = replace(result, rows=result.rows[:4])
    refused = replace(result, rows=(*result.rows[:1], result.rows[2]))
    assert (right.verdict, refused.verdict, replace(refused, asked=False).verdict) == (
        "unchecked",
        "unchecked",
        "match",
    )
    assert "UNCHECKED  no variant is wrong; 1 died: repack=on; 1 refused: kv=q4_0" in printed(right, tmp_path)


@faulty_build
@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param(
            "#include <stdlib.h>\n__attribute__((constructor)) static void die(void) { abort(); }",
            "the process that opened it died of SIGABRT",
        ),
        pytest.param(
            "#include <unistd.h>\n__attribute__((constructor)) static void wait(void) { for (;;) pause(); }",
            "hangs: ", marks=pytest.mark.slow,
        ),
        pytest.param("int nothing;", "libllama.so: has no llama_"),
    ],
)  # fmt: skip
def test_a_variant_that_dies_or_hangs_is_a_line(code, said, build, small_model, tmp_path):
    other_library(build, code)
    result = found(small_model(), f"dir={build}", "threads=2", patience=30.0)
    assert [bool(row.failed) for row in result.rows] == [False, True, False]
    text = printed(result, tmp_path)
    line = next(line for line in text.splitlines() if line.startswith("dir="))
    assert said in line or said in result.rows[1].failed
    died = "has no" not in said
    assert (result.rows[1].verdict, result.rows[1].died) == ("unchecked", died)
    assert result.verdict == "unchecked"  # what was asked for was not run
    assert max(len(line) for line in text.splitlines() if not line.startswith("next")) <= 80


@pytest.mark.parametrize("wrong", [False, True])
def test_on_a_device_every_node_is_judged(wrong, small_model, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "on_device", lambda request: request.settings.threads == 1)
    rules = (tolerances.Rule(0.0, op="CONT" if not wrong else "RMS_NORM"), *tolerances.RULES)
    result = found(small_model(), "threads=1", "threads=2", how=How(rules=rules))
    device, plain = result.rows[1:]
    assert (device.by_nodes, plain.by_nodes) == (True, False)
    assert device.judged > 1.5 * plain.judged
    assert device.ratio is None
    assert (any(name.startswith("norm-") for name in device.wrong), result.verdict == "wrong") == (wrong, wrong)
    line = "llamadiff backend 'm 1.gguf' --tokens 1,17 --llama-cpp threads=1\n"
    assert f"next   one in full: {line}" in printed(result, tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"device": "Vulkan0"}, True), ({"gpu_layers": 1}, True), ({"device": "cpu"}, False), ({}, False)],
)
def test_where_layers_are_decides(settings, said):
    request = Request("m", tokens=TOKENS, settings=Settings(**settings))
    assert module.on_device(request) == said
    assert not module.on_device(replace(request, way=Way(ubatch=3)))


def test_tokens_that_were_generated_go_through_variants_as_through_the_default(small_model):
    leaves = {row.name: row.leaves for row in found(small_model(), "kv=f16", "callback=off", n_predict=2).rows}
    assert leaves == {"default": None, "kv=f16": "kq-0", "callback=off": None}


def test_names_of_variants_that_begin_alike_are_told_apart(small_model, tmp_path):
    names = ("kv=q8_0,flash_attn=on,interleaved=3", "kv=q8_0,flash_attn=on,restored=on")
    default = found(small_model(), "callback=off")
    rows = tuple(replace(default.rows[0], name=name) for name in names)
    lines = printed(replace(default, rows=rows), tmp_path).splitlines()
    assert [line.split()[0] for line in lines[4:6]] == ["kv=q8_0,...terleaved=3", "kv=q8_0,...restored=on"]


def test_what_llama_cpp_refuses_is_a_line(small_model, tmp_path):
    result = found(small_model(), "kv=q4_0", "threads=2")
    assert "cannot make a context with these settings" in result.rows[1].failed
    line = next(line for line in printed(result, tmp_path).splitlines() if line.startswith("kv=q4_0"))
    assert line.split(maxsplit=1)[1].startswith("refused: quantized V cache requires flash_attn")
    assert (result.rows[1].verdict, result.verdict) == ("unchecked", "unchecked")


def test_a_graph_is_recorded_in_one_way_alone(small_model):
    result = found(small_model(), "ubatch=2", "kv=f16", how=How(engine="graph"))
    assert "judged through llama.cpp's graph" in result.rows[1].failed
    assert (result.rows[2].failed, result.rows[2].verdict) == ("", "match")


def test_the_command_prints_writes_and_ends(small_model, tmp_path):
    words = ["variants", small_model(), "--tokens", "1,2,3", "--only", "batch=1", "--only", "kv=f16"]
    done = run(*words, "-o", f"json:{tmp_path / 'v.json'}")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[4:7]] == ["default", "batch=1", "kv=f16"]
    data = json.loads((tmp_path / "v.json").read_text("utf-8"))
    assert data["schema"] == "llamadiff.variants/1"
    assert [row["variant"] for row in data["variants"]] == ["default", "batch=1", "kv=f16"]
    assert data["variants"][1]["top1_agree"] is True
    done = run(*words, "-o", "json:-")
    assert json.loads(done.stdout)["verdict"] == "match"


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(UserError):
        found(tmp_path / "none.gguf", "kv=f16")


def test_numbers_that_are_none_are_null(small_model):
    result = found(small_model(), "kv=f16")
    odd = replace(result, rows=(replace(result.rows[0], ratio=float("nan")), result.rows[1]))
    assert json.loads(as_json(odd))["variants"][0]["ratio_to_noise"] is None


@pytest.mark.parametrize(("off", "verdict"), [(0.0, "match"), (1e-5, "match"), (5e-5, "noise"), (1e-3, "wrong")])
def test_a_device_where_nobody_looks_is_judged_by_its_logits(off, verdict):
    """Against those of nodes that were computed alone, of which each may be off a little: 1e-9 in all."""
    right = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    nodes = SimpleNamespace(rows=[SimpleNamespace(local=SimpleNamespace(limit=5e-10)) for _ in range(2)])
    found = Variant("callback=off", "wrong", 1.0, ("attn_norm-0",), 3, "by the arithmetic of CPUs", ratio=4e4)
    judged = module._by_logits(found, {LOGITS: right}, {LOGITS: right * np.float32(1 + off)}, nodes)
    assert (judged.verdict, judged.judged, judged.ratio) == (verdict, 1, None)
    assert judged.wrong == ((LOGITS,) if verdict == "wrong" else ())
    assert ("off by 1.0e-06" in judged.headline) == (verdict == "wrong")
    assert module._by_logits(found, {LOGITS: right}, {}, nodes).verdict == "unchecked"


@pytest.mark.parametrize("name", [*WAYS, "schedule=5", "kv=f16"])
def test_every_way_takes_a_text(name):
    """A text's tokens are known when llama.cpp has run it, and what is asked for is checked before."""
    (default, variant) = run_variants(shipped_model(), Run("Once upon"), names=(name,)).rows
    assert (default.verdict, variant.failed) == ("match", "")
    assert variant.verdict in ("match", "noise")
