"""Dumped weights: what is done to one is measured and named, and weights alone are enough for a judgement of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from command import run
from safetensors.numpy import save_file

from llamadiff.engines.reference_model import Model
from llamadiff.ext.file.weight_faults import weight_fault
from llamadiff.numerics.halves import round_bf16
from llamadiff.trace.metadata import KEY, SCHEMA

Q, K, UP, NORM = "blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.ffn_up.weight", "blk.0.attn_norm.weight"
EXPERTS = "blk.0.ffn_up_exps.weight"


def halves(weight, heads):
    """Rows from pairs to halves, head by head."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def pairs(weight, heads):
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def swapped(weight, i, j):
    out = weight.copy()
    out[[i, j]] = out[[j, i]]
    return out


DONE = {
    "transposed": (UP, lambda w: w.T, "transposed: the file's rows are [out, in] = [512, 256]"),
    "plus one": (NORM, lambda w: w + 1, "1 is added to every value"),
    "minus one": (NORM, lambda w: w - 1, "1 is subtracted from every value"),
    "scaled": (UP, lambda w: w * 0.125, "every value is multiplied by 0.125"),
    "negated": (UP, lambda w: -w, "every value is multiplied by -1"),
    "scaled and moved": (NORM, lambda w: 2 * w + 3, "multiplied by 2, and then 3 is added to every value"),
    "zero": (UP, lambda w: 0 * w, "all values are zero"),
    "halves": (Q, lambda w: halves(w, 4), "each head's rows are in halves (i, i+32) where pairs (2i, 2i+1) are right"),
    "pairs": (Q, lambda w: pairs(w, 4), "each head's rows are in pairs (2i, 2i+1) where halves (i, i+32) are right"),
    "K by Q's heads": (K, lambda w: halves(w, 4), "by 4 heads of 32 where the model has 2"),
    "one row on": (UP, lambda w: np.roll(w, 1, 0), "the rows are rolled: each is 1 place later"),
    "rows back": (UP, lambda w: np.roll(w, -3, 0), "the rows are rolled: each is 3 places earlier"),
    "one column on": (UP, lambda w: np.roll(w, 1, 1), "the columns are rolled: each is 1 place later"),
    "one value on": (UP, lambda w: np.roll(w.ravel(), 1).reshape(w.shape), "all values are 1 place later"),
    "values back": (UP, lambda w: np.roll(w.ravel(), -70).reshape(w.shape), "all values are 70 places earlier"),
    "norm rolled": (NORM, lambda w: np.roll(w, 2), "the values are rolled: each is 2 places later"),
    "rows swapped": (UP, lambda w: swapped(w, 3, 40), "rows 3 and 40 are swapped"),
    "rows reversed": (UP, lambda w: w[::-1], "the rows are in reverse order"),
    "heads rolled": (Q, lambda w: np.roll(w, 64, 0), "the rows are rolled: each is 64 places later"),
    "heads swapped": (Q, lambda w: w.reshape(4, 64, -1)[[0, 2, 1, 3]].reshape(w.shape),
                      "heads of 64 rows 1 and 2 are swapped"),
    "heads regrouped": (Q, lambda w: w.reshape(4, 64, -1).swapaxes(0, 1).reshape(w.shape),
                        "the rows are regrouped: [4, 64] is written as [64, 4]"),
    "any order": (UP, lambda w: w[np.random.default_rng(1).permutation(len(w))], "the rows are in another order"),
    "another's": (UP, None, "these are the values of blk.1.ffn_up.weight"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
@pytest.mark.parametrize("name", DONE)
def test_what_was_done_to_a_weight_is_named(name, kind, small_model):
    model = Model(small_model("llama", kind))
    tensor, change, words = DONE[name]
    values = model.weights.whole(tensor) if change is not None else model.weights.whole("blk.1.ffn_up.weight")
    changed = np.ascontiguousarray(change(values) if change is not None else values)
    assert words in weight_fault(model, tensor, changed)


def test_experts_in_another_order_are_blocks_of_rows(small_model):
    model = Model(small_model("moe"))
    weight = model.weights.whole(EXPERTS)
    assert "blocks of 512 rows 0 and 1 are swapped" in weight_fault(model, EXPERTS, weight[[1, 0, 2, 3]].copy())


def test_what_has_no_name_is_told_by_its_place(small_model):
    model = Model(small_model("llama", "Q8_0"))
    weight = model.weights.whole(UP)
    assert weight_fault(model, UP, weight) is None
    cut, one = weight.reshape(-1).copy(), weight.copy()
    cut[32 * 100 :] = 0
    one[3, 70] += 1
    assert "number 100 of 4096" in weight_fault(model, UP, cut)
    assert weight_fault(model, UP, cut).endswith("every block from there on is wrong")
    assert "1 are wrong in all" in weight_fault(model, UP, one)
    assert "5 values where the file has" in weight_fault(model, UP, weight.reshape(-1)[:5])
    nibbles = weight.reshape(-1, 2)[:, ::-1].reshape(-1)
    assert weight_fault(model, UP, nibbles) == "of every 2 columns the order is another: 1, 0"
    rng = np.random.default_rng(2)
    assert "first wrong block" in weight_fault(model, UP, weight + 0.1 * rng.standard_normal(weight.shape))
    assert "first wrong block" in weight_fault(model, UP, rng.standard_normal(weight.shape) + 1000.0)
    broken = weight.copy()
    broken[5, 5] = np.nan
    assert "first wrong block of 32 is number 40" in weight_fault(model, UP, broken)


def test_weights_kept_in_sixteen_bits_are_right(small_model):
    model = Model(small_model("llama", "Q8_0"))
    for name in (UP, NORM):
        weight = model.weights.whole(name)
        assert weight_fault(model, name, round_bf16(weight)) is None
        assert weight_fault(model, name, weight.astype(np.float16)) is None


def compared(path, folder, *options, **weights):
    """The command's report of a trace of these weights alone, and its exit code."""
    metadata = {KEY: json.dumps({"schema": SCHEMA, "tokens": [1, 17, 5]})}
    save_file({f"weights/{name}": array for name, array in weights.items()}, folder / "w.safetensors", metadata)
    done = run("compare", path, "--candidate", folder / "w.safetensors", "-o", "json:-", *options)
    return json.loads(done.stdout), done.returncode


def test_a_trace_of_weights_alone_is_judged(small_model, tmp_path):
    path = small_model("llama", "Q8_0")
    weights = Model(path).weights
    good = {name: weights.whole(name) for name in (Q, UP)}
    report, code = compared(path, tmp_path, **good)
    assert (report["verdict"], code) == ("unchecked", 2)
    assert "both weights that the candidate dumped are the file's, and it recorded no tap" in report["summary"]
    assert any("--partial" in step for step in report["next_steps"])
    report, code = compared(path, tmp_path, "--partial", **good)
    assert (report["verdict"], code) == ("match", 0)
    report, code = compared(path, tmp_path, **good | {UP: np.roll(good[UP], 1, 0)})
    assert (report["verdict"], code) == ("wrong", 1)
    assert f"weights/{UP}: the rows are rolled: each is 1 place later" in report["summary"]
    assert "1 of the 2 weights that the candidate dumped is the file's" in report["summary"]
    assert "nothing could be judged" not in report["summary"]


def test_all_wrong_weights_are_counted_in_the_sentence(small_model, tmp_path):
    path = small_model("llama", "Q8_0")
    weights = Model(path).weights
    report, _ = compared(path, tmp_path, **{name: 2 * weights.whole(name) for name in (Q, K, UP)})
    assert "every value is multiplied by 2 (and 2 more checks fail)" in report["summary"]
