"""What an engine has shown of its arithmetic: one fold over what was measured of all its taps, in any order.

Of each kind of operand and each rounding there are three things to know: it was seen, it was seen not to be, or nothing
that was recorded tells. What was not computed, or was left out since it was not needed, tells nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from llamadiff.judge.measurement import TapMeasurement
from llamadiff.numerics.policies import NATIVE, READ

SELDOM = 4.5  # standard deviations: what chance exceeds one time in 300,000
ROWS = 3  # rows that differ, and are exact: a scale that is cut off is the rounded one in every second block


class RoundingState(Enum):
    """What is known of one rounding of one kind of operand."""

    SEEN = "seen"
    UNSEEN = "seen not to be"
    UNTRIED = "not tried"


@dataclass(frozen=True)
class Evidence:
    """Of one engine. ``exact``: kinds of operands, each with what was rounded to, to the last bit; ``rounds`` and
    ``others``: kinds, each with the policies that some tap shows, and that some tap refutes.
    """

    exact: frozenset[tuple[str, str]] = frozenset()
    rounds: frozenset[tuple[str, str]] = frozenset()
    others: frozenset[tuple[str, str]] = frozenset()
    assumed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, measured: Iterable[TapMeasurement], assumed: Iterable[str] = ()) -> Evidence:
        """``assumed``: policies that the engine is known to have, whatever its taps show."""
        exact, rounds, others = Counter[tuple[str, str]](), set[tuple[str, str]](), set[tuple[str, str]]()
        correlation = defaultdict[tuple[str, str], list[float]](list)
        for measurement in measured:
            tap = measurement.evidence
            if measurement.is_match:
                exact.update(dict.fromkeys(tap.labels.items(), tap.distinct_rows))
            rounds |= {(kind, policy) for kind in tap.kinds for policy in tap.seen}
            others |= {(kind, policy) for kind in tap.kinds for policy in tap.unseen}
            for policy, deviations in tap.rounding_correlation.items():
                for kind in tap.kinds:
                    correlation[kind, policy].append(deviations)
        rounds |= {each for each, found in correlation.items() if sum(found) > SELDOM * len(found) ** 0.5}
        sure = frozenset(each for each, count in exact.items() if count >= ROWS)
        return cls(sure, frozenset(rounds), frozenset(others), frozenset(assumed))

    def of_policy(self, kind: str, policy: str) -> RoundingState:
        """Whether operands of a kind are rounded so. One tap that shows it counts for more than those that do not."""
        if policy in self.assumed or (kind, policy) in self.rounds:
            return RoundingState.SEEN
        return RoundingState.UNSEEN if (kind, policy) in self.others else RoundingState.UNTRIED

    def rounds_some(self, kinds: Iterable[str], policy: str) -> bool:
        """Whether operands of one of these kinds were seen to be rounded so."""
        return policy in self.assumed or any(self.of_policy(kind, policy) is RoundingState.SEEN for kind in kinds)

    def labels(self, kind: str) -> frozenset[str]:
        """What operands of a kind were seen to be rounded to, to the last bit."""
        return frozenset(label for known, label in self.exact if known == kind)

    def unknown(self, kinds: Iterable[str]) -> frozenset[str]:
        """Those of which no tap shows what they are rounded to."""
        return frozenset(kind for kind in kinds if not self.labels(kind))

    @property
    def tells(self) -> bool:
        """Whether some tap refutes some arithmetic."""
        return bool(self.others)


def assumed_of(reads: bool, of_llama_cpp: bool, stated: str = "") -> frozenset[str]:
    """What needs not be shown: what was read back, what an engine states, and llama.cpp's own of llama.cpp."""
    return frozenset([*[READ] * reads, *[NATIVE] * of_llama_cpp, *filter(None, [stated])])
