"""The result of a comparison: rows in graph order, the verdict, the first divergence and the logits. Plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.comparison.coverage import Coverage
from llamadiff.diagnose.diagnosis import Diagnosis, explained
from llamadiff.engines.select import EngineUsed
from llamadiff.judge.tap_verdict import Finding, Local
from llamadiff.numerics import metrics, tolerances
from llamadiff.preflight.checks import Check
from llamadiff.system.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from llamadiff.manner.understand import Manner

Array = NDArray[Any]
TOP = 10
SLIGHT = 1e-6  # NMSE of a WRONG tap that is said after others


@dataclass(frozen=True)
class Row:
    """One tap of the side under test.

    ``local`` is that side's own error; ``baseline_local`` llama.cpp's, where the candidate is another trace.
    ``distance`` is each trace's NMSE against the engine's own free run: who is nearer to exact arithmetic.
    ``explained``: the way of computing that makes it noise, where one was found. ``misrecorded``: computed rightly, and
    written wrongly.
    ``at`` holds each side's value (baseline, candidate, engine's free run) where the local error is largest.
    ``expected_drift`` is what the baseline's arithmetic alone does to an exact engine, and ``ratio_to_noise``
    the drift over it. ``span`` names unrecorded taps that this one answers for.
    """

    tap: str
    layer: int | None
    op: str
    weight: str | None
    weight_type: str | None
    shape: tuple[int, ...]
    verdict: str
    local: Local | None
    baseline_local: Local | None
    drift: metrics.Difference | None
    expected_drift: float | None
    ratio_to_noise: float | None
    baseline: metrics.Stats | None
    candidate: metrics.Stats | None
    distance: Mapping[str, float] = field(default_factory=dict)
    at: Mapping[str, float] = field(default_factory=dict)
    explained: str | None = None
    misrecorded: bool = False

    @property
    def span(self) -> tuple[str, ...]:
        return self.local.span if self.local else ()


@dataclass(frozen=True)
class TopToken:
    """One token of the baseline's first ten: both sides' logits, and its rank with the candidate (1 is first)."""

    rank: int
    id: int
    text: str | None
    baseline: float
    candidate: float
    candidate_rank: int


@dataclass(frozen=True)
class Logits:
    """The next-token distributions after the last token that both sides ran.

    ``kl`` is KL(baseline || candidate) in nats, ``margin`` the baseline's logit lead of its first token over
    its second, ``agreeing`` how many of all rows have the same first token;
    ``partial``: not all of the candidate's logits were recorded; ``after`` so many tokens. ``not_finite`` are the sides
    ("baseline", "candidate") whose logits hold NaN or Inf: there is no KL then, and nothing is known to agree (None;
    nor where the baseline's first token is not among what was recorded). ``expected`` are the tokens that were asked
    for.
    """

    kl: float
    top1_agree: bool | None
    margin: float
    agreeing: int
    rows: int
    top: tuple[TopToken, ...]
    candidate_top: tuple[TopToken, ...]
    partial: bool = False
    after: int = 0
    not_finite: tuple[str, ...] = ()
    expected: tuple[TopToken, ...] = ()


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
    """How weights became floats: by ggml's own code in ``by_ggml`` tensors, each held to gguf-py's on sampled rows.

    ``refused`` are those whose sampled rows differed by a bit or more; gguf-py decoded them, and all the others.
    """

    by_ggml: int = 0
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """All that one run found out; ``summary`` is the sentence.

    ``preflight`` is what was looked at before the layers; ``arithmetics`` says what the side under test rounds
    activations to before it multiplies weights of each type; ``profile`` says in words what the first error looks like;
    ``extra`` are names of the candidate that are no tap of the model, and were ignored; ``diagnosis`` says why taps are
    wrong, in graph order; ``free_tokens``: over how many tokens the engine ran free, which drift without a candidate,
    expected drift and distances are about; ``engine``: None where no model was given; ``coverage``: how much of the run
    was judged; ``batches``: how many tokens were run at a time; ``parting``: where generated tokens part.
    """

    verdict: str
    summary: str
    rows: tuple[Row, ...]
    missing: tuple[str, ...]
    model: Mapping[str, Any]
    tokens: tuple[tuple[int, str | None], ...]
    n_prefill: int
    baseline: Mapping[str, Any]
    candidate: Mapping[str, Any]
    logits: Logits | None
    only_baseline_read: tuple[str, ...] = ()
    only_engine_read: tuple[str, ...] = ()
    timing: Mapping[str, float] = field(default_factory=dict)
    next_steps: tuple[str, ...] = ()
    preflight: tuple[Check, ...] = ()
    arithmetics: Mapping[str, str] = field(default_factory=dict)
    profile: tuple[str, ...] = ()
    prompt: str | None = None
    extra: tuple[str, ...] = ()
    diagnosis: tuple[Diagnosis, ...] = ()
    decoding: Decoding = Decoding()
    free_tokens: int | None = None
    engine: EngineUsed | None = None
    manner: Manner | None = None
    coverage: Coverage | None = None
    batches: tuple[int, ...] = ()
    parting: Parting | None = None

    @property
    def first_divergence(self) -> Row | None:
        return next((row for row in self.rows if row.verdict == tolerances.WRONG), None)

    @property
    def leading(self) -> Row | None:
        """The WRONG tap that matters first: the first one, unless it is hardly off and a later one is."""
        return leading(self.wrong, self.diagnosis)

    @property
    def wrong(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict == tolerances.WRONG)

    def frame(self) -> pd.DataFrame:
        """One row a tap, in graph order."""
        import pandas as pd

        return pd.DataFrame([_flat(row) for row in self.rows])


def leading(wrong: Sequence[Row], diagnosis: Sequence[Diagnosis]) -> Row | None:
    """Of WRONG taps the first whose op is more than slightly wrong; then a wrong record; then the first."""
    grave = [row for row in wrong if not is_slight(row, diagnosis)]
    computed = [row for row in grave if not row.misrecorded]
    return next(iter([*computed, *grave, *wrong]), None)


def is_slight(row: Row, diagnosis: Sequence[Diagnosis]) -> bool:
    """Whether a WRONG tap is hardly off, for no known reason: most likely arithmetic."""
    known = any(row.tap in d.taps for d in diagnosis if d.known and not d.harmless)
    sure = known or row.misrecorded or row.local is None or row.local.not_finite > 0
    return not sure and row.local is not None and row.local.nmse <= SLIGHT


def _flat(row: Row) -> dict[str, Any]:
    drift, local = row.drift, row.local
    out: dict[str, Any] = {
        "tap": row.tap, "layer": row.layer, "op": row.op, "weight_type": row.weight_type, "verdict": row.verdict,
        "local_nmse": local.nmse if local else None, "arithmetic": local.arithmetic if local else None,
        "limit": local.limit if local else None,
        "drift_nmse": drift.nmse if drift else None, "ratio_to_noise": row.ratio_to_noise,
        "cosine": drift.cosine if drift else None, "max_abs": drift.max_abs if drift else None,
        "mean_drift": drift.mean_drift if drift else None,
    }  # fmt: skip
    for side, stats in (("baseline", row.baseline), ("candidate", row.candidate)):
        for name in ("rms", "mean", "min", "max", "nan", "inf"):
            out[f"{side}_{name}"] = getattr(stats, name) if stats else None
    return out


def rows_of(
    findings: Sequence[Finding],
    names: Mapping[str, str],
    types: Mapping[str, str],
    under_test: str,
    misrecorded: Collection[str] = (),
) -> tuple[Row, ...]:
    """The rows of a study: one for each tap that the side under test recorded."""
    rows = []
    for finding in findings:
        local = finding.local.get(under_test)
        if local is None:
            continue
        name, layer = finding.tap.name, finding.tap.layer
        drift = finding.drift
        expected = (finding.noise or 0.0) + tolerances.F32_DRIFT * ((layer or 0) + 1)
        rows.append(Row(
            tap=name, layer=layer, op=finding.tap.kind.op, weight=names.get(name), weight_type=types.get(name),
            shape=finding.shape, verdict=local.verdict, local=local,
            baseline_local=finding.local.get("baseline") if under_test != "baseline" else None,
            drift=drift, expected_drift=expected, ratio_to_noise=drift.nmse / expected if drift else None,
            baseline=finding.stats.get("baseline"),
            candidate=finding.stats.get("candidate" if under_test == "candidate" else "engine"),
            distance=finding.distance, at=finding.at[under_test], misrecorded=name in misrecorded,
        ))  # fmt: skip
    return tuple(rows)


def with_explanations(rows: Sequence[Row], diagnosis: Sequence[Diagnosis]) -> tuple[Row, ...]:
    """The rows, those noise that a harmless way of computing explains, and those wrong that a known bug does."""
    ways = explained(diagnosis)
    wrong = {tap for d in diagnosis if d.known and not d.harmless for tap in d.taps}
    return tuple(
        _explained(row, ways[row.tap]) if row.tap in ways else _wrong(row) if row.tap in wrong else row for row in rows
    )


def _wrong(row: Row) -> Row:
    """A row that a known bug explains, whatever else might."""
    local = replace(row.local, verdict=tolerances.WRONG, unclear=False) if row.local else None
    return replace(row, verdict=tolerances.WRONG, local=local)


def _explained(row: Row, way: str) -> Row:
    """The row as noise, unless there is more to say against it than an error that rounding may leave."""
    if row.local is not None and row.local.not_finite:
        return row
    verdict = tolerances.UNCHECKED if row.local is not None and row.local.opened else tolerances.NOISE
    local = replace(row.local, verdict=verdict) if row.local else None
    return replace(row, verdict=verdict, local=local, explained=way)


def compare_logits(
    baseline: Array, candidate: Array, text_of: Any, known: Array | None = None, expect: Sequence[int] = ()
) -> Logits:
    """Compare logits [token, vocab]; the last row in full.

    ``known`` marks the candidate's values that are there: ranks are among these, and KL is NaN where the last row lacks
    some. ``expect`` are tokens to be told of, whatever their ranks. Raises UserError for one that is no token.
    """
    beyond = next((token for token in expect if not 0 <= token < baseline.shape[-1]), None)
    if beyond is not None:
        raise UserError(
            f"--expect {beyond}: there are {baseline.shape[-1]} logits, of tokens 0 to {baseline.shape[-1] - 1}"
        )
    whole = known is None or bool(known[-1].all())
    if known is not None:
        candidate = np.where(known, candidate, -np.inf)
    b, c = np.asarray(baseline[-1], np.float64), np.asarray(candidate[-1], np.float64)
    b_order, c_order = np.argsort(-b, kind="stable"), np.argsort(-c, kind="stable")
    b_rank, c_rank = np.empty(len(b), int), np.empty(len(c), int)
    b_rank[b_order] = c_rank[c_order] = np.arange(1, len(b) + 1)

    def entry(token: int) -> TopToken:
        value = float(c[token]) if known is None or known[-1][token] else float("nan")
        return TopToken(int(b_rank[token]), token, text_of(token), float(b[token]), value, int(c_rank[token]))

    rows = np.ones(len(baseline), bool) if known is None else known.any(axis=-1)
    ranked = {"baseline": _can_be_ranked(baseline), "candidate": _can_be_ranked(candidate)}
    agree = (np.argmax(baseline, -1) == np.argmax(candidate, -1)) & ranked["baseline"] & ranked["candidate"]
    if known is not None:  # nobody knows whether a token has the largest logit whose logit is not there
        rows &= known[np.arange(len(known)), np.argmax(baseline, -1)]
    hidden = known is not None and not known[-1][b_order[0]]
    not_finite = tuple(side for side, sound in ranked.items() if not sound[-1])
    margin = float(b[b_order[0]] - b[b_order[1]]) if len(b) > 1 else 0.0  # NaN where there is no first token
    return Logits(
        kl=metrics.kl_divergence(b, c) if whole else float("nan"),
        top1_agree=None if not_finite or hidden else bool(b_order[0] == c_order[0]),
        margin=margin, agreeing=int(agree[rows].sum()), rows=int(rows.sum()),
        top=() if "baseline" in not_finite else tuple(entry(int(token)) for token in b_order[:TOP]),
        candidate_top=tuple(entry(int(token)) for token in c_order[:TOP] if np.isfinite(c[token])),
        partial=not whole,
        after=len(baseline),
        not_finite=not_finite,
        expected=() if "baseline" in not_finite else tuple(entry(token) for token in expect),
    )  # fmt: skip


def _can_be_ranked(logits: Array) -> Array:
    """Which rows have a first token: those without NaN and Inf; -Inf may be a token that is ruled out."""
    return np.asarray(~(np.isnan(logits) | np.isposinf(logits)).any(axis=-1))


def arithmetics_of(rows: Sequence[Row]) -> dict[str, str]:
    """Weight type -> what activations are rounded to before the product, by most of the right products."""
    counts: dict[str, Counter[str]] = {}
    sums = {f"ffn_out-{row.layer}" for row in rows if row.tap.startswith("ffn_moe_down-")}  # of experts' products
    for row in rows:
        right = row.local is not None and row.local.verdict == tolerances.MATCH and not row.span and row.tap not in sums
        if right and row.op.startswith("MUL_MAT") and row.weight_type and row.local and row.local.arithmetic:
            counts.setdefault(row.weight_type, Counter())[row.local.arithmetic] += 1
    return {kind: count.most_common(1)[0][0] for kind, count in counts.items()}


def logit_rows(logits: Array) -> Array:
    """[token, vocab], however a trace nests it."""
    return logits.reshape(len(logits), -1)
