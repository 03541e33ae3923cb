"""GLM-4.5's checkpoints as .gguf, heads and all, by gguf-py's names: what llama.cpp's converter does, for tests."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import gguf
import numpy as np
from ext.file.conversion.checkpoints import VOCAB
from models.gguf_file import finish
from safetensors.numpy import load_file

EXPERT = ".mlp.experts."
# config.json's keys by the file's
NUMBERS = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.value_length": "head_dim", "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts", "leading_dense_block_count": "first_k_dense_replace",
    "context_length": "max_position_embeddings",
}  # fmt: skip


def convert(folder: Path, path: Path, without: str = "") -> None:
    """Write a file; ``without``: its heads."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    heads = 0 if without else config["num_nextn_predict_layers"]
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, "glm4moe")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(VOCAB)
    for key, name in NUMBERS.items():
        writer.add_uint32(f"glm4moe.{key}", config[name])
    writer.add_uint32("glm4moe.block_count", layers + heads)
    writer.add_uint32("glm4moe.rope.dimension_count", config["head_dim"] // 2)
    if heads:
        writer.add_uint32("glm4moe.nextn_predict_layers", heads)
    writer.add_uint32("glm4moe.expert_gating_func", 2)
    writer.add_bool("glm4moe.expert_weights_norm", config["norm_topk_prob"])
    writer.add_float32("glm4moe.expert_weights_scale", config["routed_scaling_factor"])
    writer.add_float32("glm4moe.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    for name, x in tensors(folder, layers + heads).items():
        writer.add_tensor(name, np.ascontiguousarray(x))
    finish(writer)


def tensors(folder: Path, layers: int) -> dict[str, np.ndarray]:
    """By the file's names; the experts of a layer are one."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, layers)
    experts: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    out = dict[str, np.ndarray]()
    for source in sorted(folder.glob("model*.safetensors")):
        for name, x in load_file(source).items():
            if name.startswith("model.layers.") and int(name.split(".")[2]) >= layers:
                continue
            if EXPERT in name:
                layer, _, rest = name.partition(EXPERT)
                number, _, part = rest.partition(".")
                experts[f"{layer}{EXPERT}{part}"][int(number)] = x
            else:
                plain = name.replace("e_score_correction_bias", "e_score_correction.bias")
                out[names.get_name(plain, (".weight", ".bias"))] = x
    for name, each in experts.items():
        out[names.get_name(name, (".weight",))] = np.stack([each[number] for number in sorted(each)])
    return out
