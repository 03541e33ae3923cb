"""Every node of llama.cpp's graph checked as it is told of: memory stays at a few nodes.

Inputs are those that it had before it ran, since ops run in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
from llamaref import Weights
from numpy.typing import NDArray

from llamadiff import plugins
from llamadiff.ext.graph.check import (
    NO_FUNCTION,
    NOT_LOOKED_AT,
    UNKNOWN_ROUNDING,
    NodeArithmetics,
    NodeCheck,
    PlainArithmetics,
    Recomputed,
    open_places,
)
from llamadiff.ext.graph.node import Node
from llamadiff.ext.graph.op import Op, Operand, compute, function_of, rounded_for
from llamadiff.ext.graph.repro import save
from llamadiff.ext.graph.streamed import streamed
from llamadiff.llamacpp.quantizing import EightBits
from llamadiff.llamacpp.request import Request
from llamadiff.numerics import metrics, tolerances
from llamadiff.numerics.pictures import closeup_of
from llamadiff.system.errors import UserError

Array = NDArray[Any]
SMALL = 1 << 20  # bytes of memory that a view of it is checked by its values, not by its place alone


class NodeChecker:
    """Checks nodes of a run one by one, as its request says; ``results`` are in graph order.
    ``on_device``: some ran on a device.

    ``q8``: how this ggml rounds to eight bits.
    """

    def __init__(self, weights: Weights, request: Request, q8: EightBits) -> None:
        self.weights, self.request, self.q8 = weights, request, q8
        self.arithmetics = {where: self._arithmetics(where) for where in (False, True)}
        self.on_device = request.settings.on_device
        self._doubtful: dict[int, Path] = {}
        self.results: list[NodeCheck] = []
        self.step = 0
        self._seen: Counter[str] = Counter()
        self._pending: Op | str | None = None  # or why it is not judged

    def _arithmetics(self, on_device: bool) -> NodeArithmetics:
        of_slice = plugins.ask_first(lambda each: each.node_arithmetics)
        if of_slice is None:
            return PlainArithmetics(self._computed)
        made: NodeArithmetics = resolve_name(of_slice)(self._computed, self._decoder, on_device)
        return made

    def begin(self, step: int) -> None:
        """A pass begins: the prefill, or a decode step."""
        self.step, self._seen = step, Counter()

    def asked(self, node: Node) -> None:
        """Before a node runs: keep its inputs."""
        self._pending = None
        if self.request.only_list or node.op == "NONE":
            return
        if node.op == "VIEW":
            self._pending = self._view(node)
            return
        try:
            node.check_type()
            sources = tuple(self._operand(source) for source in node.sources)
        except UserError as error:
            self._pending = f"{NOT_LOOKED_AT}: {error}"
            return
        self._pending = Op(node.op, node.shape, node.type, node.parameters, sources, q8=self.q8.way)

    def done(self, node: Node) -> None:
        """After a node ran: compute it again, and compare."""
        n = self._pending
        if self.request.only_list or isinstance(n, str):
            self._report(node, None, problem=n if isinstance(n, str) else None)
            return
        if n is None:
            self._report(node, 0.0 if node.is_view_of_its_source() else float("inf"))
            return
        if 0 in node.shape:  # as the last layer's, of a batch whose logits nobody asked for
            self._report(node, 0.0)
            return
        if function_of(n.name) is None:
            self._report(node, None, problem=f"{NO_FUNCTION} {n.name}")
            return
        found = node.values()
        on_device = node.on_device or self.request.settings.on_device
        self.on_device = self.on_device or on_device
        rule = tolerances.rule_for(tolerances.RULES, node.name, n.name, "*")
        try:
            best = self.arithmetics[on_device].replayed(n, found, rule.match)
        except Exception as error:  # operands of a kind that the function has not met: this node alone is not judged
            self._report(node, None, problem=f"{type(error).__name__}: {error}")
            return
        assert best is not None
        wrong = best.nmse > 10 * (rule.match + best.rounding)
        if wrong and not self.q8.are_known(rounded_for(n)):
            self._report(node, None, problem=UNKNOWN_ROUNDING)
            return
        self._report(node, best.nmse, best, found, n)
        asked = any(fnmatchcase(name, each) for each in self.request.keep_nodes for name in (node.name, n.name))
        if self.request.keep is not None and (asked or wrong or best.estimated):
            path = Path(self.request.keep) / f"{self.step}-{len(self.results):05d}.safetensors"
            save(path, n, best.values, found, node.name, node.in_memory())
            if not wrong and not asked:
                self._doubtful[len(self.results) - 1] = path

    def judged_by_place(self, node: Node) -> None:
        """A node that is another look at a memory: where that begins, and how it steps."""
        self._report(node, 0.0 if node.is_view_of_its_source() and node.steps_rightly() else float("inf"))

    def pass_over(self, node: Node, why: str) -> None:
        """A node that is not computed again."""
        self._report(node, None, problem=why)

    def settle(self) -> None:
        """All nodes have run: what they show together decides on those that were estimated."""
        self.results = self.arithmetics[self.on_device].settled(self.results)
        for number, path in self._doubtful.items():
            if self.results[number].rounding:
                path.unlink()
                path.with_suffix(".txt").unlink()

    def _view(self, node: Node) -> Op | None:
        """A view as an op on the memory that it looks into; None if that is large, or no plain numbers."""
        base = node.base
        if base is None or base.memory > SMALL or not base.is_plain:
            return None
        flat = base.values().reshape(1, 1, 1, -1)
        return Op("VIEW", node.shape, node.type, node.place, (Operand(flat, base.type, base.name),))

    def _operand(self, source: Node) -> Operand:
        """A source's values; a weight of the file is read from there, where it is needed."""
        if self._is_weight(source):
            return Operand(self.weights.read_raw(source.name), source.type, source.name)
        return Operand(source.values(), source.type, source.name)

    def _is_weight(self, source: Node) -> bool:
        return source.op == "NONE" and source.name in self.weights

    def _computed(self, n: Op) -> Array:
        """What an op gives. Weights of the file are streamed, or decoded where an op needs them whole."""
        y = streamed(n, self.weights, n.rounded)
        if y is not None:
            return y
        sources = tuple(s if s is None or s.name not in self.weights else self._whole(s) for s in n.sources)
        return compute(replace(n, sources=sources))

    def _decoder(self, name: str) -> Callable[[Array], Array]:
        """What makes floats of rows of a weight."""
        return self.weights.decoder(name) or partial(self.weights.decode_rows, name)

    def _whole(self, source: Operand) -> Operand:
        values = self.weights.whole(source.name) if source.decode is None else source.decode(source.values)
        return Operand(values.reshape(*[1] * (4 - values.ndim), *values.shape), source.kind, source.name)

    def _report(
        self, node: Node, nmse: float | None, best: Recomputed | None = None, found: Array | None = None,
        n: Op | None = None, problem: str | None = None,
    ) -> None:  # fmt: skip
        name = node.name
        self._seen[name] += 1
        weight = next((s.name for s in node.sources if self._is_weight(s)), None)
        label = name if self._seen[name] == 1 else f"{name}#{self._seen[name]}"
        index: tuple[int, ...] = ()
        stats: tuple[metrics.Stats | None, metrics.Stats | None] = None, None
        expected = value = 0.0
        seen = None
        if best is not None and found is not None:
            values = best.values.reshape(found.shape)
            stats = metrics.stats(found), metrics.stats(values)
            worst = metrics.difference(found[None], values[None], 0).worst if nmse else None
            if worst is not None:
                index, expected, value = worst.index[1:], worst.baseline, worst.candidate
            seen = _closeup(found, values, index) if self.request.pictures else None
        kind = self.weights.type(weight) if weight else None
        sources = tuple(source.name for source in node.sources)
        arithmetic = best.arithmetic if best else None
        self.results.append(NodeCheck(
            label, node.tap, node.op, weight, kind, node.type, node.shape, sources, self.step, nmse, arithmetic,
            node.place_of(index), expected, value, *stats, problem,
            _count_open(n, best, found), best.rounding if best else 0.0,
            best.estimated if best else False, seen,
        ))  # fmt: skip


def _count_open(n: Op | None, best: Recomputed | None, found: Array | None) -> int:
    """How many values of a node cannot be judged."""
    if n is None or best is None or found is None:
        return 0
    return int(open_places(n, best.values.reshape(found.shape), found).sum())


def _closeup(found: Array, values: Array, index: tuple[int, ...]) -> object:
    """What a page shows of a node, with its rows one under the other."""
    width = found.shape[-1]
    recorded, right = (metrics.Rows(side.reshape(-1, width)) for side in (found, values))
    place = int(np.ravel_multi_index(index, found.shape)) if index else 0
    return closeup_of(recorded, right, ("row", "value"), divmod(place, max(1, width)))
