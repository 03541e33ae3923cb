"""Every right arithmetic alone, where nothing is wrong; and with every known mistake, which is found at its tap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from llamadiff.judge.verdict import NOISE, WRONG, is_right
from proof.injected import BUGS
from proof.strangers.arithmetic import ARITHMETICS, BY_NAME, Arithmetic
from proof.strangers.crossing import (
    EVERY_KIND,
    RIGHT_MODELS,
    SHAPES,
    Case,
    Outcome,
    applies,
    judged,
    rounding_of,
)

GENEROUS = 100  # how many times a right op's own rounding may be stated to hide there
MISNAMED = 0.02  # of the bugs that are found, how many may be called by another bug's name
QUICK_BUGS = 24  # one in so many is crossed in the quick suite
FEW_SPARSE = ("dense", "dense", "dense", "dense", "sparse")  # what is unclear is looked for, which takes seconds
PARTS = (
    3  # an arithmetic meets one in so many of the bugs here, and others than its neighbours; all: report.py --bug all
)
LENGTHS, DECODES = (12, 5, 24, 12, 1, 40), (0, 4, 0, 4, 0, 0)
PRECISIONS = ("f32", "f32", "f32", "f16", "bf16")


@dataclass
class Judged:
    """judge(case): its outcome, found out once."""

    folder: Path
    known: dict[str, Outcome] = field(default_factory=dict)

    def __call__(self, case: Case) -> Outcome:
        if case.name not in self.known:
            self.known[case.name] = judged(case, self.folder)
        return self.known[case.name]


def _right(arithmetics: Sequence[Arithmetic], models: Sequence[str], shapes: Sequence[str], offset: int) -> list[Case]:
    """Arithmetics on models, in shapes: kinds of weights, prompts and precisions in turn."""
    named = [
        (arithmetic, model, shape)
        for arithmetic in arithmetics
        for model in models
        for shape in shapes
        if not arithmetic.only or model in arithmetic.only
    ]
    return [
        Case(arithmetic, model, EVERY_KIND[number % 7], shape=shape, seed=number % 5, length=LENGTHS[number % 6],
             decode=DECODES[number % 6], precision=PRECISIONS[number % 5], model_seed=1 + number // 2 % 3)
        for number, (arithmetic, model, shape) in enumerate(named, offset)
    ]  # fmt: skip


def _quick_right() -> list[Case]:
    """Every arithmetic once as the other tests run, models, kinds and shapes in turn."""
    turns = zip(ARITHMETICS, cycle(RIGHT_MODELS), cycle(EVERY_KIND), cycle(FEW_SPARSE), strict=False)
    return [Case(arithmetic, model, kind, shape=shape) for arithmetic, model, kind, shape in turns]


def _crossed(arithmetic: Arithmetic, number: int) -> list[Case]:
    """One arithmetic with every bug that it can have, on one of the bug's models and types."""
    return [
        Case(arithmetic, bug.models[number % len(bug.models)], bug.kinds[at % len(bug.kinds)], name)
        for at, (name, bug) in enumerate(BUGS.items())
        if applies(arithmetic, bug, bug.models[number % len(bug.models)])
    ]


def _spread() -> list[Case]:
    """Some bugs, each with another arithmetic."""
    cases = [_crossed(arithmetic, number) for number, arithmetic in enumerate(ARITHMETICS)]
    wanted = list(BUGS)[::QUICK_BUGS]
    found = []
    for number, name in enumerate(wanted):
        able = [case for crossed in cases for case in crossed if case.bug == name]
        found.append(able[(7 * number) % len(able)])
    return found


def _each_bug_once() -> list[Case]:
    """All bugs, arithmetics in turn."""
    cases = [_crossed(arithmetic, number) for number, arithmetic in enumerate(ARITHMETICS)]
    by_bug = {name: [case for crossed in cases for case in crossed if case.bug == name] for name in BUGS}
    return [able[(5 * number) % len(able)] for number, able in enumerate(by_bug.values())]


def _once_accused() -> list[Case]:
    """Right runs that were called wrong while the judge was built, one for each reason."""

    def case(name: str, model: str, kind: str, **how: Any) -> Case:
        return Case(BY_NAME[name], model, kind, **how)

    return [
        case("int8 of 16", "llama-deep", "Q4_K"),  # what was read was forgotten after two layers
        case("int8 of 16", "moe", "Q4_K"),  # experts' products were not read
        case("int8 tensor", "moe", "Q4_K"),  # one scale for all experts
        case("half sums", "moe", "Q4_K"),  # the sum of experts was taken for a product
        case("angles bf16", "stablelm", "Q8_0"),  # one pair has all of the error
        case("norms folded", "stablelm", "F16"),  # a norm's bias is folded too
        case("Q8_0", "qwen3", "Q6_K", precision="f16"),  # inputs in 16 bits are rounded the other way
        case("int8 zero point", "llama", "Q6_K", precision="bf16"),  # results in 16 bits determine no inputs
        case("int8 of 16", "llama", "Q6_K", precision="bf16"),  # some taps below the noise of 16 bits, some above
        case("int8 all round", "qwen2", "Q6_K", precision="bf16"),  # one width below it
        case("scale in K", "llama", "F32", precision="bf16"),  # what is undone has no longer 16 bits
        case("bf16 weights", "qwen3", "Q4_K", precision="f16", seed=3),  # known, but for what 16 bits do
        case("int8 tensor", "qwen2", "Q4_K", precision="bf16", seed=4, decode=4, model_seed=2),  # a scale a batch
        case("int8 zero point", "qwen2", "Q4_K", precision="f16", seed=3, decode=4, model_seed=2),  # an unlucky sample
        case("int8 cut", "qwen2", "F16", shape="sparse", seed=2, length=1, model_seed=3),  # errs as 7 bits
        case("cache f16", "qwen2", "Q4_K", shape="sparse", seed=2, length=1, model_seed=3),  # known but for attention
        case("softmax bf16", "qwen2", "Q6_K", shape="logits", seed=1, length=40, model_seed=3),
        case("f16 operands", "llama-deep", "Q8_0", length=1),  # what fits a part of the error was forgotten after two
        case("bf16 weights", "llama-deep", "Q4_K", length=1),  # layers; and then came nearer than what was kept
        case("int8 cut", "moe", "Q4_K", shape="sparse"),  # errs by 7 bits, and by its cache
        # a constant that was solved for in one row, of which experts' two weights are all that goes on
        case("bf16 weights", "moe", "BF16", shape="sparse", seed=2, length=1, model_seed=3),
        # a bug that makes one arithmetic's values huge, and another's not
        case("Q8_0 cut scale", "qwen2", "BF16", shape="sparse", seed=3, length=1, precision="f16", model_seed=3),
    ]


QUICK = [*{case.name: case for case in (*_quick_right(), *_once_accused())}.values()]
SPREAD = _spread()
# bugs that were lost behind an arithmetic, or brought right taps into discredit
ONCE_LOST = [
    Case(BY_NAME["half sums"], "qwen2", "F16", "Q, K to pairs but for biases"),  # most of what was read was wrong
    Case(BY_NAME["scale in Wq"], "llama-yarn", "F16", "rope: YaRN without temperature"),  # a scale too, but no choice
    Case(BY_NAME["norms folded"], "llama-large", "Q8_0", "half: residuals"),  # NaN was taken for 16 bits
    Case(BY_NAME["Q8_0"], "llama", "Q8_0", "logits capped at 50"),  # a variant of an arithmetic that others have
    Case(BY_NAME["silu table"], "llama-uneven", "Q8_0", "norm: sum overflows in some rows"),  # rows without a step
    Case(BY_NAME["int8 of 128"], "qwen3", "Q8_0", "softmax of masked scores over heads"),  # rows that are not finite
    Case(
        BY_NAME["bf16 operands"], "qwen2", "F16", "softmax of masked scores over heads"
    ),  # two finite rows, not twelve
    Case(BY_NAME["bf16 weights"], "moe", "F16", "norm: no weight"),  # a choice that makes other taps worse
    Case(BY_NAME["softmax bf16"], "llama", "F16", "scale in the scores as well"),
    Case(BY_NAME["bf16 weights"], "llama-fused-bias", "Q8_0", "fused: Q, V, K"),  # a bias that was not split
    Case(BY_NAME["cache 4 bits"], "llama", "F16", "embedding: first token for all"),  # rows that are alike err alike
    Case(BY_NAME["cache 4 bits"], "llama", "Q8_0", "cache: steps one slot late"),  # no 4 bits of a whole tensor
    Case(BY_NAME["other heads"], "qwen2", "F16", "transposed: all"),  # two bugs, one of which only Q and K can have
    Case(BY_NAME["int8 tensor"], "llama", "F16", "mask hides the own key"),  # NaN goes into the step of all rows
    Case(BY_NAME["Q8_0 cut scale"], "llama", "Q8_0", "embedding: row 0 for all"),  # one row: cut as rounded, by chance
]
FOUND = [*SPREAD, *ONCE_LOST]
SHORT = [  # few values: constants and factors that fit by chance, taps that show nothing
    Case(BY_NAME["cache Q8_0 and Q"], "qwen3", "F16", length=1),
    Case(BY_NAME["exp table"], "llama", "Q8_0", length=2),
    Case(BY_NAME["exp table"], "moe", "Q4_0", length=1),
    Case(BY_NAME["int8 tensor"], "moe", "Q4_0", length=1),
    Case(BY_NAME["Q8_0 scale first"], "moe", "Q4_0", length=1),
    Case(BY_NAME["Q8_0 scale first"], "moe", "Q8_0", length=1),
    Case(BY_NAME["Q8_0 scale first"], "qwen3", "Q8_0", length=1),
    Case(BY_NAME["cache Q4_0"], "qwen3", "Q8_0", length=1),
]
PARTLY = Case(BY_NAME["other heads"], "stablelm", "F16")  # RoPE rotates a part of each head
RIGHT = [
    *_right(ARITHMETICS, RIGHT_MODELS, tuple(SHAPES), 0),
    *(
        Case(arithmetic, model, EVERY_KIND[(number + length) % 7], length=length)
        for number, arithmetic in enumerate(ARITHMETICS)
        for model in (*RIGHT_MODELS, "llama-deep")
        for length in ((1, 2, 3) if model == "llama-deep" else (1, 3))  # two tokens in two layers show too little
        if not arithmetic.only or model in arithmetic.only
    ),
]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    return Judged(tmp_path_factory.mktemp("crossing"))


def _accusations(outcome: Outcome) -> list[str]:
    rows = outcome.comparison.wrong
    return [f"{row.tap}: {row.local.nmse:.1e} against {row.local.noise_limit:.0e}" for row in rows if row.local]


@pytest.mark.parametrize("case", [*QUICK, *SHORT, PARTLY], ids=lambda case: case.name)
def test_a_right_engine_is_not_accused(case: Case, judge: Judged):
    assert _accusations(judge(case)) == []


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_little_can_hide(case: Case, judge: Judged):
    """What is stated to hide in a right run is of the size of the rounding that is there."""
    rows = {row.tap: row.local for row in judge(case).comparison.rows if row.local}
    rounding = rounding_of(case, judge.folder)
    generous = {
        tap: (rows[tap].hides, size) for tap, size in rounding.items() if not rows[tap].hides <= GENEROUS * size
    }
    assert generous == {}


# arithmetic -> what shares a scale, in words that may be said of it; rows here have 256 and 512 values
SHARES = {
    "int8 row": ("a row",),
    "int8 tensor": ("the tensor",),
    "int8 of 16": ("of 16",),
    "int8 of 32": ("for 32", "of 32", "Q8_0"),
    "int8 of 64": ("for 64", "of 64"),
    "int8 of 128": ("for 128", "of 128"),
    "int8 of 256": ("for 256", "of 256", "Q8_K"),
    "int8 cut": ("by truncation, one float32 scale for 32",),
    "int8 zero point": ("and minimum a row",),
    "Q8_0 scale first": ("of 32", "for 32", "Q8_0"),
    "Q8_0 cut scale": ("of 32", "for 32", "Q8_0"),
}
READ = [("llama", "Q8_0", "f32"), ("qwen3", "Q4_K", "f32"), ("moe", "F16", "f32"), ("qwen2", "Q6_K", "bf16")]


@pytest.mark.parametrize("where", READ, ids=" ".join)
@pytest.mark.parametrize("name", SHARES)
def test_what_is_said_of_a_rounding_is_true(name: str, where: tuple[str, str, str], judge: Judged):
    """Either nothing of what shares a scale, or the truth."""
    model, kind, precision = where
    manner = judge(Case(BY_NAME[name], model, kind, precision=precision)).comparison.manner
    assert manner is not None
    said = [rounding.words() for rounding in manner.roundings.values()]
    assert [
        words for words in said if not words.endswith("bits") and not any(true in words for true in SHARES[name])
    ] == []
    assert all("8 bits" in words or "Q8" in words for words in said)


# arithmetic -> the type that its cache has, of those that a trace can state
OWN = dict.fromkeys(("float64", "cache f16 both", "cache Q8_0 and Q", "cache 4 bits"), "")
OWN["cache int8 of a head"] = "8 bits, one scale a row"
CACHES = {"cache f16": "F16", "cache bf16": "BF16", "cache Q8_0": "Q8_0", "cache Q4_0": "Q4_0"} | OWN


@pytest.mark.parametrize("shape", ["sparse", "logits"])
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_is_not_stated_is_found(name: str, shape: str, judge: Judged):
    """From what comes after it alone, where it has one of the types that can be stated, and no other type."""
    found = judge(Case(BY_NAME[name], "qwen3", "F16", shape=shape)).comparison
    assert found.manner is not None
    assert found.manner.cache in ("", CACHES[name])
    if CACHES[name]:
        assert is_right(found.verdict)
        assert found.manner.cache or found.verdict == NOISE


@pytest.mark.parametrize("bug", ["rope: steps lag by one", "K and V swapped", "scale 0.3", "window of 8"])
def test_a_cache_that_is_not_stated_hides_no_mistake(bug: str, judge: Judged):
    outcome = judge(Case(BY_NAME["cache f16"], "qwen3", "F16", bug, shape="sparse", decode=4))
    assert outcome.missed is None
    assert outcome.comparison.verdict == WRONG


@pytest.mark.parametrize("case", [case for case in FOUND if not case.arithmetic.elsewhere], ids=lambda case: case.name)
def test_a_bug_is_found_at_its_tap(case: Case, judge: Judged):
    outcome = judge(case)
    assert outcome.accused is None
    assert outcome.missed is None
    assert outcome.beside == ()
    assert case not in SPREAD or not outcome.misnamed, outcome.causes


@pytest.mark.parametrize("case", [case for case in FOUND if case.arithmetic.elsewhere], ids=lambda case: case.name)
def test_a_bug_behind_a_layout_is_found_at_its_tap(case: Case, judge: Judged):
    """The layout may be too well hidden by the bug to be seen: right taps are called wrong beside it."""
    outcome = judge(case)
    assert outcome.accused is None
    assert outcome.missed is None
    assert case not in SPREAD or not outcome.misnamed, outcome.causes


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=lambda arithmetic: arithmetic.name)
def test_right_runs_are_not_accused(arithmetic: Arithmetic, tmp_path: Path):
    outcomes = [judged(case, tmp_path) for case in RIGHT if case.arithmetic is arithmetic]
    assert {outcome.case.name: _accusations(outcome) for outcome in outcomes if outcome.comparison.wrong} == {}


def test_every_arithmetic_runs_on_every_model_that_it_can():
    models = {*RIGHT_MODELS, "llama-deep"}
    able = {(each.name, model) for each in ARITHMETICS for model in models & set(each.only or models)}
    assert {(case.arithmetic.name, case.model) for case in RIGHT} == able
    assert len({case.name for case in (*QUICK, *RIGHT)}) == 1353


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ARITHMETICS)), ids=lambda number: ARITHMETICS[number].name)
def test_every_bug_is_found(number: int, tmp_path: Path):
    cases = _crossed(ARITHMETICS[number], number)[number % PARTS :: PARTS]
    outcomes = [judged(case, tmp_path, diagnose=False) for case in cases]
    assert {outcome.case.name: outcome.accused for outcome in outcomes if outcome.accused} == {}
    assert {outcome.case.name: outcome.missed for outcome in outcomes if outcome.missed} == {}
    plain = [outcome for outcome in outcomes if not outcome.case.arithmetic.elsewhere]
    assert {outcome.case.name: outcome.beside for outcome in plain if outcome.beside} == {}


@pytest.mark.slow
def test_every_bug_is_called_by_its_name(tmp_path: Path):
    _assert_well_named([judged(case, tmp_path) for case in _each_bug_once()])


def _assert_well_named(outcomes: Sequence[Outcome]) -> None:
    found = [outcome for outcome in outcomes if outcome.first is not None]
    misnamed = {outcome.case.name: outcome.causes for outcome in found if outcome.misnamed}
    assert len(misnamed) <= MISNAMED * len(found), misnamed
