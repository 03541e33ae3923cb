"""What was found of two files of one model: how far apart, which tensors cost it, what is usual. Plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OWN = ""  # the good file's values in the good file's own type
SOURCE = "llama.cpp, tools/perplexity/README.md"
SLACK = 2.0  # times what honest quantization costs: up to which a loss is usual


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error; NaN where there is none."""

    value: float
    error: float = math.nan

    def times(self, factor: float) -> Estimate:
        """In another unit."""
        return Estimate(self.value * factor, self.error * factor)


@dataclass(frozen=True)
class Statistic:
    """One line of llama-perplexity's; ``percent``: its values are to be read as such."""

    name: str
    estimate: Estimate
    percent: bool = False


@dataclass(frozen=True)
class Contribution:
    """What restoring one tensor from the good file takes off the mean KL, in nats.

    ``kind`` is its type in the file, ``good`` that in the good file, ``more`` the bytes that this takes. ``predicted``
    was told from the taps, ``measured`` by running it; None where that was not done.
    """

    name: str
    kind: str
    good: str
    more: int
    predicted: float
    measured: Estimate | None = None

    @property
    def value(self) -> float:
        """What is known of it: measured, or else predicted."""
        return self.measured.value if self.measured is not None else self.predicted


@dataclass(frozen=True)
class Restored:
    """Several tensors changed at once: to which types, what it was said to leave of the KL, and what it does leave.

    ``whole`` is the KL without that, over the same positions.
    """

    changes: Mapping[str, str]
    more: int
    predicted: float
    measured: Estimate
    whole: float

    @property
    def share(self) -> float:
        """How much of the KL it takes off."""
        return 1 - self.measured.value / self.whole if self.whole > 0 else 0.0


@dataclass(frozen=True)
class LayerLoss:
    """One layer's output: the largest error that is made in the layer, where, and all of it that is there."""

    layer: int
    made: float
    at: str
    total: float


@dataclass(frozen=True)
class Loss:
    """All of it. ``kl`` is the mean over ``positions``, of the text where one was given, else of the prompt.

    ``kind`` is the file's type. ``honest``: the KL of the good file quantized to the same types here and now, where
    that was done; ``published``: from what to what it is for trained models. ``contributions`` are of ``weighed``, the
    mean KL of the first windows of a text; ``restored`` are the tensors that the sentence names, together; ``spent`` is
    the answer to a budget. ``damaged`` are tensors that are not what their types explain. ``made``: the NMSE at each
    tap that comes of other weights alone.
    """

    kind: str
    kl: Estimate
    positions: int
    statistics: tuple[Statistic, ...]
    weighed: Estimate
    contributions: tuple[Contribution, ...] = ()
    layers: tuple[LayerLoss, ...] = ()
    restored: Restored | None = None
    spent: Restored | None = None
    honest: Estimate | None = None
    published: tuple[float, float] | None = None
    damaged: tuple[str, ...] = ()
    text: str | None = None
    window: int = 0
    windows: int = 0
    made: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_usual(self) -> bool:
        """Whether it is no more than the types explain, as far as that is known."""
        if self.damaged:
            return False
        if self.honest is not None and math.isfinite(self.honest.value):
            return self.kl.value <= SLACK * self.honest.value + 1e-6
        return self.published is None or self.kl.value <= SLACK * self.published[1]


def named(found: Sequence[Statistic], name: str) -> Estimate | None:
    """A statistic by llama-perplexity's name for it."""
    return next((each.estimate for each in found if each.name == name), None)
