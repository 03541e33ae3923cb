"""llama.cpp against itself: the same tokens under other settings, each in a process of its own, one line for each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from llamadiff.engines.capture_request import request_for
from llamadiff.engines.model_file import ModelFile, Runnable
from llamadiff.engines.own_graph import needed_graph
from llamadiff.engines.run_spec import USUAL, How, Run
from llamadiff.engines.select import after_what_the_engine_said, capture_run, in_engine
from llamadiff.ext.state.result import DEFAULT, Variant, Variants
from llamadiff.ext.state.schedule import at_random
from llamadiff.ext.state.scheduled import Shortening, abilities, run_schedule
from llamadiff.ext.state.variation import own_way, schedule_of, varied
from llamadiff.judge.verdict import WRONG, of_node, of_unjudged
from llamadiff.llamacpp.capture import probe, scratch_directory
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import GPU, PLAIN, Request
from llamadiff.numerics import metrics
from llamadiff.result.comparison import Comparison
from llamadiff.result.logits import Logits, compare_logits, logit_rows
from llamadiff.system.errors import DiedError, UserError
from llamadiff.system.output import remove
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import LOGITS
from llamadiff.verbs.judging import judge

PATIENCE = 600.0  # seconds that a variant may take
STAND_IN = (0,)  # tokens of a text that nobody has tokenized yet
SPLIT_TENSORS = "tensor"  # over devices: judged by taps
SHORTENING = 200  # runs to make a schedule shorter
_ALWAYS = ("flash_attn=on", "kv=f16", "kv=bf16", "kv=q8_0,flash_attn=on", "kv=q4_0,flash_attn=on", "repack=on")
_EVER = (
    "used=on", "sequences=3", "interleaved=3", "freed=on", "forked=on", "restored=on", "shifted=on", "drafted=2",
    "kv=q8_0,flash_attn=on,interleaved=3", "kv=q8_0,flash_attn=on,restored=on", "reused=off", "callback=off",
)  # fmt: skip


def run_variants(
    model: str | Path, run: Run, how: How = USUAL, names: Sequence[str] = (), patience: float = PATIENCE
) -> Variants:
    """Run llama.cpp plainly, then in every other way (``names``: in these). Raises UserError if it runs not even so."""
    with scratch_directory() as folder, Child(run.settings, patience) as child:
        file = ModelFile(model, how.precision, run.settings)
        engine, used = in_engine(file, how)
        request = request_for(engine or file, run, Path(folder) / "default.safetensors")
        for name in names:
            schedule_of(name)
            varied(replace(request, tokens=request.tokens or STAND_IN), name)  # what is no setting is said first
            if (own := own_way(name)) is not None:
                own[0].check(file)
        started = time.perf_counter()
        with after_what_the_engine_said(file, used):
            opened, baseline = capture_run(engine, request, how.progress, child)
        seconds = time.perf_counter() - started
        info = baseline.info
        known = replace(request, text=None, tokens=info.tokens, n_predict=0, n_prefill=info.n_prefill)
        how = replace(how, diagnose=False, partial=True)
        by_nodes = _by_nodes(known, how, patience) if on_device(known) else None
        rows = [_compared(DEFAULT, opened, baseline, baseline, seconds, how, by_nodes)]
        for name in names or variants_of(known):
            how.progress(f"llama.cpp with {name}")
            asked = replace(known, output=f"{folder}/{len(rows)}")
            rows.append(_tried(name, opened, baseline, asked, how, patience, by_nodes))
    texts = file.token_texts(info.tokens)
    return Variants(file.describe(), texts, info.producer, tuple(rows), info.prompt, bool(names))


def variants_of(request: Request) -> Iterator[str]:
    """What is worth trying with these tokens on this machine, by the names that ``--candidate llama.cpp:`` takes."""
    count, cores = len(request.tokens), os.cpu_count() or 1
    half = 1 << max(0, (count - 1).bit_length() - 1)  # the largest power of two below the count
    yield from _ALWAYS
    yield from (f"threads={number}" for number in sorted({1, cores}))
    yield from (f"batch={size}" for size in sorted({1, 7, half}) if size < count)
    yield from (f"{key}={size}" for key in ("ubatch", "chunked") for size in sorted({half}) if size < count)
    yield from _EVER
    yield from (f"device={name}" for name, _, kind in probe(request.settings).devices if kind == GPU)


def _tried(
    name: str, default: Runnable, baseline: Trace, request: Request, how: How, patience: float,
    alone: Comparison | None,
) -> Variant:  # fmt: skip
    """One variant in a process of its own, whatever becomes of it. ``alone``: the default's nodes, on a device."""
    started = time.perf_counter()
    try:
        request, schedule = varied(request, name), schedule_of(name)
        if schedule is not None:
            return _scheduled(name, default, request, how, *schedule)
        if (own := own_way(name)) is not None:
            return own[0].run(name, own[1], request, how.progress, patience)
        with Child(request.settings, patience) as child:
            opened, trace = capture_run(default, request, how.progress, child)
        by_nodes = _by_nodes(request, how, patience) if on_device(request) else None
        found = _compared(name, opened, baseline, trace, time.perf_counter() - started, how, by_nodes)
        by_taps = not request.settings.on_device or request.settings.split == SPLIT_TENSORS
        is_seen = by_nodes is not None or by_taps
        return found if is_seen or alone is None else _by_logits(found, baseline, trace, alone)
    except UserError as error:
        said = str(error).removeprefix(f"{request.model}: ")
        seconds, died = time.perf_counter() - started, isinstance(error, DiedError)
        return Variant(name, of_unjudged(), seconds, failed=said, died=died)
    finally:
        remove(Path(str(request.output)))  # traces may be large, and are many


def _scheduled(name: str, default: Runnable, request: Request, how: How, number: int, seed: int) -> Variant:
    """A random schedule; one that fails is made as short as still fails."""
    started, vocabulary = time.perf_counter(), int(default.describe("")["vocab"])
    with Child(request.settings, PATIENCE) as child:
        schedule = at_random(number, seed, vocabulary, abilities(request, child))
    found = run_schedule(schedule, request, vocabulary)
    seconds = time.perf_counter() - started
    steps: tuple[str, ...] = ()
    if found.faults:
        how.progress("looking for the shortest schedule that fails")
        shortest = Shortening(request, vocabulary, SHORTENING).of(schedule, found)
        found = run_schedule(shortest, request, vocabulary)
        steps = tuple(step.words() for step in found.steps)
    return Variant(
        name, found.verdict, seconds, (*found.given, *found.off), found.judged, (found.faults or ("",))[0],
        failed=found.died, steps=steps,
    )  # fmt: skip


def on_device(request: Request) -> bool:
    """Whether layers are somewhere else than on the CPU, and the run is one whose every node can be looked at."""
    return request.way == PLAIN and request.settings.on_device and request.settings.split != SPLIT_TENSORS


def _by_nodes(request: Request, how: How, patience: float) -> Comparison:
    """Every node judged: what a device rounds is followed there, and taps are too far apart for it."""
    with Child(request.settings, patience) as child:
        return needed_graph("--llama-cpp device").judge_nodes(
            ModelFile(request.model, how.precision), request, how, child
        )


def _compared(
    name: str, opened: Runnable, baseline: Trace, trace: Trace, seconds: float, how: How,
    by_nodes: Comparison | None = None,
) -> Variant:  # fmt: skip
    """A trace judged on its own inputs, or every node of such a run; and the trace held against the default."""
    result = by_nodes or judge(opened, trace, None, how)
    given = (check.name for check in result.preflight if check.verdict == WRONG)
    wrong = (*given, *(row.tap for row in result.wrong))
    verdict = result.verdict if result.rows else of_unjudged()
    return Variant(
        name, verdict, seconds, wrong, sum(row.local is not None for row in result.rows),
        result.headline if wrong else "", _leaves(baseline, trace), _ratio(result), _logits(opened, baseline, trace),
        comparison=result, by_nodes=by_nodes is not None,
    )  # fmt: skip


def _by_logits(found: Variant, baseline: Trace, trace: Trace, alone: Comparison) -> Variant:
    """A run on a device whose nodes cannot be looked at, and of whose taps the arithmetic of CPUs says nothing: its
    logits, held against those of nodes that were judged each ``alone``. What these may be off by adds up.
    """
    if LOGITS not in baseline or LOGITS not in trace:
        return replace(found, verdict=of_unjudged(), wrong=(), judged=0, headline="", comparison=None)
    off = metrics.nmse(logit_rows(trace[LOGITS]), logit_rows(baseline[LOGITS]), 0)
    limit = sum(row.local.limit for row in alone.rows if row.local is not None)
    verdict = of_node(off, limit).verdict
    said = f"its logits are off by {off:.1e} of those of nodes computed alone; rounding explains {limit:.0e}"
    wrong, headline = ((LOGITS,), said) if verdict == WRONG else ((), "")
    return replace(found, verdict=verdict, wrong=wrong, judged=1, headline=headline, ratio=None, comparison=None)


def _leaves(baseline: Trace, trace: Trace) -> str | None:
    """The first tap, in the order of the run, that is not the default's bit for bit."""
    both = (tap for tap in baseline if tap in trace)
    return next((tap for tap in both if not np.array_equal(baseline[tap], trace[tap], equal_nan=True)), None)


def _ratio(result: Comparison) -> float | None:
    return next((row.ratio_to_noise for row in reversed(result.rows) if row.ratio_to_noise is not None), None)


def _logits(opened: Runnable, baseline: Trace, trace: Trace) -> Logits | None:
    if LOGITS not in baseline or LOGITS not in trace:
        return None
    return compare_logits(logit_rows(baseline[LOGITS]), logit_rows(trace[LOGITS]), opened.vocabulary.text)
