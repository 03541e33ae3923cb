"""Lanes that a layer shows to be needless are left out after it; what is found must not depend on that."""

from __future__ import annotations

import numpy as np
import pytest
from llamaref import Engine
from models.small import write_model
from traces import Mixed

from llamadiff import compare
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import USUAL, How
from llamadiff.judge import run
from llamadiff.judge.replay import Replay
from llamadiff.judge.schedule import Schedule, _cover
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import diff

TOKENS, LAYERS = (1, 17, 5, 80, 42, 9, 33), 4


def mixed(path, policies, engine=Engine, tokens=TOKENS):
    tap, n = Mixed(policies), len(tokens)
    engine(path).forward(tokens, tap=tap)
    arrays = {name: array.astype(np.float32) for name, array in tap.arrays.items()}
    return Trace(Info(tokens, tuple(range(n)), n, None, {"name": "mixed"}), arrays, dict.fromkeys(arrays, "F32"))


def drawn(n):
    return tuple(int(token) for token in np.random.default_rng(4).integers(3, 90, n))


def without(trace, *words, layers=range(LAYERS)):
    gone = {f"{word}-{layer}" for word in words for layer in layers}
    kept = {name: trace[name] for name in trace if name not in gone}
    return Trace(trace.info, kept, dict.fromkeys(kept, "F32"))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "m.gguf", kind="Q8_0", layers=LAYERS)


@pytest.fixture
def replays(monkeypatch):
    """Every replay that is made, and how many columns of activations its products had."""
    made = []

    class Watched(Replay):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)
            self.ran, self.every = [], self.lanes

        def __call__(self, name, x):
            self.ran.append((name, len(self.lanes)))
            return super().__call__(name, x)

    monkeypatch.setattr(run, "Replay", Watched)
    return made


def faulty(word, layer):
    """An engine with one wrong product."""

    class Faulty(Engine):
        def linear(self, x, name, tap):
            wrong = word if layer is None else f"blk.{layer}.{word}"
            return super().linear(x, name, tap) * (1.2 if name == wrong else 1)

    return Faulty


def both_ways(monkeypatch, path, candidate):
    """The comparison, and the one that leaves no lane out."""
    right = mixed(path, ["native"] * LAYERS)
    found = diff(right, candidate, path, how=How(diagnose=False))
    with monkeypatch.context() as patched:
        patched.setattr(
            Schedule, "_needed_lanes",
            lambda self, source, part: [lane for lane in self.replay.lanes if lane.source == source.name],
        )  # fmt: skip
        return found, diff(right, candidate, path, how=How(diagnose=False))


CASES = {
    "float32": lambda path: mixed(path, ["f32"] * LAYERS),
    "native": lambda path: mixed(path, ["native"] * LAYERS),
    "bfloat16 from layer 2": lambda path: mixed(path, ["f32", "f32", "bf16", "bf16"]),
    "another in each layer": lambda path: mixed(path, ["f16", "native", "bf16", "f32"]),
    "wrong in layer 2": lambda path: mixed(path, ["f32"] * LAYERS, faulty("ffn_up", 2)),
    "wrong in layer 0": lambda path: mixed(path, ["native"] * LAYERS, faulty("attn_q", 0)),
    "wrong, in bfloat16": lambda path: mixed(path, ["f32", "bf16", "bf16", "bf16"], faulty("ffn_down", 3)),
    "wrong head": lambda path: mixed(path, ["f32"] * LAYERS, faulty("output", None)),
    "bfloat16 head": lambda path: mixed(path, ["f32", "f32", "f32", "bf16"]),
    "scores left out": lambda path: without(mixed(path, ["f16"] * LAYERS), "kq", "kq_soft_max"),
    "few taps after layer 0": lambda path: without(
        mixed(path, ["bf16"] * LAYERS), "attn_norm", "Qcur_rope", "kqv_out", "ffn_norm", "ffn_up",
        layers=range(1, LAYERS),
    ),
    "few taps, and wrong": lambda path: without(
        mixed(path, ["f32"] * LAYERS, faulty("ffn_up", 3)), "attn_norm", "kqv_out", "ffn_norm", "ffn_swiglu",
        layers=range(1, LAYERS),
    ),
    "layers' ends left out": lambda path: without(mixed(path, ["f32"] * LAYERS), "l_out"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_verdicts_are_those_of_all_lanes(case, monkeypatch, path):
    found, whole = both_ways(monkeypatch, path, CASES[case](path))
    assert [(row.tap, row.verdict, row.span) for row in found.rows] == [(r.tap, r.verdict, r.span) for r in whole.rows]
    assert found.verdict == ("wrong" if "wrong" in case else "match" if whole.verdict == "match" else "noise")
    for row, other in zip(found.rows, whole.rows, strict=True):
        assert row.local.nmse <= max(other.local.nmse, row.local.limit) * 1.5, row.tap
        assert row.drift == other.drift


def test_a_settled_run_has_one_lane_a_source(path, replays):
    diff(mixed(path, ["native"] * LAYERS), mixed(path, ["f32"] * LAYERS), path)
    lanes = dict(replays[0].ran)
    assert lanes["attn_norm-0"] > lanes["attn_norm-1"] == lanes["result_output"] == 4  # two of them run free
    names = [name for name, _ in replays[0].ran if name != "embd"]
    assert len(names) == len(set(names))  # nothing was run twice


def test_a_layer_that_does_not_fit_is_run_again_with_every_lane_of_its_source(path, replays):
    diff(mixed(path, ["native"] * LAYERS), mixed(path, ["f32", "f32", "f16", "f16"]), path)
    runs = {layer: [count for name, count in replays[0].ran if name == f"l_out-{layer}"] for layer in range(LAYERS)}
    every = len(replays[0].every)
    assert runs[0] == [every - 1]  # llama.cpp's own arithmetic fits
    assert runs[1] == [4]  # two of them run free
    assert runs[2] == [4, every - 1]
    assert runs[3] == [4]
    assert [finding.tap.name for finding in replays[0].findings] == list(replays[0].present)


def test_the_fewest_policies_that_fit_whatever_fits():
    every = ("f32", "native", "f16", "bf16")
    assert _cover(every, [frozenset(every), frozenset({"native", "f16"})]) == ("native",)
    assert _cover(every, [frozenset({"f32"}), frozenset({"native", "f16"})]) == ("f32", "native")
    assert _cover(every, [frozenset({policy}) for policy in every]) == every


@pytest.mark.parametrize("misled", [False, True])
def test_a_long_prompt_begins_with_the_lanes_that_some_of_its_tokens_need(misled, tmp_path, replays, monkeypatch):
    """Where these do not fit all of them, the first layer is run again with every lane."""
    path = write_model(tmp_path / "m.gguf", kind="Q8_0", layers=LAYERS, extra={"context_length": 512})
    tokens = drawn(run.LONG + 1)
    if misled:
        monkeypatch.setattr(run, "_needed_at_first", lambda model, sources, lanes, how: [lanes[0]])
    found = compare(path, tokens)
    assert found.verdict == "match"
    whole = next(replay for replay in replays if len(replay.judge.positions) == len(tokens))
    assert [count for name, count in whole.ran if name == "l_out-0"] == ([1, 2] if misled else [1])
    assert [count for name, count in whole.ran if name in ("embd", "l_out-1")] == [2, 1]
    assert [finding.tap.name for finding in whole.findings] == list(whole.present)


@pytest.mark.parametrize(("policy", "first"), [("native", [1]), ("f32", [1, 2])])
def test_llama_cpps_own_arithmetic_is_tried_first(policy, first, path, replays):
    """Where it does not fit, the first layer is run again with every lane."""
    trace = mixed(path, [policy] * LAYERS, tokens=drawn(200))
    passes = run.run_passes(Model(path), trace, None, USUAL)
    assert all(finding.local["baseline"].verdict == "match" for finding in passes.findings)
    whole = next(replay for replay in replays if len(replay.judge.positions) == 200)
    assert [[count for name, count in whole.ran if name == f"l_out-{layer}"] for layer in (0, 1)] == [first, [1]]
    assert [lane.policy for lane in whole.lanes] == [policy]


def in_16_bits(trace):
    arrays = {name: trace[name].astype(np.float16).astype(np.float32) for name in trace}
    return Trace(trace.info, arrays, trace.dtypes)


@pytest.mark.parametrize("n", [7, 40])
@pytest.mark.parametrize("altered", [in_16_bits, lambda trace: without(trace, "l_out")])
def test_a_baseline_whose_lanes_cannot_be_left_out_begins_with_all(altered, n, path, replays):
    """Some of them measure noise, or they go on with values of their own."""
    right = mixed(path, ["native"] * LAYERS, tokens=drawn(n))
    assert diff(altered(right), right, path).verdict != "wrong"
    replayed = next(replay for replay in replays if any(lane.source == "baseline" for lane in replay.every))
    assert {lane.policy for lane in replayed.every if lane.source == "baseline"} >= {"f32", "native"}
    assert [count for name, count in replayed.ran if name == "l_out-0"] == [len(replayed.every)]
