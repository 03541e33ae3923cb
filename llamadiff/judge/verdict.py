"""The verdict: here alone anything becomes MATCH, NOISE, WRONG or UNCHECKED, and says why.

A tap is judged by what was measured of it (``measurement.py``) and by what the engine's taps together show of its
arithmetic (``evidence.py``). All else that has a verdict has one by a function of this file: a run, a node, a row of
logits, a check.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from llamadiff.judge.evidence import Evidence
from llamadiff.judge.measurement import SURE, VARIANTS, AllowedError, TapMeasurement
from llamadiff.numerics import arithmetic
from llamadiff.numerics.policies import CACHES, MAY_ROUND, NATIVE, READ

MATCH, NOISE, WRONG, UNCHECKED = "match", "noise", "wrong", "unchecked"
SEVERITY = (MATCH, NOISE, UNCHECKED, WRONG)
RIGHT = (MATCH, NOISE)
PLAIN = "F32"  # what is rounded to nothing
_ROUNDINGS = {NATIVE: "llama.cpp's rounding", READ: "the rounding that was read back"}
NODES = 10.0  # times a match's limit that a node's noise may reach


@dataclass(frozen=True)
class Reason:
    """One step of a verdict: what was measured, the limit that it was held to (None: none), and the evidence: what sets
    the limit, or what it means without one.
    """

    measured: str
    value: float | int
    limit: float | None
    evidence: str

    @property
    def is_kept(self) -> bool:
        return self.limit is None or self.value <= self.limit

    def __str__(self) -> str:
        value = f"{self.value:.1e}" if isinstance(self.value, float) else str(self.value)
        allowance = "" if self.limit is None else f", {'within' if self.is_kept else 'more than'} {self.limit:.1e}"
        return f"{self.measured}: {value}{allowance} ({self.evidence})"


@dataclass(frozen=True)
class Ruling:
    """A verdict, its reasons in order; of a tap, the allowance that decided it.

    ``unclear``: UNCHECKED, since an unknown rounding may leave as much; ``exact``: WRONG, since other taps show that
    nothing in it is rounded.
    """

    verdict: str
    reasons: tuple[Reason, ...] = ()
    allowance: AllowedError | None = None
    unclear: bool = False
    exact: bool = False

    @property
    def is_wrong(self) -> bool:
        return self.verdict == WRONG


# -- one tap -----------------------------------------------------------------------------------------------------------


def of_tap(m: TapMeasurement, evidence: Evidence) -> Ruling:
    """The verdict on a tap, in view of what is not finite: a value that is none where the right one is makes it wrong;
    of a tap that is right elsewhere, places at which even the right op gives none are unchecked.
    """
    found = _of_values(m, evidence)
    if m.not_finite:
        reason = Reason("values that are not finite", m.not_finite, None, "the right op gives finite ones there")
        found = Ruling(WRONG, (reason,), found.allowance)
    if m.opened and found.verdict != WRONG:
        reason = Reason("values that cannot be judged", m.opened, None, "even the right op gives NaN or Inf there")
        return replace(found, verdict=UNCHECKED, reasons=(*found.reasons, reason), unclear=False)
    return found


def _of_values(m: TapMeasurement, evidence: Evidence) -> Ruling:
    way, allowance = _allowance(m, evidence)
    if m.is_even or (allowance.fits and m.nmse <= m.limit):
        reason = Reason("own error", m.nmse, m.limit, f"what right arithmetic ({m.label}) leaves")
        coarse = m.label in arithmetic.COMPUTES or m.printed is not None
        return Ruling(NOISE if coarse else MATCH, (reason,), allowance)
    if allowance.fits:
        return Ruling(NOISE, (Reason("own error", m.nmse, allowance.whole, _allows(way)),), allowance)
    beyond = Reason("own error", m.nmse, allowance.whole, _allows(way))
    if beyond.is_kept:
        beyond = replace(beyond, limit=None, evidence=f"within {_allows(way)}, but a part of it is beyond that")
    if m.unknown:
        unknown = Reason("own error", m.nmse, None, m.unknown)
        return Ruling(UNCHECKED, (beyond, unknown), allowance, unclear=True)
    if m.printed is not None and not (m.printed.far_from_known if evidence.tells else m.printed.far):
        unknown = Reason("own error", m.nmse, None, "no value is further off than rounding may take it")
        return Ruling(UNCHECKED, (beyond, unknown), allowance, unclear=True)
    if not m.span:
        return Ruling(WRONG, (beyond,), allowance)
    return _of_span(m, evidence, beyond, allowance)


def _allowance(m: TapMeasurement, evidence: Evidence) -> tuple[str, AllowedError]:
    """The widest allowance that the engine has a right to, by what it has shown."""
    if not m.span:
        known = (m.evidence.product, m.label) in evidence.exact
        way = SURE if known or VARIANTS not in m.allowances else VARIANTS
        return way, m.allowances[way]
    allowed = [SURE, *(way for way in m.allowances if way != SURE and evidence.rounds_some(m.evidence.kinds, way))]
    way = max(allowed, key=lambda each: (m.allowances[each].fits, m.allowances[each].whole))
    return way, m.allowances[way]


def _allows(way: str) -> str:
    """What an allowance is for."""
    if way == SURE:
        return "what its own precision leaves"
    if way == VARIANTS:
        return "what its arithmetic leaves, done in another way"
    return f"what {_ROUNDINGS.get(way, f'rounding to {way}')} leaves, which its taps show"


def _of_span(m: TapMeasurement, evidence: Evidence, beyond: Reason, allowance: AllowedError) -> Ruling:
    """The verdict on a span that is beyond all that the engine has shown: what it has not shown may explain it."""
    unknown = evidence.unknown(m.evidence.kinds)
    products = bool(unknown - {*CACHES, *MAY_ROUND}) and m.unknown_rounding.products > 0
    limit = m.unknown_rounding.products if products else 0.0
    limit += m.unknown_rounding.caches if unknown & {*CACHES} else 0.0
    limit += m.unknown_rounding.attention if unknown & {*CACHES, "ROPE", "SOFT_MAX"} else 0.0
    limit += m.unknown_rounding.values if unknown & {*MAY_ROUND} else 0.0
    error = m.unknown_rounding.plain if products else m.unknown_rounding.nearest
    what = ", ".join(sorted(unknown))
    if error <= limit + m.unknown_rounding.kept:
        says = f"what rounding may leave, and no tap shows how {what} are rounded"
        reason = Reason("own error", error, limit + m.unknown_rounding.kept, says)
        return Ruling(UNCHECKED, (beyond, reason), allowance, unclear=True)
    reason = Reason("own error", error, limit + m.unknown_rounding.kept, f"what any rounding of {what} leaves")
    if not unknown:
        reason = replace(
            reason, limit=None, evidence="other taps show how all kinds of its ops round, and none so much"
        )
    exact = all(evidence.labels(kind) == {PLAIN} for kind in m.evidence.kinds)
    return Ruling(WRONG, (beyond, reason), allowance, exact=exact)


def after_wrong_partial(verdict: str, partial: str) -> Ruling:
    """The verdict on a tap that is computed from a partial one which is wrong: an error goes on through it."""
    reason = Reason("wrong taps before it", 1, None, f"{partial}, of which not all was recorded")
    return Ruling(UNCHECKED if verdict == WRONG else verdict, (reason,))


def of_harmless_way(says: str, left: float, opened: int) -> Ruling:
    """The verdict on a tap that a harmless way of computing explains, but for an NMSE that is ``left``.

    ``opened`` values cannot be judged.
    """
    reason = Reason("error that is left", left, None, f"computed again in a way that is no mistake: {says}")
    return Ruling(UNCHECKED if opened else NOISE, (reason,))


def of_known_cause(says: str, left: float) -> Ruling:
    """The verdict on a tap that a bug explains but for an NMSE that is ``left``, whatever else might."""
    return Ruling(WRONG, (Reason("error that is left", left, None, f"computed again with a mistake: {says}"),))


def of_reading(says: str) -> Ruling:
    """The verdict on a tap of which a mistake was read back: what it did gives its values."""
    return Ruling(WRONG, (Reason("mistakes that were read back", 1, None, says),))


# -- what consists of several ------------------------------------------------------------------------------------------


def worst_of(verdicts: Iterable[str], refused: object = None) -> str:
    """The worst verdict; UNCHECKED if there are none, and no milder where some were ``refused``."""
    return max([*verdicts, *[UNCHECKED] * bool(refused)], key=SEVERITY.index, default=UNCHECKED)


def is_right(verdict: str) -> bool:
    """Whether it passes: MATCH or NOISE."""
    return verdict in RIGHT


def of_run(
    taps: Sequence[str], checks: Sequence[str] = (), blamed: Collection[str] = (), reached: bool = True
) -> Ruling:
    """The verdict on a run: the worst of its taps and of what was checked before them, if it was judged to its end.

    ``blamed``: taps at which the baseline is wrong on its own inputs: then nothing was compared with what is right.
    """
    if blamed:
        says = "nothing was compared with what is right"
        reason = Reason("taps at which the baseline is wrong", len(blamed), None, says)
        return Ruling(WRONG, (reason,))
    verdict = worst_of([*taps, *checks])
    reasons = tuple(
        Reason(f"{what} that are {verdict}", some.count(verdict), None, "the worst decide")
        for what, some in (("taps", list(taps)), ("checks", list(checks)))
        if verdict in some
    )
    if is_right(verdict) and not reached:
        missing = Reason("logits that were judged", 0, None, "a run passes by its logits alone")
        return Ruling(UNCHECKED, (*reasons, missing))
    return Ruling(verdict, reasons)


def of_variants(default: str, others: Iterable[str], died: object) -> str:
    """The verdict on settings: WRONG if some are, not known where some ``died``; what is refused is no fault."""
    return WRONG if WRONG in (default, *others) else worst_of((default,), died)


def of_tensors(verdicts: Collection[str], findings: object) -> str:
    """The verdict on a file, by those on its tensors and by what was found of it besides."""
    return WRONG if findings else worst_of(verdict for verdict in verdicts if verdict != WRONG)


def of_bounds(bounds: Iterable[tuple[Reason, bool]]) -> Ruling:
    """The verdict on statistics, each with whether a user gave its limit: else rounding set it."""
    broken = [(reason, given) for reason, given in bounds if not reason.is_kept]
    verdict = MATCH if not broken else WRONG if any(given for _, given in broken) else UNCHECKED
    return Ruling(verdict, tuple(reason for reason, _ in broken))


def of_check(fault: object, is_known: bool = True) -> str:
    """The verdict on something that is so or is not: WRONG if there is a ``fault``, UNCHECKED if nothing tells."""
    return UNCHECKED if not is_known else WRONG if fault else MATCH


def of_part(verdict: str) -> str:
    """The verdict on a whole, by that on a part of it: noise there is none of the whole."""
    return MATCH if verdict == NOISE else verdict


def of_refusal(died: bool) -> str:
    """The verdict on what llama.cpp did not run: it ``died`` of it, or refused it."""
    return WRONG if died else UNCHECKED


def of_unjudged() -> str:
    """The verdict on what nobody has judged."""
    return UNCHECKED


def of_rounding(exact: bool, right: bool) -> str:
    """The verdict on what is ``exact``, or else ``right`` up to rounding, or wrong."""
    return MATCH if exact else NOISE if right else WRONG


def of_node(nmse: float | None, match: float, opened: int = 0) -> Ruling:
    """The verdict on one computation by itself, by its NMSE (None: nobody computed it again; NaN is WRONG).

    ``opened``: values at which even the right one gives NaN or Inf.
    """
    if nmse is None:
        return Ruling(UNCHECKED, (Reason("computations of it", 0, None, "there is nothing to hold it to"),))
    found = of_rounding(nmse <= match, nmse <= NODES * match)
    limit = match if found == MATCH else NODES * match
    reason = Reason("own error", nmse, limit, "what right arithmetic leaves")
    if opened and found != WRONG:
        beside = Reason("values that cannot be judged", opened, None, "NaN or Inf is right there")
        return Ruling(UNCHECKED, (reason, beside))
    return Ruling(found, (reason,))


def of_row(verdict: str, error: float, limit: float, hides: float) -> str:
    """The verdict on one token's row of a tap that has one, by its NMSE."""
    if math.isnan(error):
        return UNCHECKED
    if error <= limit:
        return MATCH
    if verdict != WRONG:
        return verdict
    return WRONG if error > max(limit, hides) else NOISE


def of_answers(verdict: str, says: str, is_mistake: bool) -> Ruling:
    """The verdict on a server's answers, which have one as logits, by what explains them: a mistake, or none."""
    reason = Reason("mistakes that explain the answers", int(is_mistake), None, says)
    return Ruling(WRONG if is_mistake else verdict if is_right(verdict) else NOISE, (reason,))
