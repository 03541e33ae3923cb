"""A diagnosis in words: what the op does, where, and how well that is proved. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llamadiff.diagnose.diagnosis import Cause, Diagnosis
from llamadiff.diagnose.registry import known_bugs


def clause(d: Diagnosis) -> str:
    """What the op does, without its subject; alternatives that the model cannot tell apart joined by "or"."""
    said = list(dict.fromkeys(_said(cause) for cause in d.causes))
    if len(said) == 1:
        return said[0]
    numbered = [f"({number}) {text}" for number, text in enumerate(said[:4], 1)]
    return f"either {', or '.join(numbered)}: this model cannot tell them apart"


def _said(cause: Cause) -> str:
    return cause.says if cause.at is None else f"{cause.says} (at {cause.at})"


def where(d: Diagnosis, recorded: Sequence[str]) -> str:
    """Which taps and layers, where it is more than one: ``recorded`` are all taps that were judged."""
    words = list(dict.fromkeys(_word(tap) for tap in d.taps))
    possible = {_layer(tap) for tap in recorded if _word(tap) in words and _layer(tap) is not None}
    layers = d.layers
    place = ""
    if len(possible) > 1:
        place = f"in all {len(layers)} layers" if len(layers) == len(possible) else f"in {layers_of(layers)}"
    if len(words) == 1:
        return place if len(layers) > 1 else ""
    named = ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) <= 4 else f"{', '.join(words[:4])} and more"
    return f"{named} {place}".strip()


def layers_of(numbers: Sequence[int]) -> str:
    """``layers 0 to 5``, ``layers 5, 11, 17``."""
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]} to {numbers[-1]}"
    return "layers " + ", ".join(map(str, numbers[:6])) + (" and more" if len(numbers) > 6 else "")


def proof(d: Diagnosis) -> str:
    """How far the replay, and how far the right op, is from what was recorded."""
    how = "exactly" if d.nmse == 0 else f"to an NMSE of {d.nmse:.1e}"
    return f"replaying that gives its values {how}; the right op is off by {_size(max(d.right.values()))}"


def nearest(d: Diagnosis) -> str:
    """That nothing fits; and what comes nearest, unless what the op did was read back."""
    text = (
        f"none of the {count(d.by_graph)} known bugs fits"
        if d.complete
        else "none of the known bugs tried in time fits"
    )
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


def count(by_graph: bool = False) -> int:
    """How many bugs are known of taps, or of a graph's nodes."""
    own = [known for known in known_bugs().values() if (known.nodes if by_graph else known.words != known.ops)]
    return sum(not known.harmless for known in own)


def _size(nmse: float) -> str:
    return f"{nmse:.1e}" if nmse < float("inf") else "Inf or NaN"


def _word(tap: str) -> str:
    return tap.rsplit("-", 1)[0]


def _layer(tap: str) -> int | None:
    end = tap.rsplit("-", 1)[-1]
    return int(end) if end.isdecimal() else None
