"""Asks llama.cpp how far another file of a model is from the good one: as it is, and with tensors of other values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.numerics.metrics import log_softmax
from llamadiff.system.progress import Progress, silent

Array = NDArray[Any]
Change = Mapping[str, str]  # a tensor's name -> the type that the good file's values have in it
NONE: Change = {}
PAIR = "llamadiff.ext.loss.two_files:run_pair"
WINDOW = 512  # tokens, what llama-perplexity runs at a time


@dataclass(frozen=True)
class Material:
    """What both files are run on: token ids, of which every position counts, or a text in windows.

    Of each window the second half counts, as with llama-perplexity. ``most``: so many windows (0: all).
    """

    tokens: tuple[int, ...] = ()
    text: str | None = None
    window: int = WINDOW
    most: int = 0


@dataclass(frozen=True)
class FilePair:
    """The two files, and how llama.cpp runs them."""

    good: str
    other: str
    settings: Settings


@dataclass(frozen=True)
class Trial:
    """What one trial gave at every position: the KL from the good file, -ln p of the next token, the same first one."""

    kl: Array
    nll: Array
    same: Array

    @property
    def mean(self) -> float:
        """The mean KL, in nats."""
        return float(self.kl.mean())


@dataclass(frozen=True)
class Trials:
    """The good file's own outcome, and one for each change; ``windows`` of ``window`` tokens were run."""

    base: Trial
    trials: tuple[Trial, ...]
    window: int
    windows: int


def run_trials(pair: FilePair, material: Material, changes: Sequence[Change], progress: Progress = silent) -> Trials:
    """Run both files side by side, the other one under each change. Raises UserError."""
    request = Request(
        pair.good, other=pair.other, errand=PAIR, settings=pair.settings, tokens=material.tokens, text=material.text,
        window=material.window if material.text is not None else 0, most=material.most,
        texts=tuple(json.dumps(dict(change)) for change in changes),
    )  # fmt: skip
    bases = list[tuple[Array, Sequence[int | None]]]()
    made: list[list[Array]] = [[] for _ in range(len(changes) + 1)]

    def hear(answer: dict[str, Any], data: Sequence[Any]) -> None:
        if "base" in answer:
            logits = np.frombuffer(data[0], np.float32).reshape(-1, answer["n_vocab"])
            bases.append((logits.copy(), answer["base"]))
            made[0].append(divergences(logits, logits, answer["base"]))
        elif "trial" in answer:
            base, targets = bases[answer["of"]]
            other = np.frombuffer(data[0], np.float32).reshape(base.shape)
            made[1 + answer["trial"]].append(divergences(base, other, targets))
        elif "judged" in answer:
            bases.clear()

    with Child(pair.settings) as child:
        answers = child.ask(request, progress, hear)
    found = np.stack([np.concatenate(each) for each in made])
    assert found.shape[-1] == FACTS
    base, *others = (Trial(each[:, KL], each[:, NLL], each[:, SAME]) for each in found)
    return Trials(base, tuple(others), answers["window"], answers["windows"])


def trial_logits(
    pair: FilePair, tokens: tuple[int, ...], changes: Sequence[Change], progress: Progress = silent
) -> list[Array]:
    """What the other file's logits [token, vocabulary] are under each change. Raises UserError."""
    request = Request(
        pair.good, other=pair.other, errand=PAIR, settings=pair.settings, tokens=tokens,
        texts=tuple(json.dumps(dict(change)) for change in changes),
    )  # fmt: skip
    found: list[Array] = []

    def hear(answer: dict[str, Any], data: Sequence[Any]) -> None:
        if "trial" in answer:
            found.append(np.frombuffer(data[0], np.float32).reshape(len(tokens), -1).astype(np.float64))

    with Child(pair.settings) as child:
        child.ask(request, progress, hear)
    return found


FACTS = 3  # of each position: the KL, the other side's negative log-likelihood, and whether its first token is the same
KL, NLL, SAME = range(FACTS)
_ROWS = 16  # that are widened at once


def divergences(base: Array, other: Array, targets: Sequence[int | None]) -> Array:
    """Logits [position, vocabulary] of both sides -> [position, fact] in float64.

    KL(base || other) is in nats; the likelihood is that of the position's target, NaN where it has none.
    """
    found = np.full((len(targets), FACTS), np.nan)
    for at in range(0, len(targets), _ROWS):
        rows = slice(at, min(at + _ROWS, len(targets)))
        found[rows] = _of_rows(base[rows].astype(np.float64), other[rows].astype(np.float64), targets[rows])
    return found


def _of_rows(base: Array, other: Array, targets: Sequence[int | None]) -> Array:
    found = np.full((len(base), FACTS), np.nan)
    p, q = log_softmax(base), log_softmax(other)
    with np.errstate(invalid="ignore"):
        found[:, KL] = np.maximum(np.einsum("pv,pv->p", np.exp(p), np.where(np.isneginf(p), 0.0, p - q)), 0.0)
    for row, target in enumerate(targets):
        if target is not None:
            found[row, NLL] = -q[row, target]
    found[:, SAME] = base.argmax(axis=1) == other.argmax(axis=1)
    return found
