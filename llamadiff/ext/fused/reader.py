"""Who reads what a process tells of nodes that run alone, and of passes in which some are not looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llamadiff.ext.fused.search import Asking, Found, Graph, Pass, Value, kernels
from llamadiff.ext.graph.check import NodeCheck
from llamadiff.ext.graph.graph import VIEWS
from llamadiff.ext.graph.readers import NodeReader
from llamadiff.llamacpp.dequantize import Dequantizer
from llamadiff.llamacpp.readers import Tell
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.sent_tensor import SentTensor


class FusedReader(NodeReader):
    """Every ``node`` of a run, checked; then what was ``found`` of kernels of several of them."""

    nodes: tuple[NodeCheck, ...] = ()
    found = Found()
    _search: Asking | None = None
    _last_pass = Pass()

    def __init__(self, request: Request, tell: Tell, file: Dequantizer | None = None) -> None:
        super().__init__(request, tell, file)
        self._places: dict[int, int] = {}  # a tensor's address -> its place in the graph
        self._reads: list[frozenset[int]] = []
        self._views: dict[int, int] = {}

    def _asks(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        """The process waits to be told what to run next."""
        if self._search is None:
            self.checker.settle()
            self.nodes = tuple(self.checker.results)
            self._search = kernels(Graph(self.nodes, self._reads, self._views))
            self._values: dict[int, Any] = {}
            self._ask_for(None)
        else:
            values, self._values = self._values, {}
            self._ask_for(values)

    def _ask_for(self, values: Mapping[int, Any] | None) -> None:
        assert self._search is not None
        try:
            self._last_pass = next(self._search) if values is None else self._search.send(values)
        except StopIteration as ended:
            self.found = ended.value
            self.tell(fused={})
        else:
            last = self._last_pass
            self.tell(fused={
                "hidden": last.hidden, "reported": last.reported, "left": last.left, "only": last.judged,
            })  # fmt: skip

    def _node(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        super()._node(answer, data)
        node = self._pending
        if self._search is not None or node is None:
            return
        place = len(self._reads)
        sources = (self._places.get(source.address) for source in node.sources)
        self._reads.append(frozenset(source for source in sources if source is not None))
        if node.op in VIEWS and node.base is not None and node.base.address in self._places:
            self._views[place] = self._places[node.base.address]
        self._places[node.address] = place

    def _value(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        self._values[answer["value"]] = Value(SentTensor(answer["node"], bytes(data[0]), self.order))

    def _computed(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        if self._search is None:
            super()._computed(answer, data)
            return
        node, place = self._pending, self._last_pass.judged
        assert node is not None
        assert place is not None
        self.checker.done(replace(node, said={**node.said, "looks": answer["looks"]}, data=self._last_pass.value))
        self._values[place] = self.checker.results.pop()

    def finish(self) -> None:
        """What was found of nodes is settled before kernels are looked for."""
