"""The loop of a judgement: assume how a candidate computes, run the engine so, look at what it finds, assume better.

At first nothing is assumed but that it computes as llama.cpp or more finely. Each look reads one thing from what was
found that the engine does in its own way and is right about, or wrote down wrongly; then all is judged anew under that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from llamadiff import plugins
from llamadiff.engines.model_file import Runnable
from llamadiff.engines.run_spec import How
from llamadiff.judge.finding import Local
from llamadiff.judge.run import Passes, run_passes
from llamadiff.judge.verdict import WRONG, is_right
from llamadiff.numerics.policies import PERTURBED
from llamadiff.numerics.rounding import Rounding
from llamadiff.result.conventions import Choice, Conventions
from llamadiff.trace.reader import Trace


@dataclass(frozen=True)
class Assumed:
    """What is assumed of a candidate: ``trace`` is its own as it would be without its ``choices`` (None: no candidate).

    ``roundings`` are those by which it is judged, ``own`` those among them that are not ggml's; ``draws``: samples of
    what 16 bits do; ``records``: taps that it computed rightly and wrote down wrongly; ``cache``: the type of K and V
    (empty: what it states); ``compute``: its arithmetic, likewise; ``slips``: what is wrong with its recording, in
    words, and put right in ``trace``.
    """

    trace: Trace | None
    sums: str = ""
    choices: tuple[Choice, ...] = ()
    roundings: Mapping[str, Rounding] = field(default_factory=dict)
    own: Mapping[str, Rounding] = field(default_factory=dict)
    draws: int = 1
    records: tuple[str, ...] = ()
    cache: str = ""
    compute: str = ""
    slips: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """What is under test, as far as it is understood: what is assumed of it, and what passes under that find."""

    assumed: Assumed
    passes: Passes

    @property
    def manner(self) -> Conventions:
        """What the candidate does in its own way."""
        a, source = self.assumed, self.passes.judge.sources[self.under_test]
        ours = Conventions(a.choices, a.own, source.precision, bool(a.sums), a.cache, a.compute)
        return ours if a.trace is not None else Conventions()

    @property
    def under_test(self) -> str:
        """The source whose taps are judged: the candidate, or the baseline alone."""
        return "baseline" if self.assumed.trace is None else "candidate"


@dataclass(frozen=True)
class Bench:
    """What a candidate is studied with; ``graph`` makes llama.cpp's, where it can be had."""

    model: Runnable
    baseline: Trace
    how: How
    graph: Callable[[], Runnable | None]

    def readers(self, study: Study) -> dict[str, list[str]]:
        """Which judged taps are computed from which."""
        found: dict[str, list[str]] = {}
        for finding in study.passes.findings:
            for name in self.model.inputs(finding.tap) if "candidate" in finding.local else ():
                found.setdefault(name, []).append(finding.tap.name)
        return found

    def run(self, assumed: Assumed) -> Study:
        """What the engine finds under an assumption about a candidate."""
        assert assumed.trace is not None
        trace = assumed.trace.lacking(assumed.records) if assumed.records else assumed.trace
        found = {"type_k": assumed.cache, "type_v": assumed.cache, "compute": assumed.compute}
        trace = trace.with_settings(**{key: value for key, value in found.items() if value})
        passes = run_passes(self.model, self.baseline, trace, self.how, None, assumed.roundings, assumed.draws)
        return Study(assumed, passes)


Look: TypeAlias = Callable[[Bench, Study], Study | None]  # a better study than the one it was given, if it sees one


def infer_conventions(bench: Bench, candidate: Trace | None, passes: Passes) -> Study:
    """A candidate under the best assumption; ``passes`` were made under none, as the baseline's are."""
    study = Study(Assumed(candidate), passes)
    slices = (look for looks in plugins.ask_all(lambda each: each.looks()) for look in looks)
    for look in () if candidate is None else (*slices, *(() if bench.model.by_graph else (_samples, _records))):
        while (better := look(bench, study)) is not None:
            study = better
    return study


def _samples(bench: Bench, study: Study) -> Study | None:
    """More samples of what 16 bits do, where only a part of a tap is wrong: one may be unlucky there."""
    apart = any(_stands_out(finding.local.get("candidate")) for finding in study.passes.findings)
    if study.assumed.draws > 1 or not apart:
        return None
    return bench.run(replace(study.assumed, draws=len(PERTURBED)))


def _stands_out(local: Local | None) -> bool:
    """Whether only a part of a tap is wrong."""
    return local is not None and local.verdict == WRONG and local.limit < local.nmse <= local.noise_limit


def _records(bench: Bench, study: Study) -> Study | None:
    """Taps that were written down wrongly.

    An op's result is judged on the inputs that were recorded. Where one of these was written wrongly, whatever reads it
    seems wrong as well. Without that tap the same ops are right: then it is the record that is wrong, not the engine.
    """
    wrong, readers = study.passes.wrong("candidate"), bench.readers(study)
    suspects = tuple(name for name in wrong if any(reader in wrong for reader in readers.get(name, ())))
    while suspects and not study.assumed.records:
        found = bench.run(replace(study.assumed, records=suspects))
        sure = tuple(name for name in suspects if _is_right_without(name, found.passes, readers[name]))
        if sure == suspects:
            return replace(found, passes=_join_passes(study.passes, found.passes, suspects))
        suspects = sure
    return None


def _is_right_without(name: str, found: Passes, readers: Sequence[str]) -> bool:
    """Whether the taps that answer for one that is left out are right; for a cache, which may be, its readers."""
    judged = {f.tap.name: f.local["candidate"] for f in found.findings if "candidate" in f.local}
    answers = [tap for tap, local in judged.items() if name in local.span] or readers
    verdicts = [judged[tap].verdict for tap in answers if tap in judged]
    return bool(verdicts) and all(map(is_right, verdicts))


def _join_passes(passes: Passes, found: Passes, left_out: tuple[str, ...]) -> Passes:
    """What was found without some taps, and what had been found of these."""
    first = {finding.tap.name: finding for finding in passes.findings}
    findings = [first[f.tap.name] if f.tap.name in left_out else f for f in found.findings]
    return replace(found, findings=findings)
