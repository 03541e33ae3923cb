"""Tensors that are split over devices, which llama.cpp takes for one then (ggml-backend-meta.cpp): what can be read.

Each device multiplies by its part of a weight. Where that is some of its columns, each has a sum of its own, and all
are added where llama.cpp goes on, but not where it stops for somebody to look: neither is such a node a sum yet, nor
would what comes after it be right. So nobody stops there, nor at what is computed of it before it is added up.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamadiff.llamacpp.tensors import Tensor

TOGETHER = "Meta("  # begins llama.cpp's name for several devices; some versions go on with none of theirs
# llama_meta_device_get_split_state in llama-model.cpp: weights of which each device has some columns, or rows
BY_COLUMNS = re.compile(r"blk\.\d+\.(attn_output|attn_output_b|ssm_out|ffn_down(_exps|_shexp)?)\.weight")
BY_ROWS = re.compile(
    r"blk\.\d+\.(attn_(q|k|v|qkv|q_b|gate)|ssm_(alpha|beta|ba|conv1d)|ffn_(up|gate|gate_up)(_exps|_shexp)?)\.weight"
    r"|output\.weight"
)
# Weights made of several, of each of which a device has some: what they give is put together in another order.
_FUSED = re.compile(r"blk\.\d+\.(attn_qkv|ffn_gate_up(_exps)?)\.weight")
_UP = re.compile(r"blk\.\d+\.ffn_up\.weight")  # with the gate's rows too, in some
_MOVES = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "CONT"}
# Ops that may be done before sums are added up; ADD, where both are part of one.
_LINEAR = {*_MOVES, "MUL", "SCALE", "ADD", "ADD_ID"}
_IN_ORDER = {*_LINEAR, "ROPE", "NORM", "RMS_NORM"}  # which leave the order of channels as it is


def is_split(weight: str) -> bool:
    """Whether each device has some of a weight."""
    return bool(BY_ROWS.fullmatch(weight) or BY_COLUMNS.fullmatch(weight))


class PartialSums:
    """Asked about each node of a pass in its order: whether its values are not there yet, or cannot be read.

    ``width``: rows of a gate; 0 where that is not known.
    """

    def __init__(self, width: int = 0) -> None:
        self.width = width
        self._sums, self._mixed = set[int](), set[int]()  # tensors of which each device has a part, or out of order

    def __call__(self, node: Tensor) -> bool:
        for found, is_one in ((self._sums, self._is_sum(node)), (self._mixed, self._is_mixed(node))):
            (found.add if is_one else found.discard)(node.address)
        return node.address in self._sums | self._mixed or not _is_contiguous(node)

    def _is_sum(self, node: Tensor) -> bool:
        if node.op.startswith("MUL_MAT"):
            return bool(BY_COLUMNS.fullmatch(node.sources[0].name))
        parts = [source.address in self._sums for source in node.sources]
        return node.op in _LINEAR and (all(parts[:2]) if node.op == "ADD" else any(parts[:1]))

    def _is_mixed(self, node: Tensor) -> bool:
        if node.op.startswith("MUL_MAT"):
            weight = node.sources[0]
            return bool(_FUSED.fullmatch(weight.name)) or (
                bool(_UP.fullmatch(weight.name)) and weight.shape[-2] != self.width
            )
        return node.op in _IN_ORDER and any(source.address in self._mixed for source in node.sources[:1])


def _is_contiguous(node: Tensor) -> bool:
    """Whether its values lie one after the other, in any pass: llama.cpp joins the parts of no other tensor."""
    values, step = node.ggml.blocks(node.tensor.type)
    for size, found in zip(node.tensor.ne, node.tensor.nb, strict=True):
        if found != step:
            return False
        step, values = step * size // values, 1
    return True
