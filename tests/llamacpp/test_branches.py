"""Nodes of branches that a graph does not take (ggml_build_forward_select): never computed, so never looked at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llamadiff.llamacpp.layout import ggml_context
from llamadiff.llamacpp.observer import NODES, Observer
from llamadiff.llamacpp.tensors import Ggml


@pytest.fixture
def ggml():
    return Ggml()


def observer_of(ggml: Ggml, sent: list) -> Observer:
    observer = Observer.__new__(Observer)
    observer.ggml, observer.telling, observer.is_like_another, observer.failure = ggml, NODES, False, None
    observer.place, observer.known, observer.opening, observer.passes = -1, set(), None, iter([(0, 1)])
    observer.start, observer.rows, observer.weights, observer.weights_read = 0, 1, frozenset(), set()
    observer.request = SimpleNamespace(way=SimpleNamespace(ubatch=0), only_list=True, model="a model",
                                       settings=SimpleNamespace(on_device=False))  # fmt: skip
    observer.library = SimpleNamespace(is_unseen=False, is_unread=lambda node: False)
    observer.given = SimpleNamespace(tell=lambda *_: None)
    observer.feed = SimpleNamespace(send=lambda event, *_: sent.append(event))
    return observer


@pytest.mark.parametrize("on_device", [True, False])
def test_what_is_on_its_way_to_a_device_is_awaited_before_a_node_is_told_of(on_device, ggml):
    assert ggml.computed_flag in (0, 16)  # which declares what makes a graph
    done: list = []
    observer = observer_of(ggml, done)
    observer.request.settings.on_device, observer.running = on_device, "context"
    observer.lib = SimpleNamespace(llama_synchronize=done.append)
    with ggml_context(ggml.lib) as context:
        node = ggml.lib.ggml_scale(context, ggml.lib.ggml_new_tensor_4d(context, 0, 4, 1, 1, 1), 2.0)
        ggml.lib.ggml_build_forward_expand(ggml.lib.ggml_new_graph(context), node)
        assert observer._observe(node, True, None)
    assert observer.failure is None
    assert done[:-1] == ["context"] * on_device
    assert "node" in done[-1]


@pytest.mark.parametrize("flags", [True, False])
def test_a_node_that_is_not_computed_is_not_looked_at(flags, ggml):
    if not ggml.computed_flag:
        pytest.skip("this ggml flags no node that it computes: all are computed")
    if not flags:
        ggml.__dict__["computed_flag"] = 0  # an older ggml flags none, and computes all
    sent: list = []
    observer = observer_of(ggml, sent)
    with ggml_context(ggml.lib) as context:
        leaf = ggml.lib.ggml_new_tensor_4d(context, 0, 4, 1, 1, 1)
        taken, other = (ggml.lib.ggml_scale(context, leaf, 2.0) for _ in range(2))
        ggml.lib.ggml_build_forward_expand(ggml.lib.ggml_new_graph(context), taken)
        assert observer._observe(taken, True, None)
        assert len(sent) == 1
        assert observer._observe(other, True, None) != flags
        assert len(sent) == (1 if flags else 2)
    assert observer.failure is None
