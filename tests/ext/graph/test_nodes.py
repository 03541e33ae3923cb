"""llama.cpp's whole graph, node by node: right on every model, and wrong exactly where a node is looked at wrongly."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from command import run
from llamaref import Weights
from models.random_models import NAMES
from sent import own_rounding

from llamadiff.engines.run_spec import Run
from llamadiff.ext.graph.backend import judge_graph, list_nodes
from llamadiff.ext.graph.check import distance, replay
from llamadiff.ext.graph.node import Node
from llamadiff.ext.graph.node_checker import NodeChecker
from llamadiff.ext.graph.op import Op, Operand, compute, function_of
from llamadiff.ext.graph.readers import check_nodes
from llamadiff.ext.graph.repro import load, save
from llamadiff.judge.verdict import of_node, worst_of
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.numerics import tolerances

TOKENS = (1, 5, 9, 30, 17, 22)
SMALL = ("llama", "moe", "qwen2", "qwen3", "qwen3moe", "stablelm", "llama-yarn", "llama-factors", "llama-fused",
         "phi3", "gpt2", "gpt-oss-mxfp4", "mamba2", "deepseek2", "deepseek2-old")  # fmt: skip


def all_right(result):
    """Flash attention is held to the limit that follows from its roundings: test_flash_attention.py."""
    assert result.verdict == "match", result.summary
    assert not [row.tap for row in result.rows if row.local is None]
    assert max(row.local.nmse for row in result.rows if row.op != "FLASH_ATTN_EXT") <= 1e-11
    assert "every checked node" in result.summary


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("name", SMALL)
def test_every_node_of_small_models_is_right(name, kind, small_model):
    all_right(judge_graph(small_model(name, kind), Run(tokens=TOKENS, n_predict=2)))


SETTINGS = {
    "f16 cache": Settings("F16", "F16"), "q8_0 cache": Settings("Q8_0", "F32"),
    "flash attention": Settings(flash_attn=True), "repacked": Settings(repack=True),
    "q5_0 K": Settings("Q5_0", "F16"), "q4_0 cache": Settings("Q4_0", "Q4_0", flash_attn=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_node_is_right_with_other_settings(name, kind, small_model, machine):
    machine.needs(SETTINGS[name], small_model("llama", kind))
    all_right(judge_graph(small_model("llama", kind), Run(tokens=TOKENS, n_predict=2, settings=SETTINGS[name])))


@pytest.mark.parametrize("flash", [False, True], ids=["plain", "flash"])
@pytest.mark.parametrize("name", NAMES)
def test_every_node_of_every_architecture_is_right(name, flash, random_model):
    all_right(judge_graph(random_model(name), Run(tokens=TOKENS, n_predict=4, settings=Settings(flash_attn=flash))))


# faults


@pytest.fixture(scope="module")
def nodes(small_model, tmp_path_factory):
    """Every node of some models, with inputs and outputs: model -> name -> (op, found)."""
    kept = {}

    def get(name: str, kind: str = "F16", **settings) -> list[tuple[Op, np.ndarray]]:
        key = (name, kind, *settings)
        if key not in kept:
            folder = tmp_path_factory.mktemp("nodes")
            path = name if isinstance(name, Path) else small_model(name, kind)
            check_nodes(Request(str(path), tokens=TOKENS, output=str(folder / "o.json"), nodes=True, keep=str(folder),
                                keep_nodes=("*",), settings=Settings(**settings)))  # fmt: skip
            kept[key] = [(op, found) for op, _, found, _ in map(load, sorted(folder.glob("*.safetensors")))]
        return kept[key]

    return get


def verdict(op: Op, found: np.ndarray) -> str:
    rule = tolerances.rule_for(tolerances.RULES, op.name, op.name, "*")
    best = replay(op, found, enough=rule.match)
    match = rule.match + best.rounding
    return of_node(best.nmse, match).verdict


def other_number(op: Op, place: int, change) -> Op:
    numbers = np.frombuffer(op.params, np.float32).copy()
    numbers[place] = change(numbers[place])
    return replace(op, params=numbers.tobytes())


def other_whole(op: Op, place: int, value: int) -> Op:
    numbers = np.frombuffer(op.params, np.int32).copy()
    numbers[place] = value
    return replace(op, params=numbers.tobytes())


def swapped(op: Op) -> Op:
    """The first two sources exchanged."""
    return replace(op, sources=(op.sources[1], op.sources[0], *op.sources[2:]))


def elsewhere(place: int):
    """A source's rows as another tensor has them: another layer's weight, another slot."""

    def change(op: Op) -> Op:
        source = op.sources[place]
        values = np.roll(source.values, 1, axis=-1 if source.values.shape[-1] > 1 else -2)
        return replace(op, sources=(*op.sources[:place], replace(source, values=values), *op.sources[place + 1 :]))

    return change


def _one_further(place: bytes) -> bytes:
    """A view that begins one value later."""
    return (np.frombuffer(place, np.int64) + np.eye(5, dtype=int)[0]).tobytes()


# op -> the model that has it, and a fault in how its node is seen
FAULTS = {
    "GET_ROWS": ("llama", elsewhere(1)),
    "SET_ROWS": ("llama", elsewhere(0)),
    "MUL_MAT": ("llama", elsewhere(0)),
    "MUL_MAT_ID": ("moe", elsewhere(2)),
    "ADD": ("llama", elsewhere(1)),
    "MUL": ("llama", elsewhere(1)),
    "DIV": ("moe", swapped),
    "RMS_NORM": ("llama", lambda op: other_number(op, 0, lambda eps: eps * 100)),
    "NORM": ("stablelm", lambda op: other_number(op, 0, lambda eps: eps * 100)),
    "ROPE": ("llama", lambda op: other_number(op, 5, lambda base: base * 2)),
    "SOFT_MAX": ("llama", lambda op: other_number(op, 0, lambda scale: scale * 2)),
    "CONT": ("llama", elsewhere(0)),
    "RESHAPE": ("llama", elsewhere(0)),
    "PERMUTE": ("llama", lambda op: other_whole(other_whole(op, 0, int(op.ints[1])), 1, int(op.ints[0]))),
    "VIEW": ("llama", lambda op: replace(op, params=_one_further(op.params))),
    "SWIGLU": ("llama", swapped),
    "ARGSORT": ("moe", lambda op: other_whole(op, 0, 1 - int(op.ints[0]))),
    "SUM_ROWS": ("moe", lambda op: replace(op, sources=(replace(op.sources[0], values=op.x() * 1.01),))),
    "CLAMP": ("moe", lambda op: other_number(op, 0, lambda low: 10.0)),
    "FLASH_ATTN_EXT": ("flash", lambda op: other_number(op, 0, lambda scale: scale * 2)),
}  # fmt: skip

# the same on models that lie beside the checkout
MORE_FAULTS = {
    "SCALE": ("gemma2.F16", lambda op: other_number(op, 0, lambda factor: factor * 1.1)),
    "GEGLU": ("gemma2.F16", swapped),
    "TANH": ("gemma2.F16", elsewhere(0)),
    "CPY": ("granitehybrid.Q8_0", elsewhere(0)),
    "CONCAT": ("deepseek2.Q8_0", swapped),
    "TRANSPOSE": ("deepseek2.Q8_0", elsewhere(0)),
    "SIGMOID": ("deepseek2.Q8_0", elsewhere(0)),
    "GELU": ("gpt2.F16", elsewhere(0)),
    "SILU": ("granitehybrid.Q8_0", elsewhere(0)),
    "SSM_CONV": ("granitehybrid.Q8_0", elsewhere(1)),
    "SSM_SCAN": ("granitehybrid.Q8_0", elsewhere(1)),
    "ADD_ID": ("gpt-oss.Q8_0", elsewhere(1)),
    "SWIGLU_OAI": ("gpt-oss.Q8_0", lambda op: other_number(op, 2, lambda alpha: alpha * 1.1)),
    "SOFTPLUS": ("qwen35.F16", elsewhere(0)),
    "GATED_DELTA_NET": ("qwen35.F16", elsewhere(2)),
}


@pytest.mark.parametrize("name", [*FAULTS, *MORE_FAULTS])
def test_a_fault_in_the_view_of_a_node_is_wrong_at_that_node(name, nodes, random_model):
    model, fault = (FAULTS | MORE_FAULTS)[name]
    if name in MORE_FAULTS:
        every = nodes(random_model(model))
    else:
        every = nodes("llama", flash_attn=True) if model == "flash" else nodes(model)
    assert {verdict(op, found) for op, found in every} == {"match"}
    chosen = [number for number, (op, _) in enumerate(every) if op.name == name and np.prod(op.shape) > 1]
    for number in chosen[:2]:
        seen = [(fault(op) if i == number else op, found) for i, (op, found) in enumerate(every)]
        assert [i for i, (op, found) in enumerate(seen) if verdict(op, found) == "wrong"] == [number]
    assert chosen


# sources that all lanes share: weights of products and of RoPE, sinks, positions
SHARED_BY_LANES = {"MUL_MAT": {0}, "MUL_MAT_ID": {0}, "ROPE": {1, 2}, "SOFT_MAX": {2}}


@pytest.mark.parametrize("model", ["llama", "gpt-oss-mxfp4", "qwen3moe", "mamba2", "deepseek2"])
def test_a_lane_is_computed_as_it_would_be_alone(model, nodes):
    """Whichever sources have lanes: the rest have one for all."""
    seen = set()
    for op, found in nodes(model):
        shapes = tuple(s and s.values.shape for s in op.sources)
        if (op.name, shapes) in seen or op.name in ("VIEW", "RESHAPE") or not all(map(all, filter(None, shapes))):
            continue
        seen.add((op.name, shapes))
        places = [i for i, s in enumerate(op.sources) if s and i not in SHARED_BY_LANES.get(op.name, ())]
        for chosen in (c for count in range(1, len(places) + 1) for c in combinations(places, count)):
            function, lanes = function_of(op.name), [_lane(op, chosen, lane) for lane in (0, 1)]
            alone = np.stack([function(one).reshape(found.shape) for one in lanes])
            both = function(_together(lanes, chosen))
            message = f"{op.name} with lanes in {chosen}"
            np.testing.assert_allclose(
                np.broadcast_to(both.reshape(-1, *found.shape), alone.shape), alone, 1e-4, 1e-6, err_msg=message
            )


def _lane(op: Op, chosen: tuple[int, ...], lane: int) -> Op:
    """The second lane's values are other ones: larger numbers, indices in another order."""
    there = {i: replace(op.sources[i], values=_other(op.sources[i].values)) for i in chosen if lane}
    return replace(op, sources=tuple(there.get(i, s) for i, s in enumerate(op.sources)))


def _other(values: np.ndarray) -> np.ndarray:
    return values[..., ::-1] if values.dtype.kind == "i" else np.asarray(values * 1.25, values.dtype)


def _together(lanes: list[Op], chosen: tuple[int, ...]) -> Op:
    def values(i: int) -> np.ndarray:
        return np.stack([lane.sources[i].values for lane in lanes[: 2 if i in chosen else 1]])

    return replace(lanes[0], sources=tuple(s and replace(s, values=values(i)) for i, s in enumerate(lanes[0].sources)))


def test_a_node_of_an_op_without_a_function_is_unchecked_and_named(small_model, monkeypatch):
    from llamadiff.ext.graph.backend import rows_of, summarize
    from llamadiff.ext.graph.check import NodeCheck

    path = small_model()
    checks = list_nodes(path, 2)
    found = [replace(check, nmse=None if check.op == "ROPE" else 0.0) for check in checks]
    rows = rows_of(found, tolerances.RULES)
    assert isinstance(checks[0], NodeCheck)
    assert worst_of([row.verdict for row in rows]) == "unchecked"
    text = summarize(rows, "llama.cpp", "a prefill").sentence
    assert "4 nodes are unchecked, for want of a function: ROPE (4)" in text
    failed = [replace(check, problem="ValueError: no") if check.op == "ROPE" else check for check in found]
    text = summarize(rows_of(failed, tolerances.RULES), "llama.cpp", "a prefill").sentence
    assert "4 nodes are unchecked, since their function failed: ROPE (4)" in text


def test_of_a_device_it_is_said_that_nodes_were_computed_alone(small_model):
    """It has kernels of several nodes, which no eval callback sees."""
    from llamadiff.ext.graph.backend import ALONE, rows_of, summarize

    rows = rows_of(list_nodes(small_model(), 2), tolerances.RULES)
    right = rows_of([replace(check, nmse=0.0) for check in list_nodes(small_model(), 2)], tolerances.RULES)
    for found in (rows, right):
        assert ALONE in summarize(found, "llama.cpp", "a prefill", on_device=True).sentence
        assert "alone" not in summarize(found, "llama.cpp", "a prefill").sentence
    assert summarize(right, "llama.cpp", "a prefill", on_device=True).headline.endswith("each computed alone")


def node_of(name, op, values):
    """A node that gave these values."""
    said = {"name": name, "op": op, "type": "f32", "ne": [*reversed(values.shape)], "nb": [*reversed(values.strides)]}
    return Node(said, data=values)


def test_a_function_that_fails_leaves_its_node_unchecked(small_model):
    checker = NodeChecker(Weights(small_model()), Request(""), own_rounding())
    x = np.ones((1, 1, 2, 8), np.float32)
    node = node_of("norm-0", "RMS_NORM", x)
    for params in (b"", np.float32(0).tobytes()):  # without its epsilon, and with it
        checker._pending = Op("RMS_NORM", x.shape, "f32", params, (Operand(x),))
        checker.done(node)
    failed, right = checker.results
    assert (failed.nmse, right.nmse, right.problem) == (None, 0.0, None)
    assert failed.problem.startswith("IndexError")


def test_a_node_without_values_has_nothing_that_is_wrong(small_model):
    """As the last layer's, of a batch whose logits nobody asked for."""
    checker = NodeChecker(Weights(small_model()), Request(""), own_rounding())
    none, some = np.empty((1, 1, 0, 8), np.float32), np.ones((1, 1, 2, 8), np.float32)
    for x, y in ((none, none), (some, 2 * some), (some, some)):
        node = node_of("l_out", "ADD", y)
        checker._pending = Op("ADD", x.shape, "f32", b"", (Operand(x), Operand(x)))
        checker.done(node)
    assert [check.nmse for check in checker.results] == [0.0, 0.0, 0.25]


def test_wrong_ops_are_saved_with_their_inputs(nodes, tmp_path):
    op, found = next((op, found) for op, found in nodes("llama") if op.name == "RMS_NORM")
    save(tmp_path / "a.safetensors", op, found, found, "norm-0")
    again, expected, actual, name = load(tmp_path / "a.safetensors")
    assert (again.name, again.shape, again.params, name) == (op.name, op.shape, op.params, "norm-0")
    assert np.array_equal(expected, actual)
    assert np.array_equal(function_of("RMS_NORM")(again), function_of("RMS_NORM")(op))


def test_the_commands(small_model, tmp_path):
    path = str(small_model("moe", "Q8_0"))
    done = run(
        "backend", path, "--tokens", "1,5,9", "--n-predict", "1", "--keep", str(tmp_path / "kept"), "-o", "json:-"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["verdict"], report["wrong"], report["logits"]) == ("match", [], None)
    assert {"Qcur_rope-0", "ffn_moe_topk-1", "result_output"} <= {tap["tap"] for tap in report["taps"]}
    tree = run("graph", path)
    assert tree.returncode == 0
    assert "layer 1" in tree.stdout
    assert "MUL_MAT_ID ffn_moe_gate-1" in tree.stdout
    dot = run("graph", path, "--dot")
    assert dot.stdout.startswith("digraph model {")
    assert '"blk.1.ffn_up_exps.weight" -> "ffn_moe_up-1"' in dot.stdout


@pytest.mark.parametrize(("params", "order", "right"), [
    ((1, 2), [3, 2, 1, 0], True), ((1, 2), [2, 3, 0, 1], False),
    ((1, 0), [3, 2, 0, 1], True), ((1, 0), [3, 2, 1, 0], False),
])  # fmt: skip
def test_where_only_the_first_are_sorted_the_others_may_be_in_any_order(params, order, right):
    """As ik_llama.cpp sorts what is chosen from."""
    x = np.array([0.2, 0.1, 0.3, 0.4], np.float32).reshape(1, 1, 1, 4)
    n = Op("ARGSORT", (1, 1, 1, 4), "i32", np.array([*params, *[0] * 14], np.int32).tobytes(), (Operand(x),))
    assert (distance(n, compute(n), np.array(order, np.int32).reshape(1, 1, 1, 4)) == 0) == right
