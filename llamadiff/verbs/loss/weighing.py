"""Which tensors cost most: ordered by what is predicted, then measured by restoring one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from llamadiff.engines.model_file import ModelFile
from llamadiff.result.loss import OWN, Contribution, Estimate
from llamadiff.system.progress import Progress, silent
from llamadiff.verbs.loss.statistics import mean_of
from llamadiff.verbs.loss.trials import NONE, FilePair, Material, run_trials

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
            ours, theirs = good.weights.stored(name), other.weights.stored(name)
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
