"""What is said of the devices of a run: which computed what, and whether what is wrong lies on one alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from llamadiff.ext.devices.parts import Part, explain, parts_of, parts_table
from llamadiff.judge.finding import Local
from llamadiff.judge.verdict import NODES, of_node, of_unjudged
from llamadiff.result.rows import blank


def row(tap, layer, op="MUL_MAT", kind="F16", wrong=False, span=(), weight=None):
    """A judged row."""
    ruling = of_node(1.0 if wrong else 0.0, 1e-12)
    local = Local(0.0, None, 1e-12, NODES * 1e-12, ruling.verdict, span=span)
    made = blank(tap, layer, op, (1,))
    return replace(made, verdict=ruling.verdict, local=local, weight_type=kind, weight=weight)


def rows(wrong=(), op="MUL_MAT"):
    """A product in each of four layers, and embeddings before them."""
    layers = [row(f"ffn_out-{layer}", layer, op, wrong=layer in wrong) for layer in range(4)]
    return [row("embd", None, "GET_ROWS"), *layers]


PRODUCER = {
    "devices": {"CPU": ["embd"], "RPC0": ["ffn_out-0", "ffn_out-1"], "RPC1": ["ffn_out-2", "ffn_out-3"]},
    "named": {"RPC0": "rpc:a:1", "RPC1": "rpc:b:2"},
}


def test_each_device_has_its_layers_under_the_name_that_the_user_gave_it():
    parts = parts_of(rows(), PRODUCER)
    assert [(part.device, part.layers, part.beside) for part in parts] == [
        ("CPU", [], ["embd"]), ("rpc:a:1", [0, 1], []), ("rpc:b:2", [2, 3], []),
    ]  # fmt: skip
    assert explain(parts) is None
    assert parts_table([part.to_json() for part in parts])[2][1:] == [
        ("rpc:a:1", "layers 0, 1", "2", "0"), ("rpc:b:2", "layers 2, 3", "2", "0"),
    ]  # fmt: skip


def test_wrong_on_one_device_and_right_on_the_other():
    assert explain(parts_of(rows(wrong=(2, 3)), PRODUCER)) == (
        ", only on rpc:b:2",
        "wrong only on rpc:b:2, layers 2, 3: MUL_MAT by F16 is right on rpc:a:1, layers 0, 1",
    )


def test_wrong_on_one_device_is_said_of_the_wrong_layers_alone():
    _, clause = explain(parts_of(rows(wrong=(3,)), PRODUCER))
    assert clause.startswith("wrong only on rpc:b:2, layer 3: ")


def test_wrong_on_both_is_of_no_device():
    end, clause = explain(parts_of(rows(wrong=(1, 2, 3)), PRODUCER))
    assert end == ""
    assert clause == "wrong on more than one device: 1 of 2 on rpc:a:1, layers 0, 1; 2 of 2 on rpc:b:2, layers 2, 3"


def test_what_could_not_be_judged_is_not_called_right():
    found = [*rows()[:1], replace(row("ffn_out-0", 0), verdict=of_unjudged()), row("ffn_out-2", 2, wrong=True)]
    end, clause = explain(parts_of(found, PRODUCER))
    assert (end, clause) == ("", "all that is wrong is on rpc:b:2, layer 2; nothing else computed MUL_MAT by F16")


@pytest.mark.parametrize("other", [{"op": "ADD"}, {"kind": "Q4_K"}, {"span": ("ffn_gate-2",)}])
def test_another_op_being_right_elsewhere_shows_nothing(other):
    found = [*rows()[:3], row("ffn_out-2", 2, **{"wrong": True, **other}), row("ffn_out-3", 3)]
    end, clause = explain(parts_of(found, PRODUCER))
    assert end == ""
    assert clause.startswith("all that is wrong is on rpc:b:2, layer 2; nothing else computed ")


def test_one_part_with_all_layers_is_no_split():
    found = [row("embd", None, "GET_ROWS"), row("ffn_out-0", 0, wrong=True)]
    assert explain(parts_of(found, {"devices": {"CPU": ["embd"], "RPC0": ["ffn_out-0"]}})) is None


def test_wrong_only_where_a_tensor_is_split_by_rows():
    producer = {"devices": {"X0": ["ffn_out-0", "ffn_out-1"], "X_Split": ["ffn_out-2", "ffn_out-3"]}}
    end, clause = explain(parts_of(rows(wrong=(2, 3)), producer))
    assert end == ", only where a tensor is split"
    assert clause == "wrong only where a tensor is split (X), layers 2, 3: MUL_MAT by F16 is right on X0, layers 0, 1"


def test_devices_that_are_one_share_weights_heads_and_channels_and_each_has_the_residual_stream():
    found = [
        row("attn_norm-0", 0, "RMS_NORM", "F32", weight="blk.0.attn_norm.weight"),
        row("Qcur_proj-0", 0, weight="blk.0.attn_q.weight", wrong=True), row("ffn_swiglu-0", 0, "SWIGLU", None),
        row("ffn_inp-0", 0, "ADD", None, span=("attn_out-0",)), row("l_out-0", 0, "ADD", None),
        row("Qcur_normed-0", 0, "RMS_NORM", "F32", weight="blk.0.attn_q_norm.weight"),
        row("ffn_moe_probs-0", 0, "SOFT_MAX", None),
    ]  # fmt: skip
    producer = {"devices": {"Meta()": [each.tap for each in found]}, "named": {"Meta()": "A/B"}}
    whole, split = parts_of(found, producer)
    assert [each.tap for each in whole.rows] == ["attn_norm-0", "l_out-0", "ffn_moe_probs-0"]
    assert len(split.rows) == 4
    assert explain([whole, split])[1] == (
        "all that is wrong is where a tensor is split (A/B), layer 0; nothing else computed MUL_MAT by F16"
    )


def test_nodes_of_one_name_are_of_its_device():
    found = [row("norm-0#2", 0, "RMS_NORM"), row("norm-1 (rms_norm)", 1, "RMS_NORM")]
    parts = parts_of(found, {"devices": {"A": ["norm-0"], "B": ["norm-1"]}})
    assert [part.device for part in parts] == ["A", "B"]


HOSTILE = [None, 7, [], "A", {"A": None}, {"A": 7}, {7: ["ffn_out-0"]}, {"A": [["ffn_out-0"]]}]


@pytest.mark.parametrize("stated", HOSTILE, ids=repr)
def test_a_trace_that_states_no_devices_has_none(stated):
    assert len(parts_of(rows(), {"devices": stated, "named": stated})) < 2


def test_a_long_name_is_cut():
    (part,) = parts_of(rows(), {"devices": {"A" * 9999: ["embd"]}})
    assert len(part.device) < 200


def test_places_in_words():
    part = Part("A", (row("x", None),))
    assert (part.place, replace(part, shared=True).place) == ("on A", "where a tensor is split (A)")
    assert SimpleNamespace(**part.to_json()).judged == 1
