"""Kernels of several nodes as a Comparison: what each gives beside what its nodes give alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import USUAL, How, Run
from llamadiff.engines.select import GRAPH, EngineUsed
from llamadiff.ext.fused.reader import FusedReader
from llamadiff.ext.fused.search import Found, Kernel
from llamadiff.ext.graph.backend import OPS, gaps, rows_of
from llamadiff.ext.graph.check import NodeCheck, layers_of
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.verdict import WRONG, of_check, of_run
from llamadiff.llamacpp.capture import read_run
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Way
from llamadiff.numerics import tolerances
from llamadiff.result.comparison import Comparison, Decoding, Judged, Sides, assemble
from llamadiff.result.message import Message
from llamadiff.result.rows import Row
from llamadiff.system.errors import UserError
from llamadiff.system.python_child import peak_rss_mb

OBSERVER = "llamadiff.ext.fused.observer:FusedObserver"
APART = (
    "these nodes run apart with GGML_CPU_DISABLE_FUSION=1 in the environment, GGML_CUDA_ or GGML_VK_ on such devices, "
    "GGML_METAL_FUSION_DISABLE=1 on a Mac: see whether the text is right then"
)
SHOWN = 4  # nodes of a kernel that are named


def judge_kernels(model: str | Path, run: Run, how: How = USUAL) -> Comparison:
    """Run llama.cpp with nobody looking between nodes, and judge what it runs as one there. Raises UserError."""
    started, file = time.perf_counter(), ModelFile(model)
    request = text_request(file, run, Path())
    if request.n_predict or len(request.batches) > 1:
        raise UserError(f"{file.path}: kernels are looked for in one batch; give no --n-predict")
    if run.settings.split == "tensor":
        raise UserError(
            "split=tensor: kernels are found by nodes that are looked at, which llama.cpp does not allow then"
        )
    request = replace(request, output=None, way=Way(observer=OBSERVER), weights=tuple(file.tensors))
    with Child(run.settings) as child:
        reader = read_run(request, how.progress, child, partial(FusedReader, file=file.dequantizer))
    assert isinstance(reader, FusedReader)
    info, nodes, found = reader.info(), reader.nodes, reader.found
    rows, alone = [_row(kernel, nodes, how.rules) for kernel in found.kernels], rows_of(nodes, how.rules)
    name = str(info.producer.get("name"))
    unsteady = Check("the same run twice", of_check(fault=True, is_known=False), f"{name} does not give the same bits")
    checks = () if found.steady else (unsteady,)
    ruling = of_run([row.verdict for row in (*alone, *rows)], [check.verdict for check in checks])
    seconds = time.perf_counter() - started
    sides = Sides(
        model=file.describe(str(info.model.get("sha256") or file.sha256)), tokens=file.token_texts(info.tokens),
        n_prefill=info.n_prefill, prompt=info.prompt, baseline=info.producer, candidate=OPS, is_engine=True,
    )  # fmt: skip
    timing = {
        "capture_s": seconds,
        "engine_s": 0.0,
        "compare_s": 0.0,
        "total_s": seconds,
        "peak_rss_mb": peak_rss_mb(),
    }
    read = reader.dequantizer
    decoding = Decoding(len(read.trusted), tuple(sorted(read.refused)))
    judged = Judged(rows=(*alone, *rows), preflight=checks, decoding=decoding, timing=timing)
    wrong = [row for row in alone if row.verdict == WRONG]
    said = _said(name, wrong, rows, found, len(nodes)).plus(*gaps(alone))
    return replace(assemble(sides, judged, ruling, said, _next_steps(wrong, rows)), engine=EngineUsed(GRAPH))


def _row(kernel: Kernel, nodes: Sequence[NodeCheck], rules: Sequence[tolerances.Rule]) -> Row:
    """That of a value of it, within what rounding may do in all of its nodes up to there."""
    own, judged = nodes[kernel.first : kernel.last + 1], nodes[kernel.place]
    before = sum(_limit(node, rules) for node in nodes[kernel.first : kernel.place])
    check = replace(kernel.check, name=judged.name, tap=judged.tap, rounding=kernel.check.rounding + before)
    (row,) = rows_of([check], rules)
    return replace(row, op=_pattern(own), layer=layers_of(nodes)[kernel.place])


def _limit(node: NodeCheck, rules: Sequence[tolerances.Rule]) -> float:
    """NMSE that rounding may leave in a node."""
    return tolerances.rule_for(rules, node.name, node.op, node.arithmetic or "F32").match + node.rounding


def _pattern(nodes: Sequence[NodeCheck]) -> str:
    return " + ".join(node.op for node in nodes)


def _said(name: str, alone: Sequence[Row], rows: Sequence[Row], found: Found, count: int) -> Message:
    """What is said of the kernels; of nodes that are wrong alone before."""
    if alone:
        return Message(f"{alone[0].tap}: {name}'s {alone[0].op} is wrong, alone already")
    if not found.steady:
        return Message(
            f"{name} does not give the same bits twice, so that kernels of several nodes cannot be told from others"
        )
    wrong = [row for row in rows if row.verdict == WRONG]
    if wrong:
        return _wrong(name, wrong)
    if not rows:
        said = f"no nodes of {name}'s graph that run together give other bits than each alone"
        return Message(said, (f"{count} nodes, none of them wrong alone",))
    unjudged = [row for row in rows if row.local is None]
    if unjudged:
        return Message(f"{name}'s {unjudged[0].op} as one kernel cannot be judged: {unjudged[0].explained}")
    said = f"every kernel of several nodes of {name}'s that gives other bits than its nodes alone is right"
    worst = max(row.local.nmse for row in rows if row.local)
    kinds = ", ".join(dict.fromkeys(f"{row.op} ({row.tap})" for row in rows))
    many = f"{len(rows)} kind{'s' if len(rows) > 1 else ''}"
    return Message(said, (f"{many}, worst own error {worst:.1e}: {kinds}",))


def _wrong(name: str, wrong: Sequence[Row]) -> Message:
    first = wrong[0]
    assert first.local is not None
    size = f"own error {first.local.nmse:.1e}, limit {first.local.limit:.0e}"
    also = [f"{len(wrong) - 1} more are wrong: {', '.join(row.op for row in wrong[1:SHOWN])}"] if wrong[1:] else []
    said = f"{first.tap}: {name}'s {first.op} is wrong as one kernel; its nodes are right alone"
    return Message(said, (size, *also))


def _next_steps(alone: Sequence[Row], rows: Sequence[Row]) -> tuple[str, ...]:
    if alone:
        return ("run llamadiff backend with --keep DIR: it saves each wrong op with its inputs, for a bug report",)
    if any(row.verdict == WRONG for row in rows):
        return (APART,)
    return ()
