"""A LoRA adapter: is it whole, and does it fit the model that it is for? It adds s B A to matrices W of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from llamaref import Weights
from llamaref.adapters import ALPHA, EMBEDDING, LowRank, fault, misfit, pairs_of, rank_of, scale_of

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.against import label_of
from llamadiff.ext.file.pairs import in_file
from llamadiff.ext.file.result import WeightReport
from llamadiff.ext.file.views import sample
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.study import Bench, Study
from llamadiff.judge.verdict import of_check
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UserError
from llamadiff.trace.hashing import file_sha256
from llamadiff.trace.reader import Trace

MOST = 3  # tensors that are named
ROWS = 256  # of W, by which its size is told
LARGE = 1.0  # times W's size: what is added is seldom as large


def fitted(report: WeightReport, adapter: ModelFile, model: ModelFile) -> WeightReport:
    """An adapter's report with whether it fits a model: its tensors there, of these shapes, and how much is added."""
    found, notes = list(report.oddities), list(report.notes)
    if adapter.architecture != model.architecture:
        says = f"is {adapter.architecture}, {model.path.name} has {model.architecture}: llama.cpp refuses the adapter"
        found.append(Oddity("general.architecture", says, "metadata"))
    low, sizes = adapter.weights, dict[str, float]()
    for name, pair in pairs_of(low).items():
        says = misfit(low, pair, name, model.weights)
        if not says:
            sizes[name] = _added(low, pair, model, name)
        elif not fault(low, pair, name):  # which is said already
            found.append(Oddity(name, says, "shape"))
    for name, size in sizes.items():
        if size > LARGE:
            says = f"what is added is {size:.3g} times as large as the weight: is alpha this adapter's?"
            found.append(Oddity(name, says, certain=False))
    if EMBEDDING in sizes and "output.weight" not in model.weights:
        says = "is the output's matrix too: llama.cpp (ggml 0.25.3) aborts when it runs, since A and B are turned there"
        found.append(Oddity(EMBEDDING, says, certain=False))
    if sizes:
        most = max(sizes, key=lambda name: sizes[name])
        often = f"at most {sizes[most]:.2g} times the weight's size ({most})"
        notes.append(f"it adds to {len(sizes)} tensors of {label_of(model.path)}, {often}")
    order = tuple(sorted(found, key=lambda each: not each.certain))
    return replace(report, oddities=order, notes=tuple(notes))


def adapter_oddities(low: Weights) -> Iterator[Oddity]:
    """What is wrong with an adapter by itself: halves without the other one, ranks that differ, no alpha."""
    for name, pair in pairs_of(low).items():
        says = fault(low, pair, name)
        if says:
            yield Oddity(name, says, "shape" if pair.is_whole else "missing")
    if not low.fields.get(ALPHA):
        says = f"{ALPHA} is {low.fields.get(ALPHA, 'not in the file')}: llama.cpp then adds B A, not alpha / rank of it"
        yield Oddity("metadata", says, "metadata", certain=False)


def ranks_and_scales(low: Weights) -> str:
    """The ranks, alpha, and the s that B A is multiplied by, in words."""
    ranks = sorted({rank_of(low, pair) for name, pair in pairs_of(low).items() if not fault(low, pair, name)})
    scales = [f"{scale_of(low.fields, rank):.5g}" for rank in ranks]
    one = "rank" if len(ranks) == 1 else "ranks"
    alpha = low.fields.get(ALPHA, "missing")
    return f"{one} {', '.join(map(str, ranks)) or 'unknown'}, alpha {alpha}, s = {', '.join(scales) or 'unknown'}"


def _added(low: Weights, pair: LowRank, model: ModelFile, name: str) -> float:
    """The size of s B A beside that of W: by the products of A and B with themselves, without making B A."""
    a, b = (low.whole(half).astype(np.float64) for half in (pair.a, pair.b))
    if name == EMBEDDING:
        a, b = b.T, a
    inner = np.einsum("...ri,...si->...rs", a, a), np.einsum("...or,...os->...rs", b, b)
    added = float(np.sqrt((inner[0] * inner[1]).sum() / (b.size // b.shape[-1] * a.shape[-1])))
    view = in_file(model, name)
    some = view.take(sample(view, ROWS)).astype(np.float64)
    own = float(np.sqrt(np.square(some).mean()))
    return abs(scale_of(low.fields, rank_of(low, pair))) * added / own if own else float("inf")


def unapplied(bench: Bench, study: Study) -> Check | None:
    """That llama.cpp, whose own values are judged, multiplies by weights of an adapter without what that adds."""
    adapter, read = bench.model.weights.adapter, bench.baseline.info.producer.get("weights_read")
    if adapter is None or study.under_test != "baseline" or not isinstance(read, (list, tuple)):
        return None
    left = [name for name, pair in adapter.pairs.items() if pair.a not in read and name in read]
    if not left:
        return None
    more = f" and {len(left) - MOST} more" if len(left) > MOST else ""
    found = (
        f"llama.cpp leaves it out at {len(left)} of its {len(adapter.pairs)} tensors, {', '.join(left[:MOST])}{more}; "
        "merge it into the model (llama-export-lora), or report it to llama.cpp"
    )
    return Check("adapter", of_check(found), found)


def refuse_other_adapter(baseline: Trace, given: Trace) -> None:
    """Raise UserError for a candidate that states another adapter than the baseline has, or another scale."""
    own, theirs = (_stated(each) for each in (baseline, given))
    same = "lora" in own and all(own.get(key) == theirs.get(key, own.get(key)) for key in ("lora_sha256", "lora_scale"))
    if "lora" not in theirs or same:
        return
    said = [f"{each.get('lora', 'none')!s:.80} at scale {each.get('lora_scale', 1.0)!s:.20}" for each in (theirs, own)]
    raise UserError(
        f"{given.path or 'the candidate'}: was run with the adapter {said[0]}, the baseline with {said[1]}; "
        "give --llama-cpp lora=FILE:SCALE, or a baseline of the same"
    )


def _stated(trace: Trace) -> Mapping[str, Any]:
    """What a trace's producer says of its settings."""
    settings = trace.info.producer.get("settings")
    return settings if isinstance(settings, dict) else {}


def stated_adapter(trace: Trace, model: Path) -> tuple[str, float] | None:
    """The adapter that a trace was recorded with, beside the trace or its model: the file, and its scale.

    Raises UserError where it is in neither place, or another file is.
    """
    stated = _stated(trace)
    name, wanted, scale = (stated.get(key) for key in ("lora", "lora_sha256", "lora_scale"))
    if not isinstance(name, str) or not Path(name).name:
        return None
    name = Path(name).name  # a name alone: a trace must not lead elsewhere
    folders = dict.fromkeys(each.parent for each in (trace.path, model) if each is not None)
    files = [folder / name for folder in folders if (folder / name).is_file()]
    found = next((file for file in files if file_sha256(file) == wanted or not isinstance(wanted, str)), None)
    if found is None:
        other = f"{files[0]} is another file (sha256 {file_sha256(files[0])[:12]})" if files else "and is not there"
        whose = f"{trace.path or 'the trace'}: was recorded with the adapter {name} (sha256 {str(wanted)[:12]})"
        raise UserError(f"{whose}, {other}; put it beside the trace or the model")
    return str(found), float(scale) if isinstance(scale, (int, float)) else 1.0
