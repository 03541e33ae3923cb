"""What is wrong with a dumped weight, told from its values and the file's, without running anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.orders import order_of
from llamadiff.numerics import metrics, tolerances
from llamadiff.numerics.arithmetic import precision

Array = NDArray[Any]
SAME = 1e-6  # NMSE of values that are the file's, as any right decoding gives them
_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv", "attn_v": "attention.head_count_kv"}


def weight_fault(model: ModelFile, tensor: str, values: Array) -> str | None:
    """What is wrong with a dumped weight, in words; None if nothing is."""
    shape = model.weights.shape(tensor)
    size = int(np.prod(shape))
    if values.size != size:
        return f"{values.size} values where the file has {size} ({list(shape)})"
    expected, flat = model.weights.whole(tensor).reshape(-1), values.reshape(-1)
    limit = SAME + tolerances.ROUNDING[precision(flat)]
    if _same(flat, expected, limit):
        return None
    if np.isfinite(flat).all() and np.isfinite(expected).all():
        told = next(_explanations(model, tensor, flat, expected, limit), None)
        if told is not None:
            return told
    return _blocks(model.weights.block_size(tensor), flat, expected)


def _explanations(model: ModelFile, tensor: str, flat: Array, expected: Array, limit: float) -> Iterator[str]:
    """What would make the file's values those, each found by measuring, the simplest first."""
    shape = model.weights.shape(tensor)
    told = list(plain_changes(flat, expected, shape, limit))
    yield from told
    if not flat.any():
        return
    other = _another_tensor(model, tensor, flat, limit)
    if other is not None:
        yield f"these are the values of {other}"
    rows = (-1, shape[-1] if len(shape) > 1 else 1)
    order = order_of(flat.reshape(rows), expected.reshape(rows), heads_of(model, tensor), limit)
    if order is not None:
        yield order


def plain_changes(flat: Array, expected: Array, shape: Sequence[int], limit: float) -> Iterator[str]:
    """What makes the expected values of a tensor those, if it is zeros, one sum for all of them, or a transpose."""
    if not flat.any():
        low, high = float(expected.min()), float(expected.max())
        yield f"all values are zero; {low:.3g} to {high:.3g} are right"
        return
    yield from _multiplied(flat, expected, limit)
    if len(shape) > 1:
        turned = np.ascontiguousarray(np.swapaxes(expected.reshape(shape), -1, -2)).reshape(-1)
        if _same(flat, turned, limit):
            yield f"transposed: the file's rows are [out, in] = {list(shape)}"


def _same(values: Array, expected: Array, limit: float) -> bool:
    """Whether an NMSE is within the limit; a value that is not finite is never."""
    return metrics.nmse(values[None], expected[None], 0) <= limit


def _multiplied(flat: Array, expected: Array, limit: float) -> Iterator[str]:
    """A constant factor, a constant that was added, or both, by least squares."""
    v, e = (np.asarray(x, np.float64) for x in (flat, expected))
    spread = float(np.square(e - e.mean()).sum())
    if not spread:
        return
    product = float(((v - v.mean()) * (e - e.mean())).sum()) / spread
    alone = float(v @ e) / float(e @ e)
    for factor, added in ((alone, 0.0), (1.0, float((v - e).mean())), (product, float((v - product * e).mean()))):
        if factor and float(np.square(v - factor * e - added).sum()) <= limit * factor**2 * spread:
            times = "" if factor == 1 else f"every value is multiplied by {factor:.6g}"
            plus = f"{abs(added):.6g} is {'added to' if added > 0 else 'subtracted from'} every value" if added else ""
            yield ", and then ".join(filter(None, (times, plus)))
            return


def _another_tensor(model: ModelFile, tensor: str, flat: Array, limit: float) -> str | None:
    """The tensor whose values these are, of those with this shape; a few rows of each are looked at first."""
    shape = model.weights.shape(tensor)
    for name in model.tensors:
        if name == tensor or model.weights.shape(name) != shape:
            continue
        first = model.weights.decode_rows(name, model.weights.read_raw(name, slice(0, 1))).reshape(-1)
        alike = _same(flat[: first.size], first, 100 * limit)
        if alike and _same(flat, model.weights.whole(name).reshape(-1), limit):
            return name
    return None


def heads_of(model: ModelFile, tensor: str) -> int:
    """How many heads a weight's rows are of; 0 if they are of none."""
    key = _HEADS.get(tensor.split(".")[-2] if "." in tensor else "")
    found = model.hyper_parameter(key) if key is not None else 0
    if found is None:
        found = model.hyper_parameter("attention.head_count")
    return found if isinstance(found, int) else 0


def _blocks(block: int, values: Array, expected: Array) -> str:
    """The first wrong block, and whether all are wrong from there on."""
    block = block if block > 1 else min(32, len(values))
    count = len(values) // block
    a, b = (x[: count * block].reshape(count, block).astype(np.float64) for x in (values, expected))
    error, size = ((a - b) ** 2).sum(1), (b**2).sum(1)
    bad = ~(error <= 1e-6 * np.maximum(size, 1e-30))
    first, wrong = int(np.argmax(bad)), int(bad.sum())
    inside = np.flatnonzero(~np.isclose(a[first], b[first], rtol=1e-3, atol=1e-9))
    place = int(inside[0]) if len(inside) else 0
    where = f"the first wrong block of {block} is number {first} of {count}, from value {place} in it"
    return f"{where}; every block from there on is wrong" if bad[first:].all() else f"{where}; {wrong} are wrong in all"
