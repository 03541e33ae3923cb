"""Strangers in C, JavaScript and Rust: a model is written flat for them, and what they dump of a run is read back.

A model: eleven 32-bit whole numbers (layers, embd, heads, KV heads, dim, ff, vocab, whether RoPE is in pairs, whether
Q, K and V have biases, whether their heads have norms, tokens), epsilon and RoPE's base in float32, the token ids, then
the tensors in the order of ``_names``; float32, or matrices as the file's own blocks. A dump: for every tap a line with
its name and shape, and its values in float32.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
from optional import needs
from waiting import HANG

from proof.strangers.model import File

Array = np.ndarray
SOURCES = Path(__file__).parent


@dataclass(frozen=True)
class Program:
    """A stranger: models that it can run, how matrices are given to it, and its mistakes.

    ``elsewhere`` are taps that come out otherwise than llama.cpp has them. ``mistakes``: a switch of the compiler, or
    (``asked``) an argument -> the tap that it falsifies. ``language`` is its source's ending, and its folder.
    """

    name: str
    models: tuple[str, ...]
    kinds: tuple[str, ...]
    raw: bool
    elsewhere: tuple[str, ...]
    mistakes: dict[str, str]
    language: str = "c"
    asked: bool = False

    @property
    def mark(self) -> pytest.MarkDecorator:
        """What it needs."""
        return needs({"c": "cc", "js": "node", "rs": "rustc"}[self.language])

    @property
    def source(self) -> Path:
        return SOURCES / {"rs": "rust"}.get(self.language, self.language) / f"{self.name}.{self.language}"


PROGRAMS = (
    Program("kahan", ("llama", "qwen2", "qwen3"), ("F32", "F16", "Q4_0"), False, (),
            {"BUG_RESCALE": "kqv_out", "BUG_POSITION": "Qcur_rope", "BUG_LAST_ROW": "ffn_out"}),
    Program("int8", ("llama", "qwen2"), ("Q8_0",), True, (),
            {"BUG_SCALE": "Qcur_proj", "BUG_UNSIGNED": "Qcur_proj", "BUG_MASK": "kq_soft_max"}),
    Program("halves", ("llama", "qwen2", "qwen3"), ("F32", "BF16", "Q8_0"), False,
            ("Qcur_proj", "Kcur_proj", "Qcur_rope", "Kcur_rope", "kq"),
            {"BUG_EPS": "attn_norm", "BUG_GROUP": "kq", "BUG_SIGN": "Qcur_rope"}),
    Program("tiles", ("llama", "qwen2", "qwen3"), ("F32", "F16"), False, (),
            {"memcpy": "embd", "unroll": "attn_norm", "sizeof": "Vcur_proj", "alias": "Qcur_rope", "lane": "kq",
             "carry": "kq_soft_max", "stride": "kqv_out", "static": "ffn_swiglu", "threads": "ffn_out",
             "overlap": "l_out"}, asked=True),
    Program("lanes", ("llama", "qwen2", "qwen3"), ("F32", "F16"), False, (),
            {"byte-offset": "embd", "wrong-stride": "attn_norm", "end-inclusive": "Kcur_proj",
             "sorted-as-text": "Qcur_rope", "shared-sums": "kq", "clamped-bytes": "kq_soft_max",
             "int16-wraps": "ffn_up", "truncated-index": "ffn_swiglu", "negative-modulo": "ffn_out",
             "view-not-copy": "result_output"},
            "js", asked=True),
    Program("rows", ("llama", "qwen2", "qwen3"), ("F32", "F16"), False, (),
            {"skip-after-step": "ffn_norm", "chunks-exact": "Vcur_proj", "zip-shorter": "Qcur_rope",
             "reversed-keys": "kq", "fold-start": "kq_soft_max", "exclusive-range": "kqv_out", "split-at": "attn_out",
             "skip-one": "ffn_inp", "saturating-cast": "ffn_swiglu", "not-cleared": "ffn_out"}, "rs", asked=True),
)  # fmt: skip


def run(program: Program, switch: str, file: File, tokens: Sequence[int], folder: Path) -> dict[str, Array]:
    """What a program records of a run of these tokens, with one mistake or none."""
    model, dump = folder / "model.flat", folder / "taps.dump"
    model.write_bytes(b"".join(flat(file, tokens, program.raw)))
    asked = [switch] if switch and program.asked else []
    subprocess.run([*_command(program, folder, switch), model, dump, *asked], check=True, timeout=HANG)
    return dict(dumped(dump.read_bytes()))


def _command(program: Program, folder: Path, switch: str) -> list[str]:
    """What starts a program, which is compiled for it."""
    if program.language == "js":
        return ["node", str(program.source)]
    target = folder / (program.name if program.asked else f"{program.name}{switch}")
    if not target.exists():
        rust = ["rustc", "-O", "--edition", "2021", "-D", "warnings"]
        c = ["cc", "-std=c99", "-O2", "-Wall", "-Wextra", "-Werror"]
        switches = [f"-D{switch}"] if switch and not program.asked else []
        words = [*(rust if program.language == "rs" else c), *switches, str(program.source), "-o", str(target)]
        subprocess.run([*words, *([] if program.language == "rs" else ["-lm"])], check=True)
    return [str(target)]


def flat(file: File, tokens: Sequence[int], raw: bool) -> Iterator[bytes]:
    """A model as the programs read it; ``raw``: matrices as the file has them."""
    h = file.hyper
    width = file["blk.0.ffn_gate.weight"].shape[0]
    flags = h.pairs, "blk.0.attn_q.bias" in file, "blk.0.attn_q_norm.weight" in file
    sizes = h.layers, h.embd, h.heads, h.kv_heads, h.dim, width, len(file["token_embd.weight"]), *flags, len(tokens)
    yield np.array(sizes, "<i4").tobytes()
    yield np.array([h.eps, h.base], "<f4").tobytes()
    yield np.array(tokens, "<i4").tobytes()
    blocks = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file.path).tensors} if raw else {}
    for name in _names(h.layers):
        if name in file:
            matrix = raw and file[name].ndim == 2
            yield np.ascontiguousarray(blocks[name] if matrix else file[name]).tobytes()


def _names(layers: int) -> Iterator[str]:
    stems = (
        "attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_q.bias", "attn_k.bias",
        "attn_v.bias", "attn_q_norm.weight", "attn_k_norm.weight", "attn_output.weight", "ffn_norm.weight",
        "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight",
    )  # fmt: skip
    yield "token_embd.weight"
    yield from (f"blk.{layer}.{stem}" for layer in range(layers) for stem in stems)
    yield from ("output_norm.weight", "output.weight")


def dumped(data: bytes) -> Iterator[tuple[str, Array]]:
    """Taps of a dump, by name."""
    start = 0
    while start < len(data):
        end = data.index(b"\n", start)
        name, *shape = data[start:end].decode().split()
        sizes = [int(size) for size in shape]
        count = int(np.prod(sizes))
        yield name, np.frombuffer(data, "<f4", count, end + 1).reshape(sizes)
        start = end + 1 + 4 * count
