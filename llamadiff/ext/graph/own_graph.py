"""The graph of a run, for the core. What judges nodes is imported where it is used: other runs wait for none of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.graph.model import GraphModel, by_its_graph, graph_of_run
from llamadiff.ext.graph.readers import KeepingReader
from llamadiff.llamacpp.capture import capture
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.system.progress import Progress
from llamadiff.trace.reader import Trace

if TYPE_CHECKING:
    from llamadiff.engines.run_spec import How
    from llamadiff.llamacpp.doctor import Examined
    from llamadiff.result.comparison import Comparison


class LlamaCppGraph:
    """Reads llama.cpp's graph (``OwnGraph`` of ``plugins.py``)."""

    def run(self, model: Path, request: Request, progress: Progress, child: Child | None) -> tuple[GraphModel, Trace]:
        return by_its_graph(model, request, progress, child)

    def of_run(
        self, model: ModelFile, trace: Trace, progress: Progress, place: Settings | None, child: Child | None
    ) -> GraphModel | None:
        return graph_of_run(model, trace, progress, place, child)

    def capture(self, request: Request, progress: Progress, child: Child | None) -> Trace:
        return capture(request, progress, child, KeepingReader)

    def judge_nodes(self, model: ModelFile, request: Request, how: How, child: Child | None) -> Comparison:
        from llamadiff.ext.graph.backend import compare_nodes

        return compare_nodes(model, request, how, child)

    def record_nodes(self, request: Request, progress: Progress) -> int:
        from llamadiff.ext.graph.recording import record

        return record(request, progress)

    def examine_ops(self, ops: Iterable[str]) -> Examined:
        from llamadiff.ext.graph.examined import ops_judged

        return ops_judged(ops)
