"""Runs drawn from a seed: a mistake or none, an arithmetic, a type of weights, and which taps are recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from llamadiff.engines.run_spec import How
from llamadiff.result.comparison import Comparison
from llamadiff.verbs.verbs import diff
from proof.strangers import recording
from proof.strangers.arithmetic import ARITHMETICS, BY_NAME, Arithmetic
from proof.strangers.crossing import Size, applies, baseline, model_file, opened, size_of, stated
from proof.strangers.engine import NONE, Bug, Engine
from proof.unlisted.bugs import TOKENS, Unlisted
from proof.unlisted.more import MISTAKES, UNLISTED

Array = np.ndarray
KINDS = ("F32", "F16", "Q8_0", "BF16")
PLAIN = BY_NAME["float32"]
ENDS = ("l_out", "result_output")
HOW = How(diagnose=False, partial=True)


@dataclass(frozen=True)
class Case:
    """What is run and how: the ``mistake`` is made as it is, or as ``scale`` times its error at its own tap, in all
    layers or in the ``layer``; in another ``model`` than its own perhaps, which has more layers.
    """

    mistake: Unlisted
    arithmetic: Arithmetic
    kind: str
    scale: float | None = None
    layer: int | None = None
    model: str = "llama"
    tokens: tuple[int, ...] = TOKENS

    @property
    def word(self) -> str:
        """The word of the tap that the mistake falsifies first."""
        return self.mistake.tap.rpartition("-")[0] or self.mistake.tap


def drawn(rng: np.random.Generator) -> Case:
    """A mistake that the arithmetic can make; every second one in plain float32."""
    while True:
        mistake = MISTAKES[rng.integers(len(MISTAKES))]
        arithmetic = PLAIN if rng.random() < 0.5 else ARITHMETICS[rng.integers(len(ARITHMETICS))]
        word = mistake.tap.rpartition("-")[0] or mistake.tap
        able = applies(arithmetic, mistake.bug, mistake.model) and not arithmetic.layout
        if able and word not in (*arithmetic.unrecorded, *arithmetic.elsewhere):
            kind = mistake.kind if rng.random() < 0.5 else KINDS[rng.integers(len(KINDS))]
            tokens = TOKENS[: rng.integers(2, len(TOKENS) + 1)] if rng.random() < 0.2 else TOKENS
            deep = mistake.model == "llama" and rng.random() < 0.5  # layers after those in which lanes are left out
            model, last = ("llama-deep", 5) if deep else (mistake.model, 1)
            layer = None if rng.random() < 0.5 else int(rng.choice([0, last]))
            return Case(mistake, arithmetic, kind, layer=layer, model=model, tokens=tokens)


def path_of(case: Case, folder: Path) -> Path:
    """The model's file."""
    return model_file(folder, case.model, case.kind)


@lru_cache(maxsize=64)
def _ran(path: Path, arithmetic: str, mistake: str, tokens: tuple[int, ...]) -> Mapping[str, Array]:
    bug = UNLISTED[mistake].bug if mistake else NONE
    with threadpool_limits(1, "blas"):
        return recording.without_cache(Engine(opened(path), BY_NAME[arithmetic], bug).run(tokens))


def right_run(case: Case, folder: Path) -> Mapping[str, Array]:
    """What the same engine records without the mistake."""
    return _ran(path_of(case, folder), case.arithmetic.name, "", case.tokens)


def run(case: Case, folder: Path) -> Mapping[str, Array]:
    """What the engine records with it."""
    if case.scale is None:
        return _ran(path_of(case, folder), case.arithmetic.name, case.mistake.name, case.tokens)
    errors = _errors(replace(case, scale=None), folder)

    def fault(engine: Engine, x: Array) -> Array:
        name = f"{case.word}-{engine.layer}" if case.mistake.tap != case.word else case.word
        wanted = case.layer is None or engine.layer == case.layer or name == case.word
        return x + np.float32(case.scale) * errors[name].reshape(x.shape) if wanted and name in errors else x

    with threadpool_limits(1, "blas"):
        bug = Bug("scaled", {}, {case.word: fault})
        return recording.without_cache(Engine(opened(path_of(case, folder)), case.arithmetic, bug).run(case.tokens))


def _errors(case: Case, folder: Path) -> Mapping[str, Array]:
    """The error that the mistake makes at its tap, by layer, on the inputs that it has there."""
    taps = run(case, folder)
    right = truth(case, taps, folder)
    names = [name for name in taps if name == case.mistake.tap or name.rpartition("-")[0] == case.word]
    found = {name: taps[name].astype(np.float32) - right[name].astype(np.float32) for name in names if name in right}
    return {name: error for name, error in found.items() if np.isfinite(error).all() and error.any()}


def truth(case: Case, taps: Mapping[str, Array], folder: Path) -> Mapping[str, Array]:
    """What the same engine computes without the mistake from what was recorded."""
    with threadpool_limits(1, "blas"), np.errstate(all="ignore"):
        return Engine(opened(path_of(case, folder)), case.arithmetic).run(case.tokens, given=taps)


def subset(rng: np.random.Generator, names: Sequence[str]) -> tuple[str, ...]:
    """Some taps, and the logits: ends of layers, some whole layers, all but the last one's, some kinds of taps, any."""
    way, share = rng.integers(5), rng.choice([0.1, 0.3, 0.7, 0.9])
    last = max(name.rpartition("-")[2] for name in names if "-" in name)
    words = {word for word in {name.rpartition("-")[0] or name for name in names} if rng.random() < share}
    layers = {layer for layer in {name.rpartition("-")[2] for name in names} if rng.random() < 0.5}

    def kept(name: str) -> bool:
        word, _, layer = name.rpartition("-")
        if way == 0 or name == "result_output":
            return (word or name) in ENDS
        if way == 1:
            return layer in layers or word == "l_out"
        if way == 2:
            return (word or name) in words
        return layer != last or word == "l_out" if way == 3 else rng.random() < share

    return tuple(name for name in names if kept(name))


def judged(case: Case, taps: Mapping[str, Array], folder: Path, names: Sequence[str] | None = None) -> Comparison:
    """What is said of taps, or of those that are named, in that order."""
    kept = taps if names is None else {name: taps[name] for name in names}
    trace = recording.save(folder / "candidate.safetensors", kept, case.tokens)
    path = path_of(case, folder)
    return diff(baseline(path, case.tokens, len(case.tokens)), trace, path, how=HOW)


def verdicts(found: Comparison) -> dict[str, str]:
    """By tap."""
    return {row.tap: row.verdict for row in found.rows}


def shows(case: Case, taps: Mapping[str, Array], names: Sequence[str], folder: Path) -> bool:
    """Whether some of these taps show the mistake: by more than could hide in the report of a right run of the same
    taps, however that counts: over the tensor, in a row, in a value.
    """
    kept = {name: taps[name] for name in names}
    right, clean = truth(case, kept, folder), judged(case, right_run(case, folder), folder, names)
    floors = {row.tap: stated(row) for row in clean.rows}
    return any(size_of(kept[name], right[name], name).above(floors.get(name, _ANY)) for name in names if name in right)


_ANY = Size(np.inf, np.inf, np.inf)
