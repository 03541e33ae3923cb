"""What the architecture asks of a file: tensors that must be there, their shapes, and keys that are left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llamaref import ModelError
from llamaref.configure import read_config
from llamaref.known_tensors import known_stems, stem_of
from llamaref.shapes import check_layers, misfits

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.finite import bad_keys
from llamadiff.result.oddity import Oddity

# Tensors that all architectures' graphs may read beside what gguf-py lists (llama-model.cpp, llama-graph.cpp).
OPTIONAL = frozenset({
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "output", "rope_freqs", "attn_rot_embd",
    "rope_factors_long", "rope_factors_short", "ffn_gate_up_exps",
})  # fmt: skip
CLASSIFIER, RANK = frozenset({"cls", "cls.output", "cls.norm"}), 4  # of models that rank: pooling_type
SOME_LAYERS = frozenset({"exp_probs_b", "rope_freqs", "rope_factors_long", "rope_factors_short", "layer_output_scale"})

# What llama.cpp assumes where a key of the architecture is not in the file (llama_model::load_hparams).
ASSUMED: Mapping[str, Callable[[ModelFile], str]] = {
    "rope.freq_base": lambda m: "10000",
    "rope.dimension_count": lambda m: "the head size",
    "attention.head_count_kv": lambda m: f"{m.hyper_parameter('attention.head_count')}, as many as heads",
    "attention.key_length": lambda m: "embedding_length / head_count",
    "attention.value_length": lambda m: "embedding_length / head_count",
}
ASSUMED_ANYWHERE: Mapping[str, Callable[[ModelFile], str]] = {
    "tokenizer.ggml.add_bos_token": lambda m: "true" if _spm(m) else "false, for most tokenizers of this kind",
}
ASSUMED_OF_BPE: Mapping[str, Callable[[ModelFile], str]] = {
    "tokenizer.ggml.bos_token_id": lambda m: "token 11",
    "tokenizer.ggml.eos_token_id": lambda m: "token 11",
    "tokenizer.ggml.pre": lambda m: "default, with a warning that generation will be degraded",
}


def _spm(model: ModelFile) -> bool:
    return bool(model.hyper_parameter("tokenizer.ggml.model") == "llama")


def rule_oddities(model: ModelFile) -> Iterator[Oddity]:
    """Tensors that are missing, unexpected, or of another shape than the metadata implies."""
    yield from _unexpected(model)
    yield from _gaps(model)
    if not model.has_engine:
        yield from bad_keys(model)
        return
    try:
        config = read_config(model.weights.fields)
        check_layers(model.weights)
    except ModelError as error:
        certain = "differs between layers" not in str(error) and "does not implement" not in str(error)
        yield Oddity("metadata", str(error), "metadata", certain)
        return
    for name, says in misfits(config, model.weights):
        yield Oddity(name, says, "shape")


def _unexpected(model: ModelFile) -> Iterator[Oddity]:
    """Tensors that no graph of the architecture reads, by gguf-py's tables."""
    known = known_stems(model.architecture)
    if known is None:
        return
    known |= OPTIONAL | (CLASSIFIER if model.hyper_parameter("pooling_type") == RANK else set())
    for name in model.tensors:
        _, stem = stem_of(name)
        is_a_heads = stem.startswith("nextn.") and model.hyper_parameter("nextn_predict_layers")
        if stem not in known and not is_a_heads and not name.endswith((".scale", ".input_scale")):
            says = f"{model.architecture} has no such tensor: llama.cpp does not read it, or refuses the file"
            yield Oddity(name, says, "unexpected", certain=False)


def _gaps(model: ModelFile) -> Iterator[Oddity]:
    """Tensors that other layers of the same kind have: a layer's kind is what it has besides."""
    layers: dict[int, set[str]] = defaultdict(set)
    for name in model.tensors:
        layer, _ = stem_of(name)
        if layer is not None:
            layers[layer].add(name.split(".", 2)[2])
    if not layers:
        return
    stated = model.hyper_parameter("block_count")
    for layer in range(max(max(layers) + 1, stated if isinstance(stated, int) and stated <= 4096 else 0)):
        if layer not in layers:
            yield Oddity(f"blk.{layer}", "the whole layer is missing", "missing")
            continue
        yield from _gaps_of(layer, layers)


def _gaps_of(layer: int, layers: Mapping[int, set[str]]) -> Iterator[Oddity]:
    """Of the layers that are like this one but for a tensor, there must be more than those that are as this one."""
    own = layers[layer]
    richer = [names for names in layers.values() if names > own and len(names - own) <= 2]
    alike = sum(names == own for names in layers.values())
    if len(richer) <= alike:
        return
    for name in sorted(set.intersection(*richer) - own):
        if name.split(".")[0] not in SOME_LAYERS:
            yield Oddity(f"blk.{layer}.{name}", f"is missing: {len(richer)} other layers have it", "missing")


def assumptions(model: ModelFile) -> Iterator[str]:
    """Keys that are not in the file, and what llama.cpp then assumes."""
    attention = any(stem_of(name)[1] in ("attn_q", "attn_qkv", "attn_k") for name in model.tensors)
    own = ASSUMED if attention and "position_embd.weight" not in model.weights else {}
    if model.hyper_parameter("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        yield "the file has no tokenizer"
    else:
        yield from _lacking(model, ASSUMED_ANYWHERE, "")
        if model.hyper_parameter("tokenizer.ggml.model") == "gpt2":
            yield from _lacking(model, ASSUMED_OF_BPE, "")
    yield from _lacking(model, own, f"{model.architecture}.")
    if "output.weight" not in model.weights and "token_embd.weight" in model.weights:
        yield "there is no output.weight: llama.cpp multiplies by token_embd.weight (a tied head)"


def _lacking(model: ModelFile, keys: Mapping[str, Callable[[ModelFile], str]], prefix: str) -> Iterator[str]:
    fields: Mapping[str, Any] = model.weights.fields
    for key, assumed in keys.items():
        if prefix + key not in fields:
            yield f"{prefix}{key} is not in the file: llama.cpp assumes {assumed(model)}"
