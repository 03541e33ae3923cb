"""Which nodes of a graph whose tensors are split over devices can be read: not those that are not added up yet."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llamadiff.ext.devices.partial_sums import PartialSums, is_split


class Graph:
    """Nodes, each made of others or of weights, by name."""

    def __init__(self, width=0):
        self.made, self.sums = {}, PartialSums(width)

    def weight(self, name):
        return SimpleNamespace(name=name, address=name, shape=(1, 1, 512, 4))

    def read(self, name, op, *sources, steps=(4, 16, 64, 64), sizes=(4, 4, 1, 1)):
        """Whether a node can be read."""
        found = [self.made.get(each) or self.weight(each) for each in sources]
        tensor = SimpleNamespace(ne=sizes, nb=steps, type=0)
        ggml = SimpleNamespace(blocks=lambda kind: (1, 4))
        node = SimpleNamespace(name=name, op=op, sources=found, address=name, tensor=tensor, ggml=ggml)
        self.made[name] = node
        return not self.sums(node)


def test_a_product_of_columns_is_added_up_by_what_comes_next():
    graph = Graph()
    assert graph.read("q", "MUL_MAT", "blk.0.attn_q.weight", "x")
    assert not graph.read("out", "MUL_MAT", "blk.0.attn_output.weight", "q")
    assert graph.read("sum", "ADD", "out", "x")
    assert graph.read("norm", "RMS_NORM", "sum")


def test_experts_are_weighed_and_added_before():
    graph = Graph()
    assert not graph.read("down", "MUL_MAT_ID", "blk.0.ffn_down_exps.weight", "x", "ids")
    assert not graph.read("weighed", "MUL", "down", "weights")
    assert not graph.read("first", "VIEW", "weighed")
    assert not graph.read("second", "VIEW", "weighed")
    assert not graph.read("both", "ADD", "first", "second")
    assert graph.read("out", "ADD", "both", "x")


def test_parts_of_two_branches_may_be_added_before_they_are_added_up():
    graph = Graph()
    assert not graph.read("attention", "MUL_MAT", "blk.0.attn_output.weight", "x")
    assert graph.read("up", "MUL_MAT", "blk.0.ffn_gate.weight", "x")
    assert not graph.read("ffn", "MUL_MAT", "blk.0.ffn_down.weight", "up")
    assert not graph.read("both", "ADD", "attention", "ffn")
    assert graph.read("out", "ADD", "both", "x")


@pytest.mark.parametrize("weight", ["attn_qkv", "ffn_gate_up_exps", "ffn_up"])
def test_what_a_fused_weight_gives_is_in_another_order(weight):
    graph = Graph()
    assert not graph.read("qkv", "MUL_MAT", f"blk.0.{weight}.weight", "x")
    assert not graph.read("q", "VIEW", "qkv")
    assert not graph.read("turned", "ROPE", "q", "positions")
    assert graph.read("attended", "FLASH_ATTN_EXT", "turned", "k", "v")


@pytest.mark.parametrize(("width", "apart"), [(512, True), (256, False), (0, False)])
def test_an_up_projection_may_hold_the_gate(width, apart):
    assert Graph(width).read("up", "MUL_MAT", "blk.0.ffn_up.weight", "x") == apart


def test_rows_that_do_not_lie_together_are_not_read_even_where_there_is_one():
    graph = Graph()
    assert graph.read("a", "CONT", "x")
    assert not graph.read("a", "VIEW", "x", steps=(4, 32, 128, 128))
    assert not graph.read("a", "VIEW", "x", sizes=(4, 1, 1, 1), steps=(4, 32, 32, 32))


def test_the_next_pass_has_nothing_of_the_one_before():
    graph = Graph()
    assert not graph.read("a", "MUL_MAT", "blk.0.ffn_down.weight", "x")
    assert graph.read("a", "RMS_NORM", "x")
    assert graph.read("b", "SCALE", "a")


def test_weights_that_are_split():
    assert all(map(is_split, ("output.weight", "blk.3.attn_k.weight", "blk.11.ffn_down_exps.weight")))
    assert not any(map(is_split, ("token_embd.weight", "blk.3.attn_norm.weight", "blk.3.ffn_gate_inp.weight")))
