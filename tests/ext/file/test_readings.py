"""What a tensor is as a whole is named: another type's blocks, values of two types, an adapter merged in."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from models.small import write_model

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.blocks.fields import FIELDS, HALVES, values_of
from llamadiff.ext.file.cost import TYPICAL
from llamadiff.ext.file.opening import judge_weights
from llamadiff.ext.file.pairs import Pair, in_file, measure
from llamadiff.ext.file.readings import another_type, low_rank
from llamadiff.ext.file.views import Stored

UP, SHAPE = "blk.1.ffn_up.weight", (512, 256)
SIZES = {kind: gguf.GGML_QUANT_SIZES[Type[kind]] for kind in (*TYPICAL, "F16", "BF16")}
ALIKE = [
    (own, called) for own, (a, b) in SIZES.items() for called, (c, d) in SIZES.items()
    if own != called and a * d == b * c and own in FIELDS and called in FIELDS
]  # fmt: skip


def values(seed: int = 5) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(SHAPE) / 16).astype(np.float32)


def through(array: np.ndarray, kind: str) -> tuple[np.ndarray, Type]:
    return gguf.quants.quantize(array, Type[kind]), Type[kind]


def back(array: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.dequantize(*through(array, kind))


def blocks(kind: str) -> np.ndarray:
    """Any blocks of a type with scales of one size."""
    rng, (per, size) = np.random.default_rng(1), SIZES[kind]
    if per == 1:
        return through(values(), kind)[0].view(np.uint8)
    made = rng.integers(0, 256, (SHAPE[0] * SHAPE[1] // per, size), dtype=np.uint8)
    for name in FIELDS[kind].keys() & {*HALVES}:
        made[:, slice(*FIELDS[kind][name])] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    if "e" in FIELDS[kind]:
        made[:, slice(*FIELDS[kind]["e"])] = rng.integers(24, 40, (len(made), FIELDS[kind]["e"][1]))
    return made.reshape(SHAPE[0], -1)


def pair(path: Path, ours: object, theirs: np.ndarray) -> Pair:
    model = ModelFile(write_model(path, kind="F32", tensors={UP: ours}, layers=2))
    return Pair(in_file(model, UP), Stored(theirs, "F32"))


@pytest.mark.parametrize(("own", "called"), ALIKE)
def test_blocks_of_another_type_as_large_are_named(own, called, tmp_path):
    stored = blocks(own)
    right = values_of(own, stored.reshape(-1, SIZES[own][1])).astype(np.float32).reshape(SHAPE)
    with np.errstate(all="ignore"):  # what they are called may be anything
        found = next(another_type(measure(pair(tmp_path / "m.gguf", (stored, Type[called]), right))))
    assert found.says == f"its blocks are {own}'s, as large as {called}'s: the file calls them {called}"
    assert next(another_type(measure(pair(tmp_path / "r.gguf", (stored, Type[own]), right))), None) is None


def test_all_types_of_one_size_are_tried():
    assert {("Q4_0", "IQ4_NL"), ("Q4_K", "IQ4_NL"), ("Q5_0", "Q5_K"), ("F16", "BF16"), ("IQ3_S", "Q3_K")} <= {*ALIKE}


LOW = 0.02 * np.random.default_rng(1).standard_normal((512, 4)) @ np.random.default_rng(2).standard_normal((4, 256))
LOW = LOW.astype(np.float32)
NAMED = {
    "blocks of Q4_0": ((through(values(), "Q4_0")[0], Type.IQ4_NL), "blocks are Q4_0's, as large as IQ4_NL's"),
    "Q4_0 in F16": (back(values(), "Q4_0").astype(np.float16), "are Q4_0's values, stored as F16"),
    "Q4_0 in Q8_0": (through(back(values(), "Q4_0"), "Q8_0"), "are Q4_0's values, stored as Q8_0"),
    "Q5_0 in Q8_0": (through(back(values(), "Q5_0"), "Q8_0"), "are Q5_0's values, stored as Q8_0"),
    "an adapter": (values() + LOW, "differs by a matrix of rank 4, 0.65"),
    "an adapter in Q8_0": (through(values() + LOW, "Q8_0"), "differs by a matrix of rank 4, 0.65"),
    "an adapter in Q4_0": (through(values() + LOW, "Q4_0"), "differs by a matrix of rank 4, 0.66"),
    "a factor": (1.5 * values(), "every value is multiplied by 1.5"),
    "a factor in Q8_0": (through(1.5 * values(), "Q8_0"), "every value is multiplied by 1.5"),
    "training": (values() + values(6), "NMSE "),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "plain.gguf", kind="F32", tensors={UP: values()})


@pytest.mark.parametrize("what", NAMED)
def test_what_a_tensor_is_instead_is_named_from_both_sides(what, plain, tmp_path):
    tensor, said = NAMED[what]
    path = write_model(tmp_path / "m.gguf", kind="F32", tensors={UP: tensor})
    (found,) = judge_weights(path, plain).findings
    assert said in found.says
    (found,) = judge_weights(plain, path).findings
    inverse = {"differs by": "differs by a matrix of rank 4", "every value": "every value is multiplied by 0.66"}
    assert inverse.get(" ".join(said.split()[:2]), said) in found.says


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_values_that_were_quantized_once_are_right(kind, plain, tmp_path):
    path = write_model(tmp_path / "m.gguf", kind="F32", tensors={UP: through(values(), kind)})
    assert [judge_weights(*each).verdict for each in ((path, plain), (plain, path))] == ["noise", "noise"]


@pytest.mark.parametrize("rank", [1, 4, 32, 256])
def test_a_rank_is_low_where_a_gap_shows_it(rank, tmp_path):
    rng = np.random.default_rng(rank)
    change = (rng.standard_normal((512, rank)) @ rng.standard_normal((rank, 256)) / 64).astype(np.float32)
    found = low_rank(measure(pair(tmp_path / "m.gguf", values() + change, values())))
    assert (found is not None and f"of rank {rank}," in found.says) == (rank < 64)
    assert (found is None) == (rank > 64)
