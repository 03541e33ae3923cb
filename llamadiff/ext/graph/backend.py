"""llama.cpp's graph, node by node, as a Comparison: for every architecture that llama.cpp runs."""

from __future__ import annotations

import fnmatch
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from llamadiff import plugins
from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import USUAL, How, Run
from llamadiff.engines.select import GRAPH, EngineUsed
from llamadiff.ext.graph.check import NO_FUNCTION, NOT_LOOKED_AT, UNKNOWN_ROUNDING, NodeCheck, layers_of
from llamadiff.ext.graph.readers import Nodes, check_nodes, found_by
from llamadiff.ext.graph.recording import read_again, recorded_request
from llamadiff.judge.finding import Local
from llamadiff.judge.preflight.checks import given_rightly
from llamadiff.judge.verdict import NODES, NOISE, SEVERITY, WRONG, of_node, of_run
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request, Settings, no_tap_fits
from llamadiff.numerics import tolerances
from llamadiff.result.comparison import Comparison, Decoding, Judged, Sides, assemble
from llamadiff.result.message import Message
from llamadiff.result.oddity import Oddity
from llamadiff.result.rows import Row, blank
from llamadiff.system.errors import UserError
from llamadiff.system.output import made_directory
from llamadiff.system.python_child import peak_rss_mb
from llamadiff.trace import taps
from llamadiff.words import unjudged

ALONE = (
    "the device computed each node alone: kernels of several nodes, which it has where nobody looks, were not judged"
)
UNSEEN = "llamadiff fused finds kernels of several nodes, which the device runs where nobody looks, and judges them"
OPEN = "since on their inputs NaN or Inf is right"
OPS = {"name": "ggml's ops in NumPy", "version": "float64 and float32"}


def compare_nodes(
    model: ModelFile, request: Request, how: How = USUAL, child: Child | None = None, recorded: Path | None = None
) -> Comparison:
    """Run llama.cpp, in a ``child`` that is ready or a new one, and judge every node on the inputs that it was given.

    ``recorded``: a file of such a run, which is judged instead. Raises UserError.
    """
    started = time.perf_counter()
    request = replace(request, nodes=True, pictures=how.pictures, weights=tuple(model.tensors))
    if recorded is not None:
        found = found_by(read_again(recorded, request, model.dequantizer))
    else:
        found = check_nodes(request, how.progress, child, model.dequantizer)
    _check_kept(request.keep_nodes, found.checks)
    info = found.info
    rows = tuple(row for row in rows_of(found.checks, how.rules)
                 if taps.is_selected(row.tap, row.layer, request.patterns, request.layer_range))  # fmt: skip
    if not rows:
        raise UserError(no_tap_fits(request))
    given = given_rightly(info)
    ruling = of_run([row.verdict for row in rows], [check.verdict for check in given])
    capture_s = time.perf_counter() - started
    sides = Sides(
        model=model.describe(str(info.model.get("sha256") or model.sha256)),
        tokens=model.token_texts(info.tokens),
        n_prefill=info.n_prefill,
        prompt=info.prompt,
        baseline=info.producer,
        candidate=OPS,
        is_engine=True,
    )
    timing = {
        "capture_s": capture_s,
        "engine_s": 0.0,
        "compare_s": 0.0,
        "total_s": capture_s,
        "peak_rss_mb": peak_rss_mb(),
    }
    decoding = Decoding(found.trusted, found.refused)
    judged = Judged(rows=rows, preflight=given, decoding=decoding, timing=timing, origin=_origin(model, rows))
    said = summarize(rows, str(info.producer.get("name")), _passes(found), found.on_device)
    if judged.origin is not None and not any(row.verdict == WRONG for row in rows):
        said = said.with_headline(f"{judged.origin.where}: {judged.origin.says}")
    said = said.with_headline(f"before any node, {given[0].name}: {given[0].found}") if given else said
    steps = (*_next_steps(rows, request, found.on_device), *unjudged.step_when_unjudgeable((), judged.origin))
    return replace(assemble(sides, judged, ruling, said, steps), engine=EngineUsed(GRAPH))


def _check_kept(patterns: Sequence[str], checks: Sequence[NodeCheck]) -> None:
    """Raise UserError for a pattern that no node fits."""
    names = {name for check in checks for name in (check.name.partition("#")[0], check.op)}
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UserError(f"--node {pattern[:80]}: no node or op of that name; llamadiff graph MODEL lists them")


def judge_graph(
    model: str | Path,
    run: Run,
    how: How = USUAL,
    keep: str | Path | None = None,
    recorded: Path | None = None,
    keep_nodes: Sequence[str] = (),
) -> Comparison:
    """Run llama.cpp and compute every node of its graph again, on the inputs it was given: any architecture.

    ``keep``: a directory for the wrong ops, each in a file; ``recorded``: a run of elsewhere, in place of one now;
    ``keep_nodes``: patterns of names, or ops, that are saved though they are right.
    Raises UserError for whatever a user can mend.
    """
    with nullcontext(None) if recorded else Child(run.settings) as child:
        file = ModelFile(model)
        request = recorded_request(recorded, str(model)) if recorded else text_request(file, run, Path())
        with made_directory(Path(keep)) if keep is not None else nullcontext(None) as folder:
            return compare_nodes(
                file, replace(request, keep=folder, keep_nodes=tuple(keep_nodes)), how, child, recorded
            )


def list_nodes(model: str | Path, n_tokens: int, settings: Settings | None = None) -> tuple[NodeCheck, ...]:
    """The nodes of llama.cpp's graph for a prompt of so many tokens; nothing is computed again."""
    file = ModelFile(model)
    with scratch_directory() as folder:
        request = text_request(
            file, Run(tokens=[0] * n_tokens, settings=settings or Settings()), Path(folder) / "nodes.json"
        )
        return check_nodes(replace(request, nodes=True, only_list=True)).checks


def worst_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Of rows of one name and op the worst, where the first was."""
    worst: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row.tap, row.op
        if key not in worst or _badness(row) > _badness(worst[key]):
            worst[key] = row
    return tuple(worst.values())


def rows_of(checks: Sequence[NodeCheck], rules: Sequence[tolerances.Rule]) -> tuple[Row, ...]:
    """One row a node of the graph, in its order; of several passes, the worst one's."""
    names = _labels([check for check in checks if check.step == 0])
    worst: dict[tuple[str, str], Row] = {}
    for check, layer in zip(checks, layers_of(checks), strict=True):
        key = (check.name, check.op)
        row = _row(check, layer, names.get(key, check.name), rules)
        if key not in worst or _badness(row) > _badness(worst[key]):
            worst[key] = row
    return tuple(worst.values())


def _labels(checks: Sequence[NodeCheck]) -> dict[tuple[str, str], str]:
    """Names of the rows: the tap's, for the last node that is it; else llama.cpp's own, once each."""
    last = {check.tap: (check.name, check.op) for check in checks if check.tap is not None}
    labels: dict[tuple[str, str], str] = {}
    taken: Counter[str] = Counter(str(tap) for tap in last)
    for check in checks:
        key = (check.name, check.op)
        if check.tap is not None and last[check.tap] == key:
            labels[key] = check.tap
            continue
        taken[check.name] += 1
        labels[key] = check.name if taken[check.name] == 1 else f"{check.name} ({check.op.lower()})"
    return labels


def _row(check: NodeCheck, layer: int | None, name: str, rules: Sequence[tolerances.Rule]) -> Row:
    rule = tolerances.rule_for(rules, name, check.op, check.arithmetic or "F32")
    match = rule.match + check.rounding
    ruling, local = of_node(check.nmse, match, check.opened), None
    is_open = check.opened > 0 and not ruling.is_wrong
    if check.nmse is not None and not is_open:
        local = Local(
            check.nmse, None if ruling.is_wrong else check.arithmetic, match, NODES * match, ruling.verdict,
            index=check.index, expected=check.expected, recorded=check.found, reasons=ruling.reasons,
        )  # fmt: skip
    return replace(
        blank(name, layer, check.op, check.shape), verdict=ruling.verdict, weight=check.weight,
        weight_type=check.weight_type, local=local, baseline=check.baseline, candidate=check.engine,
        explained=OPEN if is_open else check.problem, closeup=check.closeup,
    )  # fmt: skip


def _origin(model: ModelFile, rows: Iterable[Row]) -> Oddity | None:
    """What of the file makes values that are not finite, at the first node that cannot be judged for them."""
    first = next((row for row in rows if row.explained == OPEN), None)
    return None if first is None else plugins.ask_first(lambda each: each.not_finite(model, first.weight, first.layer))


def _badness(row: Row) -> tuple[int, float]:
    return SEVERITY.index(row.verdict), row.local.nmse if row.local else 0.0


def _why_unchecked(row: Row) -> str:
    """Why a node is: for most, nobody has written its op."""
    if row.explained in (OPEN, UNKNOWN_ROUNDING) or (row.explained or "").startswith(NOT_LOOKED_AT):
        return str(row.explained)
    failed = row.explained is not None and not row.explained.startswith(NO_FUNCTION)
    return "since their function failed" if failed else "for want of a function"


def _passes(found: Nodes) -> str:
    """What was run."""
    steps = len(found.info.tokens) - found.info.n_prefill
    return f"a prefill of {found.info.n_prefill} tokens" + (f" and {steps} decode steps" if steps else "")


def summarize(rows: Sequence[Row], name: str, passes: str, on_device: bool = False) -> Message:
    """What is said of a graph of ``name``'s, in words of the ``passes`` in which its nodes were judged."""
    judged, wrong = [row for row in rows if row.local], [row for row in rows if row.verdict == WRONG]
    left = (*gaps(rows), *[ALONE] * on_device)
    if wrong:
        return _wrong(name, wrong).plus(*left)
    if not judged:
        return Message(f"no node of {name}'s graph could be checked", left)
    worst = max(judged, key=lambda row: row.local.nmse if row.local else 0.0)
    assert worst.local is not None
    noisy = sum(row.verdict == NOISE for row in rows)
    quality = f"right up to rounding ({noisy} are noise)" if noisy else "right"
    alone = ", each computed alone" if on_device else ""
    said = f"every checked node of {name}'s graph is {quality} on the inputs it was given{alone}"
    counts = f"{len(judged)} nodes in {passes}, worst own error {worst.local.nmse:.1e} at {worst.tap}"
    return Message(said, (counts, *left))


def _wrong(name: str, wrong: Sequence[Row]) -> Message:
    """The first node that is wrong, and how many others are."""
    first = wrong[0]
    assert first.local is not None
    by = f" by {first.weight}" if first.weight else ""
    others = [row.tap for row in wrong[1:5]] + ["..."] * (len(wrong) > 5)
    also = [f"{len(wrong) - 1} more nodes are wrong: {', '.join(others)}"] if wrong[1:] else []
    size = f"own error {first.local.nmse:.1e}, limit {first.local.limit:.0e}"
    return Message(f"{first.tap}: {name}'s {first.op}{by} is wrong on the inputs it was given", (size, *also))


def gaps(rows: Sequence[Row]) -> Iterator[str]:
    """The nodes that could not be checked, and why."""
    unchecked = [row for row in rows if row.local is None]
    reasons = ("for want of a function", "since their function failed", OPEN)
    for why in (*reasons, *sorted({_why_unchecked(row) for row in unchecked}.difference(reasons))):
        of = Counter(row.op for row in unchecked if _why_unchecked(row) == why)
        if of:
            ops = ", ".join(f"{op} ({count})" for op, count in of.most_common())
            begins = next(row.tap for row in unchecked if _why_unchecked(row) == why)
            since = f", from {begins} on" if why == OPEN else ""
            yield f"{of.total()} nodes are unchecked{since}, {why}: {ops}"


def _next_steps(rows: Sequence[Row], request: Request, on_device: bool) -> tuple[str, ...]:
    if not any(row.verdict == WRONG for row in rows):
        return (UNSEEN,) if on_device else ()
    if request.keep is None:
        return ("run llamadiff backend with --keep DIR: it saves each wrong op with its inputs, for a bug report",)
    return (
        f"{Path(request.keep).name} holds inputs, parameters, expected and actual output of each wrong op; llamadiff "
        "replay FILE -o ISSUE.md runs one on any build, and writes what to report",
    )
