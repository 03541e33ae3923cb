"""Finds the causes of a run's WRONG taps: a known bug for each, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llamadiff import plugins
from llamadiff.engines.model_file import Runnable
from llamadiff.ext.explain.budget import Budget
from llamadiff.ext.explain.case import Array, Case, NotRecordedError, Recording
from llamadiff.ext.explain.registry import known_bugs
from llamadiff.ext.explain.search import (
    Fit,
    Key,
    Outcome,
    is_hidden,
    replayed,
    search,
    search_beside,
    search_part,
    search_together,
)
from llamadiff.judge.fact import ROUNDINGS, Fact
from llamadiff.judge.finding import Finding, Local
from llamadiff.judge.lanes import Source
from llamadiff.judge.run import Passes
from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.result.diagnosis import Cause, Diagnosis
from llamadiff.trace import taps

NEARER = 0.5  # of the right op's error: what leaves less of it is near
READ = 3  # taps of one unknown cause that are read back
MOST_READ = 1 << 31  # values times inputs of those taps: of large ones fewer are read
SEVERAL = 5e10  # multiply-adds for several bugs at once
INSIDE = 5e10  # multiply-adds after which a span is given up


@dataclass
class _Group:
    """Taps that one cause explains, while it is found out."""

    fits: tuple[Fit, ...]
    nearest: tuple[Fit, ...]
    complete: bool
    unclear: bool = False
    every: tuple[Fit, ...] = ()  # that was tried at the first tap, a span
    right: dict[str, float] = field(default_factory=dict)
    found: dict[str, dict[Key, Fit]] = field(default_factory=dict)  # tap -> what fits there

    def add(self, tap: str, right: float, fits: Sequence[Fit]) -> None:
        self.right[tap], self.found[tap] = right, {fit.key: fit for fit in fits}

    def drop(self, tap: str) -> None:
        del self.right[tap], self.found[tap]

    def narrowed(self, fits: Sequence[Fit]) -> None:
        """Keep the alternatives that fit here too."""
        keys = {fit.key for fit in fits}
        self.fits = tuple(fit for fit in self.fits if fit.key in keys)

    def diagnosis(self) -> Diagnosis:
        first = next(iter(self.right))
        best = self.fits[0].key if self.fits else ()
        left = {tap: fits[best].nmse if best in fits else self.right[tap] for tap, fits in self.found.items()}
        return Diagnosis(
            first, left, self.right, tuple(map(self._cause, self.fits)), tuple(map(as_cause, self.nearest)),
            bool(self.fits) and self.fits[0].harmless, self.complete,
            beside=max((fits[best].proved for fits in self.found.values() if best in fits), default=0),
        )  # fmt: skip

    def _cause(self, fit: Fit) -> Cause:
        """A cause in the words that hold of all taps, or of one that is named."""
        said = {tap: self.found[tap][fit.key].says for tap in self.right if fit.key in self.found[tap]}
        tap, words = next((tap for tap, says in said.items() if says == fit.says), None), set(said.values())
        cause = as_cause(fit)
        return replace(cause, at=tap) if cause.at is None and len(words) > 1 else cause


def as_cause(fit: Fit) -> Cause:
    """A fit in words."""
    fixes, sources = dict.fromkeys(step.fix for step in fit.own), [step.bug.source for step in fit.own]
    value = next((step.value for step in fit.own if step.value is not None), None)
    known_from = ", ".join(dict.fromkeys(filter(None, sources)))
    first = fit.own[0]
    return Cause(" + ".join(fit.causes), fit.says, "; ".join(fixes), known_from, fit.nmse, value, first.at, first.op)


@dataclass(frozen=True)
class Scene:
    """What the search for causes goes on: one trace, and how long and how far to look.

    ``run`` is of llama.cpp's graph, ``judged`` of the model that judged, whose taps have the vocabulary's inputs.
    ``thorough``: replay bugs through spans of any length, up to the whole model.
    """

    run: Recording
    judged: Recording
    source: Source
    budget: Budget
    progress: Callable[[str], None]
    thorough: bool

    @property
    def by_graph(self) -> bool:
        """Whether recipes are parts of a graph, and reach through what was not recorded."""
        return self.run.model.by_graph


def scene_of(
    model: Runnable,
    passes: Passes,
    under_test: str,
    budget: Budget,
    progress: Callable[[str], None],
    thorough: bool = False,
    judged_by: Runnable | None = None,
) -> Scene:
    """What causes of the errors that passes found in one trace are looked for with.

    ``judged_by`` is the model that judged, where it is not this one.
    """
    judge, source = passes.judge, passes.judge.sources[under_test]
    carrier = Carrier(
        [(lane.policy, source.stored) for lane in source.lanes if not lane.is_noise_probe], source.reading, judge.edges
    )
    shapes = {finding.tap.name: finding.shape for finding in passes.findings}
    tokens, where = source.trace.info.tokens, (judge.positions, judge.edges, judge.n_prefill)
    run = Recording(model, tokens, *where, carrier, shapes, source.trace.known, source.trace.printed.relative)
    judged = replace(run, model=judged_by or model)
    return Scene(run, judged, source, budget, progress, thorough)


def diagnose(scene: Scene, findings: Sequence[Finding]) -> tuple[Diagnosis, ...]:
    """Explain every WRONG tap of one trace, in graph order."""
    groups: list[_Group] = []
    for finding in findings:
        local = _wrong(finding, scene.source.name)
        if local is not None:
            scene.progress(f"looking for the cause of {finding.tap.name}")
            _join(groups, scene, finding.tap, local)
    _join_unknown(groups, scene, findings)
    _join_several(groups, scene, findings)
    known = sum(not bug.harmless for bug in known_bugs().values()) if scene.by_graph else 0
    found = [replace(group.diagnosis(), by_graph=scene.by_graph, known_bugs=known) for group in groups]
    found = [_note_hidden_layers(d, group, scene, findings) for d, group in zip(found, groups, strict=True)]
    found = [d if d.known else replace(d, read=_read(scene, findings, d)) for d in found]
    both = zip(found, groups, strict=True)
    return tuple(d for d, group in both if d.known or not group.unclear or _is_mistake(d))


def _note_hidden_layers(d: Diagnosis, group: _Group, scene: Scene, findings: Sequence[Finding]) -> Diagnosis:
    """A diagnosis that says so where its cause would not show in any other layer: they may have it too."""
    words, others = {_word(tap) for tap in group.right}, list[Case]()
    for finding in findings:
        local = finding.local.get(scene.source.name)
        if local is not None and finding.tap.kind.word in words and finding.tap.name not in group.right:
            others.append(case_of(scene.run, scene.source, finding.tap, local))
    if not d.known or d.harmless or not others or not all(is_hidden(case, group.fits[0]) for case in others):
        return d
    first, *rest = d.causes
    return replace(d, causes=(replace(first, says=f"{first.says}; in other layers it would not show"), *rest))


def _is_mistake(d: Diagnosis) -> bool:
    """Whether what was read back of an unclear error is more than a rounding."""
    return any(fact.kind not in ROUNDINGS for facts in d.read.values() for fact in facts)


def _read(scene: Scene, findings: Sequence[Finding], d: Diagnosis) -> dict[str, tuple[Fact, ...]]:
    """What is read back of the first taps that nothing explains; of large ones it takes long, and of fewer."""
    from llamadiff.ext.explain.read_back.inside import read_inside  # here: a right run does without
    from llamadiff.ext.explain.read_back.reading import read_back

    wrong = [(f.tap, f.local[scene.source.name]) for f in findings if f.tap.name in list(d.taps)[:READ]]
    inside, left, found = Budget(INSIDE), float(MOST_READ), dict[str, tuple[Fact, ...]]()
    for tap, local in wrong:
        case, in_graph = (case_of(run, scene.source, tap, local) for run in (scene.judged, scene.run))
        if local.span and _short(local) and not inside.is_spent:
            found[tap.name] = read_inside(case, replace(in_graph, budget=inside))
            found[tap.name] = found[tap.name] or _read_by_engine(case, not local.unclear)
        elif not local.span and left > 0:
            found[tap.name] = read_back(case, in_graph)
            left -= _work(case)
    return found


def _read_by_engine(case: Case, sure: bool) -> tuple[Fact, ...]:
    """What is read back of a span by whoever knows more of its engine than was recorded."""
    return plugins.ask_first(lambda each: each.read_span(case, sure)) or ()


def _work(case: Case) -> float:
    """Values of a tap times inputs of its op."""
    inputs = case.engine.w.shape(case.weight)[-1] if case.weight is not None else 1
    return float(np.prod(case.run.shape(case.tap.name))) * inputs


def is_wrong(finding: Finding, name: str) -> bool:
    """Whether a cause is looked for of a tap of one trace."""
    return _wrong(finding, name) is not None


def _wrong(finding: Finding, name: str) -> Local | None:
    local = finding.local.get(name)
    return local if local is not None and (local.verdict == "wrong" or local.unclear) else None


def case_of(run: Recording, source: Source, tap: taps.Tap, local: Local) -> Case:
    """A tap's op laid open, on what was recorded."""

    def values(name: str) -> Array:
        if name not in source.trace or name not in run.shapes or not _complete(source, name, tap):
            raise NotRecordedError(name)
        array = np.asarray(source.trace[name]).reshape(run.shapes[name])[None]
        return array.astype(np.int32 if name.startswith("ffn_moe_topk") else run.model.engine.w.dtype)

    if local.exact:
        run = replace(run, carrier=run.carrier.first)
    recorded = np.asarray(source.trace[tap.name]).reshape(run.shapes[tap.name])
    return Case(run, tap, values, recorded, limit=max(local.limit, local.noise_limit))


def _complete(source: Source, name: str, tap: taps.Tap) -> bool:
    """Whether a tap has all the values that another one's recorded rows need."""
    rows, mask = source.whole_rows(name), source.trace.known.get(tap.name)
    if rows is None:
        return True
    return mask is not None and bool((rows | ~mask.reshape(len(mask), -1).any(axis=1)).all())


def _join(groups: list[_Group], scene: Scene, tap: taps.Tap, local: Local) -> None:
    """Give a tap to the cause that explains it: one that was found before, or a new one."""
    for group in groups:
        fits = _again(group, scene, tap, local)
        if fits:
            group.narrowed(fits)
            group.add(tap.name, local.nmse, fits)
            return
    strangers = [group for group in groups if not group.fits and _word(next(iter(group.right))) == tap.kind.word]
    outcome = _looked_for(scene, tap, local, first=not strangers)
    if not outcome.fits and not strangers and local.span and scene.by_graph and (scene.thorough or _short(local)):
        proved = [group.fits[0] for group in groups if group.fits and not group.fits[0].harmless]
        case = case_of(scene.run, scene.source, tap, local)
        outcome = replace(outcome, fits=search_beside(case, local.least, scene.budget, proved).fits)
    if not outcome.fits and strangers:
        strangers[0].add(tap.name, local.nmse, ())
        return
    told = bool(local.span) and bool(
        _read_by_engine(case_of(scene.judged, scene.source, tap, local), not local.unclear)
    )
    if not outcome.tried and (scene.by_graph or local.span) and not told:
        return
    # what comes near elsewhere says nothing of a NaN, and what is further off than the right op is not near
    nearest = () if local.not_finite else tuple(fit for fit in outcome.nearest if fit.nmse < NEARER * local.nmse)
    group = _Group(outcome.fits, nearest, outcome.complete, local.unclear, outcome.every)
    group.add(tap.name, local.nmse, outcome.fits)
    groups.append(group)


def _join_unknown(groups: list[_Group], scene: Scene, findings: Sequence[Finding]) -> None:
    """Give taps that nothing explained to causes that were found at later ones."""
    wrong = {f.tap.name: (f.tap, f.local[scene.source.name]) for f in findings if scene.source.name in f.local}
    known, unknown = [group for group in groups if group.fits], [group for group in groups if not group.fits]
    for stray, name in [(group, name) for group in unknown for name in group.right]:
        tap, local = wrong[name]
        for other in known:
            if fits := _again(other, scene, tap, local):
                other.narrowed(fits)
                other.add(name, local.nmse, fits)
                stray.drop(name)
                break
    _order(groups, wrong)


def _order(groups: list[_Group], wrong: Iterable[str]) -> None:
    """Groups, and the taps of each, in graph order; without those that have none any more."""
    order = list(wrong).index
    for group in groups:
        group.right = dict(sorted(group.right.items(), key=lambda item: order(item[0])))
    groups[:] = sorted((group for group in groups if group.right), key=lambda group: order(next(iter(group.right))))


def _join_several(groups: list[_Group], scene: Scene, findings: Sequence[Finding]) -> None:
    """Give spans that no single bug explains to several: in the first such one they are looked for, in others tried."""
    wrong = {f.tap.name: (f.tap, f.local[scene.source.name]) for f in findings if scene.source.name in f.local}
    budget = Budget(max(SEVERAL, scene.budget.left), scene.budget.until)
    for stray in [group for group in groups if not group.fits and scene.by_graph]:
        asked, found = False, list[_Group]()
        for name in [*stray.right]:
            tap, local = wrong[name]
            if not local.span or local.unclear or local.not_finite or not (scene.thorough or _short(local)):
                continue
            if not found and not asked:
                asked = True
                found = _several(groups, scene, budget, tap, local, stray.every)
                groups += found
            again = [(group, _again(group, scene, tap, local)) for group in found]
            if again and all(fits for _, fits in again):
                stray.drop(name)
                for group, fits in again:
                    group.narrowed(fits)
                    group.add(name, local.nmse, fits)
    _order(groups, wrong)


def _several(
    groups: Sequence[_Group], scene: Scene, budget: Budget, tap: taps.Tap, local: Local, tried: Sequence[Fit]
) -> list[_Group]:
    """A group for each of several bugs in one span, the others taken for proved in it."""
    scene.progress(f"looking for several causes of {tap.name}")
    proved = [group.fits[0] for group in groups if group.fits and not group.fits[0].harmless]
    case = case_of(scene.run, scene.source, tap, local)
    return [_Group(fits, (), True) for fits in search_together(case, local.least, budget, proved, tried)]


def _again(group: _Group, scene: Scene, tap: taps.Tap, local: Local) -> list[Fit]:
    """Those of a group's causes that explain this tap too."""
    if not (scene.thorough or _short(local)):
        return []
    case = case_of(scene.run, scene.source, tap, local)
    found = [_replayed(case, local, fit) for fit in group.fits]
    return [fit for fit in found if fit is not None and not _is_chance(fit, case, local)]


def _replayed(case: Case, local: Local, fit: Fit) -> Fit | None:
    """A fit at another tap, beside what was proved elsewhere, or else by itself."""
    for proved in dict.fromkeys((fit.steps[: fit.proved], ())):
        found = replayed(case, local.least, fit.key, fit.values, part=fit.part, proved=proved)
        if found is not None:
            return found
    return None


def _looked_for(scene: Scene, tap: taps.Tap, local: Local, first: bool) -> Outcome:
    if local.span and not scene.thorough and not (_short(local) and first):
        return Outcome()
    if not scene.by_graph:
        return Outcome(complete=False)
    case = case_of(scene.run, scene.source, tap, local)
    outcome = search(case, local.least, scene.budget, pairs=first, by_drop=scene.thorough)
    outcome = replace(outcome, fits=tuple(fit for fit in outcome.fits if not _is_chance(fit, case, local)))
    if outcome.fits or local.span or local.not_finite:
        return outcome
    in_part = search_part(case, scene.budget)
    return in_part if in_part.fits else outcome


def _is_chance(fit: Fit, case: Case, local: Local) -> bool:
    """Whether rounding may explain what a constant does that was solved for in a single row: where all that goes on is
    one number (how much each of two experts weighs), some value of any constant before it gives that.
    """
    return local.unclear and case.n_rows < 2 and any(value is not None for value in fit.values)


def _short(local: Local) -> bool:
    """Whether a span is within one layer: then replaying bugs through it takes little time."""
    layers = {tap.layer for name in local.span if (tap := taps.parse(name)) is not None}
    return len(layers - {None}) <= 1


def _word(tap: str) -> str:
    return tap.rsplit("-", 1)[0]
