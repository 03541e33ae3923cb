"""What is not finite in a file is said as that, by every command in one sentence, and no op is blamed for it."""

from __future__ import annotations

from math import inf, nan

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from models.small import write_model
from optional import needs_slices

from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import Run
from llamadiff.ext.explain.case import Case
from llamadiff.ext.file.finite import not_finite
from llamadiff.ext.file.opening import judge_weights
from llamadiff.ext.graph.backend import judge_graph
from llamadiff.ext.graph.check import distance, open_places
from llamadiff.ext.graph.op import Op, Operand
from llamadiff.verbs.verbs import compare

TOKENS = (1, 5, 9, 30, 17, 22)
V, NORM, DOWN = "blk.1.attn_v.weight", "blk.0.attn_norm.weight", "blk.0.ffn_down.weight"


def values(rows: int, width: int) -> np.ndarray:
    return (np.random.default_rng(3).standard_normal((rows, width)) / 16).astype(np.float32)


def with_scale(kind: str, bits: int, row: int = 3, block: int = 1) -> tuple[np.ndarray, Type]:
    """V's blocks, of which one has another scale."""
    blocks = gguf.quants.quantize(values(128, 256), Type[kind])
    at = block * gguf.GGML_QUANT_SIZES[Type[kind]][1]
    blocks[row, at : at + 2] = np.frombuffer(np.uint16(bits).tobytes(), np.uint8)
    return blocks, Type[kind]


def in_nvfp4(scale: int) -> tuple[np.ndarray, Type]:
    """V's blocks, whose scales are at most this one (E4M3 without a sign)."""
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (128, 4, 36), dtype=np.uint8)
    blocks[..., :4] = rng.integers(scale // 2, scale + 1, (128, 4, 4))
    blocks[3, 1, 0] = scale
    return blocks.reshape(128, -1), Type.NVFP4


def changed(array: np.ndarray, place: object, value: float) -> np.ndarray:
    array[place] = value
    return array


# What is wrong -> what write_model is given, and what is said.
BROKEN = {
    "a scale": ({"tensors": {V: with_scale("Q4_0", 0x7E00)}}, f"{V}: the scale of row 3, block 1 is NaN"),
    "an infinite scale": (
        {"tensors": {V: with_scale("Q8_0", 0x7C00, block=0)}},
        f"{V}: the scale of row 3, block 0 is infinite",
    ),
    "a value": (
        {"tensors": {NORM: changed(np.ones(256, np.float32), 7, inf)}},
        f"{NORM}: row 0, value 7 is infinite",
    ),
    "a matrix's value": (
        {"tensors": {V: changed(values(128, 256).astype(np.float16), (9, 31), nan)}},
        f"{V}: row 9, value 31 is NaN",
    ),
    "a base of 0": (
        {"extra": {"rope.freq_base": 0.0}},
        "metadata: llama: rope.freq_base = 0.0: must be greater than 1",
    ),
    "a base of NaN": (
        {"extra": {"rope.freq_base": nan}},
        "metadata: llama.rope.freq_base = nan: expected a finite number",
    ),
}  # fmt: skip


@needs_slices("graph")
@pytest.mark.parametrize("what", BROKEN)
def test_a_file_is_named_and_no_op(what, tmp_path):
    options, said = BROKEN[what]
    path = write_model(tmp_path / "m.gguf", **options)
    for result in (compare(path, TOKENS), judge_graph(path, Run(tokens=TOKENS))):
        assert (result.verdict, result.wrong) == ("unchecked", ())
        assert result.summary.startswith(said), result.summary
        assert any("llamadiff weights FILE" in step for step in result.next_steps)
    report = judge_weights(path)
    assert report.verdict == "wrong"
    assert said.partition(": ")[0] in {finding.where for finding in report.findings}


@pytest.mark.parametrize(
    ("options", "weight"),
    [({}, V), ({"kind": "Q4_0"}, V), ({"tensors": {V: in_nvfp4(0x50)}}, V),
     ({"tensors": {V: in_nvfp4(0x7E), "blk.1.attn_v.scale": np.ones(1, np.float32)}}, V),
     ({"extra": {"rope.freq_base": 1e6, "rope.scaling.factor": 0.0}}, NORM)],
)  # fmt: skip
def test_a_right_file_is_none(options, weight, tmp_path):
    """Not even one whose values overflow in a run: what of it is not finite is nothing of the file's."""
    model = ModelFile(write_model(tmp_path / "m.gguf", **options))
    assert not_finite(model, weight, 1) is None
    assert not judge_weights(model.path).suspicions


def test_blocks_that_lack_their_scale_are_suspicious(tmp_path):
    path = write_model(tmp_path / "m.gguf", tensors={V: in_nvfp4(0x7E)})
    (found,) = judge_weights(path).suspicions
    assert (found.where, found.cause) == (V, "scale-missing")
    assert "has no .scale" in not_finite(ModelFile(path), V, 1).says
    assert not_finite(ModelFile(path), DOWN, 0) is None


def op(name: str, *sources: np.ndarray) -> Op:
    shape = sources[0].shape
    return Op(name, (1,) * (4 - len(shape)) + shape, "f32", b"", tuple(Operand(x) for x in sources))


@pytest.mark.parametrize(
    ("given", "right", "found", "is_wrong"),
    [
        ([1.0, nan], [2.0, nan], [2.0, 7.0], False),  # a kernel made a number of a NaN
        ([1.0, nan], [2.0, 0.0], [2.0, nan], False),  # or it went further than by rights
        ([1.0, nan], [2.0, nan], [2.5, nan], True),  # but what is finite on both sides is judged
        ([1.0, 3.0], [2.0, 0.0], [2.0, nan], True),  # and where all that came in is finite, NaN is wrong
        ([1.0, 3.0], [2.0, inf], [2.0, 7.0], False),  # unless it overflows by rights
        ([1.0, -inf], [2.0, -inf], [2.0, -inf], False),
        ([1.0, -inf], [2.0, 0.0], [2.0, nan], True),
    ],
)
def test_what_comes_in_decides_what_can_be_judged(given, right, found, is_wrong):
    n = op("ADD", np.array(given, np.float32), np.zeros(2, np.float32))
    right, found = (np.array(side, np.float32) for side in (right, found))
    assert (distance(n, right, found) > 1e-6) == is_wrong
    assert is_wrong or bool(open_places(n, right, found).any()) == bool(
        ~np.isfinite(right + found).all() and -inf not in given
    )


@pytest.mark.parametrize(("recorded", "proves"), [([nan, nan], False), ([1.0, nan], True)])
def test_two_nan_are_no_proof(recorded, proves, monkeypatch):
    """What many mistakes give shows none of them."""
    case = Case.__new__(Case)
    object.__setattr__(case, "recorded", np.array(recorded))
    monkeypatch.setattr(Case, "_row_errors", lambda self, x: [(np.zeros(1), np.ones(1))])
    monkeypatch.setattr("llamadiff.ext.explain.case.cpu.phases", lambda *_: [slice(None)])
    object.__setattr__(case, "run", type("Run", (), {"edges": (0, 1), "n_prefill": 1}))
    assert (case.nmse(np.zeros((1, 1))) == 0) == proves
