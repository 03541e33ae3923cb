"""llama.cpp's own graph: an engine for every architecture that llama.cpp runs, and each of its nodes, judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.cli.command import Command
    from llamadiff.plugins import OwnGraph


class Graph(Slice):
    """llama.cpp's own graph: an engine for every architecture that llama.cpp runs, and each of its nodes, judged."""

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.graph.cli import COMMANDS

        return COMMANDS

    def own_graph(self) -> OwnGraph:
        from llamadiff.ext.graph.own_graph import LlamaCppGraph

        return LlamaCppGraph()


slice_ = Graph()
