"""Weights of a GGUF file, dequantized a cache-sized block at a time while they are multiplied."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from llamaref.errors import ModelError
from llamaref.parts import check_count, parts_of

Array = NDArray[Any]
Decode = Callable[[Array], Array]  # rows as the file keeps them -> float32
Share = Callable[[Callable[[], None], int], None]  # have work done in several threads, of so many at most
# rows as the file keeps them, what they multiply, who shares the work -> products as ``Weights.products`` has them
Multiply = Callable[[Array, "Sequence[Factor]", Share], "list[Array] | None"]  # None: not such factors
MAX_ENTRIES = 1 << 16  # metadata keys, and tensors: real files have hundreds
MAX_NAME = 63  # bytes of a tensor's name: ggml.h, GGML_MAX_NAME
MAX_AXES = 4  # ggml.h, GGML_MAX_DIMS
MAX_ARRAY = 1 << 21  # values of one metadata array: real vocabularies have a quarter of a million
_TYPES, _VERSION = frozenset(map(int, gguf.GGMLQuantizationType)), version("gguf")
# mmap's own madvise would hold Python's lock meanwhile
_MADVISE: Any = ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_DONTNEED") else None
if _MADVISE is not None:
    _MADVISE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
BLOCK_WEIGHTS = 1 << 20  # four MiB of float32: BLAS multiplies many rows faster than few, and Python is asked less


@dataclass(frozen=True)
class Across:
    """W.T @ ``channels`` [out, k], gathered while W is multiplied by something else; and the same of the minima.

    ``weights`` [in, k] and ``minima`` [in / 32, k] by where their rows of W begin.
    """

    channels: Array
    weights: dict[int, Array] = field(default_factory=dict)
    minima: dict[int, Array] = field(default_factory=dict)

    def see(self, start: int, block: Array, minima: Array | None) -> None:
        """Rows of W from ``start`` on, and the minima of their blocks."""
        some = self.channels[start : start + len(block)]
        self.weights[start] = block.T @ some
        if minima is not None:
            self.minima[start] = minima.T @ some


@dataclass(frozen=True)
class Factor:
    """What a matrix multiplies: ``x`` [..., in]; ``sums`` and ``across`` as in ``Weights.product``."""

    x: Array
    sums: Array | None = None
    across: Across | None = None


class Weights:
    """The tensors of a GGUF file, or of all its parts, memory-mapped; ``read`` holds the names that were asked for.

    ``files`` are the file, or its parts. Shapes are NumPy's (outermost first): a matrix is [out, in], experts are
    [expert, out, in]. ``decoder`` may give a faster function than gguf-py's for the rows of a tensor, by its name, and
    ``multiplier`` one than NumPy's for its products; whoever sets them answers for their being right. ``meanwhile`` is
    done by a thread that has others at work, before it takes its own share.
    """

    def __init__(self, path: str | Path, dtype: type[np.floating[Any]] = np.float32, threads: int = 0) -> None:
        self.dtype = dtype
        self.read: set[str] = set()
        self.decoder: Callable[[str], Decode | None] = lambda name: None
        self.multiplier: Callable[[str], Multiply | None] = lambda name: None
        self.meanwhile: Callable[[], None] = lambda: None
        # A model may overflow: that is for the caller to see in the values, not on standard error.
        self._threads = threads or os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self._threads, initializer=partial(np.seterr, all="ignore"))
        first = open_gguf(path)
        self.fields = {name: _contents(path, name, field) for name, field in first.fields.items()}
        self.files = parts_of(Path(path), self.fields)
        readers = [first, *map(open_gguf, self.files[1:])]
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        self._maps = [(reader.data._mmap, reader.data.__array_interface__["data"][0]) for reader in readers]
        if len(readers) > 1:
            check_count(Path(path), self.fields, len(self._tensors))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def type(self, name: str) -> str:
        """ggml's name of the tensor's type: F16, Q4_K, ..."""
        return str(self._tensor(name).tensor_type.name)

    def block_size(self, name: str) -> int:
        """How many weights share a scale; 1 for types without blocks."""
        return int(gguf.GGML_QUANT_SIZES[self._tensor(name).tensor_type][0])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensor(name).shape))

    def vector(self, name: str, size: int | None = None) -> Array:
        """A small tensor whole: norms, biases, scales -> [size]."""
        tensor = self._tensor(name)
        self.read.add(name)
        values = _dequantized(name, tensor.data, tensor.tensor_type).reshape(-1)
        if size is not None and values.size != size:
            raise ModelError(f"{name}: {values.size} values where the metadata implies {size}")
        return values.astype(self.dtype, copy=False)

    def rows(self, name: str, indices: Array) -> Array:
        """Chosen rows of a matrix [n, in]: only they are dequantized; whole numbers stay such."""
        tensor = self._tensor(name)
        self.read.add(name)
        values = _dequantized(name, tensor.data[indices], tensor.tensor_type)
        return values if values.dtype.kind == "i" else values.astype(self.dtype, copy=False)

    def stored(self, name: str, rows: Any = slice(None)) -> Array:
        """Rows of a tensor as the file keeps them, undecoded: floats, or bytes of blocks (``read`` is not told)."""
        return np.asarray(self._tensor(name).data[rows])

    def stored_beside(self, name: str, shift: int) -> Array | None:
        """As many bytes as a tensor has, from ``shift`` bytes after its start in the file; None beyond the file."""
        data = self._tensor(name).data
        file, start = self._place(data)
        start += shift
        if file is None or start < 0 or start + data.nbytes > len(file):
            return None
        return np.frombuffer(file, data.dtype, data.size, start).reshape(data.shape)

    def decoded(self, name: str, data: Array) -> Array:
        """Floats of rows that the file could keep for a tensor: its type's decoding of any bytes."""
        return _dequantized(name, data, self._tensor(name).tensor_type).astype(np.float32, copy=False)

    def whole(self, name: str) -> Array:
        """A tensor whole, float32: for comparing weights, not for running them (``read`` is not told)."""
        return self.decoded(name, self.stored(name))

    def product(
        self,
        name: str,
        x: Array,
        sums: Array | None = None,
        *,
        expert: int | None = None,
        rows: Any = slice(None),
        decode: Decode | None = None,
        across: Across | None = None,
    ) -> Array:
        """x @ W.T for the matrix W = [out, in] (or one expert's): x [..., in] -> [..., out].

        ``sums`` [..., in / 32] is added to each block's sum of activations before the block's minimum
        multiplies it; only types that have minima take it. ``rows`` are those of W that are wanted. ``decode`` makes
        floats of rows as the file keeps them, where that is not to be done as the file's type says. ``across`` gathers
        its own product, to the same digits whatever the number of threads.
        """
        return self.products(name, [Factor(x, sums, across)], expert=expert, rows=rows, decode=decode)[0]

    def products(
        self,
        name: str,
        factors: Sequence[Factor],
        *,
        expert: int | None = None,
        rows: Any = slice(None),
        decode: Decode | None = None,
        joined: bool = False,
    ) -> list[Array]:
        """Several products by a matrix, which is decoded once: to the bit what each would be alone.

        ``joined``: they may be multiplied as one, which BLAS does faster, and which moves last digits.
        """
        tensor = self._tensor(name)
        self.read.add(name)
        data = np.atleast_2d(tensor.data if expert is None else tensor.data[expert])[rows]  # a vector is one row
        n_out, n_in = len(data), self.shape(name)[-1]
        for factor in factors:
            if factor.x.shape[-1] != n_in:
                raise ModelError(f"{name}: rows of {n_in} weights cannot multiply activations of {factor.x.shape[-1]}")
        faster = self.multiplier(name) if decode is None and self.dtype is np.float32 else None
        found = faster(data, factors, self._shared) if faster is not None else None
        if found is not None:
            self._forget(data)
            return found
        if joined and len(factors) > 1:
            return split(self.products(name, [_of_all(factors)], expert=expert, rows=rows, decode=decode)[0], factors)
        decode = decode or self.decoder(name) or partial(_dequantized, name, kind=tensor.tensor_type)
        columns = [self._columns(factor.x) for factor in factors]  # [in, n] each
        corrections = [
            None if factor.sums is None else self._columns(factor.sums) for factor in factors
        ]  # [in / 32, n]
        results = [np.empty((factor.x.size // n_in, n_out), self.dtype) for factor in factors]
        has_sums = any(factor.sums is not None for factor in factors)

        def multiply(start: int, stop: int) -> None:
            some = data[start:stop]
            block = decode(some)  # [rows, in]
            block = block.astype(self.dtype, copy=False)
            minima = _minima(some, tensor.tensor_type).astype(self.dtype) if has_sums else None
            for factor, x, sums, result in zip(factors, columns, corrections, results, strict=True):
                with np.errstate(all="ignore"):  # threads have an error state of their own
                    products = np.matmul(block, x)
                    if factor.across is not None:
                        factor.across.see(start, block, None if sums is None else minima)
                if sums is not None:
                    products += minima @ sums
                result.T[start:stop] = products[:, : len(result)]

        even = all(factor.across is None for factor in factors)
        self.each_block(n_out, max(1, BLOCK_WEIGHTS // n_in), multiply, even=even)
        self._forget(data)
        return [result.reshape(*factor.x.shape[:-1], n_out) for result, factor in zip(results, factors, strict=True)]

    def both_sides(self, name: str, x: Array, sums: Array | None, channels: Array) -> tuple[Array, Array, Array | None]:
        """In one pass over W: x @ W.T as ``product`` has it, W.T @ ``channels`` [out, k], and the same of the minima.

        The second is [in, k], the third [in / 32, k], or None where there are no ``sums``.
        """
        across = Across(channels)
        y = self.product(name, x, sums, across=across)
        return y, _in_order(across.weights), _in_order(across.minima) if across.minima else None

    def experts(
        self, name: str, x: Array, chosen: Array, sums: Array | None = None, *, rows: Any = slice(None),
        decode: Decode | None = None,
    ) -> Array:  # fmt: skip
        """Rows by the expert that each has ``chosen`` [...]: x [..., in] -> [..., out]; the rest as in ``product``."""
        out = np.empty((*chosen.shape, np.arange(self.shape(name)[-2])[rows].size), x.dtype)
        for expert, mine in each_expert(chosen):
            some = None if sums is None else sums[mine]
            out[mine] = self.product(name, x[mine], some, expert=expert, rows=rows, decode=decode)
        return out

    def heads(self, name: str, x: Array, sums: Array | None = None, *, decode: Decode | None = None) -> Array:
        """Every head by a matrix of its own: x [..., h, t, in] -> [..., h, t, out]; the rest as in ``product``."""
        shape = self.shape(name)  # [h, out, in], or [out, in] of a single head
        out = np.empty((*x.shape[:-1], shape[-2]), x.dtype)
        for head in range(x.shape[-3]):
            some = None if sums is None else sums[..., head, :, :]
            own = head if len(shape) == 3 else None
            out[..., head, :, :] = self.product(name, x[..., head, :, :], some, expert=own, decode=decode)
        return out

    def put(self, name: str, values: Array) -> None:
        """Take these values, float32, for a tensor's, in place of the file's."""
        kind = gguf.GGMLQuantizationType.F32
        self._tensors[name] = SimpleNamespace(name=name, data=values, tensor_type=kind, shape=values.shape[::-1])

    def forget(self, name: str) -> None:
        """Let go of a tensor's pages that were read."""
        self._forget(self._tensor(name).data)

    def _forget(self, data: Array) -> None:
        """Let go of the file's pages that were read: they stay in the system's cache, and out of this process."""
        file, _ = self._place(data)
        if _MADVISE is not None and file is not None:
            start = data.ctypes.data
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if start + data.nbytes > first:
                _MADVISE(first, start + data.nbytes - first, mmap.MADV_DONTNEED)

    def _place(self, data: Array) -> tuple[mmap.mmap | None, int]:
        """The mapped file that an array looks into, and where it begins there; None if it is in no file."""
        start = int(data.ctypes.data)
        return next(((file, start - at) for file, at in self._maps if 0 <= start - at < len(file)), (None, 0))

    def _columns(self, x: Array) -> Array:
        """Rows as columns; with zeros up to the next 16 where that is near, which BLAS multiplies faster."""
        rows = x.reshape(-1, x.shape[-1])
        n = len(rows) + (-len(rows) % 16 if len(rows) % 16 > 8 else 0)
        out = np.zeros((x.shape[-1], n), self.dtype)
        for start in range(0, len(rows), 8):  # a few rows at a time stay in the cache
            out[:, start : min(start + 8, len(rows))] = rows[start : start + 8].T
        return out

    def each_block(self, n_rows: int, step: int, work: Callable[[int, int], None], even: bool = True) -> None:
        """Call ``work(start, stop)`` for blocks of up to ``step`` rows; ``even``: as many for each of this file's
        threads.
        """
        if even:
            turns = max(1, -(-n_rows // (step * self._threads)))
            step = max(1, -(-n_rows // (turns * self._threads)))
        starts, lock = iter(range(0, n_rows, step)), Lock()

        def some() -> None:
            """Blocks that nobody has begun, until there are none."""
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                work(start, min(start + step, n_rows))

        self._shared(some, -(-n_rows // step))

    def _shared(self, work: Callable[[], None], most: int) -> None:
        """Have work done in this thread, and in others beside it: ``most`` in all, or as many as there are."""
        others = [self._pool.submit(work) for _ in range(min(self._threads, most) - 1)]
        try:
            self.meanwhile()
            work()
        finally:
            wait(others)  # whatever happened here: they work in memory that this thread will use again
        for other in others:
            other.result()

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise ModelError(f"tensor {name} is missing from the file")
        return self._tensors[name]


def _in_order(parts: dict[int, Array]) -> Array:
    """The sum of what blocks gave, whichever came first, in float64."""
    first, *others = sorted(parts)
    total = np.asarray(parts[first], np.float64)
    for start in others:
        total = total + parts[start]
    return total


def _of_all(factors: Sequence[Factor]) -> Factor:
    """Rows of several, which are multiplied faster so; nothing is added to the blocks of those without sums."""
    across = next((factor.across for factor in factors if factor.across is not None), None)
    widths = {factor.sums.shape[-1] for factor in factors if factor.sums is not None}
    rows = np.concatenate([_rows(factor.x) for factor in factors])
    if not widths:
        return Factor(rows, across=across)
    nothing = np.zeros((1, widths.pop()), rows.dtype)
    sums = [_rows(factor.sums) if factor.sums is not None else np.repeat(nothing, len(_rows(factor.x)), axis=0)
            for factor in factors]  # fmt: skip
    return Factor(rows, np.concatenate(sums), across)


def split(product: Array, factors: Sequence[Factor]) -> list[Array]:
    """Rows of all factors' product [row, out] as each has them: [..., out]."""
    parts, start = list[Array](), 0
    for factor in factors:
        stop = start + factor.x.size // factor.x.shape[-1]
        parts.append(product[start:stop].reshape(*factor.x.shape[:-1], product.shape[-1]))
        start = stop
    return parts


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def each_expert(chosen: Array) -> Iterator[tuple[int, Array]]:
    """The experts that are chosen [...], and where."""
    for expert in np.unique(chosen):
        yield int(expert), chosen == expert


def block_sizes(kind: str) -> tuple[int, int]:
    """Values and bytes of one block of a type, by ggml's name of it; KeyError for an unknown one."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    return int(values), int(size)


def type_number(kind: str) -> int:
    """ggml's number of a type; KeyError for an unknown name."""
    return int(gguf.GGMLQuantizationType[kind.upper()])


def requantized(kind: str, x: Array) -> Array:
    """Values through the blocks of a type, as gguf-py makes them and reads them back."""
    rows = np.ascontiguousarray(x, np.float32).reshape(1, -1)
    return np.asarray(dequantize(encoded(kind, rows), gguf.GGMLQuantizationType[kind]).reshape(x.shape), x.dtype)


def encoded(kind: str, rows: Array) -> Array:
    """Rows of float32 as blocks, [..., values] -> [..., bytes], as gguf-py makes them."""
    return np.asarray(quantize(rows, gguf.GGMLQuantizationType[kind.upper()]))


def decode(kind: str, rows: Array) -> Array:
    """Floats of rows of blocks, [..., bytes] -> [..., values]."""
    return _dequantized(kind, rows, gguf.GGMLQuantizationType[kind.upper()]).astype(np.float32, copy=False)


def open_gguf(path: str | Path) -> gguf.GGUFReader:
    """Open a GGUF file; raises ModelError in one line for whatever is wrong with it."""
    path = Path(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file")
    if path.is_dir():
        raise ModelError(f"{path}: is a directory; give the .gguf file in it")
    if not path.is_file():
        raise ModelError(f"{path}: is not a regular file; a model is mapped into memory")
    try:
        with path.open("rb") as file:
            head = file.read(24)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    if head[:4] != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file (it starts with {head[:4]!r}, not b'GGUF')")
    try:
        _check_head(head)
        with np.errstate(all="raise"):  # offsets that overflow
            return _Reader(path)
    except Exception as error:  # gguf-py raises many kinds on a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{path}: damaged or truncated GGUF file ({reason[:200]})") from None


def _check_head(head: bytes) -> None:
    """Refuse counts that no file means, before anything is counted up to them."""
    if len(head) < 24:
        raise ValueError(f"it ends at byte {len(head)}, within its header")
    tensors, keys = struct.unpack("<QQ", head[8:])
    if max(tensors, keys) > MAX_ENTRIES:
        raise ValueError(f"it claims {tensors} tensors and {keys} metadata keys")


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """gguf-py's reader, which takes what lies beyond the end of the file for empty, and counts up to any length.

    What llama.cpp would not read either is refused: long names of tensors, tensors without values, arrays of arrays.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Array:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > self.data.nbytes:
            raise ValueError(f"it ends at byte {self.data.nbytes}; what starts at byte {int(offset)} needs {end}")
        return np.asarray(super()._get(offset, dtype, count, override_order))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """Arrays of numbers and of texts at once: value by value, a vocabulary takes many seconds."""
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        kind, length = gguf.GGUFValueType(head[0][0]), int(head[1][0])
        if length > MAX_ARRAY:
            raise ValueError(f"the metadata array at byte {orig_offs} claims {length} values")
        number = self.gguf_scalar_to_np.get(kind)
        if number is not None:
            parts = [self._get(orig_offs + 12, number, length)]
            end = orig_offs + 12 + parts[0].nbytes
        elif kind == gguf.GGUFValueType.STRING and self.byte_order == "I":
            parts, end = self._texts(orig_offs + 12, length)
        elif kind == gguf.GGUFValueType.ARRAY:
            raise ValueError(f"the metadata array at byte {orig_offs} is one of arrays")
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        size = end - orig_offs
        return size, [*head, *parts], list(range(2, 2 + len(parts))), [gguf.GGUFValueType.ARRAY, kind]

    def _get_tensor_info_field(self, orig_offs: int) -> gguf.ReaderField:
        length = int(self._get(orig_offs, np.uint64)[0])
        if length > MAX_NAME:
            raise ValueError(f"the tensor name at byte {orig_offs} has {length} bytes; up to {MAX_NAME} are allowed")
        axes = int(self._get(orig_offs + 8 + length, np.uint32)[0])
        field = super()._get_tensor_info_field(orig_offs) if axes <= MAX_AXES else None
        shape = field.parts[3].tolist() if field is not None else []
        if field is not None and int(field.parts[4][0]) not in _TYPES:
            name, kind = str(bytes(field.parts[1]), "utf-8", "replace"), int(field.parts[4][0])
            raise ValueError(f"{name} is of type {kind}, which gguf-py {_VERSION} does not know; ggml may")
        if not shape or 0 in shape:
            raise ValueError(f"the tensor at byte {orig_offs} has {axes} axes, {shape}; 1 to {MAX_AXES} have values")
        return field

    def _texts(self, offset: int, count: int) -> tuple[list[Any], int]:
        """The bytes of ``count`` texts, each after its length; and where they end."""
        whole, texts, length_at = memoryview(self.data), [], struct.Struct("=Q").unpack_from
        size = len(whole)
        for _ in range(count):
            start = offset + 8
            end = start + length_at(whole, offset)[0] if start <= size else start
            if end > size:
                raise ValueError(f"it ends at byte {size}; the text at byte {offset} needs {end}")
            texts.append(whole[start:end])
            offset = end
        return texts, offset


def _contents(path: str | Path, name: str, field: gguf.ReaderField) -> Any:
    try:
        if field.types[:1] == [gguf.GGUFValueType.ARRAY] and field.types[-1] == gguf.GGUFValueType.STRING:
            return [str(field.parts[place], "utf-8") for place in field.data]  # faster than one by one
        return field.contents()
    except Exception as error:  # text that is no UTF-8, most often
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{path}: metadata key {name} cannot be read ({reason[:200]})") from None


def _dequantized(name: str, data: Array, kind: gguf.GGMLQuantizationType) -> Array:
    rows, width = np.asarray(data), gguf.GGML_QUANT_SIZES[kind][0] * data.shape[-1]
    if rows.dtype.kind == "i":
        return rows
    if kind.name == "Q1_0":
        return _one_bit(rows)
    with np.errstate(all="ignore"):  # a file may hold what is no number: that is for the caller to see in the values
        return _decoded(name, rows, kind, width)


def _decoded(name: str, rows: Array, kind: gguf.GGMLQuantizationType, width: int) -> Array:
    try:
        if rows.dtype != np.uint8:
            return np.asarray(dequantize(rows, kind))
        # as one row: gguf-py takes rows by groups of sixteen, which costs more than they do
        values = dequantize(np.ascontiguousarray(rows).reshape(1, -1), kind)
        return np.asarray(values).reshape(*rows.shape[:-1], width // gguf.GGML_QUANT_SIZES[kind][1])
    except NotImplementedError:
        raise ModelError(f"{name}: gguf-py cannot dequantize {kind.name}") from None


def _one_bit(rows: Array) -> Array:
    """Q1_0, which gguf-py does not decode: a float16 scale, then 128 signs, the lowest bit first; 1 is plus."""
    blocks = np.ascontiguousarray(rows).reshape(*rows.shape[:-1], -1, 18)
    scales = blocks[..., :2].view(np.float16).astype(np.float32)
    signs = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little")
    return np.where(signs, scales, -scales).reshape(*rows.shape[:-1], -1)


def _minima(rows: Array, kind: gguf.GGMLQuantizationType) -> Array:
    """The minimum of every block: [rows, blocks]. Blocks of Q4_1 and Q5_1 begin with scale and minimum, float16."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, size)
    return np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
