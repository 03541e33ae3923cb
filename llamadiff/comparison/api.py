"""The Python API: compare, check and diff with a keyword for everything; from it, a Run and a How are made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llamadiff.comparison import verbs
from llamadiff.comparison.result import Comparison
from llamadiff.engines.run_spec import Costing, How, Run
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Settings
from llamadiff.numerics import tolerances
from llamadiff.system.progress import Progress, silent
from llamadiff.trace.reader import Trace


def compare(
    model: str | Path,
    prompt: str | None = None,
    *,
    tokens: Sequence[int] = (),
    chat: bool = False,
    n_predict: int = 0,
    candidate: verbs.Candidate | None = None,
    name_map: str | None = None,
    timeout: float = 600.0,
    patterns: Sequence[str] = (),
    layers: range | None = None,
    settings: Settings | None = None,
    rules: Sequence[tolerances.Rule] = tolerances.RULES,
    save: str | Path | None = None,
    partial: bool = False,
    precision: str = "f32",
    engine: str | None = None,
    diagnose: bool = True,
    explain: float = 0.0,
    progress: Progress = silent,
    child: Child | None = None,
    expect: Sequence[int] = (),
    text: str | None = None,
    spend: int = 0,
) -> Comparison:
    """Run llama.cpp and the engine on the same tokens, line up every tap, and judge.

    Without ``candidate`` the engine is it, and llama.cpp's own ops are judged; with one (a trace, what ``--candidate``
    takes: a file, a dump, a command; or a function of the token ids that returns arrays by the names of taps), the
    candidate's are; its token ids serve where neither ``prompt`` nor ``tokens`` is given. ``save`` keeps the traces in
    a directory. ``child``: llama.cpp's process, if it was started before. Of a candidate that is another .gguf of the
    model, ``text`` is measured on too, and ``spend`` bytes are spent on finer types. The rest are fields of Run and
    How, and described there. Raises UserError for whatever a user can mend.
    """
    run = Run(prompt, tokens, chat, n_predict, patterns, layers, settings or Settings())
    costing = Costing(text, "the text" if text is not None else None, spend)
    how = How(
        rules, engine, precision, diagnose, explain, partial, expect, name_map, timeout, progress, costing=costing
    )
    return verbs.compare(model, run, candidate, how, save, child)


def check(
    trace: str | Path | Trace,
    model: str | Path,
    rules: Sequence[tolerances.Rule] = tolerances.RULES,
    partial: bool = False,
    candidate: verbs.Candidate | None = None,
) -> Comparison:
    """Judge a recorded llama.cpp trace with the engine, or a ``candidate`` that is given its tokens.

    Needs no llama.cpp where the engine runs the file.
    """
    return verbs.check(trace, model, How(rules, partial=partial), candidate)


def diff(
    baseline: str | Path | Trace,
    candidate: str | Path | Trace,
    model: str | Path | None = None,
    rules: Sequence[tolerances.Rule] = tolerances.RULES,
    diagnose: bool = True,
    explain: float = 0.0,
    progress: Progress = silent,
    partial: bool = False,
    expect: Sequence[int] = (),
) -> Comparison:
    """Two traces: drift alone, or with the model also the local errors of both.

    ``partial``: what the candidate recorded is enough, though the logits are not among it.
    ``expect``: tokens that the table of logits is to have.
    """
    how = How(rules, diagnose=diagnose, explain=explain, partial=partial, expect=expect, progress=progress)
    return verbs.diff(baseline, candidate, model, how)
