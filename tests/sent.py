"""Nodes of ggml's as llama.cpp's process would tell of them, for tests that make some themselves."""

from __future__ import annotations

import sys
from functools import cache

from llamadiff.ext.graph.node import Node
from llamadiff.llamacpp.probes import rounding_of
from llamadiff.llamacpp.quantizing import EightBits
from llamadiff.llamacpp.sent_tensor import BYTE_ORDERS
from llamadiff.llamacpp.tensors import Tensor


def node_of(tensor: Tensor, with_value: bool = True, tap: str | None = None) -> Node:
    """A tensor with the values of what it reads, and its own."""
    order = BYTE_ORDERS[sys.byteorder]
    sources = tuple(Node(source.to_dict(), data=source.data, order=order) for source in tensor.sources)
    base = None if tensor.base is None else Node(tensor.base.to_dict(), data=tensor.base.data, order=order)
    said = {**tensor.said_in_full(), "tap": tap}
    return Node(said, tensor.data if with_value else None, order, sources, base)


@cache
def own_rounding() -> EightBits:
    """How this machine's llama-cpp-python rounds to eight bits."""
    return EightBits.from_answer(rounding_of())
