"""The benchmark's synthetic models are valid: llama.cpp runs them, and the engine agrees with it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import llamadiff
from llamadiff.engines.run_spec import Run
from tools.benchmarks import synthesize

TOKENS = (1, 20, 35, 7, 9, 11)


@pytest.mark.parametrize("mix", synthesize.MIXES)
def test_llama_cpp_and_the_engine_agree_on_a_synthetic_model(mix: str, tmp_path: Path) -> None:
    path = tmp_path / f"{mix}.gguf"
    synthesize.write(synthesize.SHAPES["mini"], mix, path)
    comparison = llamadiff.compare(path, Run(tokens=TOKENS, n_predict=2))
    assert comparison.verdict == "match"
    assert {row.tap: row.local.nmse for row in comparison.rows if not row.local.nmse <= 1e-11} == {}
    assert 0.1 < comparison.rows[-1].baseline.rms < 10


@pytest.mark.parametrize("kind", synthesize.LAYOUTS, ids=lambda kind: kind.name)
def test_random_blocks_have_the_spread_that_was_asked_for(kind: gguf.GGMLQuantizationType) -> None:
    matrix = synthesize.Matrix("blk.0.ffn_up.weight", 64, 1024, kind, seed=3)
    blocks = matrix._rows(synthesize.generator(3, matrix.name), 64)
    weights = gguf.quants.dequantize(blocks.view(np.uint8).reshape(matrix.byte_shape), kind)
    assert weights.std() == pytest.approx(1024**-0.5, rel=0.05)
    assert abs(weights.mean()) < 0.1 * 1024**-0.5


def test_one_seed_is_one_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.gguf", "b.gguf", "other.gguf")]
    for path, seed in zip(files, (5, 5, 6), strict=True):
        synthesize.write(synthesize.SHAPES["mini"], "Q4_K_M", path, seed)
    a, b, other = (path.read_bytes() for path in files)
    assert a == b != other


def test_types_are_those_of_llama_cpps_quantizer() -> None:
    tiny, qwen = synthesize.SHAPES["tinyllama"], synthesize.SHAPES["qwen2.5-0.5b"]

    def kind(shape: synthesize.Shape, name: str, n_in: int) -> str:
        return synthesize.matrix_type("Q4_K_M", name, n_in, shape).name

    more = [i for i in range(22) if kind(tiny, f"blk.{i}.ffn_down.weight", 5632) == "Q6_K"]
    assert more == [0, 1, 4, 7, 10, 13, 16, 19, 20, 21]
    assert kind(tiny, "token_embd.weight", 2048) == "Q4_K"
    assert kind(tiny, "output.weight", 2048) == "Q6_K"
    assert kind(qwen, "token_embd.weight", 896) == "Q8_0"
    assert kind(qwen, "blk.5.attn_q.weight", 896) == "Q5_0"
    assert kind(qwen, "blk.0.attn_v.weight", 896) == "Q8_0"
    assert kind(qwen, "blk.5.ffn_down.weight", 4864) == "Q6_K"
