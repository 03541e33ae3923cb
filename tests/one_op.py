"""One op in a graph of its own, computed by ggml; and random inputs for it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from sent import node_of

from llamadiff.ext.graph.node_checker import NodeChecker
from llamadiff.ext.graph.op import Array, Op, Operand, function_of
from llamadiff.llamacpp.layout import InitParams
from llamadiff.llamacpp.tensors import Ggml, Tensor

TYPES = {"float32": 0, "float16": 1, "int32": 26, "int64": 27, "uint16": 30}  # bfloat16 is given as its bits
INT, LONG, SIZE, FLOAT, BOOL = ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float, ctypes.c_bool

# A test's input: an array [ne3, ne2, ne1, ne0], or one in another order of memory and the permutation to this.
Input = Any


@dataclass(frozen=True)
class Blocks:
    """Values in a quantized type, as gguf-py quantizes them: also an input."""

    kind: str
    array: Array


Then = Callable[["Graph", int, Any], None]

SCAN, PLAIN, SAME = 1e-9, 1e-12, 0.0  # NMSE that an op may have


class Graph:
    """A graph of one op."""

    def __init__(self) -> None:
        self.ggml = Ggml()
        path = Path(self.ggml.lib._name)
        base = self.base = ctypes.CDLL(str(path))  # functions that give tensors, not addresses
        self.pointer = ctypes.POINTER(self.ggml.structure)
        base.ggml_init.restype, base.ggml_init.argtypes = ctypes.c_void_p, [InitParams]
        base.ggml_free.argtypes = [ctypes.c_void_p]
        self.cpu = ctypes.CDLL(str(path.with_name(path.name.replace("ggml-base", "ggml-cpu"))))
        base.ggml_new_graph.restype, base.ggml_new_graph.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        base.ggml_build_forward_expand.restype = None
        base.ggml_build_forward_expand.argtypes = [ctypes.c_void_p, self.pointer]
        base.ggml_new_tensor_4d.restype = self.pointer
        base.ggml_new_tensor_4d.argtypes = [ctypes.c_void_p, ctypes.c_int, *[LONG] * 4]
        self.cpu.ggml_graph_compute_with_ctx.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]

    @contextmanager
    def context(self) -> Iterator[int]:
        context = self.base.ggml_init(InitParams(32 << 20, None, False))
        yield context
        self.base.ggml_free(context)

    def build(
        self, context: int, name: str, sources: Sequence[Any], types: Sequence[Any], values: Sequence[Any]
    ) -> Any:
        builder = getattr(self.base, f"ggml_{name}")
        builder.restype = self.pointer
        builder.argtypes = [ctypes.c_void_p, *[self.pointer] * len(sources), *types]
        return builder(context, *sources, *values)

    def tensor(self, context: int, given: Input) -> Any:
        if given is None:
            return None
        if isinstance(given, Blocks):
            return self._blocks(context, given)
        array, axes = given if isinstance(given, tuple) else (given, None)
        made = self.base.ggml_new_tensor_4d(context, TYPES[array.dtype.name], *reversed(array.shape))
        ctypes.memmove(made.contents.data, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        return made if axes is None else self.build(context, "permute", [made], [INT] * 4, axes)

    def _blocks(self, context: int, given: Blocks) -> Any:
        kind = GGMLQuantizationType[given.kind.upper()]
        data = quantize(given.array, kind)
        made = self.base.ggml_new_tensor_4d(context, int(kind), *reversed(given.array.shape))
        ctypes.memmove(made.contents.data, np.ascontiguousarray(data).ctypes.data, data.nbytes)
        return made

    def run(
        self, name: str, inputs: Sequence[Input], types: Sequence[Any] = (), values: Sequence[Any] = (),
        then: Then | None = None, threads: int = 2, checker: NodeChecker | None = None,
    ) -> tuple[Op, Array]:  # fmt: skip
        """The node as an Op, and what ggml gives.

        ``then`` is done to the node before it is computed; a ``checker`` is told of it as of a node of a graph.
        """
        with self.context() as context:
            node = self.build(context, name, [self.tensor(context, given) for given in inputs], types, values)
            if then is not None:
                then(self, context, node)
            tensors = [source.contents if source else None for source in node.contents.src]
            sources = tuple(None if tensor is None else self._operand(tensor) for tensor in tensors)
            if checker is not None:
                checker.asked(node_of(Tensor(self.ggml, node.contents)))
            graph = self.base.ggml_new_graph(context)
            self.base.ggml_build_forward_expand(graph, node)
            assert self.cpu.ggml_graph_compute_with_ctx(context, graph, threads) == 0
            result = node_of(Tensor(self.ggml, node.contents))
            if checker is not None:
                checker.done(result)
            return Op(result.op, result.shape, result.type, result.parameters, sources), result.values()

    def _operand(self, tensor: Any) -> Operand:
        node = node_of(Tensor(self.ggml, tensor))
        values = node.values()
        return Operand(values.astype(np.float32) if node.type == "f16" else values, node.type)


def nmse(found: Array, expected: Array) -> float:
    if np.array_equal(found, expected):
        return 0.0
    finite = np.isfinite(expected)
    assert np.array_equal(found[~finite], expected[~finite])
    expected, found = expected[finite].astype(np.float64), found[finite].astype(np.float64)
    return float(((found - expected) ** 2).sum() / (expected**2).sum())


def normal(*shape: int, seed: int = 0, size: float = 1.0) -> Array:
    rng = np.random.default_rng([seed, *shape])
    return (size * rng.standard_normal(shape)).astype(np.float32)


def uniform(*shape: int, low: float, high: float, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape).astype(np.float32)


def check(
    graph: Graph,
    name: str,
    inputs: list[Input],
    types: list[Any],
    values: list[Any],
    limit: float,
    unwritten: int = 0,
) -> None:
    """A function against ggml; NaN stands for the ``unwritten`` values that ggml leaves as they were."""
    n, expected = graph.run(name, inputs, types, values)
    compute = function_of(n.name)
    assert compute is not None, n.name
    found = compute(n)
    written = ~np.isnan(found)
    assert (~written).sum() == unwritten
    assert found.shape == n.shape == expected.shape
    assert found.dtype == (np.int32 if n.kind == "i32" else np.float32)
    assert nmse(found[written], expected[written]) <= limit
    check_batches(n, compute, found)


def check_batches(n: Op, compute: Callable[[Op], Array], found: Array) -> None:
    """Each source alone with a batch axis, and all of them, two different members each."""
    assert any(source is not None for source in n.sources)
    halved = [source and replace(source, values=_other(source.values)) for source in n.sources]
    stacked = [
        source and replace(source, values=np.stack([source.values, _other(source.values)])) for source in n.sources
    ]
    for i, source in enumerate(n.sources):
        if source is not None:
            expected = [found, compute(replace(n, sources=(*n.sources[:i], halved[i], *n.sources[i + 1 :])))]
            batched = compute(replace(n, sources=(*n.sources[:i], stacked[i], *n.sources[i + 1 :])))
            assert_same(batched, expected)
    assert_same(compute(replace(n, sources=tuple(stacked))), [found, compute(replace(n, sources=tuple(halved)))])


def assert_same(batched: Array, expected: list[Array]) -> None:
    np.testing.assert_allclose(np.broadcast_to(batched, (2, *expected[0].shape)), expected, rtol=1e-5, atol=1e-6)


def _other(x: Array) -> Array:
    return x if x.dtype.kind == "i" else x * np.float32(0.75)
