"""Weights of a GGUF file, dequantized a cache-sized block at a time while they are multiplied."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from llamaref.errors import ModelError
from llamaref.parts import SPLIT, check_parts, parts_of

if TYPE_CHECKING:
    from llamaref.adapters import Adapter

Array = NDArray[Any]
Made = TypeVar("Made")
Decode = Callable[[Array], Array]  # rows as the file keeps them -> float32
MAX_ENTRIES = 1 << 16  # metadata keys, and tensors: real files have hundreds
MAX_NAME = 63  # bytes of a tensor's name: ggml.h, GGML_MAX_NAME
MAX_AXES = 4  # ggml.h, GGML_MAX_DIMS
MAX_ARRAY = 1 << 21  # values of one metadata array: real vocabularies have a quarter of a million
_TYPES, _VERSION = frozenset(map(int, gguf.GGMLQuantizationType)), version("gguf")
BLOCK_WEIGHTS = 1 << 20  # four MiB of float32: BLAS multiplies many rows faster than few, and Python is asked less


class Weights:
    """The tensors of a GGUF file, or of all its parts, memory-mapped; ``read`` holds the names that were asked for.

    ``files`` are the file, or its parts. Shapes are NumPy's (outermost first): a matrix is [out, in], experts are
    [expert, out, in]. ``decoder`` may give a faster function than gguf-py's for the rows of a tensor, by its name;
    whoever sets it answers for its being right. ``map`` may be one that works in several threads. ``adapter``: what is
    added to products with some of them, which is an Engine's to do.
    """

    adapter: Adapter | None = None

    def __init__(self, path: str | Path, dtype: type[np.floating[Any]] = np.float32) -> None:
        self.dtype = dtype
        self.read: set[str] = set()
        self.decoder: Callable[[str], Decode | None] = lambda name: None
        self.map: Callable[..., Iterator[Any]] = map
        first = open_gguf(path)
        self.fields = {name: _contents(path, name, field) for name, field in first.fields.items()}
        self.files = parts_of(Path(path), self.fields)
        readers = [first, *map(open_gguf, self.files[1:])]
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        self._maps = [(reader.data._mmap, reader.data.__array_interface__["data"][0]) for reader in readers]
        if len(readers) > 1:
            stated = [{key: _contents(file, key, reader.fields[key]) for key in SPLIT if key in reader.fields}
                      for file, reader in zip(self.files, readers, strict=True)]  # fmt: skip
            check_parts(self.files, stated, [[tensor.name for tensor in reader.tensors] for reader in readers])

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
        values = _dequantize(name, tensor.data, tensor.tensor_type).reshape(-1)
        if size is not None and values.size != size:
            raise ModelError(f"{name}: {values.size} values where the metadata implies {size}")
        return values.astype(self.dtype, copy=False)

    def rows(self, name: str, indices: Array) -> Array:
        """Chosen rows of a matrix [n, in]: only they are dequantized; whole numbers stay such."""
        tensor = self._tensor(name)
        self.read.add(name)
        values = _dequantize(name, tensor.data[indices], tensor.tensor_type)
        return values if values.dtype.kind == "i" else values.astype(self.dtype, copy=False)

    def read_raw(self, name: str, rows: Any = slice(None)) -> Array:
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

    def decode_rows(self, name: str, data: Array) -> Array:
        """Floats of rows that the file could keep for a tensor: its type's decoding of any bytes."""
        return _dequantize(name, data, self._tensor(name).tensor_type).astype(np.float32, copy=False)

    def whole(self, name: str) -> Array:
        """A tensor whole, float32: for comparing weights, not for running them (``read`` is not told)."""
        return self.decode_rows(name, self.read_raw(name))

    def by_blocks(
        self,
        name: str,
        work: Callable[[slice, Array, Array], Made],
        *,
        expert: int | None = None,
        rows: Any = slice(None),
        decode: Decode | None = None,
    ) -> Iterator[Made]:
        """What ``work`` makes of a matrix W = [out, in] (or one expert's), some rows at a time, in their order.

        It is given which rows of W these are, their weights [row, in], and the rows as the file keeps them. ``rows``
        are those of W that are wanted. ``decode`` makes floats of rows as the file keeps them, where that is not to be
        done as the file's type says.
        """
        kind, data = self._tensor(name).tensor_type, self._matrix(name, expert, rows)
        self.read.add(name)
        decode = decode or self.decoder(name) or partial(_dequantize, name, kind=kind)
        step = max(1, BLOCK_WEIGHTS // self.shape(name)[-1])

        def of(start: int) -> Made:
            some = data[start : start + step]
            return work(slice(start, start + len(some)), decode(some).astype(self.dtype, copy=False), some)

        return self.map(of, range(0, len(data), step))

    def product(
        self,
        name: str,
        x: Array,
        sums: Array | None = None,
        *,
        expert: int | None = None,
        rows: Any = slice(None),
        decode: Decode | None = None,
    ) -> Array:
        """x @ W.T for the matrix W: x [..., in] -> [..., out]; ``expert``, ``rows`` and ``decode`` as in ``by_blocks``.

        ``sums`` [..., in / 32] is added to each block's sum of activations before the block's minimum multiplies it;
        only types that have minima take it.
        """
        n_out, n_in = len(self._matrix(name, expert, rows)), self.shape(name)[-1]
        if x.shape[-1] != n_in:
            raise ModelError(f"{name}: rows of {n_in} weights cannot multiply activations of {x.shape[-1]}")
        flat, out = _rows(x).astype(self.dtype, copy=False), np.empty((x.size // n_in, n_out), self.dtype)
        added = None if sums is None else _rows(sums).astype(self.dtype, copy=False)

        def multiply(some: slice, w: Array, stored: Array) -> None:
            with np.errstate(all="ignore"):  # a model may overflow: that is for the caller to see in the values
                out[:, some] = (w @ flat.T).T  # so BLAS is faster than the other way round
                if added is not None:
                    out[:, some] += (self.minima(name, stored) @ added.T).T

        list(self.by_blocks(name, multiply, expert=expert, rows=rows, decode=decode))
        return out.reshape(*x.shape[:-1], n_out)

    def minima(self, name: str, stored: Array) -> Array:
        """The minima of blocks of a tensor's rows, [row, in / 32], where its type has any."""
        return block_minima(self._tensor(name).tensor_type.name, stored).astype(self.dtype)

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

    def _place(self, data: Array) -> tuple[mmap.mmap | None, int]:
        """The mapped file that an array looks into, and where it begins there; None if it is in no file."""
        start = int(data.ctypes.data)
        return next(((file, start - at) for file, at in self._maps if 0 <= start - at < len(file)), (None, 0))

    def _matrix(self, name: str, expert: int | None, rows: Any) -> Array:
        """Rows of a matrix as the file keeps them; a vector is one row."""
        data = self._tensor(name).data
        return np.asarray(np.atleast_2d(data if expert is None else data[expert])[rows])

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise ModelError(f"tensor {name} is missing from the file")
        return self._tensors[name]


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


def requantize(kind: str, x: Array) -> Array:
    """Values through the blocks of a type, as gguf-py makes them and reads them back."""
    rows = np.ascontiguousarray(x, np.float32).reshape(1, -1)
    return np.asarray(dequantize(encode(kind, rows), gguf.GGMLQuantizationType[kind]).reshape(x.shape), x.dtype)


def encode(kind: str, rows: Array) -> Array:
    """Rows of float32 as blocks, [..., values] -> [..., bytes], as gguf-py makes them."""
    return np.asarray(quantize(rows, gguf.GGMLQuantizationType[kind.upper()]))


def decode(kind: str, rows: Array) -> Array:
    """Floats of rows of blocks, [..., bytes] -> [..., values]."""
    return _dequantize(kind, rows, gguf.GGMLQuantizationType[kind.upper()]).astype(np.float32, copy=False)


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
        start = head[:4].decode("ascii", "replace")
        start = f'"{start}"' if start.isprintable() and start.isascii() else f"bytes {head[:4].hex(' ')}"
        raise ModelError(f'{path}: not a GGUF file (it starts with {start}, not "GGUF")')
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


def _dequantize(name: str, data: Array, kind: gguf.GGMLQuantizationType) -> Array:
    rows, width = np.asarray(data), gguf.GGML_QUANT_SIZES[kind][0] * data.shape[-1]
    if rows.dtype.kind == "i":
        return rows
    if kind.name == "Q1_0":
        return _one_bit(rows)
    with np.errstate(all="ignore"):  # a file may hold what is no number: that is for the caller to see in the values
        return _decode_rows(name, rows, kind, width)


def _decode_rows(name: str, rows: Array, kind: gguf.GGMLQuantizationType, width: int) -> Array:
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


def block_minima(kind: str, rows: Array) -> Array:
    """The minimum of every block, [..., bytes] -> [..., blocks]: Q4_1's and Q5_1's begin with scale and minimum."""
    blocks = np.ascontiguousarray(rows).reshape(*rows.shape[:-1], -1, block_sizes(kind)[1])
    return np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
