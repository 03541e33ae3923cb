"""Checkpoints that see or hear, tiny and random, and the projector files that llama.cpp's converters make of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from models.gguf_file import write_gguf

WIDE, HEADS, LAYERS, FF, PATCH = 64, 4, 3, 128, 8
HEAD = WIDE // HEADS
Values = dict[str, Any]
Q8_0 = gguf.GGMLQuantizationType.Q8_0


@dataclass
class Pair:
    """A checkpoint's tensors, the file's, config.json and the processor's, and the file's keys."""

    checkpoint: Values = field(default_factory=dict)
    tensors: Values = field(default_factory=dict)
    config: Values = field(default_factory=dict)
    processor: Values = field(default_factory=dict)
    keys: Values = field(default_factory=dict)

    def written(self, folder: Path, kind: str = "F32") -> tuple[Path, Path]:
        """The file, and the checkpoint's folder."""
        from safetensors.numpy import save_file

        path = folder / "ck"
        path.mkdir(exist_ok=True)
        text = {"language_model.model.embed_tokens.weight": np.ones((8, WIDE), np.float32)}
        save_file({**self.checkpoint, **text}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        (path / "preprocessor_config.json").write_text(json.dumps(self.processor), encoding="utf-8")
        stored = {name: _stored(values, kind) for name, values in self.tensors.items()}
        keys = {name: _typed(value) for name, value in self.keys.items()}
        return write_gguf(folder / "mmproj.gguf", {"general.type": "mmproj", **keys}, stored, "clip"), path


def _stored(values: Any, kind: str) -> Any:
    values = np.ascontiguousarray(values)
    if kind == "F32" or values.ndim < 2:
        return values
    if kind == "F16":
        return values.astype(np.float16)
    quantized = gguf.GGMLQuantizationType[kind]
    if values.shape[-1] % 32 and kind != "BF16":
        return values.astype(np.float16)
    return gguf.quants.quantize(values, quantized), quantized


def _typed(value: Any) -> Any:
    return (value, gguf.GGUFValueType.FLOAT32, None) if isinstance(value, float) else value


def gemma3() -> Pair:
    """SigLIP; one is added to the projector's norm."""
    pair = Pair(config={
        "model_type": "gemma3", "mm_tokens_per_image": 4, "text_config": {"hidden_size": WIDE},
        "vision_config": {**_eye(), "model_type": "siglip_vision_model", "image_size": 32},
    }, processor=_mean(0.5), keys=_keys("vision", "gemma3", image_size=32, patch_size=PATCH))  # fmt: skip
    pair.keys |= {"clip.use_gelu": True, "clip.vision.projector.scale_factor": 2}
    _siglip(pair, "vision_tower.vision_model.")
    _both(pair, "mm.input_projection.weight", "multi_modal_projector.mm_input_projection_weight", (WIDE, WIDE))
    _both(pair, "mm.soft_emb_norm.weight", "multi_modal_projector.mm_soft_emb_norm.weight", (WIDE,), lambda x: x + 1)
    pair.checkpoint["vision_tower.vision_model.head.probe"] = _values("probe", (1, 1, WIDE))
    return pair


def qwen2vl() -> Pair:
    """Q, K and V in one; a kernel of two frames; a merger that has its own names."""
    eye = {"embed_dim": WIDE, "hidden_size": WIDE, "num_heads": HEADS, "depth": LAYERS, "patch_size": PATCH}
    pair = Pair(config={
        "model_type": "qwen2_vl", "hidden_size": WIDE, "vision_config": {**eye, "spatial_merge_size": 2},
    }, processor=_mean(0.4), keys=_keys("vision", "qwen2vl_merger", image_size=560, patch_size=PATCH))  # fmt: skip
    kernel = _values("kernel", (WIDE, 3, 2, PATCH, PATCH))
    pair.checkpoint["visual.patch_embed.proj.weight"] = kernel
    pair.tensors |= {"v.patch_embd.weight": kernel[:, :, 0], "v.patch_embd.weight.1": kernel[:, :, 1]}
    for i in range(LAYERS):
        for end, shape in ((".weight", (3 * WIDE, WIDE)), (".bias", (3 * WIDE,))):
            fused = _values(f"qkv{i}{end}", shape)
            pair.checkpoint[f"visual.blocks.{i}.attn.qkv{end}"] = fused
            parts = zip("qkv", np.split(fused, 3), strict=True)
            pair.tensors |= {f"v.blk.{i}.attn_{letter}{end}": part for letter, part in parts}
        names = {"attn_out": "attn.proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2", "ln1": "norm1", "ln2": "norm2"}
        _layer(pair, f"v.blk.{i}.", f"visual.blocks.{i}.", names)
    _linear(pair, "v.post_ln", "visual.merger.ln_q", (WIDE,))
    _linear(pair, "mm.0", "visual.merger.mlp.0", (4 * WIDE, 4 * WIDE))
    _linear(pair, "mm.2", "visual.merger.mlp.2", (WIDE, 4 * WIDE))
    return pair


def qwen3vl() -> Pair:
    """Of which gguf-py has no name for the merger: mm.0, mm.2, and those of deepstack, are found by values."""
    pair = qwen2vl()
    pair.config |= {"model_type": "qwen3_vl", "text_config": {"hidden_size": WIDE}}
    pair.config["vision_config"] |= {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 16}
    pair.keys |= {"clip.projector_type": "qwen3vl_merger", "clip.vision.image_size": 4 * PATCH, "clip.use_gelu": True}
    for name in [name for name in pair.checkpoint if ".merger." in name]:
        values = pair.checkpoint.pop(name)
        for old, new in (("ln_q", "norm"), ("mlp.0", "linear_fc1"), ("mlp.2", "linear_fc2")):
            if old in name:
                pair.checkpoint[name.replace(old, new)] = values
    for number, layer in enumerate((0, 2)):
        theirs = f"visual.deepstack_merger_list.{number}."
        _linear(pair, f"v.deepstack.{layer}.norm", f"{theirs}norm", (4 * WIDE,))
        _linear(pair, f"v.deepstack.{layer}.fc1", f"{theirs}linear_fc1", (4 * WIDE, 4 * WIDE))
        _linear(pair, f"v.deepstack.{layer}.fc2", f"{theirs}linear_fc2", (WIDE, 4 * WIDE))
    return pair


def pixtral() -> Pair:
    """Q and K permuted by heads, no biases, a row of the language model's embedding."""
    pair = Pair(config={
        "model_type": "llava", "text_config": {"hidden_size": WIDE}, "vision_feature_layer": -1,
        "vision_config": {**_eye(), "model_type": "pixtral", "image_size": 32, "hidden_act": "silu"},
    }, processor=_mean(0.45), keys=_keys("vision", "pixtral", image_size=32, patch_size=PATCH))  # fmt: skip
    pair.keys |= {"clip.use_silu": True, "clip.vision.attention.layer_norm_epsilon": 1e-5}
    _both(pair, "v.patch_embd.weight", "vision_tower.patch_conv.weight", (WIDE, 3, PATCH, PATCH))
    _both(pair, "v.pre_ln.weight", "vision_tower.ln_pre.weight", (WIDE,))
    for i in range(LAYERS):
        ours, theirs = f"v.blk.{i}.", f"vision_tower.transformer.layers.{i}."
        for letter in "qkvo":
            name = "attn_out" if letter == "o" else f"attn_{letter}"
            change = permuted if letter in "qk" else None
            _both(pair, f"{ours}{name}.weight", f"{theirs}attention.{letter}_proj.weight", (WIDE, WIDE), change)
        for name, own, shape in (("ffn_up", "up", (FF, WIDE)), ("ffn_gate", "gate", (FF, WIDE)),
                                 ("ffn_down", "down", (WIDE, FF))):  # fmt: skip
            _both(pair, f"{ours}{name}.weight", f"{theirs}feed_forward.{own}_proj.weight", shape)
        for name, own in (("ln1", "attention_norm"), ("ln2", "ffn_norm")):
            _both(pair, f"{ours}{name}.weight", f"{theirs}{own}.weight", (WIDE,))
    for n in (1, 2):
        _linear(pair, f"mm.{n}", f"multi_modal_projector.linear_{n}", (WIDE, WIDE))
    pair.tensors["v.token_embd.img_break"] = np.ones(WIDE, np.float32)
    return pair


def llava() -> Pair:
    """CLIP, of which the last layer but one is read: the last, and the norm behind it, are in no file."""
    pair = Pair(config={
        "model_type": "llava", "text_config": {"hidden_size": WIDE}, "vision_feature_layer": -2,
        "vision_config": {**_eye(), "model_type": "clip_vision_model", "image_size": 32},
    }, processor=_mean(0.48), keys=_keys("vision", "mlp", image_size=32, patch_size=PATCH))  # fmt: skip
    pair.keys |= {"clip.vision.block_count": LAYERS - 1, "clip.vision.attention.layer_norm_epsilon": 1e-5}
    head = "vision_tower.vision_model."
    _both(pair, "v.class_embd", f"{head}embeddings.class_embedding", (WIDE,))
    _siglip(pair, head, positions=17)
    _linear(pair, "v.pre_ln", f"{head}pre_layrnorm", (WIDE,))
    gone = ("v.post_ln", f"v.blk.{LAYERS - 1}.", "v.patch_embd.bias")
    pair.tensors = {name: values for name, values in pair.tensors.items() if not name.startswith(gone)}
    pair.checkpoint.pop(f"{head}embeddings.patch_embedding.bias")
    _linear(pair, "mm.0", "multi_modal_projector.linear_1", (WIDE, WIDE))
    _linear(pair, "mm.2", "multi_modal_projector.linear_2", (WIDE, WIDE))
    return pair


def ultravox() -> Pair:
    """Whisper's encoder; biases of convolutions as columns."""
    pair = Pair(config={
        "model_type": "ultravox", "hidden_size": 256, "stack_factor": 8, "text_config": {"hidden_size": WIDE},
        "audio_config": {"model_type": "whisper", "d_model": WIDE, "encoder_layers": LAYERS, "num_mel_bins": 80,
                         "encoder_attention_heads": HEADS},
    }, keys=_keys("audio", "ultravox", num_mel_bins=80))  # fmt: skip
    pair.keys |= {"clip.audio.projector.stack_factor": 8, "clip.audio.attention.layer_norm_epsilon": 1e-5}
    for n, width in ((1, 80), (2, WIDE)):
        _both(pair, f"a.conv1d.{n}.weight", f"audio_tower.conv{n}.weight", (WIDE, width, 3))
        _both(pair, f"a.conv1d.{n}.bias", f"audio_tower.conv{n}.bias", (WIDE,), lambda x: x[:, None])
    _both(pair, "a.position_embd.weight", "audio_tower.embed_positions.weight", (50, WIDE))
    for i in range(LAYERS):
        names = {"attn_q": "self_attn.q_proj", "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj",
                 "ffn_up": "fc1", "ffn_down": "fc2", "ln1": "self_attn_layer_norm",
                 "ln2": "final_layer_norm"}  # fmt: skip
        _layer(pair, f"a.blk.{i}.", f"audio_tower.layers.{i}.", names)
        theirs = f"audio_tower.layers.{i}.self_attn.k_proj.weight"
        _both(pair, f"a.blk.{i}.attn_k.weight", theirs, (WIDE, WIDE))
    _linear(pair, "a.post_ln", "audio_tower.layer_norm", (WIDE,))
    _both(pair, "mm.a.norm_pre.weight", "multi_modal_projector.ln_pre.weight", (8 * WIDE,))
    _both(pair, "mm.a.mlp.1.weight", "multi_modal_projector.linear_1.weight", (256, 8 * WIDE))
    _both(pair, "mm.a.norm_mid.weight", "multi_modal_projector.ln_mid.weight", (128,))
    _both(pair, "mm.a.mlp.2.weight", "multi_modal_projector.linear_2.weight", (WIDE, 128))
    return pair


PAIRS: Mapping[str, Callable[[], Pair]] = {
    each.__name__: each for each in (gemma3, qwen2vl, qwen3vl, pixtral, llava, ultravox)
}


def permuted(values: Any) -> Any:
    """Rows of each head from halves to pairs."""
    return values.reshape(HEADS, 2, HEAD // 2, -1).swapaxes(1, 2).reshape(values.shape)


def _eye() -> Values:
    return {"hidden_size": WIDE, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "patch_size": PATCH}


def _mean(mean: float) -> Values:
    return {"image_mean": [mean] * 3, "image_std": [0.5, 0.4, 0.3]}


def _keys(kind: str, projector: str, **more: int) -> Values:
    sizes = {"embedding_length": WIDE, "feed_forward_length": FF, "block_count": LAYERS, "projection_dim": WIDE,
             "attention.head_count": HEADS, **more}  # fmt: skip
    mean = {"gemma3": 0.5, "pixtral": 0.45, "mlp": 0.48}.get(projector, 0.4)
    pixels = {f"clip.vision.{name}": value for name, value in _mean(mean).items()} if kind == "vision" else {}
    return {
        f"clip.has_{kind}_encoder": True, "clip.projector_type": projector, **pixels,
        f"clip.{kind}.attention.layer_norm_epsilon": 1e-6,
        **{f"clip.{kind}.{name}": value for name, value in sizes.items()},
    }  # fmt: skip


def _siglip(pair: Pair, head: str, positions: int = 16) -> None:
    _linear(pair, "v.patch_embd", f"{head}embeddings.patch_embedding", (WIDE, 3, PATCH, PATCH))
    _both(pair, "v.position_embd.weight", f"{head}embeddings.position_embedding.weight", (positions, WIDE))
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_out": "self_attn.out_proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2", "ln1": "layer_norm1",
        "ln2": "layer_norm2",
    }  # fmt: skip
    for i in range(LAYERS):
        _layer(pair, f"v.blk.{i}.", f"{head}encoder.layers.{i}.", names)
    _linear(pair, "v.post_ln", f"{head}post_layernorm", (WIDE,))


def _layer(pair: Pair, ours: str, theirs: str, names: Mapping[str, str]) -> None:
    shapes: dict[str, tuple[int, ...]] = {"ffn_up": (FF, WIDE), "ffn_down": (WIDE, FF), "ln1": (WIDE,), "ln2": (WIDE,)}
    for own, name in names.items():
        _linear(pair, f"{ours}{own}", f"{theirs}{name}", shapes.get(own, (WIDE, WIDE)))


def _linear(pair: Pair, ours: str, theirs: str, shape: tuple[int, ...]) -> None:
    _both(pair, f"{ours}.weight", f"{theirs}.weight", shape)
    _both(pair, f"{ours}.bias", f"{theirs}.bias", shape[:1])


def _both(
    pair: Pair, ours: str, theirs: str, shape: tuple[int, ...], change: Callable[[Any], Any] | None = None
) -> None:
    values = _values(theirs, shape)
    pair.checkpoint[theirs] = values
    pair.tensors[ours] = values if change is None else change(values)


def _values(name: str, shape: tuple[int, ...]) -> Any:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    middle = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
    return random.normal(middle, 0.3 if len(shape) == 1 else float(np.prod(shape[1:])) ** -0.5, shape).astype("f4")
