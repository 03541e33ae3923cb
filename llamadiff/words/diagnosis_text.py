"""A diagnosis in words: what the op does, where, and how well that is proved. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from llamadiff.judge.fact import runs_of
from llamadiff.result.diagnosis import Cause, Diagnosis
from llamadiff.result.rows import stem
from llamadiff.trace.taps import layer_of

_FEW_TAPS = 4
_FEW_STEPS = 3  # of layers at the same distance
_FEW_PARTS = 6  # of a list of layers


def clause(d: Diagnosis) -> str:
    """What the op does, without its subject; alternatives that the model cannot tell apart joined by "or"."""
    said = list(dict.fromkeys(_cause_text(cause) for cause in d.causes))
    if len(said) == 1:
        return said[0]
    numbered = [f"({number}) {text}" for number, text in enumerate(said[:4], 1)]
    return f"either {', or '.join(numbered)}: this model cannot tell them apart"


def likeliest(d: Diagnosis) -> str:
    """What the op does, of several alternatives the first."""
    return _cause_text(d.causes[0])


def alternatives(d: Diagnosis) -> Iterator[str]:
    """What else the op may do, where the model cannot tell it apart."""
    _first, *others = dict.fromkeys(_cause_text(cause) for cause in d.causes)
    if others:
        yield f"or it {', or '.join(others[:3])}: this model cannot tell them apart"


def _cause_text(cause: Cause) -> str:
    return cause.says if cause.at is None else f"{cause.says} (at {cause.at})"


def where(d: Diagnosis, recorded: Sequence[str]) -> str:
    """Which taps, in which layers: ``recorded`` are all taps that were judged."""
    if len(d.taps) == 1:
        return f"{d.tap} alone"
    words = list(dict.fromkeys(stem(tap) for tap in d.taps))
    possible = {layer_of(tap) for tap in recorded if stem(tap) in words and layer_of(tap) is not None}
    named = " and ".join(words) if len(words) <= 2 else f"{', '.join(words[:-1])} and {words[-1]}"
    named = named if len(words) <= _FEW_TAPS else f"{', '.join(words[:_FEW_TAPS])} and more"
    if len(possible) <= 1 or not d.layers:
        return named
    if len(d.layers) < len(possible):
        return f"{named} in {layers_of(d.layers)}"
    return f"{named} in both layers" if len(possible) == 2 else f"{named} in all {len(possible)} layers"


def layers_of(numbers: Sequence[int]) -> str:
    """``layer 3``, ``layers 0-5``, ``layers 5, 11, 17``; nothing of no layers."""
    return f"layer{'s' if len(numbers) > 1 else ''} {ranges(numbers)}" if numbers else ""


def ranges(numbers: Sequence[int]) -> str:
    """``3``, ``0-5``, ``5, 11``, ``0, 2, ..., 28``, the first of many that have no order."""
    steps = {after - before for before, after in pairwise(numbers)}
    if len(steps) == 1 and steps != {1} and len(numbers) > _FEW_STEPS:
        return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
    parts = [part for run in runs_of(numbers) for part in _range(run)]
    return ", ".join(parts[:_FEW_PARTS]) + (" and more" if len(parts) > _FEW_PARTS else "")


def _range(run: Sequence[int]) -> list[str]:
    return [f"{run[0]}-{run[-1]}"] if len(run) > 2 else list(map(str, run))


def proof(d: Diagnosis) -> str:
    """How far the replay, and how far the right op, is from what was recorded."""
    how = "exactly" if d.nmse == 0 else f"to an NMSE of {d.nmse:.1e}"
    that = f"that beside {d.beside} more" if d.beside else "that"
    return f"replaying {that} gives its values {how}; the right op is off by {_size(max(d.right.values()))}"


def nearest(d: Diagnosis) -> str:
    """That nothing fits; and what comes nearest, unless what the op did was read back."""
    if not d.by_graph:
        return "no known bug was tried: that takes llama.cpp's graph of these tokens"
    text = f"none of the {d.known_bugs} known bugs fits" if d.complete else "none of the known bugs tried in time fits"
    if d.nearest and not any(d.read.values()):
        text += f"; nearest: {', '.join(f'{cause.name} (NMSE {cause.nmse:.1e})' for cause in d.nearest)}"
    return text


def fix(d: Diagnosis) -> str:
    """What to do about it."""
    fixes = list(dict.fromkeys(cause.fix for cause in d.causes))
    return fixes[0] if len(fixes) == 1 else "; or ".join(fixes[:3])


def names(causes: Iterable[Cause]) -> str:
    """The causes' names, alternatives apart."""
    return " or ".join(dict.fromkeys(cause.name for cause in causes))


def _size(nmse: float) -> str:
    return f"{nmse:.1e}" if nmse < float("inf") else "Inf or NaN"
