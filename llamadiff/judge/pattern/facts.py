"""What a wrong tap's error looks like: facts, each of which narrows the cause down; none is a guess at it."""

from __future__ import annotations

from llamadiff.judge.pattern import instead, parts, places
from llamadiff.judge.pattern.deviation import Deviation, Fact

INSTEAD = (
    instead.zeros,
    instead.another_tensor,
    instead.other_axes,
    instead.other_rows,
    instead.other_channels,
    instead.factors,
    instead.shifts,
    instead.turns,
    parts.parts,
)
WHERE = (places.first_token, places.tokens, places.growth, places.heads, places.channels, places.bounds)


def profile(d: Deviation) -> tuple[Fact, ...]:
    """What the values are instead of the right ones, and where they are wrong; the telling facts first."""
    return tuple(fact for facts in (*INSTEAD, *WHERE) for fact in facts(d))
