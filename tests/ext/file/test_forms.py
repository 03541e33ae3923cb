"""The same values in another form are no difference: scales beside blocks, 16 bits of another kind, names of a part."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from models.small import write_model

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.architectures import TABLES
from llamadiff.ext.file.checkpoint import _canonical
from llamadiff.ext.file.opening import judge_weights
from llamadiff.ext.file.pairs import in_file
from llamadiff.ext.file.views import InFile, whole

UP, SHAPE = "blk.1.ffn_up.weight", (512, 256)
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # E2M1


def values(seed: int = 5) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(SHAPE) / 16).astype(np.float32)


@cache
def in_nvfp4() -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 64 values as ModelOpt makes them, and their factor: the largest block has the scale 448."""
    array = values()
    factor = np.abs(array).max() / (6 * 448)
    parts = (array / factor).reshape(len(array), -1, 4, 16)
    sizes = np.abs(parts).max(axis=-1) / 6
    codes = np.array([_scale(code) for code in range(127)], np.float32)
    scales = np.abs(sizes[..., None] - codes).argmin(axis=-1).astype(np.uint8)
    units = parts / np.maximum(codes[scales], 1e-9)[..., None]
    quants = (np.abs(np.abs(units)[..., None] - CODES).argmin(axis=-1) + 8 * (units < 0)).astype(np.uint8)
    packed = quants[..., :8] | quants[..., 8:] << 4
    blocks = np.concatenate([scales, packed.reshape(*packed.shape[:2], 32)], axis=-1)
    return blocks.reshape(len(array), -1), np.array([factor], np.float32)


def _scale(code: int) -> float:
    """UE4M3."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 512 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def written(path: Path, tensors: dict[str, object]) -> Path:
    return write_model(path, kind="F32", tensors=tensors)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("m") / "plain.gguf", {UP: values()})


def with_factor(path: Path, factor: float | None = 1.0) -> Path:
    blocks, scale = in_nvfp4()
    tensors = {UP: (blocks, Type.NVFP4)}
    if factor is not None:
        tensors["blk.1.ffn_up.scale"] = scale * np.float32(factor)
    return written(path, tensors)


def test_blocks_and_their_factor_are_their_values(plain, tmp_path):
    path = with_factor(tmp_path / "m.gguf")
    for a, b in ((path, plain), (plain, path)):
        report = judge_weights(a, b)
        assert (report.verdict, report.findings, report.suspicions) == ("noise", (), ())
    assert judge_weights(path, path).verdict == "match"


@pytest.mark.parametrize(
    ("factor", "said"),
    [(None, "has no blk.1.ffn_up.scale: every value is multiplied by "), (2.0, "is multiplied by 1.99")],
)
def test_a_factor_that_is_missing_or_another_is_named(factor, said, plain, tmp_path):
    path = with_factor(tmp_path / "m.gguf", factor)
    (found,) = judge_weights(path, plain).findings
    assert (found.where, said in found.says) == (UP, True), found.says
    (found,) = judge_weights(plain, path).findings
    assert ("the other side " + said if factor is None else "is multiplied by 0.49") in found.says
    right = with_factor(tmp_path / "right.gguf")
    says = [judge_weights(*pair).findings[0].says for pair in ((right, path), (path, right))]
    assert [each.startswith("the other side has no") for each in says] == [factor is None, False]


def test_each_expert_has_a_factor_of_its_own(tmp_path):
    blocks, _ = in_nvfp4()
    path = written(tmp_path / "m.gguf", {"blk.1.x.weight": (blocks.reshape(4, 128, -1), Type.NVFP4),
                                         "blk.1.x.scale": np.array([1, 2, 4, 8], np.float32)})  # fmt: skip
    view = in_file(ModelFile(path), "blk.1.x.weight")
    plain = whole(InFile(view.weights, view.name)).reshape(4, -1)
    assert np.array_equal(whole(view).reshape(4, -1), plain * np.array([[1], [2], [4], [8]], np.float32))


def halves(array: np.ndarray, kind: str) -> tuple[np.ndarray, Type]:
    if kind == "F16":
        return array.astype(np.float16), Type.F16
    return gguf.quants.quantize(array, Type.BF16), Type.BF16


@pytest.mark.parametrize(("kind", "of"), [("BF16", "F16"), ("F16", "BF16")])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_16_bits_may_be_made_of_other_16_bits(kind, of, is_damaged, tmp_path):
    first = halves(values(), of)
    floats = first[0].astype(np.float32) if of == "F16" else gguf.quants.dequantize(*first)
    floats = floats * np.float32(1.01) if is_damaged else floats
    made, source = (written(tmp_path / name, {UP: some}) for name, some in
                    (("made.gguf", halves(floats, kind)), ("source.gguf", first)))  # fmt: skip
    for pair in ((made, source), (source, made)):
        assert (judge_weights(*pair).verdict == "wrong") == is_damaged


@pytest.mark.parametrize("architecture", TABLES)
def test_names_of_a_model_without_its_head_are_those_of_the_whole(architecture):
    """As embedding models have them, and what was saved of a part; no other name is changed."""
    table = TABLES[architecture]
    rules = [rule for of in (table.outside, table.layer) for some in of.values() for rule in some]
    for rule in rules:
        name = rule.source.replace("{i}", "11").replace("{x}", "3") + ("" if rule.exact else ".weight")
        first, _, rest = name.partition(".")
        assert _canonical(name, table) == name
        if rest != "weight":
            assert _canonical(rest, table) == name
            assert _canonical(f"language_model.{name}", table).endswith(rest)
            assert _canonical(f"extra.{rest}", table) == f"extra.{rest}"
            assert first in ("model", "transformer", "backbone")
