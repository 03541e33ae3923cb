"""A recorded graph as an engine: a forward function with taps, for every architecture that llama.cpp runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from llamaref import Weights
from llamaref.adapters import A, B
from llamaref.sums import Matrix

from llamadiff.ext.graph.graph import LOOKS, STORES, Graph, GraphNode, tap_shape
from llamadiff.ext.graph.op import ROUNDING, Array, Op, Operand, compute, function_of
from llamadiff.ext.graph.ops.products import PRODUCTS, matrices
from llamadiff.ext.graph.streamed import STREAMED, streamed
from llamadiff.numerics.policies import CACHES, NATIVE
from llamadiff.system.errors import UserError
from llamadiff.trace import taps

ADAPTER = (A, B)  # how names of its matrices end


@dataclass(frozen=True)
class Then:
    """What a node gives, changed; ``alter`` is what it computes instead beforehand, if it does."""

    change: Callable[[Array], Array]
    alter: Alter | None = None


Alter = Callable[[Op], Op | Array] | Then  # what a node computes instead: another op, or these values


@dataclass(frozen=True)
class GraphStep:
    """One pass: its tap, and the values of the nodes that are still read, by number."""

    tap: Any
    values: dict[int, Array]


class GraphEngine:
    """Runs a graph on the tokens that it was recorded with; ``altered`` nodes, by number, compute something else."""

    windows: tuple[int, ...] = ()  # of each layer: a graph has masks, and no number

    def __init__(self, graph: Graph, weights: Weights, altered: Mapping[int, Alter] | None = None) -> None:
        self.graph, self.w, self.altered = graph, weights, altered or {}
        missing = {node.op for node in graph.nodes if node.op != "VIEW" and function_of(node.op) is None}
        if missing:
            raise UserError(f"the graph has ops that are not implemented: {', '.join(sorted(missing))}")

    def forward(self, tokens: Sequence[int], positions: Any, tap: Any) -> Array:
        """Compute every node; at each that is a tap, go on with what the tap returns -> the last node's values."""
        return self.run(self.step(tokens, positions, tap))

    def step(self, tokens: Sequence[int], positions: Any, tap: Any) -> GraphStep:
        """One pass. The positions are the graph's own."""
        if tuple(tokens) != self.graph.tokens:
            raise UserError("the graph was recorded with other tokens")
        return GraphStep(tap, self.leaves())

    def run(self, step: GraphStep) -> Array:
        """Every node, in its order -> the last one's values."""
        x: Array = np.zeros(0)
        with np.errstate(all="ignore"):
            for node in self.graph.nodes:
                x = self.computed(node, step.values, step.tap, self.altered.get(node.number))
                if node.label is not None:
                    x = self._tapped(node, x, step.tap)
                elif node.op in PRODUCTS:
                    x = step.tap.product(x)
                self.keep(node, x, step.values, node.label is not None and node.number not in self.altered)
                for unused in self.last_uses.get(node.number, ()):
                    step.values.pop(unused, None)
        return x

    def leaves(self) -> dict[int, Array]:
        """The tensors that a run starts with: inputs, and empty caches."""
        return {number: given[None] for number, given in self.graph.given.items()}

    def keep(self, node: GraphNode, x: Array, values: dict[int, Array], recorded: bool = False) -> None:
        """A node's values among the others, and in the memory that it writes to, or is a recorded view of."""
        if node.view is not None and (node.writes or recorded):
            self._write(node, x, values)
        values[node.number] = x

    @cached_property
    def last_uses(self) -> dict[int, list[int]]:
        """Which nodes' values nobody reads after each node. Leaves stay: they are memory."""
        last: dict[int, int] = {}
        for node in self.graph.nodes:
            for number in (*node.sources, *((node.view[0],) if node.view else ())):
                if number is not None and number not in self.graph.leaves:
                    last[number] = node.number
        out: dict[int, list[int]] = {}
        for number, user in last.items():
            out.setdefault(user, []).append(number)
        return out

    def _tapped(self, node: GraphNode, x: Array, tap: Any) -> Array:
        """What a tap returns, in the node's shape; keys beyond the tokens are padding that no tap sees."""
        shaped = x.reshape(len(x), *tap_shape(node, len(self.graph.tokens)))
        known = taps.parse(str(node.label))
        if known is None or not known.causal:
            return np.asarray(tap(node.label, shaped)).reshape(-1, *node.shape)
        n = len(self.graph.tokens)
        seen = np.asarray(tap(node.label, np.ascontiguousarray(shaped[..., :n])))
        whole = np.array(np.broadcast_to(shaped, (len(seen), *shaped.shape[1:])), order="C")
        whole[..., :n] = seen
        return whole.reshape(-1, *node.shape)

    def computed(self, node: GraphNode, values: dict[int, Array], tap: Any, alter: Alter | None = None) -> Array:
        """What a node gives, [b, ne3, ne2, ne1, ne0]; ``alter`` is given its op with operands, and changes it.

        Weights that are streamed have a name and no values yet.
        """
        if isinstance(alter, Then):
            x = np.asarray(alter.change(self.computed(node, values, tap, alter.alter)))
            return x.reshape(-1, *node.shape)
        return self._computed(node, self._op(node, values), tap, alter)

    def _computed(self, node: GraphNode, n: Op, tap: Any, alter: Callable[[Op], Op | Array] | None) -> Array:
        if alter is not None:
            changed = alter(n if n.name in STREAMED else self._with_weights(n))
            if not isinstance(changed, Op):
                return changed.reshape(-1, *node.shape)
            n = changed
        if n.sources and n.sources[0] is not None and not n.sources[0].values.size:
            given = list[Array]()

            def operands(x: Array, kind: str) -> tuple[Array, ...]:
                given[:] = tap.operands(kind.upper(), x)
                return tuple(given)

            y = streamed(n, self.w, operands)
            if y is not None:
                return y if n.name not in PRODUCTS else self._summed(n, y, n.source_kind().upper(), given[0], tap)
        n = self._with_weights(n)
        if n.name == "VIEW":
            return _viewed(n)
        if n.name in PRODUCTS:
            return self.product(n, self.read_from(node), tap)
        cache = self._cache(node.view[0] if node.op in STORES and node.view else None)
        if cache:
            n = replace(n, sources=(self._stored(n, cache, tap), *n.sources[1:]))
        return self._rounded(n, tap) if n.name in ROUNDING else compute(n)

    def _op(self, node: GraphNode, values: dict[int, Array]) -> Op:
        if node.op == "VIEW":
            assert node.view is not None
            return Op("VIEW", node.shape, node.kind, node.view[1], (self._operand(node.view[0], values),))
        sources = tuple(None if s is None else self._operand(s, values) for s in node.sources)
        return Op(node.op, node.shape, node.kind, node.params, sources)

    def _with_weights(self, n: Op) -> Op:
        return replace(n, sources=tuple(self._whole(s) if s is not None and s.name else s for s in n.sources))

    def _cache(self, number: int | None) -> str:
        """``cache_k`` or ``cache_v``, if a tensor is one of those; empty if it is not."""
        leaf = self.graph.leaves.get(number) if number is not None else None
        name = leaf.name if leaf is not None else ""  # llama-kv-cache.cpp's: cache_k_l, and the layer's number
        return next((cache for cache in CACHES if name.startswith(f"{cache}_l")), "")

    def read_from(self, node: GraphNode) -> str:
        """The cache that a product's first operand lies in, following views to their base; empty for other values."""
        number = node.sources[0]
        while number is not None and number in self.graph.by_number:
            source = self.graph.by_number[number]
            if source.op not in LOOKS:
                break
            number = source.view[0] if source.view is not None else source.sources[0]
        return self._cache(number)

    def _stored(self, n: Op, cache: str, tap: Any) -> Operand:
        """Rows on their way into a cache, as each lane's keeps them; a transposed cache is given one value a row."""
        rows = n.sources[0]
        assert rows is not None
        x = rows.values
        width = x.shape[-1] if x.shape[-1] > 1 else x[0].size // len(self.graph.tokens)
        kept = tap.store(cache, x.reshape(len(x), -1, width))
        return replace(rows, values=kept.reshape(len(kept), *x.shape[1:]))

    def _rounded(self, n: Op, tap: Any) -> Array:
        """An op that ggml rounds in its own way: as ggml in the lanes that follow it, exactly in the others."""
        policies = [policy for policy, _ in getattr(tap, "ways", (("f32", {}),))]
        if NATIVE not in policies:
            return compute(replace(n, exact=True))
        exact, native = (compute(replace(n, exact=which)) for which in (True, False))
        shape = (len(policies), *exact.shape[-4:])
        choose = np.array([policy == NATIVE for policy in policies]).reshape(-1, 1, 1, 1, 1)
        return np.where(choose, np.broadcast_to(native, shape), np.broadcast_to(exact, shape))

    def _operand(self, number: int, values: dict[int, Array]) -> Operand:
        leaf = self.graph.leaves.get(number)
        if leaf is not None and number not in self.graph.given:
            return Operand(np.zeros((0,)), leaf.kind, leaf.name)  # a weight: read where it is needed
        node = self.graph.by_number.get(number)
        adapter = leaf.name if leaf is not None and leaf.name.endswith(ADAPTER) else ""  # a weight, of another file
        return Operand(values[number], node.kind if node else leaf.kind if leaf else "f32", adapter)

    def _whole(self, source: Operand) -> Operand:
        if source.values.size:
            return source
        w = self.w.whole(source.name) if source.decode is None else source.decode(self.w.read_raw(source.name))
        return Operand(w.reshape(1, *[1] * (4 - w.ndim), *w.shape), source.kind, source.name)

    def product(self, n: Op, cache: str, tap: Any) -> Array:
        """Each lane's arithmetic rounds the activations; of products that multiply two of them, both."""
        first = n.sources[0]
        assert first is not None
        x, *rest = tap.operands(cache or first.kind.upper(), n.x(1), *([] if first.name else [n.x()]))
        first = first if first.name else replace(first, values=rest[0])
        n = replace(n, sources=(first, Operand(x), *n.sources[2:]), exact=True)
        return self._summed(n, compute(n), cache or first.kind.upper(), x, tap)

    def _summed(self, n: Op, y: Array, kind: str, x: Array, tap: Any) -> Array:
        """A product as each lane's arithmetic adds it; ``x`` are its activations as they are multiplied."""

        def parts(run: int) -> Iterator[Matrix]:
            first, *others = [s and replace(s, values=_of_run(s.values, run)) for s in n.sources]
            assert first is not None
            w = first.values if first.values.size else self.w.read_raw(first.name)
            one = replace(n, sources=(first, *others))
            return matrices(one, w.reshape(*[1] * (4 - w.ndim), *w.shape), _of_run(x, run))

        return np.asarray(tap.accumulate(y, kind, parts, by_row=n.name == "MUL_MAT_ID"))

    def _write(self, node: GraphNode, x: Array, values: dict[int, Array]) -> None:
        """A node that writes into another's memory: a cache. Views of it that are there already show what it wrote."""
        assert node.view is not None
        base, place = node.view
        memory = values.get(base)
        if memory is None:
            return
        written = _written(memory, x, node.shape, place)
        values[base] = written
        for view in self.graph.views.get(base, ()):
            if view.number in values and view.view is not None:
                values[view.number] = _window(written, view.shape, view.view[1])


def _of_run(x: Array, run: int) -> Array:
    """What one run of a batch has, on four axes; what is alike in all is there once, or has no batch axis."""
    return x if x.ndim < 5 else x[run if len(x) > 1 else 0]


def _written(memory: Array, x: Array, shape: tuple[int, ...], place: bytes) -> Array:
    """A memory after a write, in as many lanes as what is written. What was there before stays as it is."""
    if x.size == len(x) * memory[0].size and _is_whole(shape, place):
        return x.reshape(len(x), *memory.shape[1:])
    memory = np.array(memory, order="C") if len(memory) >= len(x) else np.repeat(memory, len(x), axis=0)
    _window(memory, shape, place)[...] = x
    return memory


def _is_whole(shape: tuple[int, ...], place: bytes) -> bool:
    """Whether a view is of a memory's values in their order, from the first on."""
    offset, *strides = (int(step) for step in np.frombuffer(place, np.int64))
    steps = [1, *accumulate(reversed(shape), mul)][:-1][::-1]
    return offset == 0 and all(size == 1 or at == step for size, at, step in zip(shape, strides, steps, strict=True))


def _viewed(n: Op) -> Array:
    """What a view looks at, not copied: nothing writes into values that are there."""
    x = n.x()
    once = x[:1] if x.strides[0] == 0 else x  # lanes that are alike are looked at once
    window = _window(np.ascontiguousarray(once), n.shape, n.params)
    return window if len(window) == len(x) else np.broadcast_to(window, (len(x), *window.shape[1:]))


def _window(memory: Array, shape: tuple[int, ...], place: bytes) -> Array:
    """The values [b, ne3, ne2, ne1, ne0] of a contiguous [b, ...] memory that a view looks at."""
    offset, *strides = (int(step) for step in np.frombuffer(place, np.int64))
    flat = memory.reshape(len(memory), -1)
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if min(offset, *strides) < 0 or last >= flat.shape[-1]:
        raise ValueError(f"a view of values {offset} to {last} in a memory of {flat.shape[-1]}")
    steps = [flat.strides[0], *(step * flat.itemsize for step in strides)]
    return np.lib.stride_tricks.as_strided(flat[:, offset:], (len(flat), *shape), steps)
