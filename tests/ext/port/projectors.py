"""Small random checkpoints of models that see or hear, of transformers' own classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from models.gguf_file import finish, write_gguf

TEXT = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
EYE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 14,
       "image_size": 56, "vision_use_head": False}  # fmt: skip
MEAN = {"image_mean": [0.48, 0.45, 0.4], "image_std": [0.27, 0.26, 0.28]}
WHISPER = {
    "d_model": 24, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 40, "num_mel_bins": 80,
    "max_source_positions": 1500,
}  # fmt: skip


@dataclass(frozen=True)
class Sense:
    """What sees or hears: transformers' name of the model, its parts' configs, what config.json has beside these, and
    what preprocessor_config.json has.
    """

    name: str
    parts: dict[str, dict[str, Any]]
    more: dict[str, Any]
    fed: dict[str, Any]
    hears: bool = False


def _qwen(**more: Any) -> dict[str, Any]:
    return {"depth": 3, "hidden_size": 64, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "in_channels": 3, **more}  # fmt: skip


EPSILON = "clip.vision.attention.layer_norm_epsilon"
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
SENSES = {
    "gemma3": Sense("Gemma3ForConditionalGeneration", {"text": {**TEXT, "head_dim": 16}, "vision": EYE},
                    {"mm_tokens_per_image": 4}, {"image_seq_length": 4}),
    "smolvlm": Sense("SmolVLMForConditionalGeneration", {"text": TEXT, "vision": EYE}, {"scale_factor": 2},
                     {"size": {"longest_edge": 56}}),
    "idefics3": Sense("Idefics3ForConditionalGeneration", {"text": TEXT, "vision": EYE}, {"scale_factor": 2},
                      {"size": {"longest_edge": 56}}),
    "qwen2vl": Sense("Qwen2VLForConditionalGeneration",
                     {"text": {**TEXT, "rope_scaling": ROPE}, "vision": _qwen(embed_dim=48, mlp_ratio=2)}, {}, {}),
    "qwen25vl": Sense("Qwen2_5_VLForConditionalGeneration",
                      {"text": {**TEXT, "rope_scaling": ROPE},
                       "vision": _qwen(hidden_size=48, intermediate_size=80, out_hidden_size=64, window_size=112,
                                       fullatt_block_indexes=[1], num_layers=3)}, {}, {}),
    "qwen3vl": Sense("Qwen3VLForConditionalGeneration",
                     {"text": {**TEXT, "head_dim": 16, "rope_scaling": {**ROPE, "mrope_interleaved": True}},
                      "vision": _qwen(hidden_size=48, intermediate_size=80, out_hidden_size=64, patch_size=16,
                                      num_position_embeddings=64, deepstack_visual_indexes=[0, 1])}, {}, {}),
    "pixtral": Sense("LlavaForConditionalGeneration",
                     {"text": {**TEXT, "model_type": "mistral"},
                      "vision": {**EYE, "model_type": "pixtral", "head_dim": 12, "hidden_act": "silu"}},
                     {"vision_feature_layer": -1, "vision_feature_select_strategy": "full",
                      "projector_hidden_act": "gelu"}, {}),
    "llava": Sense("LlavaForConditionalGeneration",
                   {"text": {**TEXT, "model_type": "llama"},
                    "vision": {**EYE, "num_hidden_layers": 4, "model_type": "clip_vision_model", "projection_dim": 32}},
                   {"vision_feature_layer": -2}, {}),
    "internvl": Sense("InternVLForConditionalGeneration",
                      {"text": {**TEXT, "model_type": "qwen2"},
                       "vision": {**EYE, "num_hidden_layers": 4, "image_size": [56, 56], "patch_size": [14, 14],
                                  "layer_scale_init_value": 0.5}},
                      {"downsample_ratio": 0.5}, {}),
    "llama4": Sense("Llama4ForConditionalGeneration",
                    {"text": {**TEXT, "head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96},
                     "vision": {**EYE, "intermediate_size": 192, "vision_output_dim": 40, "projector_input_dim": 40,
                                "projector_output_dim": 40, "pixel_shuffle_ratio": 0.5}}, {}, {}),
    "lfm2vl": Sense("Lfm2VlForConditionalGeneration",
                    {"text": {**TEXT, "full_attn_idxs": [0], "layer_types": ["full_attention"]},
                     "vision": {**{key: value for key, value in EYE.items() if key != "image_size"}, "patch_size": 16,
                                "num_patches": 16}},
                    {"downsample_factor": 2, "projector_hidden_size": 96}, {"encoder_patch_size": 16}),
    "voxtral": Sense("VoxtralForConditionalGeneration",
                     {"text": {**TEXT, "head_dim": 16},
                      "audio": {"hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 3,
                                "num_attention_heads": 2, "num_mel_bins": 128, "max_source_positions": 1500,
                                "head_dim": 12}}, {"projector_hidden_act": "gelu"}, {}, True),
    "qwen2audio": Sense("Qwen2AudioForConditionalGeneration",
                        {"text": {**TEXT, "model_type": "qwen2"}, "audio": {**WHISPER, "num_mel_bins": 128}}, {}, {},
                        True),
}  # fmt: skip


def make(folder: Path, name: str, **changes: Any) -> Path:
    """Write a checkpoint; ``changes``: of config.json, for its parts as ``vision_NAME=...``."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    sense = SENSES[name]
    kind = getattr(transformers, sense.name)
    parts = {f"{part}_config": dict(options) for part, options in sense.parts.items()}
    config = kind.config_class(**parts, **sense.more)
    torch.manual_seed(len(name) + 5)
    model = kind(config)
    with torch.no_grad():
        for x in model.parameters():
            if x.numel():
                x.add_((0.3 if x.ndim == 1 else 0.05) * torch.randn_like(x))
    model.save_pretrained(folder)
    _as_published(folder / "model.safetensors", name)
    about = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [sense.name]}
    if name == "internvl":
        about["vision_config"]["architectures"] = ["InternVisionModel"]
    if name == "pixtral":
        known = {"added_tokens_decoder": {"12": {"content": "[IMG_BREAK]"}}}
        (folder / "tokenizer_config.json").write_text(json.dumps(known), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps({**MEAN, **sense.fed}), encoding="utf-8")
    return folder


def _as_published(path: Path, name: str) -> None:
    """Tensors have the names that checkpoints and converters have for them: transformers 5 writes others."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    towers = ("embeddings", "encoder", "post_layernorm", "pre_layrnorm")
    is_clip = any("post_layernorm" in other for other in tensors)

    def named(own: str) -> str:
        tower = next((tower for tower in towers if f"vision_tower.{tower}" in own), None)
        if name == "internvl":
            return f"model.{own}"
        return own if tower is None or not is_clip else own.replace("vision_tower.", "vision_tower.vision_model.")

    made = {named(own): x for own, x in tensors.items()}
    if name == "pixtral":
        made["embed_tokens.weight"] = next(
            x for own, x in tensors.items() if own.endswith("embed_tokens.weight")
        ).clone()
    save_file(made, path, {"format": "pt"})


def write_llava(checkpoint: Path, path: Path) -> Path:
    """The file of a LLaVA with a CLIP, with the names that llama.cpp's older converter gave its tensors."""
    from safetensors.numpy import load_file

    about = json.loads((checkpoint / "config.json").read_text("utf-8"))
    eye, tensors = about["vision_config"], load_file(checkpoint / "model.safetensors")
    layers = eye["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    sizes = {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "image_size": "image_size",
             "attention.head_count": "num_attention_heads", "patch_size": "patch_size"}  # fmt: skip
    for key, value in {**{key: eye[name] for key, name in sizes.items()}, "block_count": layers,
                       "projection_dim": about["text_config"]["hidden_size"]}.items():  # fmt: skip
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", eye["layer_norm_eps"])
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", MEAN[key])
    whole = {"embeddings.class_embedding": "v.class_embd", "embeddings.patch_embedding.weight": "v.patch_embd.weight",
             "embeddings.position_embedding.weight": "v.position_embd.weight"}  # fmt: skip
    whole |= {f"pre_layrnorm.{end}": f"v.pre_ln.{end}" for end in ("weight", "bias")}
    words = {"layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
    words |= {f"self_attn.{theirs}": f"attn_{ours}" for theirs, ours in zip(
        ("q_proj", "k_proj", "v_proj", "out_proj"), ("q", "k", "v", "out"), strict=True)}  # fmt: skip
    whole |= {f"encoder.layers.{layer}.{theirs}.{end}": f"v.blk.{layer}.{ours}.{end}" for layer in range(layers)
              for theirs, ours in words.items() for end in ("weight", "bias")}  # fmt: skip
    for name, x in tensors.items():
        own = whole.get(name.replace("vision_model.", "").removeprefix("vision_tower."))
        number = {"linear_1": 0, "linear_2": 2}.get(name.split(".")[-2])
        own = f"mm.{number}.{name.rpartition('.')[2]}" if "multi_modal_projector" in name else own
        if own is not None:
            writer.add_tensor(own, x)
    finish(writer)
    return path


def write_smolvlm(
    checkpoint: Path, path: Path, changed: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
) -> Path:
    """The file of a SmolVLM, as llama.cpp's converter makes it, without it; ``changed`` puts a mistake into it."""
    from safetensors.numpy import load_file

    about = json.loads((checkpoint / "config.json").read_text("utf-8"))
    eye = about["vision_config"]
    fields: dict[str, Any] = {
        "clip.has_vision_encoder": True, "clip.projector_type": "idefics3", "clip.use_gelu": True,
        "clip.vision.projection_dim": about["text_config"]["hidden_size"], "clip.vision.image_size": eye["image_size"],
        "clip.vision.patch_size": eye["patch_size"], "clip.vision.embedding_length": eye["hidden_size"],
        "clip.vision.feed_forward_length": eye["intermediate_size"],
        "clip.vision.block_count": eye["num_hidden_layers"],
        "clip.vision.attention.head_count": eye["num_attention_heads"],
        EPSILON: (eye["layer_norm_eps"], gguf.GGUFValueType.FLOAT32, None),
        "clip.vision.projector.scale_factor": about["scale_factor"], "clip.vision.image_mean": MEAN["image_mean"],
        "clip.vision.image_std": MEAN["image_std"],
    }  # fmt: skip
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, eye["num_hidden_layers"])
    stored = load_file(checkpoint / "model.safetensors")
    seen = {name: x for name, x in stored.items() if "vision_model" in name or "connector" in name}
    found = {names.get_name(name, (".weight", ".bias")): x for name, x in seen.items()}
    tensors: dict[str, Any] = {str(name): (x, None) for name, x in found.items()}
    if changed is not None:
        changed(fields, tensors)
    return write_gguf(path, fields, tensors, arch="clip")
