"""Devices that round otherwise than ggml's CPU: right nodes in each arithmetic are right, and bugs on top are found.

Nodes are computed here in NumPy as a device's kernels would, with none of the code that judges them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from llamaref import Weights
from sent import own_rounding

from llamadiff.ext.cpus import half_sums
from llamadiff.ext.cpus.device import HALF, DeviceArithmetics, replayed, settled
from llamadiff.ext.graph.check import NodeCheck
from llamadiff.ext.graph.node import Node
from llamadiff.ext.graph.node_checker import NodeChecker
from llamadiff.ext.graph.op import Op, Operand, compute
from llamadiff.judge.verdict import of_node
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.numerics import tolerances

ROWS, OUT, CHANNELS = 12, 40, 64


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


# what kernels round


def f16(x: np.ndarray) -> np.ndarray:
    return np.float32(np.float16(x))


def kept_bits(x: np.ndarray, bits: int, to: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """With so many bits in front of and behind the point."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(to(np.ldexp(fraction, bits)), exponent - bits).astype(np.float32)


def bf16(x: np.ndarray) -> np.ndarray:
    return kept_bits(x, 8, np.rint)


def tf32(x: np.ndarray) -> np.ndarray:
    return kept_bits(x, 11, lambda v: np.copysign(np.floor(np.abs(v) + 0.5), v))


def cut(x: np.ndarray) -> np.ndarray:
    return kept_bits(x, 11, np.trunc)


def eight_bits(scale: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    def of(x: np.ndarray) -> np.ndarray:
        blocks = x.reshape(-1, 32)
        step = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        return (np.round(blocks / step) * scale(step)).reshape(x.shape).astype(np.float32)

    return of


def same(x: np.ndarray) -> np.ndarray:
    return x


# how kernels add: x [row, in], w [out, in]


def in_float(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return (x.astype(np.float64) @ w.T.astype(np.float64)).astype(np.float32)


def one_by_one(order: Callable[[int], list[int]]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """In float16, NumPy's own."""

    def of(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        x, w = np.float16(x), np.float16(w)
        total = np.zeros((len(x), len(w)), np.float16)
        for k in order(x.shape[1]):
            total = total + x[:, k, None] * w[None, :, k]
        return total.astype(np.float32)

    return of


def at_once(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """In float16, a product not rounded before it is added."""
    total = np.zeros((len(x), len(w)), np.float16)
    for k in range(x.shape[1]):
        total = np.float16(total.astype(np.float64) + x[:, k, None].astype(np.float64) * w[None, :, k])
    return total.astype(np.float32)


def in_a_tree(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """In float16, halves first: an order that is not followed."""
    products = np.float16(x)[:, None, :] * np.float16(w)
    while products.shape[-1] > 1:
        products = products[..., 0::2] + products[..., 1::2]
    return products[..., 0].astype(np.float32)


def in_parts(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Four parts in float16, which are then added in float32."""
    parts = [one_by_one(range)(a, b) for a, b in zip(np.split(x, 4, 1), np.split(w, 4, 1), strict=True)]
    return np.sum(parts, axis=0, dtype=np.float32)


def backwards_by(step: int) -> Callable[[int], list[int]]:
    return lambda count: [k for start in range(0, count, step) for k in reversed(range(start, start + step))]


ARITHMETICS = {  # what it is called -> the weights' rounding, the activations', how they are added
    "F16 by F16": (f16, f16, in_float),
    "BF16 by BF16": (bf16, bf16, in_float),
    "TF32 by TF32": (tf32, tf32, in_float),
    "TF32 by TF32, cut off": (cut, cut, in_float),
    "activations in F16": (same, f16, in_float),
    "activations in BF16": (same, bf16, in_float),
    "activations in Q8_0": (same, eight_bits(f16), in_float),
    "activations in Q8_0, scales in F32": (same, eight_bits(same), in_float),
    f"{HALF}: in order": (f16, f16, one_by_one(range)),
    f"{HALF}: pairs": (f16, f16, one_by_one(backwards_by(2))),
    f"{HALF}: fours": (f16, f16, one_by_one(backwards_by(4))),
    f"{HALF}: at once": (f16, f16, at_once),
    f"{HALF}: a tree": (f16, f16, in_a_tree),
    f"{HALF}: four parts": (f16, f16, in_parts),
}
SMALL = {"TF32 by TF32": 1e-6}  # in the range of F16 it is that
UNKNOWN = (f"{HALF}: a tree", f"{HALF}: four parts")


def product(name: str) -> tuple[Op, np.ndarray]:
    """Two heads of one product, with the result of a right kernel."""
    w, x = normal(1, 2, OUT, CHANNELS), normal(1, 2, ROWS, CHANNELS) * np.float32(SMALL.get(name, 1))
    of_w, of_x, add = ARITHMETICS[name]
    found = np.stack([add(of_x(x[0, head]), of_w(w[0, head])) for head in range(2)])[None]
    return Op("MUL_MAT", found.shape, "f32", bytes(64), (Operand(w), Operand(x))), found


def of_experts(name: str) -> tuple[Op, np.ndarray]:
    """Three experts, two for each token."""
    w, x = normal(1, 3, OUT, CHANNELS), normal(1, ROWS, 1, CHANNELS) * np.float32(SMALL.get(name, 1))
    ids = np.array([[0, 1], [2, 0], [1, 2]] * (ROWS // 3), np.int32)
    of_w, of_x, add = ARITHMETICS[name]
    found = np.stack([np.stack([add(of_x(x[0, t]), of_w(w[0, e]))[0] for e in ids[t]]) for t in range(ROWS)])[None]
    return Op("MUL_MAT_ID", found.shape, "f32", bytes(64), (Operand(w), Operand(x), Operand(ids[None, None]))), found


def judged(n: Op, found: np.ndarray) -> tuple[str, str]:
    """Verdict and arithmetic on a device, all nodes of whose kind are like this one."""
    rule = tolerances.rule_for(tolerances.RULES, n.name, n.name, "*")
    best = replayed(n, found, None, rule.match, DeviceArithmetics(compute))
    limit = rule.match + best.rounding
    return of_node(best.nmse, limit).verdict, best.arithmetic


@pytest.mark.parametrize("make", [product, of_experts])
@pytest.mark.parametrize("name", ARITHMETICS)
def test_a_right_node_is_right_in_the_arithmetic_of_its_device(name, make):
    n, found = make(name)
    assert judged(n, found) == ("match", name.partition(":")[0])
    rule = tolerances.rule_for(tolerances.RULES, n.name, n.name, "*")
    assert replayed(n, found, None, rule.match, None).nmse > 100 * rule.match, "the CPU has this arithmetic too"
    assert (replayed(n, found, None, rule.match, DeviceArithmetics(compute)).rounding > 0) == (name in UNKNOWN)


def last_row_skipped(found: np.ndarray) -> np.ndarray:
    return np.concatenate([found[..., :-1, :], np.zeros_like(found[..., -1:, :])], axis=-2)


def scaled(found: np.ndarray) -> np.ndarray:
    return np.where(np.arange(found.shape[-1]) < 8, np.float32(1.01) * found, found)


BUGS = {
    "the last row is skipped": last_row_skipped,
    "some outputs are a little large": scaled,
    "all is a little large": lambda found: np.float32(1.01) * found,
    "rows are a place further": lambda found: np.roll(found, 1, axis=-2),
    "outputs are exchanged": lambda found: found[..., [1, 0, *range(2, found.shape[-1])]],
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("name", ARITHMETICS)
def test_a_bug_on_top_is_found(name, bug):
    n, found = product(name)
    assert judged(n, BUGS[bug](found))[0] == "wrong"


@pytest.mark.parametrize("name", ARITHMETICS)
def test_a_product_of_other_inputs_is_found(name):
    """A block of channels is left out, in results that are as round as right ones."""
    n, _ = product(name)
    of_w, of_x, add = ARITHMETICS[name]
    x = n.x(1).copy()
    x[..., :4] = 0
    found = np.stack([add(of_x(x[0, head]), of_w(n.x()[0, head])) for head in range(2)])[None]
    assert judged(n, found)[0] == "wrong"


def test_a_rounding_that_no_device_has_is_wrong():
    n, _ = product("F16 by F16")
    found = in_float(kept_bits(n.x(1)[0, 0], 6, np.rint), n.x()[0, 0])[None, None]
    n = replace(n, shape=found.shape, sources=tuple(Operand(s.values[:, :1]) for s in n.sources))
    assert judged(n, found)[0] == "wrong"


# what is only estimated


def test_of_very_many_products_some_are_followed_and_the_rest_estimated(monkeypatch):
    n, found = product(f"{HALF}: fours")
    monkeypatch.setattr(half_sums, "MOST", found.size)
    monkeypatch.setattr(half_sums, "LEAST", 8)
    best = replayed(n, found, None, 1e-10, DeviceArithmetics(compute))
    assert not best.estimated
    assert best.rounding / 10 < best.nmse < best.rounding
    assert judged(n, last_row_skipped(found))[0] == "wrong"


@pytest.mark.parametrize("many", [False, True])
def test_a_slip_below_the_loss_is_found_where_the_order_is_known(many, monkeypatch):
    """In one output a weight is off by a thousandth: less than sums in float16 lose."""
    name = f"{HALF}: pairs"
    n, _ = product(name)
    of_w, of_x, add = ARITHMETICS[name]
    w = n.x().copy()
    w[0, 1, 39] *= np.float32(1.001)
    found = np.stack([add(of_x(n.x(1)[0, head]), of_w(w[0, head])) for head in range(2)])[None]
    if many:
        monkeypatch.setattr(half_sums, "MOST", found.size * 16)
        monkeypatch.setattr(half_sums, "LEAST", 8)
    best = DeviceArithmetics(compute).explained(n, found, 1e-10)
    assert best is None


def check(number: int, arithmetic: str, estimated: bool, weight: str = "ffn_down") -> NodeCheck:
    rounding = 1e-6 if estimated else 0.0
    weight = f"blk.{number}.{weight}.weight"
    return NodeCheck(f"node-{number}", None, "MUL_MAT", weight, "Q4_K", "f32", (1, 1, 1, 1), (), 0, 1e-7, arithmetic,
                     rounding=rounding, estimated=estimated)  # fmt: skip


def test_a_loss_is_granted_where_most_nodes_of_the_kind_show_it():
    nodes = [check(0, HALF, True), check(1, HALF, True), check(2, "Q8_K", False)]
    assert [node.rounding > 0 for node in settled(nodes)] == [True, True, False]


def test_a_loss_is_not_granted_where_other_nodes_of_the_kind_are_exact():
    nodes = [check(0, HALF, True), *(check(number, HALF, False) for number in (1, 2))]
    assert [node.rounding for node in settled(nodes)] == [0, 0, 0]
    others = [check(number, HALF, True, "ffn_up") for number in range(12)]
    assert [node.rounding > 0 for node in settled([*nodes, *others])] == [False] * 3 + [True] * 12


# weights of the file


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("wrong", [False, True])
def test_weights_of_the_file_are_rounded_as_they_are_decoded(kind, wrong, small_model):
    weights = Weights(small_model("llama", kind))
    name = "blk.0.ffn_down.weight"
    w, x = weights.whole(name), normal(1, 1, 9, weights.shape(name)[-1])
    found = in_float(f16(x[0, 0]), f16(w))[None, None] * np.float32(1.01 if wrong else 1)
    checker = NodeChecker(weights, Request("", settings=Settings(gpu_layers=1)), own_rounding())
    stored = Operand(weights.read_raw(name), kind.lower(), name)
    n = Op("MUL_MAT", found.shape, "f32", bytes(64), (stored, Operand(x)))
    best = replayed(n, found, checker._computed, 1e-10, checker.arithmetics[True].device)
    assert (best.nmse <= 1e-10) != wrong
    assert wrong or best.arithmetic in ("F16 by F16", "F16")


# RoPE


def rotated(
    base: float = 10000.0, first: int = 0, neox: bool = True, heads: int = 3, factor: float = 1.0
) -> np.ndarray:
    """Angles by a power for each pair in float32, as GPUs have them, and not by multiplying on."""
    x, half = TURNED.x(), 16
    power = np.power(np.float32(base ** (-2 / 32)), np.arange(half, dtype=np.float32))
    positions = np.arange(first, first + x.shape[1], dtype=np.float32)
    theta = (positions[:, None] * power * np.float32(1 + 1e-7) / np.float32(factor))[:, None, :].astype(np.float32)
    cos, sin = np.cos(theta), np.sin(theta)
    a, b = (x[0, ..., :half], x[0, ..., half:]) if neox else (x[0, ..., 0::2], x[0, ..., 1::2])
    out = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    out[:, heads:] = x[0, :, heads:]
    return out[None].astype(np.float32)


def _turned() -> Op:
    numbers = np.zeros(16, np.int32)
    numbers[1], numbers[2], numbers[4] = 32, 2, 4096  # dimensions, NEOX, context
    numbers[5:11] = np.array([10000.0, 1.0, 0.0, 1.0, 32.0, 1.0], np.float32).view(np.int32)
    positions = np.arange(600, dtype=np.int32)[None, None, None]
    return Op(
        "ROPE", (1, 600, 3, 32), "f32", numbers.tobytes(), (Operand(normal(1, 600, 3, 32)), Operand(positions, "i32"))
    )


TURNED = _turned()


def test_angles_in_float32_are_right():
    found = rotated()
    rule = tolerances.rule_for(tolerances.RULES, "ROPE", "ROPE", "*")
    assert replayed(TURNED, found, None, rule.match, None).nmse > 10 * rule.match, "the CPU has these angles too"
    assert judged(TURNED, found) == ("match", "angles in F32")


@pytest.mark.parametrize(
    "bug", [{"base": 10010.0}, {"first": 1}, {"neox": False}, {"heads": 2}, {"factor": 1.0001}], ids=str
)
def test_a_wrong_rotation_is_found(bug):
    assert judged(TURNED, rotated(**bug))[0] == "wrong"


def test_a_value_that_no_rotation_gives_is_found():
    found = rotated()
    found[0, 7, 1, 3] *= np.float32(1.01)
    assert judged(TURNED, found)[0] == "wrong"


# flash attention


def attention(kind: str, queries: int, shift: int = 0, scale: float = 0.25, keys: int = 24) -> tuple[Op, np.ndarray]:
    """Two heads whose weighted values are added in float16, by two threads that share the keys.

    A bug is a mask that is ``shift`` keys off, another scale, or that only so many ``keys`` are seen.
    """
    q, k, v = normal(1, 2, queries, 16), normal(1, 2, 24, 16), normal(1, 2, 24, 17)[..., :16]
    visible = np.arange(24)[None] <= np.arange(queries)[:, None] % 24
    mask = np.where(visible, 0, -np.inf).astype(np.float32)[None, None]
    numbers = np.zeros(16, np.int32)
    numbers[:3] = np.array([0.25, 0, 0], np.float32).view(np.int32)
    sources = (Operand(q), Operand(k, kind), Operand(v, kind), Operand(mask, "f16"))
    n = Op("FLASH_ATTN_EXT", (1, queries, 2, 16), "f32", numbers.tobytes(), sources)
    scores = np.einsum("hqd,hkd->hqk", f16(q[0]), f16(k[0])) * np.float32(scale)
    scores = np.where(np.roll(visible, shift, axis=1) & (np.arange(24) < keys), scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total = np.zeros((2, 2, queries, 16), np.float16)
    for key in range(24):
        total[key % 2] += np.float16(weights[..., key, None]) * np.float16(v[0, :, key, None, :])
    found = total.sum(axis=0, dtype=np.float32) / weights.sum(axis=-1, keepdims=True)
    return n, found.swapaxes(0, 1)[None]


@pytest.mark.parametrize(("kind", "queries"), [("q8_0", 20), ("f32", 20), ("f16", 70)])
def test_attention_in_float16_is_right(kind, queries):
    n, found = attention(kind, queries)
    assert judged(n, found) == ("match", HALF)
    assert replayed(n, found, None, 1e-10, None).nmse > 1e-8, "the CPU has this arithmetic too"


@pytest.mark.parametrize("bug", [{"shift": 1}, {"scale": 0.26}, {"keys": 23}], ids=str)
@pytest.mark.parametrize("kind", ["q8_0", "f32"])
def test_wrong_attention_is_found(kind, bug):
    assert judged(*attention(kind, 70, **bug))[0] == "wrong"


@pytest.mark.parametrize(("where", "fits"), [("device", True), ("host", False)])
def test_a_node_is_judged_by_the_device_that_has_its_values(where, fits, small_model):
    """Whatever the settings say: some llama.cpp computes on a GPU that nobody asked for."""
    checker = NodeChecker(Weights(small_model()), Request("", nodes=True), own_rounding())
    w, x = normal(1, 1, OUT, CHANNELS), normal(1, 1, ROWS, CHANNELS)
    found = in_float(bf16(x[0, 0]), bf16(w[0, 0]))[None, None]

    def told(values: np.ndarray, op: str, sources: tuple[Node, ...] = (), **more: object) -> Node:
        said = {
            "name": op.lower(), "op": op, "type": "f32", "ne": [*reversed(values.shape)],
            "nb": [*np.cumprod([4, *reversed(values.shape[1:])]).tolist()], "view": None, "params": "00" * 64, **more,
        }  # fmt: skip
        return Node(said, np.ascontiguousarray(values).tobytes(), sources=sources)

    node = told(found, "MUL_MAT", (told(w, "ADD"), told(x, "ADD")), where=where)
    checker.asked(node)
    checker.done(node)
    checker.settle()
    assert (checker.results[0].nmse < 1e-10, checker.on_device) == (fits, fits)
