"""What an engine has shown: one fold, in any order, of three values; and what a tap's verdict makes of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from llamadiff.judge.evidence import Evidence, RoundingState, assumed_of
from llamadiff.judge.measurement import SURE, AllowedError, TapEvidence, TapMeasurement, UnknownRounding
from llamadiff.judge.verdict import of_tap
from llamadiff.numerics.policies import NATIVE, READ

NO, YES = AllowedError(False, 1e-11, 1e-10, 1e-4), AllowedError(True, 1e-6, 1e-5, 1e-2)
KINDS = frozenset({"F16", "cache_k"})
SPAN = TapMeasurement(
    nmse=1e-8, per_token=(1e-8,), label="F32", limit=1e-12, is_even=False, allowances={SURE: NO, "f16": YES},
    evidence=TapEvidence(kinds=KINDS), span=("ffn_up-2",),
    unknown_rounding=UnknownRounding(products=1e-4, caches=1e-4, plain=1e-8, nearest=1e-8),
)  # fmt: skip


def exact(kind: str, label: str = "F32", rows: int = 12, **more) -> TapMeasurement:
    """A product that is right to the last bit."""
    shows = TapEvidence(kinds=frozenset({kind}), labels={kind: label}, distinct_rows=rows, **more)
    return TapMeasurement(
        nmse=1e-14, per_token=(1e-14,), label=label, limit=1e-10, is_even=True, allowances={SURE: YES}, evidence=shows
    )


def correlated(deviations: float) -> TapMeasurement:
    """The span, whose errors go so far with those of rounding to float16."""
    return replace(SPAN, evidence=TapEvidence(kinds=KINDS, rounding_correlation={"f16": deviations}))


def test_what_was_not_tried_tells_nothing() -> None:
    """A right tap after which lanes are left out takes nothing back of what those showed before."""
    told = exact("F16", unseen=frozenset({"f16", "native"}))
    for taps in permutations([told, exact("F16"), exact("F16")]):
        evidence = Evidence.of(taps)
        assert evidence.of_policy("F16", "f16") is RoundingState.UNSEEN
        assert evidence.of_policy("F16", "bf16") is RoundingState.UNTRIED
        assert evidence.of_policy("Q8_0", "f16") is RoundingState.UNTRIED


def test_one_tap_that_shows_a_rounding_counts_for_more_than_those_that_do_not() -> None:
    several = [exact("F16", unseen=frozenset({"f16"}))] * 5
    shows = exact("F16", "F16", seen=frozenset({"f16"}))
    assert Evidence.of([*several, shows]).of_policy("F16", "f16") is RoundingState.SEEN


def test_few_rows_make_no_arithmetic_known() -> None:
    assert Evidence.of([exact("F16", rows=1)] * 2).unknown(KINDS) == KINDS
    assert Evidence.of([exact("F16", rows=1)] * 3).unknown(KINDS) == {"cache_k"}


@pytest.mark.parametrize(
    ("taps", "verdict", "words"),
    [
        ([], "unchecked", "no tap shows how F16, cache_k are rounded"),
        ([exact("F16")], "unchecked", "no tap shows how cache_k are rounded"),
        ([exact("F16"), exact("cache_k")], "wrong", "other taps show how all kinds of its ops round, and none so much"),
        ([exact("F16", "F16", seen=frozenset({"f16"}))], "noise", "what rounding to f16 leaves, which its taps show"),
    ],
)
def test_a_span_is_what_the_engines_taps_show(taps, verdict: str, words: str) -> None:
    """As large as a rounding that nothing shows is no acquittal; where all is exact, it is wrong."""
    ruling = of_tap(SPAN, Evidence.of([*taps, SPAN]))
    assert ruling.verdict == verdict
    assert words in str(ruling.reasons[-1])
    assert ruling.reasons[0].measured == "own error"
    assert ruling.reasons[0].value == SPAN.nmse


@pytest.mark.parametrize(
    ("part", "kind"),
    [("products", "F16"), ("caches", "cache_k"), ("attention", "cache_v"), ("attention", "ROPE"),
     ("attention", "SOFT_MAX"), ("values", "GELU")],
)  # fmt: skip
def test_a_span_may_be_off_by_what_its_unknown_kinds_leave(part: str, kind: str) -> None:
    leaves = replace(SPAN.unknown_rounding, **{**dict.fromkeys(("products", "caches"), 0.0), part: 1e-4})
    span = replace(SPAN, evidence=TapEvidence(kinds=frozenset({kind})), unknown_rounding=leaves)
    assert of_tap(span, Evidence.of([span])).verdict == "unchecked"
    nothing = replace(span, unknown_rounding=replace(leaves, **{part: 0.0}))
    assert of_tap(nothing, Evidence.of([nothing])).verdict == "wrong"


def test_size_is_no_evidence_and_errors_that_go_with_a_rounding_are() -> None:
    apart, together = correlated(1.5), correlated(8.0)
    assert of_tap(apart, Evidence.of([apart])).verdict == "unchecked"
    assert of_tap(together, Evidence.of([together])).verdict == "noise"
    several = [correlated(3.0)] * 4  # each might be chance, and all are none
    assert of_tap(several[0], Evidence.of(several)).verdict == "noise"


def test_more_than_any_rounding_is_wrong_whatever_was_shown() -> None:
    rough = replace(SPAN.unknown_rounding, plain=1e-2, nearest=1e-2)
    far = replace(SPAN, nmse=1e-2, allowances={SURE: NO}, unknown_rounding=rough)
    assert of_tap(far, Evidence()).verdict == "wrong"


def test_what_was_read_back_needs_not_be_shown_nor_llama_cpps_own() -> None:
    assert Evidence(assumed=assumed_of(True, False)).rounds_some(KINDS, READ)
    assert Evidence(assumed=assumed_of(False, True)).rounds_some(KINDS, NATIVE)
    assert not Evidence().rounds_some(KINDS, NATIVE)


def test_values_that_are_not_finite_are_wrong_and_open_places_unchecked() -> None:
    right = exact("F16")
    assert of_tap(replace(right, not_finite=2), Evidence()).verdict == "wrong"
    assert of_tap(replace(right, opened=2), Evidence()).verdict == "unchecked"
    assert of_tap(replace(right, not_finite=2, opened=2), Evidence()).verdict == "wrong"
