"""What engines call the taps of a head: as llama.cpp does, with or without the layer's number, or as checkpoints do."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

from llamadiff.candidates.name_map import AUTO, Entry, Map
from llamadiff.ext.graph.model import GraphModel
from llamadiff.trace.taps import Tap, layer_of

HEAD = "mtp_"  # begins llama.cpp's names of a head's nodes
# Modules of checkpoints by llama.cpp's node: DeepSeek's and GLM's, where a head is a layer like others, and Qwen's.
MODULES = {
    "mtp_tok_embd": ("model.layers.{i}.embed_tokens",),
    "mtp_hnorm": ("model.layers.{i}.hnorm", "mtp.pre_fc_norm_hidden"),
    "mtp_enorm": ("model.layers.{i}.enorm", "mtp.pre_fc_norm_embedding"),
    "mtp_eh_proj": ("model.layers.{i}.eh_proj", "mtp.fc"),
    "mtp_attn_norm": ("model.layers.{i}.input_layernorm", "mtp.layers.0.input_layernorm"),
    "mtp_post_attn_norm": ("model.layers.{i}.post_attention_layernorm", "mtp.layers.0.post_attention_layernorm"),
    "mtp_attn_post_norm": ("model.layers.{i}.post_attention_layernorm", "mtp.layers.0.post_attention_layernorm"),
    "mtp_attn_out": ("model.layers.{i}.self_attn.o_proj", "mtp.layers.0.self_attn.o_proj"),
    "mtp_ffn_out": ("model.layers.{i}.mlp", "mtp.layers.0.mlp"),
    "mtp_shared_head_norm": ("model.layers.{i}.shared_head.norm", "mtp.norm"),
    "result_output": ("model.layers.{i}.shared_head.head",),
}


def head_layers(model: GraphModel) -> list[int]:
    """The layers of the heads."""
    names = (node.name for node in model.graph.nodes)
    return sorted({layer for name in names if name.startswith(HEAD) and (layer := layer_of(name)) is not None})


def by_heads(model: GraphModel) -> GraphModel:
    """The same model, whose heads' taps come first: a name that heads and trunk have is a head's."""
    first, out = set(head_layers(model)), copy(model)
    out.taps = sorted(model.taps, key=lambda tap: tap.layer not in first)
    return out


def with_own_names(mapping: Map, model: GraphModel) -> Map:
    """A map with the names of a graph's taps that the vocabulary has not; one that is found by values stays so."""
    if mapping is AUTO:
        return mapping
    heads = head_layers(model)
    entries = (entry for tap in model.taps for entry in _entries(tap, model, heads))
    return {**mapping, **{f"{entry.word} {entry.name}": entry for entry in entries}}


def _entries(tap: Tap, model: GraphModel, heads: list[int]) -> Iterator[Entry]:
    word, layer = tap.kind.word, tap.layer
    yield Entry(word, f"{word}-{{i}}" if layer is not None else word)
    node = model.graph.labelled[tap.name]
    name = node.name
    is_others = model.graph.labelled.get(name, node) is not node
    if "(" in name or is_others or (layer is not None and layer not in heads):
        return
    stem = name.removesuffix(f"-{layer}")
    yield Entry(word, name if stem == name else f"{stem}-{{i}}")
    if len(heads) == 1:
        yield Entry(word, stem)
        for module in MODULES.get(stem, ()):
            yield Entry(word, module.replace("{i}", str(heads[0])))
