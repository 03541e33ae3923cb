"""Why taps are wrong: the causes that were found, with what proves them. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llamadiff.judge.fact import Fact
from llamadiff.trace import taps

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Cause:
    """A known bug that fits: its name, what the op does, what to do, who had it, and the NMSE it leaves.

    ``at`` is the tap that this is said of: where it was not recorded, or where other words hold of other taps; ``op``
    the op of its node.
    """

    name: str
    says: str
    fix: str
    source: str
    nmse: float
    value: float | None = None
    at: str | None = None
    op: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Why taps are wrong.

    ``taps`` maps each to the NMSE that replaying the cause leaves; ``right`` to what the right op leaves.
    ``causes`` are one, or several that this model cannot tell apart ("either ... or ..."), or none: then ``nearest``
    are those that come nearest, and fit not. ``harmless``: a way of computing and no mistake. ``complete``: no known
    bug was left untried for want of time. ``by_graph``: llama.cpp's graph was at hand, in which bugs are known.
    ``known_bugs``: how many there are. ``read``: where no bug is known, what the ops did, as it was read back from
    taps. ``beside``: how many other bugs, proved too, are replayed with it.
    """

    tap: str
    taps: Mapping[str, float]
    right: Mapping[str, float]
    causes: tuple[Cause, ...]
    nearest: tuple[Cause, ...] = ()
    harmless: bool = False
    complete: bool = True
    by_graph: bool = False
    known_bugs: int = 0
    beside: int = 0
    read: Mapping[str, tuple[Fact, ...]] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        return bool(self.causes)

    @property
    def nmse(self) -> float:
        """The worst that replaying the cause leaves."""
        return max(self.taps.values())

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for name in self.taps if (layer := taps.layer_of(name)) is not None}))
