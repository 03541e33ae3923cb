"""Taps that were computed right and written wrong: the ops that read them are right once they are left out.

An op's result is judged on the inputs that were recorded. Where one of these was written wrongly, whatever reads it
seems wrong as well. Without that tap the same ops are right: then it is the record that is wrong, not the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llamadiff.engines.model_file import Runnable
from llamadiff.engines.run_spec import How
from llamadiff.judge.run import Passes, run_passes
from llamadiff.numerics import tolerances
from llamadiff.trace.reader import Trace


def misrecorded(
    model: Runnable, baseline: Trace, candidate: Trace, passes: Passes, how: How
) -> tuple[tuple[str, ...], Passes]:
    """The taps of a candidate that were recorded wrongly, and what passes find as if these had not been recorded."""
    readers = _readers(model, passes)
    suspects, known = _suspects(passes, readers), passes.judge.sources["candidate"]
    while suspects:
        rest = candidate.lacking(suspects)
        found = run_passes(model, baseline, rest, how, None, known.reading, known.draws)
        sure = tuple(name for name in suspects if _is_right_without(name, found, readers[name]))
        if sure == suspects:
            return suspects, _together(passes, found, suspects)
        suspects = sure
    return (), passes


def _readers(model: Runnable, passes: Passes) -> dict[str, list[str]]:
    """Which judged taps are computed from which."""
    found: dict[str, list[str]] = {}
    for finding in passes.findings:
        for name in model.inputs(finding.tap) if "candidate" in finding.local else ():
            found.setdefault(name, []).append(finding.tap.name)
    return found


def _suspects(passes: Passes, readers: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The WRONG taps that have a WRONG reader."""
    wrong = passes.wrong("candidate")
    return tuple(name for name in wrong if any(reader in wrong for reader in readers.get(name, ())))


def _is_right_without(name: str, found: Passes, readers: Sequence[str]) -> bool:
    """Whether the taps that answer for one that is left out are right; for a cache, which may be, its readers."""
    judged = {f.tap.name: f.local["candidate"] for f in found.findings if "candidate" in f.local}
    answers = [tap for tap, local in judged.items() if name in local.span] or readers
    verdicts = [judged[tap].verdict for tap in answers if tap in judged]
    return bool(verdicts) and all(verdict in (tolerances.MATCH, tolerances.NOISE) for verdict in verdicts)


def _together(passes: Passes, found: Passes, left_out: tuple[str, ...]) -> Passes:
    """What was found without some taps, and what had been found of these."""
    first = {finding.tap.name: finding for finding in passes.findings}
    findings = [first[f.tap.name] if f.tap.name in left_out else f for f in found.findings]
    return replace(found, findings=findings)
