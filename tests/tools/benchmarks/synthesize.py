"""Writes a GGUF model of a real model's shape with random weights: ``synthesize.py SHAPE TYPE OUT.gguf [--seed N]``.

The file costs what the real one costs to read, to dequantize and to run: shapes, mix of types and size of the
vocabulary are the real ones, and activations stay healthy through all layers. The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import TokenType
from numpy.typing import NDArray

Array = NDArray[Any]
BLOCK_BYTES = 1 << 24  # of one write: what bounds the memory


@dataclass(frozen=True)
class Shape:
    """Sizes of one model; ``long_context`` divides slow RoPE frequencies as Llama 3.1 and 3.2 do."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    architecture: str = "llama"
    rope_base: float = 10000.0
    rms_eps: float = 1e-5
    tied: bool = False
    biases: bool = False
    long_context: bool = False

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


SHAPES = {
    "mini": Shape(2, 256, 4, 2, 512, 300, 512),
    "tinyllama": Shape(22, 2048, 32, 4, 5632, 32000, 2048),
    "llama-3.2-1b": Shape(16, 2048, 32, 8, 8192, 128256, 131072, rope_base=500000.0, tied=True, long_context=True),
    "qwen2.5-0.5b": Shape(
        24, 896, 14, 2, 4864, 151936, 32768, "qwen2", rope_base=1000000.0, rms_eps=1e-6, tied=True, biases=True
    ),
    "llama-2-7b": Shape(32, 4096, 32, 32, 11008, 32000, 4096),
}
MIXES = {  # the command's TYPE -> the type of most matrices, the file type
    "F16": (Type.F16, gguf.LlamaFileType.MOSTLY_F16),
    "Q8_0": (Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "Q4_K_M": (Type.Q4_K, gguf.LlamaFileType.MOSTLY_Q4_K_M),
    "Q6_K": (Type.Q6_K, gguf.LlamaFileType.MOSTLY_Q6_K),
}

# -- which tensor has which type (llama.cpp, src/llama-quant.cpp) -------------------------------------------------

FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}


def matrix_type(mix: str, name: str, n_in: int, shape: Shape) -> Type:
    """The type that llama.cpp's quantizer gives a matrix with rows of ``n_in`` (llama_tensor_get_type_impl)."""
    kind = MIXES[mix][0]
    if mix == "Q4_K_M" and wants_more_bits(name, shape):
        kind = Type.Q6_K
    return kind if n_in % gguf.GGML_QUANT_SIZES[kind][0] == 0 else FALLBACK[kind]


def wants_more_bits(name: str, shape: Shape) -> bool:
    """Whether Q4_K_M gives a tensor Q6_K: the output matrix, and attn_v and ffn_down of the first eighth of the
    layers, the last, and every third between."""
    if name == ("token_embd.weight" if shape.tied else "output.weight"):
        return True
    if not name.endswith(("attn_v.weight", "ffn_down.weight")):
        return False
    layer, eighth = int(name.split(".")[1]), shape.n_layer // 8
    return layer < eighth or layer >= 7 * shape.n_layer // 8 or (layer - eighth) % 3 == 2


# -- random blocks ------------------------------------------------------------------------------------------------

LAYOUTS = {  # ggml-common.h
    Type.Q8_0: np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    Type.Q5_0: np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    Type.Q4_K: np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)]),
    Type.Q6_K: np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]),
}


def random_blocks(rng: np.random.Generator, kind: Type, count: int, scale: float) -> Array:
    """``count`` valid blocks: random quants under a scale of 0.75 to 1.25 times ``scale``. -> [count] of the layout."""
    layout = LAYOUTS[kind]
    raw = rng.bit_generator.random_raw(-(-count * layout.itemsize // 8))
    blocks = raw.view(np.uint8)[: count * layout.itemsize].view(layout)
    blocks["d"] = rng.uniform(0.75 * scale, 1.25 * scale, count)
    if kind == Type.Q8_0:
        np.maximum(blocks["qs"], -127, out=blocks["qs"])
    if kind == Type.Q5_0:
        blocks["d"] *= rng.choice(np.float16([-1, 1]), count)  # as in real files; the quants' mean is not 0
    if kind == Type.Q4_K:
        # Six-bit scales and minima, 32 to 63: their highest bits are bits 5 and 7 of the first eight bytes.
        blocks["scales"][:, :8] |= 0xA0
        blocks["dmin"] = blocks["d"] * np.float32(7.5)  # the mean of a quant, so the mean of a weight is 0
    return blocks


@cache
def spread(kind: Type) -> float:
    """The standard deviation of the weights of blocks with scale 1."""
    blocks = random_blocks(np.random.default_rng(0), kind, 4096, 1.0)
    return float(gguf.quants.dequantize(blocks.view(np.uint8).reshape(4096, -1), kind).std())


@cache
def half_levels() -> Array:
    """65536 float32 values, evenly spaced, of mean 0 and standard deviation 1."""
    return np.linspace(-np.sqrt(3), np.sqrt(3), 1 << 16, dtype=np.float32)


def random_halves(rng: np.random.Generator, count: int, deviation: float) -> Array:
    """``count`` float16 weights."""
    table = (half_levels() * np.float32(deviation)).astype(np.float16)
    return table[rng.bit_generator.random_raw(-(-count // 4)).view(np.uint16)[:count]]


# -- tensors ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A random matrix [out, in] with weights of standard deviation 1 / sqrt(in), made while it is written.

    ``GGUFWriter.write_tensor_data`` takes it for an array: it asks for ``nbytes`` and ``tofile`` only.
    """

    name: str
    n_out: int
    n_in: int
    kind: Type
    seed: int

    @property
    def row_bytes(self) -> int:
        per_block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return self.n_in // int(per_block) * int(size)

    @property
    def nbytes(self) -> int:
        return self.n_out * self.row_bytes

    @property
    def byte_shape(self) -> tuple[int, int]:
        return self.n_out, self.row_bytes

    def tofile(self, file: BinaryIO) -> None:
        rng = generator(self.seed, self.name)
        step = max(1, BLOCK_BYTES // self.row_bytes)
        for start in range(0, self.n_out, step):
            self._rows(rng, min(step, self.n_out - start)).tofile(file)

    def _rows(self, rng: np.random.Generator, rows: int) -> Array:
        deviation = self.n_in**-0.5
        if self.kind == Type.F16:
            return random_halves(rng, rows * self.n_in, deviation)
        count = rows * self.row_bytes // LAYOUTS[self.kind].itemsize
        return random_blocks(rng, self.kind, count, deviation / spread(self.kind))


def generator(seed: int, name: str) -> np.random.Generator:
    """Each tensor has its own numbers, whatever comes before it in the file."""
    return np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))


def matrix_sizes(shape: Shape) -> Iterator[tuple[str, int, int]]:
    """Name, rows and row width of every matrix, in the order of the file."""
    s, width_kv = shape, shape.n_head_kv * shape.head_dim
    yield "token_embd.weight", s.n_vocab, s.n_embd
    for i in range(s.n_layer):
        yield f"blk.{i}.attn_q.weight", s.n_embd, s.n_embd
        yield f"blk.{i}.attn_k.weight", width_kv, s.n_embd
        yield f"blk.{i}.attn_v.weight", width_kv, s.n_embd
        yield f"blk.{i}.attn_output.weight", s.n_embd, s.n_embd
        yield f"blk.{i}.ffn_gate.weight", s.n_ff, s.n_embd
        yield f"blk.{i}.ffn_up.weight", s.n_ff, s.n_embd
        yield f"blk.{i}.ffn_down.weight", s.n_embd, s.n_ff
    if not s.tied:
        yield "output.weight", s.n_vocab, s.n_embd


def vectors(shape: Shape, seed: int) -> Iterator[tuple[str, Array]]:
    """Norm weights near 1, small biases, and the frequency factors: float32."""
    norms = [f"blk.{i}.{part}_norm.weight" for i in range(shape.n_layer) for part in ("attn", "ffn")]
    for name in [*norms, "output_norm.weight"]:
        yield name, 1 + 0.1 * generator(seed, name).standard_normal(shape.n_embd, np.float32)
    if shape.biases:
        width_kv = shape.n_head_kv * shape.head_dim
        for i in range(shape.n_layer):
            for part, size in (("q", shape.n_embd), ("k", width_kv), ("v", width_kv)):
                name = f"blk.{i}.attn_{part}.bias"
                yield name, 0.1 * generator(seed, name).standard_normal(size, np.float32)
    if shape.long_context:
        yield "rope_freqs.weight", frequency_factors(shape)


def frequency_factors(shape: Shape, factor: float = 32.0, low: float = 1.0, high: float = 4.0) -> Array:
    """Llama 3.2's divisors of the RoPE frequencies: [head_dim / 2] (transformers, modeling_rope_utils.py).

    Frequencies that turn less than ``low`` times over the 8192 positions of the original context are divided by
    ``factor``, those that turn more than ``high`` times stay, and those between are blended.
    """
    frequency = shape.rope_base ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    turns = 8192 * frequency / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - keep) / factor + keep)).astype(np.float32)


# -- the file -----------------------------------------------------------------------------------------------------


def vocabulary(size: int) -> list[tuple[str, float, TokenType]]:
    """Text, score and type of every token of a SentencePiece-like tokenizer: ``w0``, ``w1``, ... are words."""
    special = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    raw_bytes = [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    parts = ["\u2581", "w", "\u2581w", *"0123456789"]
    words = [f"\u2581w{i}" for i in range(size - len(special) - len(raw_bytes) - len(parts))]
    pieces = [(piece, -float(rank), TokenType.NORMAL) for rank, piece in enumerate([*parts, *words])]
    return [(text, 0.0, kind) for text, kind in special + raw_bytes] + pieces


def add_metadata(writer: gguf.GGUFWriter, shape: Shape, mix: str) -> None:
    """Hyper-parameters and tokenizer."""
    writer.add_name("synthetic")
    writer.add_file_type(MIXES[mix][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.n_vocab)
    texts, scores, kinds = zip(*vocabulary(shape.n_vocab), strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


def write(shape: Shape, mix: str, path: Path, seed: int = 0) -> None:
    """Write the model; the file appears under its name when it is complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    small = list(vectors(shape, seed))
    large = [
        Matrix(name, n_out, n_in, matrix_type(mix, name, n_in, shape), seed)
        for name, n_out, n_in in matrix_sizes(shape)
    ]
    writer = gguf.GGUFWriter(part, shape.architecture)
    try:
        add_metadata(writer, shape, mix)
        for name, values in small:
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        for matrix in large:
            writer.add_tensor_info(matrix.name, matrix.byte_shape, np.dtype(np.uint8), matrix.nbytes, matrix.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in [*(values for _, values in small), *large]:
            writer.write_tensor_data(tensor)
        writer.close()
        part.replace(path)
    finally:
        writer.close()
        part.unlink(missing_ok=True)


def main() -> None:
    """Parse, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("type", choices=MIXES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(SHAPES[arguments.shape], arguments.type, arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
