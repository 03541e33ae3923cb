"""What a checkpoint's own code should compute: the engine of a file, with the checkpoint's weights and activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from llamaref import Weights

from llamadiff.engines.model_file import ModelFile, Runnable
from llamadiff.engines.reference_model import Model
from llamadiff.ext.file.original import original_of
from llamadiff.ext.file.views import Array
from llamadiff.ext.graph.graph import Graph
from llamadiff.ext.graph.model import GraphModel
from llamadiff.ext.pytorch.transformers import config_of
from llamadiff.system.progress import Progress
from llamadiff.verbs.by_original import Original

# What config.json calls the two ways to compute GELU, and ggml's ops of these.
GELU = {"gelu": "ERF", "gelu_python": "ERF", "gelu_new": "", "gelu_fast": "", "gelu_pytorch_tanh": ""}
KEYS = ("hidden_act", "hidden_activation", "activation_function", "activation")
WORDS = {"ERF": "GELU (erf)", "": "GELU (tanh)"}


class _OfFile(Model):
    """The engine with other weights in the file's place, which is still described as it is."""

    def describe(self, sha256: str | None = None) -> dict[str, Any]:
        return ModelFile(self.path).describe(sha256)


class _GraphOfFile(GraphModel):
    """The same with llama.cpp's graph."""

    def describe(self, sha256: str | None = None) -> dict[str, Any]:
        return ModelFile(self.path).describe(sha256)


def find_original(file: Runnable, folder: Path, progress: Progress) -> Original | None:
    """The checkpoint in a file's place; None where the folder holds none of it."""
    if not file.by_graph:
        return original_of(file, folder, partial(_by_reference, file.path), progress)
    own = cast("GraphModel", file).graph
    graph, stated = _with_stated_gelu(own, config_of(folder))
    found = original_of(file, folder, partial(_by_graph, file.path, graph), progress)
    if found is None or graph is own:
        return found
    other = WORDS["" if stated else "ERF"]
    label = f"{found.label}, and by {WORDS[stated]} as its config.json says (llama.cpp's graph has {other})"
    return replace(found, label=label)


def _by_reference(path: Path, tensors: Mapping[str, Array], keys: Mapping[str, Any]) -> Runnable:
    weights = _replaced(path, tensors)
    weights.fields.update(keys)
    return _OfFile(path, weights=weights)


def _by_graph(path: Path, graph: Graph, tensors: Mapping[str, Array], keys: Mapping[str, Any]) -> Runnable:
    """llama.cpp's graph has its metadata in its nodes: it takes no ``keys``."""
    return _GraphOfFile(path, graph, weights=_replaced(path, tensors))


def _replaced(path: Path, tensors: Mapping[str, Array]) -> Weights:
    weights = Weights(path)
    for name, values in tensors.items():
        weights.put(name, values)
    return weights


def _with_stated_gelu(graph: Graph, config: Any) -> tuple[Graph, str]:
    """The graph with GELU as a config states it: llama.cpp's has one way for all models of an architecture."""
    stated = next((GELU[each] for key in KEYS if (each := getattr(config, key, None)) in GELU), None)
    kinds = {f"{op}{'_ERF' * (not stated)}": f"{op}{'_ERF' * bool(stated)}" for op in ("GELU", "GEGLU")}
    if stated is None or not any(node.op in kinds for node in graph.nodes):
        return graph, ""
    return replace(graph, nodes=tuple(replace(node, op=kinds.get(node.op, node.op)) for node in graph.nodes)), stated
