"""Recurrent and newer ops against ggml itself: each op alone in a graph, on random inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llamaref import Weights
from one_op import (
    BOOL,
    FLOAT,
    INT,
    LONG,
    PLAIN,
    SAME,
    SCAN,
    SIZE,
    TYPES,
    Graph,
    Input,
    check,
    nmse,
    normal,
    uniform,
)
from sent import node_of, own_rounding

from llamadiff.ext.graph.node_checker import NodeChecker
from llamadiff.ext.graph.op import Array, Op, Operand, arithmetics, function_of
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.tensors import Tensor

BOOLS = [BOOL] * 3


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graph()


@pytest.mark.parametrize(("seqs", "channels", "tokens", "taps"), [(1, 6, 1, 4), (3, 5, 7, 4), (2, 8, 3, 3)])
def test_ssm_conv(graph: Graph, seqs: int, channels: int, tokens: int, taps: int) -> None:
    inputs = [normal(1, seqs, channels, taps - 1 + tokens), normal(1, 1, channels, taps)]
    check(graph, "ssm_conv", inputs, [], [], PLAIN)


@pytest.mark.parametrize("mamba", [1, 2])
@pytest.mark.parametrize(
    ("seqs", "tokens", "heads", "dim", "groups", "state"),
    [(1, 1, 4, 3, 1, 16), (3, 5, 4, 2, 2, 16), (2, 6, 6, 1, 3, 20), (2, 3, 8, 4, 8, 32)],
)
def test_ssm_scan(
    graph: Graph, mamba: int, seqs: int, tokens: int, heads: int, dim: int, groups: int, state: int
) -> None:
    inputs = mamba_inputs(seqs, tokens, heads, dim, groups, state, 1 if mamba == 2 else state)
    check(graph, "ssm_scan", inputs, [LONG], [1], SCAN)


@pytest.mark.parametrize(("tokens", "kept"), [(5, 3), (2, 3), (3, 3)])
def test_ssm_scan_keeps_states(graph: Graph, tokens: int, kept: int) -> None:
    inputs = mamba_inputs(2, tokens, 4, 3, 2, 16, 1)
    check(graph, "ssm_scan", inputs, [LONG], [kept], SCAN, max(0, kept - tokens) * 2 * 4 * 3 * 16)


def test_ssm_scan_of_a_version_that_states_no_number_gives_one_state(graph: Graph) -> None:
    n, found = graph.run("ssm_scan", mamba_inputs(2, 5, 4, 3, 2, 16, 1), [LONG], [1])
    assert n.ints[0] == 1
    assert nmse(found, function_of("SSM_SCAN")(replace(n, params=bytes(len(n.params))))) < SCAN


def mamba_inputs(seqs: int, tokens: int, heads: int, dim: int, groups: int, state: int, decays: int) -> list[Input]:
    step_sizes = normal(1, seqs, tokens, heads, size=2)
    step_sizes[0, -1, -1, -1] = 25  # beyond softplus's threshold
    return [
        normal(seqs + 2, heads, dim, state),
        normal(seqs, tokens, heads, dim, seed=1),
        step_sizes,
        uniform(1, 1, heads, decays, low=-2, high=-0.1),
        normal(seqs, tokens, groups, state, seed=2),
        normal(seqs, tokens, groups, state, seed=3),
        np.arange(seqs, dtype=np.int32)[::-1].reshape(1, 1, 1, seqs) + np.int32(1),
    ]


LINEAR = [(1, 1, 1, 32), (1, 5, 2, 64), (3, 4, 3, 64), (2, 1, 2, 64)]


def token_inputs(seqs: int, tokens: int, heads: int, size: int, count: int) -> list[Array]:
    return [normal(1, seqs * tokens, heads, size, seed=seed, size=0.5) for seed in range(count)]


@pytest.mark.parametrize(("seqs", "tokens", "heads", "size"), LINEAR)
def test_rwkv_wkv6(graph: Graph, seqs: int, tokens: int, heads: int, size: int) -> None:
    k, v, r = token_inputs(seqs, tokens, heads, size, 3)
    decay = uniform(1, seqs * tokens, heads, size, low=0.1, high=0.99)
    inputs = [k, v, r, normal(1, 1, heads, size), decay, normal(1, 1, seqs, heads * size * size)]
    check(graph, "rwkv_wkv6", inputs, [], [], SCAN)


@pytest.mark.parametrize(("seqs", "tokens", "heads", "size"), LINEAR)
def test_gated_linear_attention(graph: Graph, seqs: int, tokens: int, heads: int, size: int) -> None:
    gate = uniform(1, seqs * tokens, heads, size, low=0.1, high=0.99)
    inputs = [*token_inputs(seqs, tokens, heads, size, 3), gate, normal(1, 1, seqs, heads * size * size)]
    check(graph, "gated_linear_attn", inputs, [FLOAT], [size**-0.5], SCAN)


@pytest.mark.parametrize(("seqs", "tokens", "heads"), [(1, 1, 1), (1, 5, 2), (3, 4, 3)])
def test_rwkv_wkv7(graph: Graph, seqs: int, tokens: int, heads: int) -> None:
    size = 64  # ggml's vectors read whole heads of 64
    r, k, v, a = token_inputs(seqs, tokens, heads, size, 4)
    a = a / np.linalg.norm(a, axis=-1, keepdims=True)
    decay = uniform(1, seqs * tokens, heads, size, low=0.1, high=0.99)
    inputs = [r, decay, k, v, -a, a * decay, normal(1, 1, seqs, heads * size * size)]
    check(graph, "rwkv_wkv7", inputs, [], [], SCAN)


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("kept", [1, 3])
@pytest.mark.parametrize(
    ("seqs", "key_seqs", "tokens", "heads", "key_heads", "size"),
    [(1, 1, 1, 1, 1, 16), (2, 2, 5, 4, 2, 16), (4, 2, 3, 6, 3, 12), (2, 1, 2, 2, 2, 32)],
)
def test_gated_delta_net(
    graph: Graph, per_key: bool, kept: int, seqs: int, key_seqs: int, tokens: int, heads: int, key_heads: int, size: int
) -> None:
    q, k = (normal(key_seqs, tokens, key_heads, size, seed=seed) for seed in (1, 2))
    inputs = [
        q / np.linalg.norm(q, axis=-1, keepdims=True),
        k / np.linalg.norm(k, axis=-1, keepdims=True),
        normal(seqs, tokens, heads, size, seed=3),
        uniform(seqs, tokens, heads, size if per_key else 1, low=-2, high=0),
        uniform(seqs, tokens, heads, 1, low=0, high=1),
        normal(seqs, heads, size, size),
    ]
    unwritten = max(0, kept - tokens) * inputs[-1].size
    check(graph, "gated_delta_net", inputs, [LONG], [kept], SCAN, unwritten)


# Sparse attention and hyper-connections


@pytest.mark.parametrize("keys", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("streams", "masks", "tokens", "heads", "size", "cached"),
    [(1, 1, 1, 1, 32, 5), (1, 1, 4, 3, 64, 9), (4, 2, 3, 2, 32, 6), (2, 1, 2, 4, 16, 7)],
)
def test_lightning_indexer(
    graph: Graph, keys: type, streams: int, masks: int, tokens: int, heads: int, size: int, cached: int
) -> None:
    mask = normal(masks, 1, tokens, cached).astype(np.float16)
    mask[..., 1:, -1] = -np.inf
    inputs = [
        normal(streams, tokens, heads, size),
        normal(streams, cached, 1, size, seed=1).astype(keys),
        normal(streams, 1, tokens, heads, seed=2),
        mask,
    ]
    check(graph, "lightning_indexer", inputs, [], [], PLAIN)


@pytest.mark.parametrize(("tokens", "iterations"), [(1, 1), (5, 4), (3, 20)])
def test_dsv4_hc_comb(graph: Graph, tokens: int, iterations: int) -> None:
    inputs = [normal(1, 1, tokens, 24), uniform(1, 1, 1, 3, low=0.5, high=2), normal(1, 1, 1, 24, seed=1)]
    check(graph, "dsv4_hc_comb", inputs, [FLOAT, INT], [1e-2, iterations], PLAIN)


@pytest.mark.parametrize(("tokens", "streams", "size"), [(1, 4, 8), (5, 3, 7)])
def test_dsv4_hc_pre(graph: Graph, tokens: int, streams: int, size: int) -> None:
    x = normal(1, tokens, streams, size)
    check(graph, "dsv4_hc_pre", [x, normal(1, 1, tokens, streams)], [], [], PLAIN)
    check(graph, "dsv4_hc_pre_gated", [x, normal(1, tokens, streams, size, seed=1)], [FLOAT], [1.7], PLAIN)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("tokens", "streams", "size"), [(1, 4, 8), (5, 3, 7)])
def test_dsv4_hc_post(graph: Graph, mixed: bool, tokens: int, streams: int, size: int) -> None:
    inputs = [
        normal(1, 1, tokens, size),
        normal(1, tokens, streams, size),
        normal(1, 1, tokens, streams),
        normal(1, tokens, streams, streams) if mixed else None,
    ]
    check(graph, "dsv4_hc_post", inputs, [], [], PLAIN)


# What else newer architectures use


@pytest.mark.parametrize(("outer", "inner", "rows", "columns"), [(1, 1, 1, 1), (2, 3, 9, 4), (1, 2, 16, 5)])
def test_solve_tri(graph: Graph, outer: int, inner: int, rows: int, columns: int) -> None:
    matrix = normal(outer, inner, rows, rows, size=0.3) + 2 * np.eye(rows, dtype=np.float32)
    check(graph, "solve_tri", [matrix, normal(outer, inner, rows, columns)], BOOLS, [True, True, False], PLAIN)


@pytest.mark.parametrize(
    ("of", "written", "start"),
    [
        ((1, 1, 4, 6), (1, 1, 2, 3), (0, 0, 1, 2)),
        ((2, 3, 4, 5), (2, 2, 3, 5), (0, 1, 1, 0)),
        ((2, 3, 4, 5), (1, 1, 1, 7), (0, 2, 0, 1)),
    ],
)
@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_set(graph: Graph, kind: type, of: tuple[int, ...], written: tuple[int, ...], start: tuple[int, ...]) -> None:
    a, b = normal(*of, size=100).astype(kind), normal(*written, seed=1, size=100).astype(kind)
    offset = sum(place * stride for place, stride in zip(start, a.strides, strict=True))
    check(graph, "set", [a, b], [SIZE] * 4, [*a.strides[2::-1], offset], SAME)


@pytest.mark.parametrize("seed", range(12))
def test_top_k_of_equal_values(graph: Graph, seed: int) -> None:
    """Of values that are often equal, and often -inf."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 60))
    x = rng.integers(0, 1 + rng.integers(1, 12), (2, 1, 5, size)).astype(np.float32)
    x[rng.random(x.shape) < 0.3] = -np.inf
    check(graph, "top_k", [x], [INT], [int(rng.integers(1, size + 1))], SAME)


def test_a_node_without_sources_is_checked(graph: Graph, small_model: Callable[..., Path]) -> None:
    checker = NodeChecker(Weights(small_model()), Request(""), own_rounding())
    checker.begin(0)
    with graph.context() as context:
        made = graph.build(context, "arange", [], [FLOAT] * 3, [2.0, 9.0, 1.5])
        node = node_of(Tensor(graph.ggml, made.contents))
        checker.asked(node)
        whole = graph.base.ggml_new_graph(context)
        graph.base.ggml_build_forward_expand(whole, made)
        assert graph.cpu.ggml_graph_compute_with_ctx(context, whole, 1) == 0
        checker.done(node_of(Tensor(graph.ggml, made.contents)))
    assert [result.nmse for result in checker.results] == [0.0]


@pytest.mark.parametrize("name", ["gelu", "gelu_quick"])
def test_every_value_of_a_table_is_followed(graph: Graph, name: str) -> None:
    """ggml fills its tables in float32; whether its compiler fused a product with a sum shows in one value of GELU."""
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    n, found = graph.run(name, [x[np.isfinite(x)].reshape(1, 1, 1, -1)], [], [])
    compute = function_of(n.name)
    assert compute is not None
    assert any(np.array_equal(compute(tried), found) for tried in arithmetics(n))


@pytest.mark.parametrize("shifts", [(1, 0, 0, 0), (-2, 3, 1, -1), (0, -1, 2, 1)])
def test_roll(graph: Graph, shifts: tuple[int, ...]) -> None:
    check(graph, "roll", [normal(2, 3, 5, 4)], [INT] * 4, list(shifts), SAME)


# Windows


@pytest.mark.parametrize("kind", ["float32", "float16", "int32"])
def test_casts_truncate(graph: Graph, kind: str) -> None:
    x = np.array([[[[-2.7, -0.5, 0.0, 0.5, 1.5, 2.5, 3.99, 70000.0]]]], np.float32)
    check(graph, "cast", [x[..., :-1] if kind == "float16" else x], [INT], [TYPES[kind]], 0.0)


def test_rows_are_written_where_the_destination_has_other_axes():
    """Releases of 2025 write into a cache that is stated as a whole."""
    values, numbers, cache = normal(1, 1, 2, 6), np.array([[[[3, 1]]]]), normal(1, 1, 2, 12)
    sources = (Operand(values), Operand(numbers, "i64"), Operand(cache))
    compute = function_of("SET_ROWS")
    written = compute(Op("SET_ROWS", (1, 1, 4, 6), "f32", b"", sources))
    expected = cache.reshape(4, 6).copy()
    expected[[3, 1]] = values[0, 0]
    assert np.array_equal(written[0, 0], expected)
