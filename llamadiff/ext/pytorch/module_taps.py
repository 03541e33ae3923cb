"""Which taps a checkpoint's modules hold: by the tensors of the file that their parameters become.

A converter calls the weight of ``model.layers.0.post_attention_layernorm`` blk.0.ffn_norm in one architecture and
blk.0.post_attention_norm in another. The op that reads this tensor gives the tap of what the module puts out, and what
that op reads is the tap of what the module takes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import numpy as np
from llamaref import Weights
from llamaref.known_tensors import stem_of, usual_names
from numpy.typing import NDArray

from llamadiff.candidates.map_file import INPUT
from llamadiff.candidates.name_map import Entry, Map
from llamadiff.candidates.pieces import Piece
from llamadiff.engines.model_file import Runnable
from llamadiff.ext.graph.graph import Graph, GraphNode
from llamadiff.ext.graph.model import GraphModel
from llamadiff.ext.pytorch.modules import HEAD
from llamadiff.trace import taps

Array = NDArray[Any]
WEIGHT = ".weight"
ROUTER, EXPERTS_OUT = "ffn_gate_inp", "ffn_out"
ROTATED = ("attn_q", "attn_k")  # converters permute their rows for RoPE in pairs
NORMS = ("NORM", "RMS_NORM", "L2_NORM")
SINGLE = ("GET_ROWS", "MUL_MAT", *NORMS)  # ops of a tap that one module computes alone
SAMPLE, ALIKE = 16, 0.5  # rows of a matrix that are sought in the file's, and from which cosine on one is found


@dataclass(frozen=True)
class Place:
    """Where a tensor stands in the model: the taps of the op's result and of what that reads; None where no tap is."""

    result: taps.Tap | None
    operand: taps.Tap | None


def find_taps(
    module_parameters: Mapping[str, Mapping[str, Any]],
    record: Callable[[Sequence[int]], Mapping[str, Any]],
    model: Runnable,
    tokens: Sequence[int],
) -> tuple[list[Piece], Map]:
    """What modules put out and took in, under the names of the taps that they hold, and how those were treated.

    ``module_parameters``: of each module its own parameters, by their names; ``record`` runs the modules on tokens.
    """
    values, run_of_one = record(tokens), cache(lambda: record(tokens[:1]))
    found: dict[str, Array] = {}
    treated: dict[str, tuple[str, ...]] = {}
    tensors = dict(_tensors_of(module_parameters, model))
    places = {name: _place_in(model, tensor, "bias" in module_parameters[name]) for name, tensor in tensors.items()}

    def keep(tap: taps.Tap | None, name: str, done: tuple[str, ...] = ()) -> None:
        tensor = values.get(name)
        if tap is None or tensor is None or tap.name in found:
            return
        want = taps.shape_of(tap, len(tokens), model.sizes)
        if tensor.numel() == math.prod(want):
            if tensor.ndim == 4 and run_of_one()[name].shape[1] > 1:
                tensor = tensor.transpose(1, 2)  # heads before tokens
            found[tap.name] = np.asarray(tensor.float().contiguous().numpy()).reshape(want)
            treated[tap.kind.word] = done

    embeddings = {name for name, tensor in tensors.items() if stem_of(tensor) == (None, "token_embd")}
    for name, tensor in tensors.items():
        done = _treatment_of(module_parameters[name].get("weight"), tensor, model)
        if name not in embeddings and stem_of(tensor)[1] != ROUTER and done is not None:
            keep(places[name].result, name, done)
    for name in _expert_blocks(tensors):
        keep(_tap_named(model, f"{EXPERTS_OUT}-{stem_of(tensors[name])[0]}"), name.rpartition(".")[0])
    for name in tensors:
        keep(places[name].operand, name + INPUT)
    for name in embeddings:  # last, since it may be scaled behind its module: then the first op has read it
        keep(places[name].result, name)
    entries = {tap.kind.word: Entry(tap.kind.word, tap.kind.word + "-{i}" * (tap.layer is not None), None,
                                    treated.get(tap.kind.word, ())) for tap in model.taps}  # fmt: skip
    return [Piece(name, array) for name, array in found.items()], entries


def _tensors_of(modules: Mapping[str, Mapping[str, Any]], model: Runnable) -> Iterator[tuple[str, str]]:
    """Modules with a weight of their own, and the file's tensor that it becomes, without its suffix."""
    usual = usual_names(model.architecture, model.n_layer)
    for name, parameters in modules.items():
        tensor = usual(name + WEIGHT)
        if name == HEAD:  # tables lack it where no file has a head of its own
            tensor = f"output{WEIGHT}"
        if "weight" in parameters and tensor is not None:
            yield name, tensor.removesuffix(WEIGHT)


def _place_in(model: Runnable, tensor: str, biased: bool) -> Place:
    if model.by_graph:
        return _place_in_graph(cast("GraphModel", model), tensor, biased)
    layer, stem = stem_of(tensor)
    made = [tap for tap in model.taps if (tap.layer, tap.kind.weight) == (layer, stem) and tap.kind.op in SINGLE]
    if len(made) != 1:
        return Place(None, None)
    inputs = model.inputs(made[0])
    return Place(made[0], _tap_named(model, inputs[0]) if len(inputs) == 1 else None)


def _place_in_graph(model: GraphModel, tensor: str, biased: bool) -> Place:
    """The first node that reads a weight, and that which adds the module's bias."""
    graph = model.graph
    readers = _readers(graph, tensor + WEIGHT)
    if tensor == "output":
        readers = readers or [node for node in _readers(graph, "token_embd" + WEIGHT) if node.op == "MUL_MAT"]
    if tensor == "token_embd":
        readers = [node for node in readers if node.op == "GET_ROWS"]
    added = _readers(graph, tensor + ".bias") if biased else []
    if not readers or (biased and not added):
        return Place(None, None)
    first, last = readers[0], (added or readers)[0]
    by_scale = any(node.op == "SCALE" and last.number in node.sources for node in graph.nodes)
    read = next((graph.by_number[x] for x in first.sources if x in graph.by_number), None)
    if read is not None and first.op == "MUL" and read.op in NORMS:  # the weight of a norm, which a module is with it
        read = graph.by_number.get(read.sources[0] or 0)
    label = partial(_label_of, model)
    result = _tap_named(model, taps.LOGITS) if tensor == "output" else label(last)
    return Place(None if tensor == "token_embd" and by_scale else result, label(read))


def _readers(graph: Graph, leaf: str) -> list[GraphNode]:
    numbers = {each.number for each in graph.leaves.values() if each.name == leaf}
    return [node for node in graph.nodes if not numbers.isdisjoint(node.sources)]


def _label_of(model: GraphModel, node: GraphNode | None) -> taps.Tap | None:
    if node is None or node.label is None or model.graph.labelled.get(node.label) is not node:
        return None
    return _tap_named(model, node.label)


def _tap_named(model: Runnable, name: str) -> taps.Tap | None:
    return next((tap for tap in model.taps if tap.name == name), None)


def _expert_blocks(tensors: Mapping[str, str]) -> Iterator[str]:
    """The routers that stand beside their experts; the module around both puts out the weighted sum."""
    for name, tensor in tensors.items():
        around = name.rpartition(".")[0] + "."
        inside = {stem_of(other)[1] for each, other in tensors.items() if each.startswith(around)}
        if stem_of(tensor)[1] == ROUTER and all(stem.startswith("ffn_") for stem in inside):
            yield name


def _treatment_of(weight: Any, tensor: str, model: Runnable) -> tuple[str, ...] | None:
    """How a module's rows lie against the file's; None where they lie otherwise than any treatment says."""
    if weight is None or not _has_other_rows(weight, tensor + WEIGHT, model.weights):
        return ()
    return ("permuted",) if model.rope_pairs and stem_of(tensor)[1] in ROTATED else None


def _has_other_rows(weight: Any, tensor: str, file: Weights) -> bool:
    """Whether rows of the file's matrix are a module's, and in another order."""
    if tensor not in file or tuple(weight.shape) != tuple(file.shape(tensor)) or weight.ndim != 2:
        return False
    rows = weight.shape[0]
    sample = np.random.default_rng(rows).permutation(rows)[:SAMPLE]
    own = weight.detach().float().cpu().numpy()
    sought = file.decode_rows(tensor, file.read_raw(tensor, sample))
    norms = np.linalg.norm(sought, axis=1)[:, None] * np.linalg.norm(own, axis=1)
    cosines = sought @ own.T / np.maximum(norms, np.finfo(np.float32).tiny)
    in_place = cosines[np.arange(len(sample)), sample] > ALIKE
    return bool(4 * np.count_nonzero(~in_place & (cosines.max(axis=1) > ALIKE)) > len(sample))
