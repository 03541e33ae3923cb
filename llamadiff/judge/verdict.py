"""The verdict on one tap of one source: its errors, held to what rounding explains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from llamadiff.judge.allowance import Allowance, Hiding, unseen
from llamadiff.judge.compared import Compared
from llamadiff.judge.errors import Errors
from llamadiff.judge.finding import Local
from llamadiff.judge.fit import Fitted
from llamadiff.judge.lanes import Source
from llamadiff.judge.noise import TapNoise
from llamadiff.judge.pattern.deviation import Fact
from llamadiff.numerics import arithmetic, metrics, tolerances


@dataclass(frozen=True)
class Judgement:
    """One tap of one source: its ``errors`` under the arithmetic that fits best, called ``label``; their limits."""

    source: Source
    seen: Compared
    fitted: Fitted
    label: str
    errors: Errors
    noise: TapNoise
    bounds: Allowance

    @cached_property
    def verdict(self) -> str:
        """MATCH, NOISE, WRONG, or UNCHECKED: as far off as a rounding may be that nothing here shows."""
        verdict = self.bounds.verdict(self.errors.rows, self.errors.largest, self.errors.recorded)
        if verdict == tolerances.MATCH and (self.label in arithmetic.EIGHT_BITS or self.is_printed):
            return tolerances.NOISE
        unclear = verdict == tolerances.WRONG and (
            (self.noise.span and self.noise.is_unclear(self.errors.rows, self.fitted.errors))
            or (self.is_printed and not self.noise.is_far(self.errors.rows))
        )
        return tolerances.UNCHECKED if unclear else verdict

    @property
    def is_printed(self) -> bool:
        """Whether the values were read from a log."""
        return self.seen.tap.name in self.source.trace.printed.slack

    @property
    def hiding(self) -> Hiding:
        """What could hide: in llama.cpp's own matches, no more than the table says."""
        matches = self.source.name == "baseline" and self.verdict == tolerances.MATCH
        return unseen(self.bounds.match) if matches else self.bounds.hiding()

    def local(self, facts: tuple[Fact, ...]) -> Local:
        """It as plain data; ``facts`` say what its errors look like."""
        errors, hiding, worst = self.errors, self.hiding, self.errors.worst
        room = self.source.trace.printed.slack.get(self.seen.tap.name)
        printed = 0.0 if room is None else metrics.ratio(float((room * room).sum()), float(errors.sizes.sum()))
        return Local(
            nmse=errors.nmse, per_token=errors.per_row, verdict=self.verdict, facts=facts,
            arithmetic=None if self.verdict == tolerances.WRONG else self.label, least=self.fitted.least,
            limit=self.bounds.match, noise_limit=hiding.whole, span=tuple(self.noise.span),
            token=worst.token, index=worst.index, expected=worst.baseline, recorded=worst.candidate,
            unclear=self.verdict == tolerances.UNCHECKED,
            guess=self.noise.guess if self.verdict == tolerances.NOISE else None,
            hides=max(hiding.whole, printed), hides_row=hiding.row, hides_value=hiding.value,
        )  # fmt: skip
