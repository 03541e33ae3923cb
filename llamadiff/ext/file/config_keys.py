"""config.json against a file's metadata, key by key, with what llama.cpp assumes where the file says nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.lacking import DEFAULT_BASE, assumed, same
from llamadiff.result.oddity import Oddity
from llamadiff.trace.stated import brief

Array = NDArray[Any]
MAX_HEAD = 1 << 16
HUGE = 1e30  # beyond which no hyper-parameter is a number
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192  # Llama 3's scaling, where config.json leaves a part of it out

# Names of one thing in config.json, the first that is there counts.
NAMES: Mapping[str, tuple[str, ...]] = {
    "block_count": ("num_hidden_layers", "n_layer", "n_layers"),
    "context_length": ("max_position_embeddings", "n_positions", "n_ctx"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "use_parallel_residual": ("use_parallel_residual",),
}
OF_MAMBA: Mapping[str, tuple[str, ...]] = {
    "block_count": NAMES["block_count"], "embedding_length": NAMES["embedding_length"],
    "attention.layer_norm_rms_epsilon": ("layer_norm_epsilon", "rms_norm_eps"), "ssm.conv_kernel": ("conv_kernel",),
    "ssm.state_size": ("state_size",), "ssm.time_step_rank": ("num_heads",), "ssm.group_count": ("n_groups",),
}  # fmt: skip
MODEL_TYPES = {
    "llama": ("llama", "mistral", "mixtral"), "gemma3": ("gemma3_text", "gemma3"), "qwen3moe": ("qwen3_moe",),
}  # fmt: skip
WINDOWED = ("gemma2", "gemma3", "phi3")

# The mistake that a key's difference is, where it has a name.
CAUSES = {
    "rope.freq_base": "rope-base", "rope.freq_base_swa": "rope-base", "rope.scaling.type": "rope-scaling",
    "rope.scaling.factor": "rope-scaling", "rope.scaling.original_context_length": "rope-scaling",
    "rope.dimension_count": "rope-dimensions", "attention.layer_norm_rms_epsilon": "epsilon",
    "attention.layer_norm_epsilon": "epsilon", "attention.head_count": "head-count",
    "attention.head_count_kv": "head-count",
}  # fmt: skip
FIXED: Mapping[str, Mapping[str, Any]] = {"qwen3moe": {"norm_topk_prob": True}}  # that no key of a file can say
UNIMPORTANT = ("context_length", "expert_feed_forward_length")  # nothing is computed from them at short prompts


@dataclass(frozen=True)
class Stated:
    """What config.json implies for the keys of a file (without the architecture), and the names it has there."""

    values: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)

    def number(self, key: str) -> int:
        value = self.values.get(key)
        return value if isinstance(value, int) and 0 <= value < 1 << 31 else 0


def model_types(architecture: str) -> tuple[str, ...]:
    """What config.json may call an architecture's models."""
    return MODEL_TYPES.get(architecture, (architecture,))


def stated_by(config: Mapping[str, Any], architecture: str) -> Stated:
    """The metadata that a config.json implies."""
    config = _of_text(config)
    table = OF_MAMBA if architecture == "mamba2" else NAMES
    values, names = dict[str, Any](), dict[str, str]()
    for key, choices in table.items():
        name = next((name for name in choices if config.get(name) is not None), None)
        if name is not None:
            values[key], names[key] = config[name], name
    for make in (_sizes, _rope, _window, _state_space):
        for key, (value, name) in make(config, architecture, values):
            values[key], names[key] = value, name
    return Stated(values, names)


Made = Iterator[tuple[str, tuple[Any, str]]]


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that is about the language model."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _sizes(config: Mapping[str, Any], architecture: str, known: Mapping[str, Any]) -> Made:
    heads, embd = known.get("attention.head_count"), known.get("embedding_length")
    if not _is_count(heads) or not _is_count(embd):
        return
    size, name = config.get("head_dim"), "head_dim"
    if not _is_count(size):
        size, name = embd // heads, "hidden_size / num_attention_heads"
    yield "attention.key_length", (size, name)
    yield "attention.value_length", (size, name)
    if "attention.head_count_kv" not in known:
        yield "attention.head_count_kv", (heads, "num_attention_heads")
    if architecture == "gpt2" and "feed_forward_length" not in known:
        yield "feed_forward_length", (4 * embd, "4 * n_embd")


def rope_parameters(config: Mapping[str, Any], layers: str = "full_attention") -> dict[str, Any]:
    """RoPE's settings as newer and older config.json state them."""
    config = _of_text(config)
    found = config.get("rope_parameters")
    if isinstance(found, dict):
        inner = found.get(layers)
        return dict(inner if isinstance(inner, dict) else found)
    scaling = config.get("rope_scaling")
    parameters = dict(scaling) if isinstance(scaling, dict) else {}
    base = config.get("rope_local_base_freq") if layers == "sliding_attention" else config.get("rope_theta")
    factor = config.get("partial_rotary_factor")
    parameters |= {"rope_theta": base} if base is not None else {}
    return parameters | ({"partial_rotary_factor": factor} if factor is not None else {})


def _rope(config: Mapping[str, Any], architecture: str, known: Mapping[str, Any]) -> Made:
    if architecture in ("gpt2", "mamba2"):
        return
    rope, own = rope_parameters(config), "rope_parameters." if "rope_parameters" in config else ""
    if _is_number(rope.get("rope_theta")):
        yield "rope.freq_base", (float(rope["rope_theta"]), own + "rope_theta")
    if architecture == "gemma3":
        local = rope_parameters(config, "sliding_attention").get("rope_theta")
        if _is_number(local):
            yield "rope.freq_base_swa", (float(local), "rope_parameters.sliding_attention.rope_theta")
    size, part = known.get("attention.key_length"), rope.get("partial_rotary_factor", 1.0)
    if _is_count(size) and _is_number(part):
        yield "rope.dimension_count", (int(part * size), own + "partial_rotary_factor")
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("linear", "yarn") and _is_number(rope.get("factor")):
        yield "rope.scaling.type", (kind, own + "rope_type")
        yield "rope.scaling.factor", (float(rope["factor"]), own + "factor")
        original = rope.get("original_max_position_embeddings")
        if kind == "yarn" and _is_count(original):
            yield "rope.scaling.original_context_length", (original, own + "original_max_position_embeddings")


def _window(config: Mapping[str, Any], architecture: str, known: Mapping[str, Any]) -> Made:
    if architecture in WINDOWED and _is_count(config.get("sliding_window")):
        yield "attention.sliding_window", (config["sliding_window"], "sliding_window")


def _state_space(config: Mapping[str, Any], architecture: str, known: Mapping[str, Any]) -> Made:
    expand, embd = config.get("expand", 2), known.get("embedding_length")
    if architecture == "mamba2" and _is_number(expand) and _is_count(embd):
        yield "ssm.inner_size", (int(expand * embd), "expand * hidden_size")


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < HUGE


def metadata_oddities(model: ModelFile, stated: Stated, config: Mapping[str, Any]) -> Iterator[Oddity]:
    """Keys of the file that do not say what config.json does."""
    for key, wanted in stated.values.items():
        found = model.weights.fields.get(f"{model.architecture}.{key}")
        where, name = f"{model.architecture}.{key}", stated.names[key]
        certain = key not in UNIMPORTANT
        if found is not None:
            values = found if isinstance(found, list) else [found]
            if not all(same(value, wanted) for value in values):
                yield Oddity(where, f"is {_short(found)}; config.json has {name} = {_short(wanted)}",
                             CAUSES.get(key, "metadata"), certain)  # fmt: skip
            continue
        taken = assumed(model, key)
        if taken is not None and not same(taken, wanted):
            says = f"is not in the file: llama.cpp takes {_short(taken)}; config.json has {name} = {_short(wanted)}"
            yield Oddity(where, says, CAUSES.get(key, "metadata"), certain)
    yield from _vocabulary(model, config)
    for name, only in FIXED.get(model.architecture, {}).items():
        wanted = _of_text(config).get(name)
        if wanted is not None and wanted != only:
            says = f"is {_short(wanted)}; llama.cpp knows {_short(only)} alone, whatever a file says"
            yield Oddity(f"config.json: {name}", says, "fixed")


def _vocabulary(model: ModelFile, config: Mapping[str, Any]) -> Iterator[Oddity]:
    """The number of tokens; some converters pad it, or leave out what the tokenizer does not have."""
    wanted = _of_text(config).get("vocab_size")
    tokens = model.weights.fields.get("tokenizer.ggml.tokens")
    if _is_count(wanted) and isinstance(tokens, list) and len(tokens) != wanted:
        says = f"has {len(tokens)} entries; config.json has vocab_size = {wanted}"
        yield Oddity("tokenizer.ggml.tokens", says, "vocabulary", certain=False)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"
    return brief(value) if isinstance(value, (list, dict)) else str(value)[:100]


def rope_tensors(config: Mapping[str, Any]) -> dict[str, Array]:
    """The tensors of factors that a config's RoPE scaling implies: stem -> values."""
    rope = rope_parameters(config)
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "llama3" and _is_number(rope.get("factor")):
        return {"rope_freqs": llama3_factors(rope, _of_text(config))}
    if kind in ("longrope", "su"):
        return {
            f"rope_factors_{side}": np.asarray(rope[f"{side}_factor"], np.float32)
            for side in ("long", "short") if _is_numbers(rope.get(f"{side}_factor"))
        }  # fmt: skip
    return {}


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) < 1 << 16 and all(_is_number(item) for item in value)


def llama3_factors(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Array:
    """Divisors of the frequencies (transformers, modeling_rope_utils.py, _compute_llama3_parameters): [n_rot / 2].

    Frequencies that turn less than ``low`` times over the original context are divided by the factor, those that turn
    more than ``high`` times stay, and those between are blended.
    """
    heads, embd, size = (config.get(name) for name in ("num_attention_heads", "hidden_size", "head_dim"))
    if not _is_count(size):
        size = embd // heads if _is_count(embd) and _is_count(heads) else 0
    size = size if size <= MAX_HEAD else 0
    low, high = _number(rope, "low_freq_factor", LOW), _number(rope, "high_freq_factor", HIGH)
    context = _number(rope, "original_max_position_embeddings", ORIGINAL)
    frequency = abs(_number(rope, "rope_theta", DEFAULT_BASE)) ** (-np.arange(0, size, 2) / max(size, 1))
    turns = context * frequency / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low or 1.0), 0, 1)
    return np.asarray(1 / ((1 - keep) / (_number(rope, "factor", 1.0) or 1.0) + keep), np.float32)


def _number(stated: Mapping[str, Any], name: str, otherwise: float) -> float:
    """A number that a config states; another where it is none."""
    value = stated.get(name)
    return float(value) if _is_number(value) else otherwise
