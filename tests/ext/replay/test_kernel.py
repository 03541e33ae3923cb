"""A stranger's kernel on an op's inputs: what is wrong is found, what only adds in another order is right."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from command import run

from llamadiff.ext.graph.op import Op, Operand
from llamadiff.ext.graph.repro import SavedInputs, load_inputs, save_inputs
from llamadiff.ext.replay.python_kernel import inputs_for, load_function

KERNELS = Path(__file__).with_name("kernels.py")
F, HALF = np.float32, np.float16
DICE = np.random.default_rng


def params(floats=(), ints=()):
    """op_params with some of its numbers set."""
    packed = bytearray(64)
    for form, numbers in (("f", floats), ("i", ints)):
        for place, value in dict(numbers).items():
            struct.pack_into(form, packed, 4 * place, value)
    return bytes(packed)


def random(*shape, seed=0, size=1.0):
    return (size * DICE([seed, *shape]).standard_normal(shape)).astype(F)


def q8_0(rows, columns):
    """Random blocks of Q8_0: scales of some thousandths."""
    blocks = np.zeros((rows, columns // 32, 34), np.uint8)
    blocks[..., :2] = DICE(1).uniform(2e-4, 4e-4, (rows, columns // 32, 1)).astype(HALF).view(np.uint8)
    blocks[..., 2:] = DICE(2).integers(-127, 128, (rows, columns // 32, 32)).astype(np.int8).view(np.uint8)
    return blocks.reshape(rows, -1)


def q4_k(rows, columns):
    """Random blocks of Q4_K."""
    blocks = DICE(3).integers(0, 256, (rows, columns // 256, 144)).astype(np.uint8)
    for at, scale in ((0, 1e-4), (2, 5e-5)):
        blocks[..., at : at + 2] = np.full((rows, columns // 256, 1), scale, HALF).view(np.uint8)
    return blocks.reshape(rows, -1)


def mask(tokens, keys):
    seen = np.arange(keys)[None, :] <= np.arange(tokens)[:, None] + keys - tokens
    return np.where(seen, 0, -np.inf).astype(F)[None, None]


ROPE = params({5: 10000.0, 6: 1.0, 8: 1.0, 9: 32.0, 10: 1.0}, {1: 64, 4: 4096})
SCALED = params({0: 0.125})
OPS = {
    "norm": ("RMS_NORM", [(random(1, 1, 64, 128), "f32")], params({0: 1e-5}), (1, 1, 64, 128)),
    "f32": ("MUL_MAT", [(random(1, 1, 64, 96, size=0.1), "f32"), (random(1, 1, 64, 96, seed=1), "f32")], params(),
            (1, 1, 64, 64)),
    "f16": ("MUL_MAT", [(random(64, 96, size=0.02).astype(HALF), "f16"), (random(1, 1, 64, 96), "f32")], params(),
            (1, 1, 64, 64)),
    "q8_0": ("MUL_MAT", [(q8_0(64, 256), "q8_0"), (random(1, 1, 32, 256, size=0.5), "f32")], params(), (1, 1, 32, 64)),
    "q4_k": ("MUL_MAT", [(q4_k(64, 512), "q4_k"), (random(1, 1, 32, 512, size=0.5), "f32")], params(), (1, 1, 32, 64)),
    "softmax": ("SOFT_MAX", [(random(1, 4, 16, 64), "f32"), (mask(16, 64), "f32")], SCALED, (1, 4, 16, 64)),
    "attention": (
        "FLASH_ATTN_EXT",
        [(random(1, 4, 16, 32, size=0.5), "f32"), (random(1, 2, 192, 32, seed=1, size=0.5), "f32"),
         (random(1, 2, 192, 32, seed=2, size=0.3), "f32"), (mask(16, 192), "f16")], SCALED, (1, 16, 4, 32),
    ),
    "rope": ("ROPE", [(random(1, 5, 4, 64), "f32"), (np.arange(5, dtype=np.int32).reshape(1, 1, 1, 5), "i32")], ROPE,
             (1, 5, 4, 64)),
    "gelu": ("GELU", [(random(1, 1, 8, 64), "f32")], params(), (1, 1, 8, 64)),
    "swiglu": ("SWIGLU", [(random(1, 1, 8, 64), "f32"), (random(1, 1, 8, 64, seed=1), "f32")], params(ints={0: 2}),
               (1, 1, 8, 64)),
    "rows": ("GET_ROWS", [(random(1, 1, 90, 64), "f32"), (np.arange(6, dtype=np.int32).reshape(1, 1, 1, 6), "i32")],
             params(), (1, 1, 6, 64)),
}  # fmt: skip


def op_file(folder, kind):
    """An op as backend --keep saves it, but for results."""
    name, sources, packed, shape = OPS[kind]
    op = Op(name, shape, "f32", packed, tuple(Operand(values, of, "") for values, of in sources))
    path = folder / f"{kind}.safetensors"
    save_inputs(path, SavedInputs(op, f"{kind}-0"))
    return path


def tried(path, function, *more):
    """The report of a kernel on an op, and what was printed beside it."""
    done = run("replay", path, "--candidate", f"python:{KERNELS}:{function}", "-o", "json:-", *more)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == {"match": 0, "noise": 0, "wrong": 1, "unchecked": 2}[report["verdict"]]
    return report


def given(path, function):
    """What a kernel gives on an op as it was saved."""
    return load_function(KERNELS, function)(inputs_for(load_inputs(path).op))


RIGHT = [
    ("f32", "matmul_blocked"), ("f32", "matmul_reversed"), ("f32", "matmul_pairwise"), ("f32", "matmul_fused"),
    ("f16", "matmul_blocked"), ("q8_0", "matmul_blocked"), ("q8_0", "matmul_of_eight_bits"), ("q4_k", "matmul_blocked"),
    ("q4_k", "matmul_of_superblocks"), ("norm", "rms_norm"), ("softmax", "softmax"),
    ("softmax", "softmax_by_powers_of_two"), ("attention", "attention"), ("rope", "rope"), ("gelu", "gelu"),
    ("swiglu", "swiglu"), ("rows", "get_rows"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "function"), RIGHT)
def test_another_order_of_sums_is_right(kind, function, tmp_path):
    report = tried(op_file(tmp_path, kind), function)
    op = report["ops"][0]
    assert report["verdict"] in ("match", "noise"), op["summary"]
    assert len(op["cases"]) >= 20
    assert op["common"] is None
    in_eight = {"matmul_of_eight_bits": "Q8_0", "matmul_of_superblocks": "Q8_K"}.get(function)
    assert in_eight is None or any(in_eight in (case["arithmetic"] or "") for case in op["cases"])


WRONG = [
    ("norm", "rms_norm_eps_outside", "rms_norm", ""),
    ("softmax", "softmax_without_maximum", "softmax", "with large values"),
    ("softmax", "softmax_unscaled_beyond_one_block", "softmax", "with more than 1024 keys"),
    ("f32", "matmul_partial_tile_lost", "matmul_blocked", "where the number of rows is not a multiple of 32"),
    ("f16", "matmul_sums_in_half", "matmul_blocked", ""),
    ("q8_0", "matmul_last_scale_of_the_block_before", "matmul_blocked", "with more than 32 channels"),
    ("q4_k", "matmul_last_minimum_lost", "matmul_blocked", ""),
    ("attention", "attention_without_the_last_key", "attention", ""),
    ("rope", "rope_positions_wrap", "rope", "with positions from 4000 on"),
    ("rope", "rope_base_off", "rope", "with more than 1 token"),
    ("gelu", "gelu_by_erf", "gelu", ""),
    ("swiglu", "swiglu_of_an_approximate_exp", "swiglu", ""),
    ("rows", "get_rows_never_the_last", "get_rows", ""),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "function", "right", "common"), WRONG, ids=[each[1] for each in WRONG])
def test_what_a_fixed_tolerance_lets_pass_is_wrong(kind, function, right, common, tmp_path):
    path = op_file(tmp_path, kind)
    np.testing.assert_allclose(given(path, function), given(path, right), rtol=1e-2, atol=1e-2)
    report = tried(path, function)
    op = report["ops"][0]
    assert report["verdict"] == "wrong", op["summary"]
    assert common in (op["common"] or "")
    first = op["cases"][0] if op["smallest_wrong"] == 0 else next(
        case for case in op["cases"] if case["case"] == op["smallest_wrong"])  # fmt: skip
    at = first["wrong"]
    assert at["error"] is None or at["error"] > at["limit"]
    assert f"row {at['row']}, column {at['column']}" in op["summary"]
