"""Tiny random checkpoints that see, as transformers saves them, and the two files that llama.cpp runs of Qwen2-VL's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from models.gguf_file import write_gguf

WIDE, HEADS, LAYERS, PATCH = 64, 4, 2, 14
GEMMA = ("<bos>", "<eos>", "<pad>", "<image_soft_token>", "<start_of_image>", "<end_of_image>")
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>",
        "<|video_pad|>")  # fmt: skip
TEXT = {"hidden_size": WIDE, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": 2, "vocab_size": 264, "max_position_embeddings": 512}  # fmt: skip


def gemma3(folder: Path) -> Path:
    """Text embeddings are scaled, and a picture's rows see each other both ways."""
    import transformers

    tokenizer = _tokenizer(GEMMA, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
                           extra_special_tokens={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>",
                                                 "eoi_token": "<end_of_image>"})  # fmt: skip
    ids = dict(zip(("image_token_index", "boi_token_index", "eoi_token_index"), range(260, 263), strict=True))
    config = transformers.Gemma3Config(
        text_config={**TEXT, "head_dim": 16, "sliding_window": 32}, mm_tokens_per_image=4, **ids,
        vision_config={"hidden_size": WIDE, "intermediate_size": 96, "num_hidden_layers": LAYERS, "image_size": 56,
                       "num_attention_heads": HEADS, "patch_size": PATCH},
    )  # fmt: skip
    _saved(transformers.Gemma3ForConditionalGeneration(config), folder)
    image = transformers.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    transformers.Gemma3Processor(image, tokenizer, image_seq_length=4).save_pretrained(folder)
    return folder


def qwen2vl(folder: Path) -> Path:
    """Positions of three sections."""
    import transformers

    tokenizer = _tokenizer(QWEN, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        vision_config={"depth": LAYERS, "embed_dim": WIDE, "hidden_size": WIDE, "num_heads": HEADS, "mlp_ratio": 2,
                       "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2},
        **dict(zip(names, range(260, 264), strict=True)),
    )  # fmt: skip
    _saved(transformers.Qwen2VLForConditionalGeneration(config), folder)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    image = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": 2,
             "temporal_patch_size": 2, "min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 64,
             "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(image), encoding="utf-8")
    return folder


def _tokenizer(special: tuple[str, ...], **more: Any) -> Any:
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab={**vocabulary, "Hi": 256}, merges=[("H", "i")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **more)


def _saved(model: Any, folder: Path) -> None:
    import torch

    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, values in model.named_parameters():
            middle = float(values.ndim < 2 and name.endswith("weight") and "soft" not in name)
            scale = 0.3 if values.ndim < 2 else values[0].numel() ** -0.5
            values.copy_(middle + scale * torch.randn(values.shape, generator=random))
    model.save_pretrained(folder)


def text_file(folder: Path, path: Path) -> Path:
    """The language model of Qwen2-VL's checkpoint."""
    tensors = _tensors(folder)
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    parts = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
             **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
             **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}}  # fmt: skip
    for i in range(LAYERS):
        names |= {f"model.layers.{i}.{a}.{end}": f"blk.{i}.{b}.{end}" for a, b in parts.items()
                  for end in ("weight", "bias")}  # fmt: skip
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    words = tokenizer["model"]["vocab"] | {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    tokens = sorted(words, key=words.get)
    sizes = {"block_count": LAYERS, "context_length": 512, "embedding_length": WIDE, "feed_forward_length": 96,
             "attention.head_count": HEADS, "attention.head_count_kv": 2}  # fmt: skip
    fields = {
        **{f"qwen2vl.{key}": value for key, value in sizes.items()},
        "qwen2vl.attention.layer_norm_rms_epsilon": _float(1e-6), "qwen2vl.rope.freq_base": _float(10000.0),
        "qwen2vl.rope.dimension_sections": [2, 3, 3, 0], "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["H i"], "tokenizer.ggml.eos_token_id": 259,
        "tokenizer.ggml.token_type": [3 if word in QWEN else 1 for word in tokens],
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }  # fmt: skip
    return write_gguf(path, fields, {own: tensors[name] for name, own in names.items() if name in tensors}, "qwen2vl")


def eye_file(folder: Path, path: Path) -> Path:
    """Its encoder and projector."""
    found, tensors = {}, _tensors(folder)
    parts = {"attn.proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down", "norm1": "ln1", "norm2": "ln2"}
    names = {"merger.ln_q": "v.post_ln", "merger.mlp.0": "mm.0", "merger.mlp.2": "mm.2"}
    for i in range(LAYERS):
        names |= {f"blocks.{i}.{a}": f"v.blk.{i}.{b}" for a, b in parts.items()}
    for end in ("weight", "bias"):
        found |= {f"{own}.{end}": tensors[f"visual.{name}.{end}"] for name, own in names.items()}
        for i in range(LAYERS):
            cut = np.split(tensors[f"visual.blocks.{i}.attn.qkv.{end}"], 3)
            found |= {f"v.blk.{i}.attn_{x}.{end}": part for x, part in zip("qkv", cut, strict=True)}
    kernel = tensors["visual.patch_embed.proj.weight"]
    found |= {"v.patch_embd.weight": kernel[:, :, 0], "v.patch_embd.weight.1": kernel[:, :, 1]}
    sizes = {"projection_dim": WIDE, "image_size": 560, "patch_size": PATCH, "embedding_length": WIDE,
             "feed_forward_length": 2 * WIDE, "block_count": LAYERS, "attention.head_count": HEADS}  # fmt: skip
    fields = {
        "general.type": "mmproj", "clip.has_vision_encoder": True, "clip.projector_type": "qwen2vl_merger",
        "clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3,
        "clip.vision.attention.layer_norm_epsilon": _float(1e-6),
        **{f"clip.vision.{key}": value for key, value in sizes.items()},
    }  # fmt: skip
    return write_gguf(path, fields, {name: np.ascontiguousarray(values) for name, values in found.items()}, "clip")


def _float(value: float) -> Any:
    return value, gguf.GGUFValueType.FLOAT32, None


def _tensors(folder: Path) -> Any:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")
