"""llama.cpp against itself, in several ways: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamadiff.judge.verdict import of_variants
from llamadiff.result.comparison import Comparison
from llamadiff.result.logits import Logits

DEFAULT = "default"


@dataclass(frozen=True)
class Variant:
    """What came of one way to run llama.cpp.

    ``wrong`` are the taps whose op is wrong on its own inputs, of ``judged``; ``by_nodes``, on a device, the nodes.
    ``leaves`` is the first tap whose values are not the default's, bit for bit. ``ratio``: how far the logits are from
    exact, over what this variant's own rounding explains; of a device that is not known. ``failed``: why it did not run
    to its end, which is neither wrong nor right; ``died``: llama.cpp died of it or hangs, else it refuses.
    ``comparison``: its taps or nodes, judged; ``wrong`` begins with what its passes were given wrongly. Of a random
    schedule, ``wrong`` says what is, of so many tokens; ``steps``: what to do to see it, in llama.cpp's calls.
    Of drafts, how many were ``accepted`` of those ``drafted``, and that in words (``counted``); ``wrong`` says what is,
    of so many rows of logits.
    """

    name: str
    verdict: str
    seconds: float
    wrong: tuple[str, ...] = ()
    judged: int = 0
    headline: str = ""
    leaves: str | None = None
    ratio: float | None = None
    logits: Logits | None = None
    failed: str = ""
    died: bool = False
    comparison: Comparison | None = None
    by_nodes: bool = False
    steps: tuple[str, ...] = ()
    counted: str = ""
    drafted: int | None = None
    accepted: int | None = None


@dataclass(frozen=True)
class Variants:
    """All that were tried on one model and its tokens; the first is the default. ``asked``: a user named the others."""

    model: Mapping[str, Any]
    tokens: tuple[tuple[int, str | None], ...]
    baseline: Mapping[str, Any]
    rows: tuple[Variant, ...]
    prompt: str | None = None
    asked: bool = False

    @property
    def verdict(self) -> str:
        """WRONG if a variant is, UNCHECKED if one dies, or one that was asked for is refused; else that is no fault."""
        default, *others = (row.verdict for row in self.rows)
        return of_variants(default, others, self.died or (self.asked and self.refused))

    @property
    def died(self) -> tuple[Variant, ...]:
        """Those that llama.cpp died of."""
        return tuple(row for row in self.rows if row.died)

    @property
    def refused(self) -> tuple[Variant, ...]:
        """Those that it does not run."""
        return tuple(row for row in self.rows if row.failed and not row.died and not row.steps)
