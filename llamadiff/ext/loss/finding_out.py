"""From two files to their Loss: how far apart they are, which tensors that is, what bytes would recover."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import Costing, How
from llamadiff.ext.loss.budget import choose
from llamadiff.ext.loss.result import OWN, Contribution, Estimate, LayerLoss, Loss, Restored
from llamadiff.ext.loss.statistics import mean_of, statistics
from llamadiff.ext.loss.trials import NONE, FilePair, Material, run_trials
from llamadiff.ext.loss.usual import file_type, published
from llamadiff.ext.loss.words import EQUAL
from llamadiff.judge.finding import Finding
from llamadiff.llamacpp.request import Settings
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress, silent
from llamadiff.trace.taps import RESIDUAL

WEIGHED = 2  # windows of a text on which tensors are restored one at a time


@dataclass(frozen=True)
class Passed:
    """What is known of the other file's run: judged by the good file's weights (``findings``), which weight makes each
    tap, the tokens, and llama.cpp's settings."""

    findings: Sequence[Finding]
    weight_names: Mapping[str, str]
    tokens: tuple[int, ...]
    settings: Settings


def loss_of(good: ModelFile, other: ModelFile, run: Passed, damaged: Sequence[str], how: How) -> Loss:
    """What the other file's types cost. ``damaged`` are tensors that are known to be wrong. Raises UserError."""
    on_device, costing = run.settings.on_device, how.costing
    if on_device and costing.spend:
        raise UserError("--spend: finer types are tried on the CPU alone; leave out what puts layers elsewhere")
    pair = FilePair(str(good.path), str(other.path), replace(run.settings, repack=False))  # tensors change places
    material = Material(text=costing.text) if costing.text is not None else Material(run.tokens)
    types, kind = {} if on_device else honest_types(good, other), file_type(other)
    trials = run_trials(pair, material, [NONE, *([types] if types else [])], how.progress)
    plain, *honest = trials.trials
    some = _Some(good, pair, replace(material, most=WEIGHED), how.progress)
    tensors = differing(good, other, predicted(run.findings, run.weight_names))
    whole, ranked = measure(pair, some.material, tensors, how.progress, damaged)
    return Loss(
        kind, mean_of(plain.kl), len(plain.kl), statistics(trials.base, plain), whole, ranked,
        layers=tuple(_layers(run.findings)),
        restored=some.restored(_named(ranked, damaged, whole), whole),
        spent=some.spent(ranked, whole, costing),
        honest=mean_of(honest[0].kl) if honest else None,
        published=published(kind), damaged=tuple(damaged),
        text=costing.text_name, window=trials.window, windows=trials.windows, made=made_here(run.findings),
    )  # fmt: skip


def _named(ranked: Sequence[Contribution], damaged: Sequence[str], whole: Estimate) -> list[Contribution]:
    """The tensors that the sentence is about: those that are damaged, or else those that cost most."""
    return [one for one in ranked if one.name in damaged] if damaged else telling(ranked, whole)


@dataclass(frozen=True)
class _Some:
    """Both files, and the part of what they are run on that tensors are weighed on."""

    good: ModelFile
    pair: FilePair
    material: Material
    progress: Progress

    def restored(self, named: Sequence[Contribution], whole: Estimate) -> Restored | None:
        """These tensors restored at once; None if there are none, or nothing is lost."""
        if not named or whole.value <= EQUAL:
            return None
        more, gain = sum(one.more for one in named), sum(one.value for one in named)
        return self._changed({one.name: OWN for one in named}, more, gain, whole)

    def spent(self, ranked: Sequence[Contribution], whole: Estimate, costing: Costing) -> Restored | None:
        """What the bytes that are to be spent recover."""
        if not costing.spend:
            return None
        chosen, more, gain = choose(self.good, ranked, costing.spend)
        return self._changed(chosen, more, gain, whole) if chosen else Restored({}, 0, whole.value, whole, whole.value)

    def _changed(self, changes: Mapping[str, str], more: int, gain: float, whole: Estimate) -> Restored:
        """Several tensors changed at once, measured; that should take ``gain`` off what is lost."""
        found = run_trials(self.pair, self.material, [changes], self.progress).trials[0]
        return Restored(dict(changes), more, max(0.0, whole.value - gain), mean_of(found.kl), whole.value)


def _layers(findings: Sequence[Finding]) -> Iterator[LayerLoss]:
    """For each layer what is made in it, and what there is of it at its end."""
    made = made_here(findings)
    for output in findings:
        layer = output.tap.layer
        own = {each.tap.name: made[each.tap.name] for each in findings
               if each.tap.layer == layer and each.tap.name in made}  # fmt: skip
        if output.tap.kind.word == RESIDUAL and layer is not None and own:
            at = max(own, key=own.__getitem__)
            total = output.drift.nmse if output.drift is not None else math.nan
            yield LayerLoss(layer, own[at], at, total)


SIDE = "candidate"
_BRANCHES = ((".attn_", "attn_out"), (".ffn_", "ffn_out"))  # a weight's name has it -> the tap of its branch's output


def made_here(findings: Sequence[Finding]) -> dict[str, float]:
    """Tap -> the NMSE that comes of other weights alone, on the inputs of the file that is looked at."""
    own = {finding.tap.name: finding.local.get(SIDE) for finding in findings}
    return {tap: local.nmse for tap, local in own.items() if local is not None and math.isfinite(local.nmse)}


def predicted(findings: Sequence[Finding], weights: Mapping[str, str]) -> dict[str, float]:
    """Tensor -> its share of the whole loss. ``weights``: a tap's name to that of the weight that makes it."""
    made = made_here(findings)
    sizes = {each.tap.name: stats.rms for each in findings if (stats := each.stats.get(SIDE)) is not None}
    costs: dict[str, float] = {}
    for finding in findings:
        tap, weight = finding.tap, weights.get(finding.tap.name)
        if weight is not None and tap.name in made:
            share = _share(weight, tap.layer, sizes)
            costs[weight] = costs.get(weight, 0.0) + made[tap.name] * share
    total = sum(costs.values())
    return {name: cost / total for name, cost in costs.items()} if total > 0 else {}


def _share(weight: str, layer: int | None, sizes: Mapping[str, float]) -> float:
    """How much of the residual's power the branch of a weight is."""
    output = next((tap for part, tap in _BRANCHES if part in weight), "")
    branch, residual = sizes.get(f"{output}-{layer}"), sizes.get(f"l_out-{layer}")
    return (branch / residual) ** 2 if branch and residual else 1.0


MEASURED = 24  # tensors, those that are predicted to cost most
NAMED, TELLING = 3, 0.1  # tensors that the sentence names, each with such a share of the loss
SURE = 3.0  # standard errors; of a few positions there is none, and nothing is sure
EXACT = ("F32", "F64", "F16", "BF16")
MOST_QUANTIZED = 1 << 28  # values that are quantized to learn what is honest


def differing(good: ModelFile, other: ModelFile, shares: Mapping[str, float]) -> list[Contribution]:
    """The tensors that both files have and store otherwise, those of the largest predicted share first."""
    found = []
    for name in other.tensors:
        if name in good.weights and good.weights.shape(name) == other.weights.shape(name):
            ours, theirs = good.weights.read_raw(name), other.weights.read_raw(name)
            kinds = other.weights.type(name), good.weights.type(name)
            if kinds[0] != kinds[1] or not np.array_equal(ours.view(np.uint8), theirs.view(np.uint8)):
                found.append(Contribution(name, *kinds, ours.nbytes - theirs.nbytes, shares.get(name, 0.0)))
    return sorted(found, key=lambda one: -one.predicted)


def measure(
    pair: FilePair, material: Material, tensors: Sequence[Contribution], progress: Progress = silent,
    first: Sequence[str] = (),
) -> tuple[Estimate, tuple[Contribution, ...]]:  # fmt: skip
    """The KL of the file as it is, and what restoring each tensor takes off that.

    Those that ``first`` names are measured whatever is predicted. Predictions become nats. The ones that cost most
    come first.
    """
    ordered = sorted(tensors, key=lambda one: one.name not in first)
    tried, left = ordered[:MEASURED], ordered[MEASURED:]
    plain, *each = run_trials(pair, material, [NONE, *({one.name: OWN} for one in tried)], progress).trials
    whole = plain.mean
    found = [
        replace(one, predicted=one.predicted * whole, measured=mean_of(plain.kl - trial.kl))
        for one, trial in zip(tried, each, strict=True)
    ]
    found += [replace(one, predicted=one.predicted * whole) for one in left]
    ranked = sorted(found, key=lambda one: (one.measured is None, -one.value))
    return mean_of(plain.kl), tuple(ranked)


def telling(tensors: Sequence[Contribution], whole: Estimate) -> list[Contribution]:
    """Those that the sentence names: the few that cost most, each with a share that is worth a word, and is sure."""
    least = TELLING * whole.value
    sure = [one for one in tensors if one.measured is not None and one.value > SURE * one.measured.error]
    return [one for one in sure[:NAMED] if one.value >= least]


def honest_types(good: ModelFile, other: ModelFile) -> dict[str, str]:
    """The file's tensors of blocks with their types, as quantizing the good file would make them; none if too many."""
    kinds = {
        name: other.weights.type(name)
        for name in other.tensors
        if name in good.weights and other.weights.type(name) not in EXACT
    }
    size = sum(int(np.prod(good.weights.shape(name))) for name in kinds)
    same = all(good.weights.type(name) == kind for name, kind in kinds.items())
    return {} if same or size > MOST_QUANTIZED else kinds
