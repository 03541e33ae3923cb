"""The result of a comparison: rows in graph order, the verdict, the first divergence and the logits. Plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from llamadiff import plugins
from llamadiff.engines.select import EngineUsed
from llamadiff.judge.coverage import COUNT, SEED, SPAN
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.verdict import MATCH, WRONG, Reason, Ruling, worst_of
from llamadiff.result.coverage import Coverage
from llamadiff.result.diagnosis import Diagnosis
from llamadiff.result.logits import Logits, Positions
from llamadiff.result.message import Message
from llamadiff.result.normal import Answer, Normal
from llamadiff.result.notebook import as_html
from llamadiff.result.oddity import Oddity
from llamadiff.result.rows import Row, flat, leading_row

if TYPE_CHECKING:
    import pandas as pd

    from llamadiff.result.conventions import Conventions

Array = NDArray[Any]
EXACT = "exact arithmetic"  # what the engine computes without roundings


@dataclass(frozen=True)
class Taken:
    """A token that one side takes, and both sides' logits of it; the candidate's is None if it was not recorded."""

    id: int
    text: str | None
    baseline: float
    candidate: float | None


@dataclass(frozen=True)
class Parting:
    """Where greedy choices part: at which generated token (1 is the first), the ``token``-th of the run.

    ``wanted``: the token with the candidate's own largest logit, where that is not the one that it took;
    ``checked``: its logits were recorded, so that this is known.
    """

    step: int
    token: int
    baseline: Taken
    candidate: Taken
    wanted: Taken | None
    checked: bool


@dataclass(frozen=True)
class Decoding:
    """How weights became floats: in ``by_ggml`` tensors by ggml's code, or ours that gives the same; each held to
    gguf-py's on sampled rows.

    ``refused`` are those whose sampled rows differed by a bit or more; gguf-py decoded them, and all the others.
    """

    by_ggml: int = 0
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class BySketch:
    """How many taps were verified by sketch: through so many random ``combinations`` of the rows of each span, and of
    the channels; ``seed`` draws them.
    """

    taps: int
    combinations: int = COUNT
    span: int = SPAN
    seed: int = SEED


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Who was compared, and on what; ``baseline`` and ``candidate`` are the producers.

    ``is_engine``: the candidate is the engine itself. ``batches``: how many tokens were run at a time.
    """

    model: Mapping[str, Any]
    tokens: tuple[tuple[int, str | None], ...]
    n_prefill: int
    prompt: str | None = None
    batches: tuple[int, ...] = ()
    baseline: Mapping[str, Any]
    candidate: Mapping[str, Any]
    is_engine: bool = False


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What was found of the side under test: a row a tap in graph order, and all that was seen besides.

    ``preflight`` is what was looked at before the layers; ``extra`` are names of the candidate that are no tap of the
    model, and were ignored; ``found_map`` are the lines of a map that was found by values; ``notes`` say how it was
    read; ``diagnosis`` says why taps are wrong, in graph order;
    ``blamed``: the baseline's taps that are off on its own inputs, beside a candidate; ``free_tokens``: over how many
    tokens the engine ran free, which drift without a candidate, expected drift and distances are about; ``coverage``:
    how much of the run was judged. ``positions``: the logits of all of them, where they are gated.
    ``only_baseline_read`` and ``only_engine_read`` are tensors of the file; ``origin``: what of it is not finite.
    """

    rows: tuple[Row, ...]
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    found_map: tuple[str, ...] = ()
    coverage: Coverage | None = None
    preflight: tuple[Check, ...] = ()
    diagnosis: tuple[Diagnosis, ...] = ()
    manner: Conventions | None = None
    notes: tuple[str, ...] = ()
    logits: Logits | None = None
    positions: Positions | None = None
    only_baseline_read: tuple[str, ...] = ()
    only_engine_read: tuple[str, ...] = ()
    free_tokens: int | None = None
    decoding: Decoding = Decoding()
    timing: Mapping[str, float] = field(default_factory=dict)
    blamed: tuple[str, ...] = ()
    origin: Oddity | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Sides, Judged):
    """All that one run found out; ``headline`` is the finding in a line, ``proof`` what stands under it.

    ``reasons`` are the verdict's. ``arithmetics`` says what the side under test rounds activations to before it
    multiplies weights of each type; ``profile`` says in words what the first error looks like; ``engine``: None where
    no model was given; ``parting``: where generated tokens part. ``more``: what a slice found besides, under its name.
    """

    verdict: str
    headline: str
    proof: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    arithmetics: Mapping[str, str] = field(default_factory=dict)
    profile: tuple[str, ...] = ()
    engine: EngineUsed | None = None
    parting: Parting | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def by_sketch(self) -> BySketch | None:
        """What was verified without computing it all; None if nothing was."""
        count = sum(row.local is not None and row.local.sketched for row in self.rows)
        return BySketch(count) if count else None

    def overrule(self, ruling: Ruling, said: Message) -> Comparison:
        """The same under another verdict, with its reasons after those of the first, and what is said of it then."""
        reasons = (*self.reasons, *ruling.reasons)
        return replace(self, verdict=ruling.verdict, reasons=reasons, headline=said.headline, proof=said.clauses)

    @property
    def said(self) -> Message:
        """Finding and proof."""
        return Message(self.headline, self.proof)

    @property
    def summary(self) -> str:
        """Finding and proof in one sentence."""
        return self.said.sentence

    @property
    def first_divergence(self) -> Row | None:
        return next((row for row in self.rows if row.verdict == WRONG), None)

    @property
    def leading(self) -> Row | None:
        """The WRONG tap that matters first: the first one, unless it is hardly off and a later one is."""
        return leading_row(self.wrong, self.diagnosis)

    @property
    def wrong(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict == WRONG)

    @property
    def normal(self) -> tuple[Answer, ...]:
        """Whether the layers' outputs are alike on both sides: the model's own, or the code's."""
        found = ask_normal(self)
        return () if found is None else found.answers

    def frame(self) -> pd.DataFrame:
        """One row a tap, in graph order."""
        import pandas as pd

        frame = pd.DataFrame([flat(row) for row in self.rows])
        return frame.astype({"layer": "Int64"}) if len(frame) else frame  # whole numbers, where some have none

    def __repr__(self) -> str:
        return f"<Comparison {self.verdict.upper()}: {self.headline} ({len(self.rows)} taps)>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return as_html(self.verdict, self.said, self.rows)


def ask_normal(result: Comparison) -> Normal | None:
    """What a slice says of the layers' outputs; None where none is there, or they were not recorded."""
    return plugins.ask_first(lambda each: each.normal(result))


class HasVerdict(Protocol):
    """Whatever was judged."""

    @property
    def verdict(self) -> str: ...


def verdict_of(found: Iterable[HasVerdict], refused: object = None) -> str:
    """The worst verdict of several; no milder than UNCHECKED where some were ``refused``."""
    return worst_of((each.verdict for each in found), refused)


def assemble(sides: Sides, judged: Judged, ruling: Ruling, said: Message, next_steps: tuple[str, ...]) -> Comparison:
    """The Comparison of two sides, with the verdict and what is said of it. Nothing else makes one."""
    made = Comparison(
        **vars(sides),
        **vars(judged),
        verdict=ruling.verdict,
        reasons=ruling.reasons,
        headline=said.headline,
        proof=said.clauses,
        next_steps=next_steps,
        arithmetics=_arithmetics(judged.rows),
        profile=_profile(judged.rows, judged.diagnosis),
    )
    return reduce(lambda result, each: each.add_to(result), plugins.slices().values(), made)


def _profile(rows: Sequence[Row], diagnosis: Sequence[Diagnosis]) -> tuple[str, ...]:
    """What the leading error looks like."""
    first = leading_row([row for row in rows if row.verdict == WRONG], diagnosis)
    return tuple(fact.says for fact in first.local.facts) if first is not None and first.local is not None else ()


def _arithmetics(rows: Sequence[Row]) -> dict[str, str]:
    """Weight type -> what activations are rounded to before the product, by most of the right products."""
    counts: dict[str, Counter[str]] = {}
    sums = {f"ffn_out-{row.layer}" for row in rows if row.tap.startswith("ffn_moe_down-")}  # of experts' products
    for row in rows:
        right = row.local is not None and row.local.verdict == MATCH and not row.span and row.tap not in sums
        if right and row.op.startswith("MUL_MAT") and row.weight_type and row.local and row.local.arithmetic:
            counts.setdefault(row.weight_type, Counter())[row.local.arithmetic] += 1
    return {kind: count.most_common(1)[0][0] for kind, count in counts.items()}
