"""GGUF files that hold no model, as llama.cpp's tools write them: adapters, projectors, vocabularies and others."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from llamaref import Weights

from llamadiff.engines.run_spec import Run
from llamadiff.llamacpp.request import Settings
from models.gguf_file import finish

RANK, ALPHA = 4, 8.0
ADAPTED = ("attn_q", "attn_v", "ffn_down")


def write_adapter(
    path: Path, model: Path, stems: tuple[str, ...] = ADAPTED, rank: int = RANK, alpha: float = ALPHA, seed: int = 7,
    architecture: str = "", size: float = 0.004, kind: str = "F32", **fields: str,
) -> Path:  # fmt: skip
    """A LoRA adapter of some of a model's matrices (convert_lora_to_gguf.py)."""
    weights, rng = Weights(model), np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture or weights.fields["general.architecture"])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for key, value in fields.items():
        writer.add_string(key, value)
    for name in weights:
        if name.split(".")[-2] in stems and name.endswith(".weight"):
            *experts, rows, width = weights.shape(name)
            a, b = _normal(rng, *experts, rank, width), size * _normal(rng, *experts, rows, rank)
            if name == "token_embd.weight":  # whose rows are looked up
                a, b = _normal(rng, rows, rank), size * _normal(rng, width, rank)
            for end, values in ((".lora_a", a), (".lora_b", b)):
                own = gguf.GGMLQuantizationType["F32" if values.shape[-1] % 32 and kind == "Q8_0" else kind]
                writer.add_tensor(name + end, gguf.quantize(values, own), raw_dtype=own)
    finish(writer)
    return path


def with_adapter(model: Path, folder: Path) -> Run:
    """A run of the model with an adapter of two matrices of each layer, as large as they are."""
    adapter = write_adapter(folder / "adapter.gguf", model, ("attn_q", "ffn_down"), rank=5, size=0.02)
    return Run(settings=Settings(lora=str(adapter)))


def merged(adapter: Path, model: Path, scale: float = 1.0) -> dict[str, np.ndarray]:
    """What the adapter makes of the model's matrices: W + scale alpha / rank B A, by their names."""
    low, weights = Weights(adapter), Weights(model)
    made = {}
    for name in low:
        if name.endswith(".lora_a"):
            of = name.removesuffix(".lora_a")
            a, b = low.whole(name), low.whole(f"{of}.lora_b")
            made[of] = weights.whole(of) + np.float32(scale * low.fields["adapter.lora.alpha"] / len(a)) * (b @ a)
    return made


def write_projector(path: Path, width: int = 64) -> Path:
    """A vision encoder and its projector, as --mmproj takes it."""
    rng, writer = np.random.default_rng(3), gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    for key, value in {"embedding_length": width, "block_count": 1, "image_size": 32, "patch_size": 8}.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_tensor("v.patch_embd.weight", _normal(rng, width, 3, 8, 8))
    for stem in ("attn_q", "attn_k", "attn_v", "attn_out"):
        writer.add_tensor(f"v.blk.0.{stem}.weight", _normal(rng, width, width))
    writer.add_tensor("mm.0.weight", _normal(rng, 2 * width, width))
    finish(writer)
    return path


def write_vocabulary(path: Path, architecture: str = "llama") -> Path:
    """A tokenizer without a model (convert_hf_to_gguf.py --vocab-only)."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("vocab")
    writer.add_uint32(f"{architecture}.context_length", 64)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581once"])
    writer.add_token_scores([0.0] * 260)
    writer.add_token_types([2, 3, 3, *[6] * 256, 1])
    finish(writer)
    return path


def write_importance(path: Path) -> Path:
    """What llama-imatrix writes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    writer.add_tensor("blk.0.attn_q.weight.in_sum2", np.ones((1, 64), np.float32))
    writer.add_tensor("blk.0.attn_q.weight.counts", np.ones((1, 1), np.float32))
    finish(writer)
    return path


def write_control_vector(path: Path) -> Path:
    """What llama-cvector-generator writes."""
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", 2)
    writer.add_tensor("direction.1", np.ones(64, np.float32))
    finish(writer)
    return path


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)
