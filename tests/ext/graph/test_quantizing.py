"""CPUs differ in how they round to eight bits: this one's way is measured, and each is judged by its own."""

from __future__ import annotations

import base64
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp
from llamaref import Engine, ops
from sent import own_rounding

from llamadiff import Trace
from llamadiff.candidates.reference import record as recorded
from llamadiff.engines.run_spec import Run
from llamadiff.ext.graph.backend import judge_graph
from llamadiff.ext.graph.check import replay
from llamadiff.ext.graph.node import Node
from llamadiff.ext.graph.op import Op, Operand
from llamadiff.ext.graph.ops import unary
from llamadiff.ext.graph.readers import NodeReader
from llamadiff.ext.graph.repro import load, save
from llamadiff.judge.lanes import policies_for
from llamadiff.judge.settings import cache_settings, stored_types
from llamadiff.judge.verdict import of_node
from llamadiff.llamacpp import probes
from llamadiff.llamacpp.installed import Installed
from llamadiff.llamacpp.interface import FUNCTIONS
from llamadiff.llamacpp.layout import declare
from llamadiff.llamacpp.library import behind
from llamadiff.llamacpp.probes import rounding_of
from llamadiff.llamacpp.quantizing import probe, way_of
from llamadiff.llamacpp.readers import TapReader
from llamadiff.llamacpp.request import Settings
from llamadiff.numerics import arithmetic, cpu, eight_bits, tolerances
from llamadiff.numerics.cpu import PARTNER
from llamadiff.numerics.policies import GELU, NATIVE, operands, rounding_type
from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.system.libraries import Loaded
from llamadiff.trace.metadata import Info
from llamadiff.verbs.verbs import diff, record

OTHERS = (cpu.NEON, cpu.PLAIN)
X = probe("Q8_0").reshape(-1, 256)[:4]


def one_by_one(x: np.ndarray, way: str) -> np.ndarray:
    """Q8_0 as ggml's sources have it, a number at a time, written anew."""
    out = []
    for block in x.astype(np.float32).reshape(-1, 32):
        peak = np.abs(block).max()
        scale = peak / np.float32(127)
        inverse = np.float32(127) / peak if way == "" else np.float32(1) / scale
        for value in block:
            step = np.float32(value * inverse)
            below = np.floor(np.float64(step))
            rest = np.float64(step) - below
            up = rest > 0.5 or (rest == 0.5 and (step > 0 if way == cpu.PLAIN else below % 2))
            out.append((below + up) * np.float32(np.float16(scale)))
    return np.array(out, np.float32).reshape(x.shape)


@pytest.mark.parametrize("way", [cpu.AVX, *OTHERS])
def test_a_way_is_what_the_sources_say_and_known_from_what_it_gives(way):
    x = np.concatenate([X, -X])
    assert np.array_equal(eight_bits.round_q8_0(x, way), one_by_one(x, way))
    q8_k = blocks("Q8_K", q8_k_one_by_one(probe("Q8_K"), fused=False))
    assert way_of({"Q8_0": blocks("Q8_0", one_by_one(probe("Q8_0"), way)), "Q8_K": q8_k}) == way


def blocks(name: str, values: np.ndarray, order: str = "<") -> str:
    """As ggml keeps what values were rounded to: a block's first value is 127 times its scale, up to its sign."""
    scales = (np.abs(values[:, :1]) if name == "Q8_0" else -values[:, :1]).astype(np.float64) / 127
    quants = np.rint(values / scales).astype(np.int8)
    kept = scales.astype(f"{order}f2" if name == "Q8_0" else f"{order}f4").view(np.uint8)
    sums = np.zeros((len(values), 32 if name == "Q8_K" else 0), np.uint8)
    return base64.b64encode(np.concatenate([kept, quants.view(np.uint8), sums], axis=1).tobytes()).decode()


def q8_k_one_by_one(x: np.ndarray, fused: bool) -> np.ndarray:
    """Q8_K as ggml's sources have it, a number at a time: what is rounded is the float32 product, or the exact one."""
    out = []
    for block in x.astype(np.float32).reshape(-1, 256):
        peak = max(block, key=abs)
        inverse = np.float32(-127) / peak
        for value in block:
            product = Fraction(float(value)) * Fraction(float(inverse))
            step = round(product if fused else Fraction(float(value * inverse)))  # halves to even
            out.append(np.float32(min(127, step)) * (np.float32(1) / inverse))
    return np.array(out, np.float32).reshape(x.shape)


@pytest.mark.parametrize("fused", [False, True])
def test_a_product_that_is_rounded_once_is_told_from_one_that_is_rounded_twice(fused):
    x = np.concatenate([probe("Q8_K")[:16], -probe("Q8_K")[:16]])
    expected = q8_k_one_by_one(x, fused)
    assert np.array_equal(arithmetic.round_q8_k(x, fused), expected)
    assert not np.array_equal(arithmetic.round_q8_k(x, not fused), expected)
    for order in "<>":
        said = {"Q8_K": blocks("Q8_K", q8_k_one_by_one(probe("Q8_K"), fused), order)}
        assert way_of(said, order) == cpu.UNKNOWN  # of Q8_0 it says nothing
        said["Q8_0"] = blocks("Q8_0", one_by_one(probe("Q8_0"), cpu.AVX), order)
        assert way_of(said, order) == (cpu.FUSED if fused else "")
    way = cpu.q8_way(cpu.NEON, cpu.FUSED if fused else "")
    assert np.array_equal(arithmetic.round_to(x, arithmetic.as_cpu("Q8_K", way)), expected)
    assert arithmetic.as_cpu("Q8_0", way) == "Q8_0 NEON"


def test_no_answer_is_no_way():
    assert way_of({"Q8_0": blocks("Q8_0", np.ones((8, 32), np.float32))}) == cpu.UNKNOWN
    assert way_of({}) == cpu.UNKNOWN


def test_this_machines_ggml_has_one_of_them(small_model, tmp_path):
    """And its captures say which."""
    assert own_rounding().way in cpu.Q8_WAYS
    trace = record(small_model("llama", "Q8_0"), Run(tokens=(1, 5)), tmp_path / "t.safetensors")
    assert trace.info.producer["settings"]["q8"] == own_rounding().way


def test_without_ggml_no_way_is_assumed(monkeypatch):
    def missing(stem: str) -> None:
        raise AttributeError(stem)

    monkeypatch.setattr(probes, "load", missing)
    assert way_of(probes.rounding_of()["rounded"]) == cpu.UNKNOWN


NO_ANSWER = {  # what a ggml may not say of how it rounds, or say that nobody knows
    "nothing": {"rounded": {}, "partners": {}}, "no way": {"rounded": {}}, "no partner": {"partners": {}},
    "another partner": {"partners": {**PARTNER, "Q8_0": "Q8_2_X4"}},
}  # fmt: skip


def silent(function, lacking="nothing"):
    """A run whose ggml cannot be asked how it rounds; what it tells comes through ``function`` alone."""

    def began(self, answer, data):
        function(self, {"began": {**answer["began"], **NO_ANSWER[lacking]}}, data)

    return began


@pytest.mark.parametrize("lacking", NO_ANSWER)
@pytest.mark.parametrize(("off", "verdict"), [(0.0, "match"), (1e-3, "unchecked")])
def test_where_no_way_is_known_no_product_is_wrong(off, verdict, lacking, small_model, tmp_path, monkeypatch):
    """Neither a node nor a tap; what fits a way that is known is right."""
    right = Node.values

    def shaken(self):
        return right(self) * np.float32(1 + off) if self.name == "result_output" else right(self)

    for reader in (TapReader, NodeReader):
        monkeypatch.setattr(reader, "_began", silent(reader._began, lacking))
    monkeypatch.setattr(Node, "values", shaken)
    run = Run(tokens=(1, 5, 9))
    found = judge_graph(small_model("llama", "Q8_0"), run)
    assert found.verdict == verdict
    assert [row.tap for row in found.rows if row.verdict != "match"] == ([] if not off else ["result_output"])
    assert ("how this ggml rounds to eight bits is not known" in found.headline + "".join(found.proof)) == bool(off)
    monkeypatch.undo()
    monkeypatch.setattr(TapReader, "_began", silent(TapReader._began, lacking))
    trace = record(small_model("llama", "Q8_0"), run, tmp_path / "t.safetensors")
    assert trace.info.producer["settings"]["q8"] == cpu.UNKNOWN
    values = {name: np.array(trace[name]) for name in trace}
    values["result_output"] *= np.float32(1 + off)
    there = Trace(trace.info, values, trace.dtypes)
    found = diff(there, there, small_model("llama", "Q8_0"))
    assert found.verdict == verdict
    assert ("rounds to eight bits is not known" in found.headline) == bool(off)


@pytest.mark.parametrize("exported", [True, False])
def test_the_library_that_computes_is_asked(exported):
    """A backend that ggml loaded by itself exports how it rounds, and libllama does not (as in all binary releases)."""
    llama = Path(llama_cpp._lib._name)
    library = Installed(Loaded(llama, behind(llama)), "llama-cpp-python", llama_cpp)
    library.lib.llama_backend_init()
    if not exported:
        library.lib = Loaded(library.lib._name)  # nothing behind it
        declare(library.lib, FUNCTIONS)
    assert way_of(rounding_of(library.kernels())["rounded"]) == own_rounding().way
    assert exported or "ggml-cpu" in str(library.kernels()._name)


def product(way: str, kind: str = "q8_0") -> Op:
    weight = eight_bits.round_q8_0(np.random.default_rng(3).standard_normal((1, 1, 16, 256)).astype(np.float32))
    return Op("MUL_MAT", (1, 1, len(X), 16), "f32", b"", (Operand(weight, kind), Operand(X[None, None])), q8=way)


def verdict(n: Op, found: np.ndarray) -> str:
    rule = tolerances.rule_for(tolerances.RULES, n.name, n.name, "*")
    best = replay(n, found, enough=rule.match)
    assert best is not None
    return of_node(best.nmse, rule.match).verdict


@pytest.mark.parametrize("way", OTHERS)
def test_a_product_is_judged_as_its_cpu_rounds(way, tmp_path):
    n = product(way)
    found = one_by_one(X, way).astype(np.float64) @ n.x()[0, 0].T.astype(np.float64)
    assert verdict(n, found[None, None].astype(np.float32)) == "match"
    assert verdict(replace(n, q8=cpu.AVX), found[None, None].astype(np.float32)) == "wrong"
    save(tmp_path / "a.safetensors", n, found, found, "node")
    assert load(tmp_path / "a.safetensors")[0].q8 == way


def test_rows_of_a_cache_are_kept_as_the_cpu_rounds():
    rows = Op("CPY", (1, 1, *X.shape), "q8_0", b"", (Operand(X[None, None]),), q8=cpu.PLAIN)
    found = one_by_one(X, cpu.PLAIN)[None, None]
    assert verdict(rows, found) == "match"
    assert verdict(replace(rows, q8=cpu.AVX), found) == "wrong"


@pytest.mark.parametrize("way", OTHERS)
def test_a_trace_is_judged_as_its_own_cpu_rounds(way):
    info = Info((1,), (0,), 1, None, {"name": "llama.cpp", "settings": {**Settings().to_json(), "q8": way}}, {})
    stored = cache_settings(Trace(info, {}, {}))
    assert rounding_type(NATIVE, "Q4_0", stored) == f"Q8_0 {way}"
    assert policies_for(["Q4_0"], stored, ["f32", NATIVE]) == ["f32", NATIVE]
    carrier = Carrier([(NATIVE, stored), (NATIVE, {})])
    mine, usual = carrier.operands("Q4_0", X[None])[0]
    assert np.array_equal(mine, one_by_one(X, way))
    assert np.array_equal(usual, one_by_one(X, cpu.AVX))
    with_sums, sums = carrier.operands("Q5_1", X[None])
    assert np.array_equal(with_sums[0], mine)
    assert np.array_equal(sums[0], eight_bits.q8_1_sums(X, way))
    assert not np.array_equal(sums[0], sums[1])
    rows = Carrier([(NATIVE, {**stored, "cache_k": "Q8_0"})]).store("cache_k", X[None])
    assert np.array_equal(rows[0], mine)


@pytest.mark.parametrize("way", OTHERS)
def test_a_trace_of_another_cpu_is_admitted_and_judged(way, small_model):
    """Rounding parts so seldom that these few values do not show it: nothing else may change."""
    path = small_model("llama", "Q8_0")
    trace = recorded(Engine(path), (1, 5, 9), "engine")
    there = Trace(replace(trace.info, producer={"name": "x", "settings": {"q8": way}}), trace, trace.dtypes)
    assert set(stored_types(there)) == {"cache_k", "cache_v"}
    assert diff(trace, there, path).verdict == "match"


@pytest.mark.parametrize("said", ["of its own", 7, None])
def test_a_way_that_nobody_knows_is_unknown(said):
    info = Info((1,), (0,), 1, None, {"name": "x", "settings": {"q8": said}}, {})
    assert cache_settings(Trace(info, {}, {}))["q8"] == cpu.UNKNOWN


@pytest.mark.parametrize("settings", [{"q8": ""}, {}])
def test_an_engine_that_says_nothing_of_it_is_tried_as_most_are(settings):
    info = Info((1,), (0,), 1, None, {"name": "x", "settings": settings}, {})
    assert "q8" not in cache_settings(Trace(info, {}, {}))


@pytest.mark.parametrize(("kernel", "features"), [
    (unary.UNFUSED, "CPU : AVX = 1 | LLAMAFILE = 1 |"), (unary.UNFUSED, "FMA = 0"), (unary.FUSED, "CPU : FMA = 1 |"),
    (unary.FUSED, "CPU : NEON = 1 | ARM_FMA = 1 |"),
])  # fmt: skip
def test_the_table_of_gelu_as_ggml_fills_it(kernel, features):
    """All that it holds, on a CPU that fuses a product and a sum, and on one that does not: one number is another."""
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    x = x[np.abs(x) < arithmetic.GELU_END]
    stored = {GELU: cpu.FUSED} if cpu.fuses(features) else {}
    (found,) = operands(NATIVE, GELU, stored, ops.gelu(x))
    assert np.array_equal(found, arithmetic.round_in_table(unary._gelu_single(x, kernel)))
    assert found[x == np.float32(-1.9990234375)] == np.float32([-0.045471191, -0.045501709][kernel == unary.FUSED])
