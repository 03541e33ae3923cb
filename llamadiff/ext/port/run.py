"""The verb: is llama.cpp's graph of a file what the checkpoint's own code computes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llamadiff import plugins
from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.file.same_model import check_same_matrices, config_json, same_checkpoint
from llamadiff.ext.graph.model import by_its_graph
from llamadiff.ext.port.alignment import distance
from llamadiff.ext.port.causes import Causes
from llamadiff.ext.port.faults import faults_of, said, with_faults
from llamadiff.ext.port.graph_values import node_values
from llamadiff.ext.port.lineup import Lineup, LiningUp
from llamadiff.ext.port.loading import check_vocabulary, folder_of, kept_as_in, matrices_of, model_of, other_ids
from llamadiff.ext.port.places import Apart, Reasons, joined, places_of
from llamadiff.ext.port.pooling import POOLED, mode_of, with_pooling
from llamadiff.ext.port.sides import GRAPH, MODEL, UNSURE, Blame, other_keys, third_opinion, uneven, unstated
from llamadiff.ext.port.tensors import Tensors
from llamadiff.ext.port.torch_ops import check_runs, layers_of
from llamadiff.ext.prompt.own_code import is_function
from llamadiff.ext.pytorch.transformers import config_read
from llamadiff.judge.verdict import of_check, of_part, worst_of
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.llamacpp.child import Child
from llamadiff.result.comparison import Comparison
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.verbs.judging import judge

CLOSE = 1e-8  # NMSE of logits that are the model's but for rounding
KERNELS = 1e-2  # NMSE of llama.cpp's logits against its graph's that no rounding to 16 bits explains


@dataclass(frozen=True)
class Port:
    """``model`` is the file's description, ``code`` the class of the checkpoint's code. ``logits``: NMSE of the graph's
    against the model's; ``own``: of llama.cpp's against the graph's. Where something parts, ``keys`` are the file's
    keys and tensors that are not what the checkpoint has, ``unsaid`` the numbers that the model has read of its config
    and no key has, and ``opinion`` is whose logits a third reading of the file has. ``quantized``: the types of the
    file's matrices, where the model was given these. ``steps``: llama.cpp's own run, its last tokens as decode steps,
    judged by the graph of all tokens in one go. ``concerns``: what is odd about the file by itself. ``other_ids``: the
    prompt's by the checkpoint's own tokenizer, where llama.cpp has others. ``unseen``: the command that looks at what
    was not looked at here. ``end``: the last node that the model has, where llama.cpp's graph goes on.
    ``fed``: of an eye or an ear, what went in.
    """

    model: Mapping[str, Any]
    code: str
    tokens: Sequence[tuple[int, str | None]]
    baseline: Mapping[str, Any]
    places: Sequence[Apart]
    lineup: Lineup
    logits: float
    own: float
    keys: Sequence[str] = ()
    unsaid: Mapping[str, float] = field(default_factory=dict)
    opinion: str | None = None
    quantized: Sequence[str] = ()
    steps: Comparison | None = None
    prompt: str | None = None
    concerns: Sequence[str] = ()
    other_ids: tuple[int, ...] | None = None
    unseen: str | None = None
    end: str | None = None
    fed: str | None = None

    @property
    def decoded(self) -> int:
        """How many tokens llama.cpp ran as decode steps."""
        return len(self.tokens) - self.steps.n_prefill if self.steps is not None else 0

    @property
    def verdict(self) -> str:
        steps = [] if self.steps is None else [of_part(self.steps.verdict)]
        is_close = self.logits <= CLOSE and self.own <= KERNELS
        parts = [of_check(self.places, is_known=is_close or bool(self.places)), *steps]
        return worst_of([*parts, of_check(self.other_ids is not None)])


def port(path: Path, checkpoint: str, run: Run, how: How) -> Port:
    """Line a checkpoint's code up with llama.cpp's graph of a file. Raises UserError."""
    how.progress("loading the checkpoint")
    file, is_own = ModelFile(path, settings=run.settings), is_function(checkpoint)  # which may be what is wrong
    if not is_own:
        original = folder_of(checkpoint)
        same_checkpoint(file, original, config_json(original))
    with config_read() as read:
        model, pooling = model_of(checkpoint), mode_of(Path(checkpoint))
        n_layer = len(layers_of(model))
        if is_own:
            check_same_matrices(file, matrices_of(model), checkpoint)
        model = model if pooling is None else with_pooling(model, pooling)
        quantized = _kept(model, file, checkpoint)
        with scratch_directory() as folder, Child(run.settings) as child:
            request = replace(text_request(file, run, Path(folder) / "llama.cpp"), pooled=pooling is not None)
            graph, trace = by_its_graph(path, request, how.progress, child)
        check_vocabulary(model, trace.info.tokens)
        if is_own:
            check_runs(model, trace.info.tokens)
        how.progress("computing llama.cpp's graph")
        values = node_values(graph.graph, graph.weights)
        how.progress("lining up the model with it")
        causes = Causes(graph)
        lining = LiningUp(model, graph.graph, graph.weights, values, n_layer, causes.edits)
        found = lining.run()
    ids = None if is_own else other_ids(checkpoint, trace.info)
    last = lining.graph.nodes[-1]
    logits, end = values[last.number].ravel(), last.label or taps.LOGITS
    config = _config_of(model)
    keys, unsaid, opinion, faults = list[str](), dict[str, float](), None, list[Oddity]()
    places = list[Apart]()
    if found.departed:
        how.progress("searching for causes")
        opinion = third_opinion(file, trace.info.tokens, logits, lining.model_logits, end)
        if opinion != MODEL:  # which shows that all is in the file
            faults, unsaid = faults_of(file, checkpoint, config), unstated(file, config, read)
            unsaid = {name: x for name, x in unsaid.items() if not any(name in each.says for each in faults)}
        prefixes = [name for name, _ in layers_of(model)]
        tensors = Tensors(graph.weights, file.architecture, lining.parameters, prefixes)
        reasons = Reasons(lining, graph.graph, tensors, opinion)
        lists = uneven(file, config, read, n_layer) if opinion == GRAPH and not is_own else {}
        blame = Blame(tuple(each.where for each in faults), unsaid, opinion, is_own, lists)
        places = [
            replace(place, side=reasons.side(place, blame.of(place.name, place.says, place.text, place.layers)))
            for place in joined(places_of(found.departed, causes, reasons.of))
        ]
        places = with_faults(places, faults, graph.graph, file.tensors)
        shown = {place.fault.partition(" (and ")[0] for place in places if place.fault is not None}
        keys = [key for key in said(faults) or reasons.misplaced if key not in shown]
        keys += blame.unkept(place.layers for place in places if place.side == UNSURE)
        places = [replace(each, otherwise=f"pools by {pooling}") if POOLED in each.name else each for each in places]
    steps = judge(graph, trace, None, replace(how, diagnose=False)) if run.n_predict else None
    recorded = trace[end].ravel() if end in trace else None
    return Port(
        file.describe(), type(model).__name__, file.token_texts(trace.info.tokens), dict(trace.info.producer),
        places, found, found.logits, distance(recorded, logits) if recorded is not None else float("nan"),
        keys, {} if all(each.is_keyless for each in places) else unsaid, opinion, quantized, steps, trace.info.prompt,
        _concerns(file, faults if found.departed else [*other_keys(file, config)], bool(found.departed)), ids,
        None if is_own else shlex.join(["llamadiff", "weights", str(path), checkpoint]),
        end if last is not graph.graph.nodes[-1] else None,
    )  # fmt: skip


def _concerns(file: ModelFile, faults: Sequence[Oddity], shown: bool) -> list[str]:
    """What is odd about the file, as far as a second tells, and ``faults`` that are not ``shown`` already."""
    found = [line for lines in plugins.ask_all(lambda each: each.concerns(file)) for line in lines]
    unseen = [] if shown else [f"this prompt does not show it: {line}" for line in said(faults)]
    return [*unseen, *(line for line in found if not any(each.where in line for each in faults))]


def _kept(model: Any, file: ModelFile, checkpoint: str) -> tuple[str, ...]:
    """The quantized types of a file, whose matrices the model is given. Raises UserError for a file that has others,
    with what is wrong with it where that is known.
    """
    try:
        return kept_as_in(model, file)
    except UserError:
        wrong = said(faults_of(file, checkpoint, _config_of(model)))
        if not wrong:
            raise
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(f"{file.path}: {wrong[0]}{more}; convert it again: llamadiff weights {file.path} {checkpoint}"
                        ) from None  # fmt: skip


def _config_of(model: Any) -> Mapping[str, Any]:
    config: Any = getattr(model, "config", None)
    return config.to_dict() if hasattr(config, "to_dict") else {}
