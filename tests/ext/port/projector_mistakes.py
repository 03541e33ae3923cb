"""Mistakes in files and modules of models that see or hear, each with its place and what is said of it.

What changes the module stands for a graph that does otherwise: the file is right, and llama.cpp's graph is not what the
model computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from ext.port.projectors import EPSILON

FILE, GRAPH = "the file", "llama.cpp's graph"


@dataclass(frozen=True)
class Mistake:
    """``kind``: whose checkpoint; ``edit`` is given the file's fields and tensors, or the module. ``place``: what the
    first place's name begins with; ``says``: words about it; ``side``: who is called wrong.
    """

    kind: str
    edit: Callable[..., None]
    place: str
    says: str
    side: str


def _key(name: str, value: Any) -> Callable[..., None]:
    def edit(fields: dict[str, Any], _: dict[str, Any]) -> None:
        _, *types = fields[name]
        fields[name] = (value, *types)

    return edit


def _swapped(one: str, other: str) -> Callable[..., None]:
    def edit(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        for end in ("weight", "bias"):
            if f"{one}.{end}" in tensors:
                a, b = f"{one}.{end}", f"{other}.{end}"
                tensors[a], tensors[b] = tensors[b], tensors[a]

    return edit


def _made(name: str, make: Callable[[Any], Any]) -> Callable[..., None]:
    def edit(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        values, kind = tensors[name]
        tensors[name] = (np.ascontiguousarray(make(values)).astype(values.dtype), kind)

    return edit


def _lost(*names: str) -> Callable[..., None]:
    def edit(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in names:
            (fields if name in fields else tensors).pop(name)

    return edit


def _copied(one: str, other: str) -> Callable[..., None]:
    def edit(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[other] = tensors[one]

    return edit


FILES: dict[str, Mistake] = {
    "epsilon": Mistake(
        "gemma3",
        _key(EPSILON, 1e-3),
        "NORM, layers 0-2",
        "layer_norm_epsilon: is 0.001; config.json: vision_config.layer_norm_eps says 1e-06",
        FILE,
    ),
    "epsilon of an ear": Mistake(
        "qwen2audio",
        _key(EPSILON.replace("vision", "audio"), 1e-3),
        "NORM",
        "layer_norm_epsilon: is 0.001; transformers' code says 1e-05",
        FILE,
    ),
    "heads": Mistake(
        "smolvlm",
        _key("clip.vision.attention.head_count", 2),
        "MUL_MAT attn_scores",
        "attention.head_count: is 2; config.json: vision_config.num_attention_heads says 4",
        FILE,
    ),
    "norms exchanged": Mistake(
        "gemma3", _swapped("v.blk.1.ln1", "v.blk.1.ln2"), "NORM, layer 1", "which is v.blk.1.ln2", FILE
    ),
    "q and k exchanged": Mistake(
        "smolvlm",
        _swapped("v.blk.0.attn_q", "v.blk.0.attn_k"),
        "SOFT_MAX attn_probs, layer 0",
        "which is v.blk.0.attn_k",
        FILE,
    ),
    "up's rows permuted": Mistake(
        "smolvlm",
        _made("v.blk.2.ffn_up.weight", lambda x: x[::-1]),
        "MUL_MAT ffn_up, layer 2",
        "mlp.fc1.weight where llama.cpp's graph has v.blk.2.ffn_up.weight",
        FILE,
    ),
    "positions shifted": Mistake(
        "smolvlm",
        _made("v.position_embd.weight", lambda x: np.roll(x, 1, 0)),
        "ADD pos_embed",
        "where llama.cpp's graph has v.position_embd.weight",
        FILE,
    ),
    "patches transposed": Mistake(
        "gemma3",
        _made("v.patch_embd.weight", lambda x: x.swapaxes(-1, -2)),
        "MUL_MAT v.patch_embd",
        "where llama.cpp's graph has v.patch_embd.weight",
        FILE,
    ),
    "channels reversed": Mistake(
        "smolvlm",
        _made("v.patch_embd.weight", lambda x: x[:, ::-1]),
        "MUL_MAT v.patch_embd",
        "where llama.cpp's graph has v.patch_embd.weight",
        FILE,
    ),
    "bias lost": Mistake(
        "smolvlm",
        _lost("v.blk.1.attn_out.bias"),
        "MUL_MAT attn_out, layer 1",
        "no tensor has the values of vision_model.encoder.layers.1.self_attn.out_proj.bias",
        FILE,
    ),
    "no activation": Mistake(
        "smolvlm",
        _lost("clip.use_gelu"),
        "GELU_QUICK ffn_gelu_quick",
        "clip.use_gelu: is not in the file: llama.cpp takes False (quick GELU is computed then)",
        FILE,
    ),
    "final norm lost": Mistake(
        "gemma3",
        _lost("v.post_ln.weight", "v.post_ln.bias"),
        "POOL_2D",
        "no tensor has the values of vision_tower.post_layernorm.weight",
        FILE,
    ),
    "plus one missing": Mistake(
        "gemma3", _made("mm.soft_emb_norm.weight", lambda x: x - 1), "MUL mm.soft_emb_norm", "", FILE
    ),
    "window pattern": Mistake(
        "qwen25vl",
        _key("clip.vision.n_wa_pattern", 3),
        "SOFT_MAX attn_probs",
        "n_wa_pattern: is 3; config.json: fullatt_block_indexes[0] + 1 says 2",
        FILE,
    ),
    "frame twice": Mistake(
        "qwen2vl",
        _copied("v.patch_embd.weight", "v.patch_embd.weight.1"),
        "MUL_MAT v.patch_embd",
        "no tensor has the values of visual.patch_embed.proj.weight",
        FILE,
    ),
    "kernel reversed": Mistake(
        "qwen2audio",
        _made("a.conv1d.1.weight", lambda x: x[..., ::-1]),
        "IM2COL a.conv1d.1",
        "has audio_tower.conv1.weight where llama.cpp's graph has",
        FILE,
    ),
    "projector scaled": Mistake(
        "smolvlm",
        _made("mm.model.fc.weight", lambda x: x * 1.01),
        "MUL_MAT mm.model.fc",
        "multiplies its result by 0.990099",
        FILE,
    ),
}


def _activation(kind: str) -> Callable[..., None]:
    def edit(model: Any) -> None:
        from transformers.activations import ACT2FN

        for _, module in [*model.named_modules()]:
            if hasattr(module, "activation_fn") or hasattr(module, "act"):
                setattr(module, "activation_fn" if hasattr(module, "activation_fn") else "act", ACT2FN[kind])

    return edit


def _each(path: str, change: Callable[[Any], None]) -> Callable[..., None]:
    """In each layer."""

    def edit(model: Any) -> None:
        for _, layer in model.lined_up:
            module = layer
            for name in path.split(".") if path else ():
                module = getattr(module, name)
            change(module)

    return edit


def _skipped(module: Any) -> None:
    module.forward = lambda x, *_, **__: x


def _scaled(attention: Any) -> None:
    attention.scale = attention.scaling = 0.5


def _causal(attention: Any) -> None:
    import torch

    usual = attention.forward

    def forward(hidden_states: Any, attention_mask: Any = None, **more: Any) -> Any:
        n = hidden_states.shape[1]
        mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
        return usual(hidden_states=hidden_states, attention_mask=mask, **more)

    attention.forward = forward


def _without_residual(layer: Any) -> None:
    def forward(hidden_states: Any, *_: Any, **more: Any) -> Any:
        x, _ = layer.self_attn(hidden_states=layer.layer_norm1(hidden_states), attention_mask=None)
        return x + layer.mlp(layer.layer_norm2(x))

    layer.forward = forward


def _norm_after(layer: Any) -> None:
    def forward(hidden_states: Any, *_: Any, **more: Any) -> Any:
        x, _ = layer.self_attn(hidden_states=hidden_states, attention_mask=None)
        x = layer.layer_norm1(hidden_states + x)
        return layer.layer_norm2(x + layer.mlp(x))

    layer.forward = forward


def _max_pool(model: Any) -> None:
    import torch

    pool = model.multi_modal_projector.avg_pool
    model.multi_modal_projector.avg_pool = torch.nn.MaxPool2d(pool.kernel_size, pool.stride)


def _other_shuffle(model: Any) -> None:
    def shuffle(x: Any, factor: int = 2) -> Any:
        batch, n, width = x.shape
        side = int(n**0.5)
        x = x.view(batch, side // factor, factor, side // factor, factor, width).permute(0, 1, 3, 4, 2, 5)
        return x.reshape(batch, n // factor**2, width * factor**2)

    model.connector.pixel_shuffle = shuffle


def _positions_shifted(model: Any) -> None:
    import torch

    table = model.vision_model.embeddings.position_embedding
    usual = table.forward
    table.forward = lambda ids: usual(torch.roll(ids, 1, -1))


def _no_window(model: Any) -> None:
    model.visual.fullatt_block_indexes = [0, 1, 2]


def _rope_base(model: Any) -> None:
    model.visual.rotary_pos_emb.inv_freq = model.visual.rotary_pos_emb.inv_freq**1.2


def _feature_layer(model: Any) -> None:
    model.config.vision_feature_layer = -3


def _stacked_elsewhere(model: Any) -> None:
    model.visual.deepstack_visual_indexes = [0, 2]


def _no_gelu(model: Any) -> None:
    model.audio_tower.conv2.forward = lambda x, usual=model.audio_tower.conv2.forward: -usual(x)


def _projector_bias(model: Any) -> None:
    import torch

    linear = model.connector.modality_projection.proj
    linear.bias = torch.nn.Parameter(torch.linspace(-1, 1, linear.out_features))


def _double(model: Any) -> None:
    norm = model.multi_modal_projector.mm_soft_emb_norm
    norm.forward = lambda x, usual=norm.forward: usual(x) * 2


def _norm_of_mean(model: Any) -> None:
    import torch

    model.audio_tower.layer_norm.forward = lambda x: torch.nn.functional.rms_norm(
        x, (x.shape[-1],), model.audio_tower.layer_norm.weight, 1e-5) + model.audio_tower.layer_norm.bias  # fmt: skip


MODULES: dict[str, Mistake] = {
    "gelu erf": Mistake(
        "smolvlm", _activation("gelu"), "GELU ffn_gelu", "takes GELU (erf); llama.cpp's graph takes GELU (tanh)", GRAPH
    ),
    "gelu quick": Mistake(
        "gemma3",
        _activation("quick_gelu"),
        "GELU ffn_gelu",
        "takes quick GELU; llama.cpp's graph takes GELU (tanh)",
        GRAPH,
    ),
    "silu": Mistake(
        "smolvlm", _activation("silu"), "GELU ffn_gelu", "takes SiLU; llama.cpp's graph takes GELU (tanh)", GRAPH
    ),
    "scale of scores": Mistake(
        "smolvlm", _each("self_attn", _scaled), "SOFT_MAX attn_probs", "scales scores by 0.5", GRAPH
    ),
    "causal": Mistake(
        "smolvlm",
        _each("self_attn", _causal),
        "SOFT_MAX attn_probs",
        "computes mul, add, softmax of attn_scores",
        GRAPH,
    ),
    "first norm skipped": Mistake(
        "gemma3", _each("layer_norm1", _skipped), "NORM", "leaves this out, and goes on with its input", GRAPH
    ),
    "no residual": Mistake(
        "gemma3",
        _each("", _without_residual),
        "ADD ffn_inp",
        "leaves out the layer's input: attn_out goes on alone",
        GRAPH,
    ),
    "norm after": Mistake(
        "gemma3", _each("", _norm_after), "NORM", "leaves this out, and goes on with its input", GRAPH
    ),
    "final norm skipped": Mistake(
        "gemma3",
        lambda model: _skipped(model.vision_tower.post_layernorm),
        "NORM",
        "leaves this out, and goes on with its input",
        GRAPH,
    ),
    "largest for mean": Mistake("gemma3", _max_pool, "POOL_2D", "computes max_pool2d_with_indices of norm_b", GRAPH),
    "pixel shuffle": Mistake("smolvlm", _other_shuffle, "MUL_MAT mm.model.fc", "computes mm of norm_b", GRAPH),
    "positions shifted": Mistake("smolvlm", _positions_shifted, "ADD pos_embed", "computes add of patch_bias", GRAPH),
    "no window": Mistake("qwen25vl", _no_window, "SOFT_MAX attn_probs", "computes mul, softmax of attn_scores", GRAPH),
    "rope base": Mistake(
        "qwen2vl", _rope_base, "ROPE Qcur_rope and Kcur_rope", "uses base 63095.7, where llama.cpp has 10000", GRAPH
    ),
    "feature layer": Mistake(
        "llava", _feature_layer, "MUL_MAT mm.0", "reads a part of layer_out-1 where llama.cpp's graph reads", GRAPH
    ),
    "deepstack moved": Mistake(
        "qwen3vl", _stacked_elsewhere, "NORM", "reads layer_out-2 where llama.cpp's graph reads layer_out-1", GRAPH
    ),
    "second convolution's sign": Mistake(
        "qwen2audio", _no_gelu, "GELU_ERF", "adds what neg of a.conv1d.2 gives", GRAPH
    ),
    "projector's bias": Mistake(
        "smolvlm",
        _projector_bias,
        "MUL_MAT mm.model.fc",
        "no tensor has the values of connector.modality_projection.proj.bias",
        FILE,
    ),
    "projector doubled": Mistake("gemma3", _double, "MUL_MAT mm.input_projection", "multiplies its result by 2", GRAPH),
    "norm without mean": Mistake(
        "qwen2audio", _norm_of_mean, "NORM", "does not subtract the mean; llama.cpp's graph has LayerNorm", GRAPH
    ),
}
