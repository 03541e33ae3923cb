"""Runs a Python program as ``python`` does, and keeps the arrays that its own functions bind, take and return.

    python python_agent.py FOLDER MOST INTERPRETER (SCRIPT | -m MODULE | -c CODE) [ARGUMENT...]

This runs in the program's own interpreter, 3.8 or later, so it imports the standard library alone, and knows arrays by
what they offer. ``words`` in FOLDER gets their values as they are, ``spans`` where each array stands and when it was
seen (log.py): the address stands for a variable, since Python puts each new array wherever there is room.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import runpy
import struct
import sys
import sysconfig
import threading
import types
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

SPAN = struct.Struct("<QII")  # address, stop, words
LEAST = 4  # values of an array
SMALL = 1 << 14  # bytes that are read whole at each look; larger arrays are sampled, and read whole now and then
WEIGHTS = 1 << 20, 256  # bytes of an array, and the size of two of its axes, from which on it is a weight
FLAT = 4 << 20  # bytes of one axis: a whole file in one array
LARGEST = 64 << 20
RARELY = 1 << 12  # looks, at most, between two at all of an array that does not change
USELESS = 512, 1 << 13  # looks at a line in turn that find nothing: it is left alone; if one has, later
SHARE = 32  # part of all bytes that one line may write: a loop that decodes weights must leave room for the rest
OFTEN = 8  # and after so many it is looked at less often
PARTS = 8  # of an array: if all but two stay as they were, a loop fills it
ITEMS = 512  # of a container
DEPTH = 3  # containers in each other
REGION = 1 << 11  # values of a variable at one address
KEPT = 1 << 12  # arrays that are remembered
FIRST = 1 << 32, 1 << 63  # the first address, and that of matrices, which may be weights (log.py)
MATRIX = 1 << 12, 32, 1 << 13  # bytes, the size of both axes, and of more axes the product of the largest two


class Layout(NamedTuple):
    """What an array is: bytes of a value, its axes, and the object whose memory it is, with where it begins there."""

    size: int
    shape: tuple[int, ...]
    owner: Any
    start: int


class Array:
    """Arrays of one kind: ``layout`` of one (None: no floats), all its bytes in C order, and those of some values."""

    cost = 1  # how much longer than of NumPy's a byte takes to read

    def layout(self, value: Any) -> Layout | None:
        raise NotImplementedError

    def raw(self, value: Any) -> bytes:
        raise NotImplementedError

    def sample(self, value: Any, shape: tuple[int, ...]) -> bytes:
        """Those of about a hundred of its values."""
        some = {1: 96, 2: 12}.get(len(shape), 5)
        return self.raw(value[tuple(slice(None, None, max(1, size // some)) for size in shape)])


class NumpyArray(Array):
    """numpy.ndarray, and what is derived from it."""

    def layout(self, value: Any) -> Layout | None:
        dtype = value.dtype
        if dtype.kind not in "fc" and dtype.name != "bfloat16":
            return None
        shape = value.shape if dtype.kind != "c" else (*value.shape, 2)
        size = min(8, dtype.itemsize if dtype.kind != "c" else dtype.itemsize // 2)
        start = value.__array_interface__["data"][0] if value.nbytes > SMALL else 0
        return Layout(size, shape, value if value.base is None else value.base, start)

    def raw(self, value: Any) -> bytes:
        dtype = value.dtype
        if dtype.itemsize > 8 and dtype.kind == "f":
            value = value.astype("<f8")
        elif dtype.str[0] == ">":
            value = value.astype(dtype.newbyteorder("<"))
        return bytes(value.tobytes())

    def sample(self, value: Any, shape: tuple[int, ...]) -> bytes:
        return Array.sample(self, value, value.shape)


class TorchTensor(Array):
    """torch.Tensor, on the CPU or copied from a device."""

    cost = 2

    def layout(self, value: Any) -> Layout | None:
        if not (value.is_floating_point() or value.is_complex()) or value.layout != sys.modules["torch"].strided:
            return None
        size = value.element_size() if not value.is_complex() else value.element_size() // 2
        if size < 2:
            return None
        shape = tuple(value.shape) if not value.is_complex() else (*value.shape, 2)
        owner = value._base if value._base is not None else value
        return Layout(size, shape, owner, value.storage_offset())

    def raw(self, value: Any) -> bytes:
        whole = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size())

    def sample(self, value: Any, shape: tuple[int, ...]) -> bytes:
        return Array.sample(self, value.detach(), tuple(value.shape))


class Buffer(Array):
    """What has the buffer protocol: array.array, memoryview, ctypes."""

    cost = 2
    SIZES = {"e": 2, "f": 4, "d": 8}  # noqa: RUF012

    def layout(self, value: Any) -> Layout | None:
        with memoryview(value) as view:
            size = self.SIZES.get(view.format.lstrip("<=@"), 0)
            return Layout(size, tuple(view.shape or ()), value, 0) if size else None

    def raw(self, value: Any) -> bytes:
        with memoryview(value) as view:
            return view.tobytes()

    def sample(self, value: Any, shape: tuple[int, ...]) -> bytes:
        with memoryview(value) as view:
            return view[:: max(1, len(view) // 96)].tobytes() if len(shape) == 1 else b""


class Converted(Array):
    """What NumPy makes an array of: JAX's, MLX's, and others that offer ``__array__`` or DLPack."""

    cost = 4

    def layout(self, value: Any) -> Layout | None:
        found = NUMPY.layout(self._array(value))
        return None if found is None else found._replace(owner=value, start=0)

    def raw(self, value: Any) -> bytes:
        return NUMPY.raw(self._array(value))

    def sample(self, value: Any, shape: tuple[int, ...]) -> bytes:
        return b""

    def _array(self, value: Any) -> Any:
        numpy = sys.modules["numpy"]
        return numpy.asarray(value) if hasattr(value, "__array__") else numpy.from_dlpack(value)


class Tinygrad(Array):
    """tinygrad's Tensor, if it has been computed: what is still to be is left to the program."""

    cost = 4
    SIZES = {"float": 4, "double": 8, "half": 2, "c_half": 2, "__bf16": 2}  # noqa: RUF012

    def layout(self, value: Any) -> Layout | None:
        buffer, size = self._buffer(value), self.SIZES.get(value.dtype.name, 0)
        shape = tuple(value.shape)
        return (
            Layout(size, shape, value, 0) if size and buffer is not None and buffer.nbytes == value.nbytes() else None
        )

    def raw(self, value: Any) -> bytes:
        buffer = self._buffer(value)
        return bytes(buffer.as_memoryview() if hasattr(buffer, "as_memoryview") else buffer.as_buffer())

    def sample(self, value: Any, shape: tuple[int, ...]) -> bytes:
        return b""

    @staticmethod
    def _buffer(value: Any) -> Any:
        """Its memory: to read that adds nothing to what the program computes."""
        return getattr(getattr(value, "uop", getattr(value, "lazydata", None)), "realized", None)


class Floats(Array):
    """Lists and tuples of floats, and of such lists of equal lengths."""

    cost = 2

    def layout(self, value: Any) -> Layout | None:
        shape: list[int] = []
        each = value
        while isinstance(each, (list, tuple)) and each and len(shape) < 4:
            shape.append(len(each))
            each = each[-1] if isinstance(each[0], type(each[-1])) else None
        is_float = isinstance(each, float) or type(each).__name__ in ("float32", "float16")
        return Layout(8, tuple(shape), value, 0) if is_float else None

    def raw(self, value: Any) -> bytes:
        """Raises TypeError or ValueError if it is not what its ends say."""
        length = None
        while isinstance(value[0], (list, tuple)):
            length = len(value[0])
            if any(len(each) != length for each in value):
                raise ValueError("lists of different lengths")
            value = list(chain.from_iterable(value))
        return array("d", value).tobytes()

    def sample(self, value: Any, shape: tuple[int, ...]) -> bytes:
        while len(shape) > 1:
            value = list(chain.from_iterable(value[:: max(1, shape[0] // 12)]))
            shape = shape[1:]
        return array("d", value[:: max(1, len(value) // 96)]).tobytes()


NUMPY, FLOATS = NumpyArray(), Floats()
SEQUENCE, MAPPING, OBJECT = "sequence", "mapping", "object"  # containers


class Kinds:
    """What a type's objects are: arrays of some kind, containers, or neither (None)."""

    def __init__(self, is_own: Callable[[str], bool]) -> None:
        self._is_own = is_own
        self._known: dict[type, Any] = {}

    def __call__(self, kind: type) -> Any:
        if kind not in self._known:
            self._known[kind] = self._classify(kind)
        return self._known[kind]

    def _classify(self, kind: type) -> Any:  # noqa: PLR0911
        names = {(each.__module__.partition(".")[0], each.__name__) for each in kind.__mro__}
        if ("numpy", "ndarray") in names:
            return NUMPY
        if ("torch", "Tensor") in names:
            return TorchTensor() if not kind.__name__.startswith(("Fake", "Functional")) else None
        if ("tinygrad", "Tensor") in names:
            return Tinygrad()
        if issubclass(kind, (list, tuple)):
            return SEQUENCE
        if issubclass(kind, dict):
            return MAPPING
        if issubclass(kind, (array, memoryview, ctypes.Array)):
            return Buffer()
        if issubclass(kind, (type, str, bytes, bytearray, int, float, types.ModuleType, types.FunctionType)):
            return None
        if "numpy" in sys.modules and hasattr(kind, "shape") and (
            hasattr(kind, "__array__") or hasattr(kind, "__dlpack__")
        ) and kind.__module__.partition(".")[0] != "numpy":  # fmt: skip
            return Converted()
        home = getattr(sys.modules.get(kind.__module__), "__file__", None)
        is_own = kind.__module__ == "__main__" or (home is not None and self._is_own(home))
        return OBJECT if is_own or kind is types.SimpleNamespace else None


class Own:
    """Which files are the program's: none of Python's library, and none that were installed but its package."""

    def __init__(self) -> None:
        paths = sysconfig.get_paths()
        self._library = tuple(os.path.join(paths[name], "") for name in ("stdlib", "platstdlib"))
        self._known = {__file__: False, "<string>": False}
        self._packages: tuple[str, ...] = ()

    def add(self, name: str) -> None:
        """A package's files are the program's wherever they were installed."""
        self._packages += (name.partition(".")[0],)

    def add_code(self) -> None:
        """So is what is given as -c."""
        self._known["<string>"] = True

    def __call__(self, path: str) -> bool:
        if path not in self._known:
            self._known[path] = self._is(os.path.abspath(path)) if not path.startswith("<") else False
        return self._known[path]

    def _is(self, path: str) -> bool:
        parts = path.split(os.sep)
        installed = [place for place, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
        if installed:
            return parts[installed[-1] + 1].partition(".")[0] in self._packages
        return not path.startswith(self._library)


class Line:
    """What has come of looking at a line, or at a function's returns."""

    __slots__ = ("bytes", "useful", "useless")

    def __init__(self) -> None:
        self.useful, self.useless, self.bytes = False, 0, 0


class Remembered:
    """An array or container that was looked at: when it is looked at again unless it is seen to have changed."""

    __slots__ = ("content", "lines", "next", "reference", "seen", "still", "wait")

    def __init__(self, owner: Any) -> None:
        try:
            self.reference: Any = weakref.ref(owner)
        except TypeError:
            self.reference = None  # lists: by what they hold
        self.seen = b""  # its bytes, or its sample
        self.lines: set[Any] = set()  # of the loop that fills it
        self.still = 0  # looks since it was seen to change
        self.content, self.next, self.wait = 0, 0, 0

    def goes_on(self, place: tuple[Any, int]) -> bool:
        """Whether the loop that fills it may still run at a line where it is as at the last look."""
        self.still += 1
        if self.still > len(self.lines) or not place[1]:
            self.lines.clear()
            return False
        is_known = place in self.lines
        self.lines.add(place)
        return is_known

    def is_of(self, owner: Any) -> bool:
        return self.reference is None or self.reference() is owner


class Recorder:
    """Looks at frames of the program's functions, and writes the arrays there that have changed."""

    def __init__(self, folder: str, most: int, own: Own) -> None:
        self.own, self._most, self._kinds = own, most, Kinds(own)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        self._words, self._spans = (os.open(os.path.join(folder, name), flags, 0o600) for name in ("words", "spans"))
        self._lock, self.is_off = threading.Lock(), False
        self._looks = self._stops = self._bytes = self._now = 0
        self._lines: dict[Any, Line] = {}
        self._seen: set[int] = set()
        self._remembered: dict[Any, Remembered] = {}
        self._regions: dict[Any, list[int]] = {}
        self._next, self._place = [*FIRST], (None, 0)
        self._globals: dict[Any, list[str]] = {}

    def look(self, frame: Any, number: int, result: Any = None) -> bool:
        """What a frame has before a line (0: when it returns ``result``) -> whether to look there again."""
        if self.is_off:
            return False
        with self._lock:
            try:
                return self._look(frame, number, result)
            except Exception:  # whatever an object does when it is looked at, the program goes on as without
                return True

    def _look(self, frame: Any, number: int, result: Any) -> bool:
        code = frame.f_code
        line = self._lines.setdefault((code, number), Line())
        line.useless += 1
        if number and line.useless > OFTEN and line.useless & (line.useless - 1):  # ever less often
            return line.useless <= USELESS[line.useful]
        self._looks += 1
        self._now, self._place = 0, (code, number)
        for name, value in self._values(frame, result):
            self._take(code, name, value, 0)
        if self._now:
            self._stops += 1
            line.bytes += self._now
            line.useful, line.useless = True, 0
        return line.useless <= USELESS[line.useful] and line.bytes <= self._most // SHARE

    def _values(self, frame: Any, result: Any) -> Iterator[tuple[str, Any]]:
        """The variables of a frame, the global ones that it names, and its result."""
        code, every = frame.f_code, frame.f_locals
        yield from list(every.items())
        if every is not frame.f_globals:
            names = self._globals.get(code)
            if names is None:
                names = self._globals[code] = [name for name in code.co_names if name in frame.f_globals]
            for name in names:
                yield name, frame.f_globals.get(name)
        if result is not None:
            yield "return", result

    def _take(self, code: Any, name: str, value: Any, depth: int) -> int:  # noqa: PLR0911
        """Write what has changed of a value -> the bytes that were read for it."""
        kind = self._kinds(type(value))
        if kind is None:
            return 0
        if kind is SEQUENCE:
            if not value:
                return 0
            layout = FLOATS.layout(value)
            if layout is None:
                return self._take_container(code, name, value, kind, depth)
            return self._take_array(code, name, value, FLOATS, layout)
        if isinstance(kind, str):
            return self._take_container(code, name, value, kind, depth)
        try:
            layout = kind.layout(value)
            return 0 if layout is None else self._take_array(code, name, value, kind, layout)
        except Exception:  # an array that is traced, gone, or on a device that fails
            return 0

    def _take_container(self, code: Any, name: str, value: Any, kind: str, depth: int) -> int:
        if depth == DEPTH:
            return 0
        items = [*_items(value, kind)]
        held = hash(tuple([id(each) for _, each in items]))
        known = self._recall((id(value), kind), value)
        if known.content == held and self._looks < known.next:
            return 64
        before, read = self._now, 0
        if kind is SEQUENCE:
            read += self._take_rows(code, name, [each for _, each in items])
        for key, each in items:
            read += self._take(code, name + key, each, depth + 1)
        known.content = held
        known.wait = 0 if self._now > before else min(2 * known.wait + 1, read // SMALL)
        known.next = self._looks + known.wait
        return read

    def _take_rows(self, code: Any, name: str, rows: list[Any]) -> int:
        """A list of small arrays of one shape, such as heads, as one array."""
        kind = self._kinds(type(rows[0])) if rows else None
        if not isinstance(kind, (NumpyArray, TorchTensor)) or len({type(row) for row in rows}) > 1:
            return 0
        layouts = [kind.layout(row) for row in rows]
        first = layouts[0]
        if first is None or any(each is None or each[:2] != first[:2] for each in layouts):
            return 0
        count = first.size * len(rows)
        for size in first.shape:
            count *= size
        if not 0 < count <= SMALL:
            return 0
        self._write(code, name, first.size, (len(rows), *first.shape), b"".join(kind.raw(row) for row in rows))
        return count

    def _take_array(self, code: Any, name: str, value: Any, kind: Array, layout: Layout) -> int:
        size, shape, owner, start = layout
        count = 1
        for each in shape:
            count *= each
        if count < LEAST or count * size > LARGEST or _is_weight(shape, size * count):
            return 0
        cost = count * size * kind.cost
        is_small = cost <= SMALL
        known = self._recall(
            (id(value), code, name) if is_small else (id(owner), start, shape), value if is_small else owner
        )
        seen = kind.raw(value) if is_small else kind.sample(value, shape)
        is_cache = not is_small and bool(known.lines or (known.content and seen == known.seen))  # some rows change
        if seen != known.seen and self._place[1] and _is_partly(known.seen, seen):
            known.seen, known.still = seen, 0
            known.lines.add(self._place)  # a loop fills it: it is read when that has ended
            return cost
        if seen != known.seen:
            known.seen = seen
            known.lines.clear()
        elif known.lines:
            if known.goes_on(self._place):
                return cost
        elif is_small or self._looks < known.next:
            return cost if is_small else 1 << 10
        raw = seen if is_small else kind.raw(value)
        content = hash(raw)
        has_changed = content != known.content
        known.content, known.wait = content, 0 if has_changed else min(RARELY, 2 * known.wait + 1)
        known.next = self._looks + known.wait
        if has_changed:
            self._write(code, name, size, shape, raw, is_cache or _is_matrix(shape, len(raw), owner is value))
        return cost

    def _recall(self, key: Any, owner: Any) -> Remembered:
        known = self._remembered.get(key)
        if known is None or not known.is_of(owner):
            if len(self._remembered) >= KEPT:
                self._remembered.clear()
            known = self._remembered[key] = Remembered(owner)
        return known

    def _write(
        self, code: Any, name: str, size: int, shape: tuple[int, ...], raw: bytes, is_matrix: bool = False
    ) -> None:
        """Keep an array's bytes, if they are not kept yet, also with other axes last."""
        content = hash(raw) if len(raw) > SMALL else hash((code, name, raw))  # a small one again for each variable
        if content in self._seen or not raw.strip(b"\0") or self.is_off:
            return
        self._seen.add(content)
        for number, each in enumerate(chain([raw], () if is_matrix else _turned(size, shape, raw))):
            self._add(self._address((code, name, number), len(each), is_matrix), each)

    def _address(self, variable: Any, size: int, is_matrix: bool) -> int:
        """A variable's, for values of such a size; another one now and then: each page is kept in all its versions."""
        key = (variable, size.bit_length(), is_matrix)
        region = self._regions.setdefault(key, [0, REGION])
        if region[1] == REGION:
            region[:] = [self._next[is_matrix], 0]
            self._next[is_matrix] += max(1 << 12, 2 << size.bit_length())
        region[1] += 1
        return region[0]

    def _add(self, address: int, raw: bytes) -> None:
        raw += bytes(-len(raw) % 4)
        if self._bytes + len(raw) > self._most:
            self.is_off = True
            return
        for start in range(0, len(raw), 1 << 30):
            os.write(self._words, raw[start : start + (1 << 30)])
        os.write(self._spans, SPAN.pack(address, self._stops, len(raw) // 4))
        self._bytes += len(raw)
        self._now += len(raw)

    def stop(self) -> None:
        self.is_off = True


def _items(value: Any, kind: str) -> Iterable[tuple[str, Any]]:
    """The items of a container, and names of them."""
    if kind is SEQUENCE:
        return ((f"[{number}]", each) for number, each in enumerate(value[:ITEMS]))
    if kind is OBJECT:
        slots = [name for each in type(value).__mro__ for name in _slots(each) if hasattr(value, name)]
        named = [*getattr(value, "__dict__", {}).items(), *((name, getattr(value, name)) for name in slots)]
    else:
        named = [*value.items()]
    return ((f".{name}", each) for name, each in named[:ITEMS])


def _slots(kind: type) -> list[str]:
    names = kind.__dict__.get("__slots__", ())
    return [name for name in ([names] if isinstance(names, str) else names) if name not in ("__dict__", "__weakref__")]


def _is_partly(before: bytes, after: bytes) -> bool:
    """Whether most of an array is as before."""
    size = len(after)
    if len(before) != size or size < PARTS:
        return False
    edges = [size * part // PARTS for part in range(PARTS + 1)]
    same = sum(before[start:end] == after[start:end] for start, end in zip(edges, edges[1:]))  # noqa: B905, RUF007
    return same >= PARTS - 2


def _is_weight(shape: tuple[int, ...], size: int) -> bool:
    """Whether it is as large as a weight, and has no axis for the tokens of a short prompt."""
    if max(shape) * 8 >= size:
        return size > FLAT
    return size > WEIGHTS[0] and sum(each >= WEIGHTS[1] for each in shape) >= 2


def _is_matrix(shape: tuple[int, ...], size: int, is_owner: bool) -> bool:
    """Whether it is more likely a weight, or the rest of a file, than values of a few tokens."""
    first, *more = sorted((each for each in shape if each > 1), reverse=True) or [1]
    if not more:
        return size > WEIGHTS[0] or (size > MATRIX[0] << 4 and not is_owner)
    if len(more) > 1:
        return first * more[0] > MATRIX[2]
    return size > MATRIX[0] and more[0] >= MATRIX[1]


def _turned(size: int, shape: tuple[int, ...], raw: bytes) -> Iterator[bytes]:
    """Small arrays in other orders of their axes: a token's channels may lie apart, as in [head, token, dim]."""
    shape = tuple(each for each in shape if each > 1)
    if len(shape) < 2 or len(raw) > WEIGHTS[0] or size not in (2, 4, 8):
        return
    if len(shape) == 2:
        if shape[0] > shape[1]:  # [channel, token]
            yield _swapped(size, shape[1], raw)
        return
    first, second, last = shape[0], shape[1], 1
    for each in shape[2:]:
        last *= each
    yield _grouped(size * last, first, second, raw)  # [head, token, ...]
    if len(shape) > 3:  # [head, query head, token, dim]
        yield _grouped(size * shape[-1], len(raw) // (size * shape[-2] * shape[-1]), shape[-2], raw)
    elif shape[2] < shape[1]:  # [head, dim, token]
        yield _swapped(size, shape[2], raw)


def _grouped(size: int, first: int, second: int, raw: bytes) -> bytes:
    """Blocks of bytes [first, second] as [second, first]."""
    places = (size * (i * second + j) for j in range(second) for i in range(first))
    return b"".join([raw[place : place + size] for place in places])


def _swapped(size: int, columns: int, raw: bytes) -> bytes:
    """Values [row, column] as [column, row]."""
    values = array({2: "H", 4: "I", 8: "Q"}[size], raw)
    return b"".join([values[column::columns].tobytes() for column in range(columns)])


def watch_lines(recorder: Recorder) -> None:
    """Look at each line and return of the program's own functions from now on: by sys.monitoring, else settrace."""
    if not hasattr(sys, "monitoring"):
        _trace_lines(recorder)
        return
    monitoring = sys.monitoring
    events, tool = monitoring.events, next(each for each in (3, 4, 2, 5) if monitoring.get_tool(each) is None)
    monitoring.use_tool_id(tool, "llamadiff")

    def started(code: Any, _: int) -> Any:
        if recorder.own(code.co_filename):
            monitoring.set_local_events(tool, code, events.LINE | events.PY_RETURN)
        return monitoring.DISABLE

    def line(code: Any, number: int) -> Any:
        return None if recorder.look(sys._getframe(1), number) else monitoring.DISABLE

    def returned(code: Any, _: int, result: Any) -> Any:
        return None if recorder.look(sys._getframe(1), 0, result) else monitoring.DISABLE

    monitoring.register_callback(tool, events.PY_START, started)
    monitoring.register_callback(tool, events.LINE, line)
    monitoring.register_callback(tool, events.PY_RETURN, returned)
    monitoring.set_events(tool, events.PY_START)


def _trace_lines(recorder: Recorder) -> None:
    left: set[Any] = set()

    def inside(frame: Any, event: str, result: Any) -> Any:
        if event in {"line", "return"}:
            place = (frame.f_code, frame.f_lineno if event == "line" else 0)
            if place not in left and not recorder.look(frame, place[1], result if event == "return" else None):
                left.add(place)
        return None if recorder.is_off else inside

    def called(frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        return inside if not recorder.is_off and recorder.own(code.co_filename) else None

    threading.settrace(called)
    sys.settrace(called)


def run_program(words: list[str], recorder: Recorder) -> None:
    """What ``python words`` does, in a new ``__main__``."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    own_path = sys.path[0] if not _is_safe() else None
    sys.modules["__main__"] = main
    if words[0] in ("-m", "-c"):
        if own_path is not None:
            sys.path[0] = os.getcwd() if words[0] == "-m" else ""
        sys.argv = [words[0], *words[2:]]
        if words[0] == "-c":
            recorder.own.add_code()
            watch_lines(recorder)
            exec(compile(words[1], "<string>", "exec"), main.__dict__)  # noqa: S102
            return
        recorder.own.add(words[1])
        watch_lines(recorder)
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    script = words[0]
    sys.argv = words
    if not os.path.exists(script):
        sys.stderr.write(f"{sys.executable}: can't open file {os.path.abspath(script)!r}: no such file\n")
        sys.exit(2)
    is_file = os.path.isfile(script) and not _is_archive(script)
    if own_path is not None:
        sys.path[0] = os.path.dirname(os.path.realpath(script)) if is_file else os.path.abspath(script)
    if not is_file:
        if own_path is None:
            sys.path.insert(0, script)
        watch_lines(recorder)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    path = os.path.abspath(script) if sys.version_info >= (3, 9) else script
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    from importlib.machinery import SourceFileLoader

    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    if os.path.dirname(os.path.realpath(path)) == os.path.realpath(sysconfig.get_path("scripts")):
        for name in code.co_names:  # a command that was installed: what it imports is the program
            recorder.own.add(name)
    watch_lines(recorder)
    exec(code, main.__dict__)  # noqa: S102


def _is_safe() -> bool:
    """Whether Python was told to leave the program's folder out of sys.path."""
    return bool(sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def _is_archive(path: str) -> bool:
    import zipfile

    return zipfile.is_zipfile(path)


def _without_agent(trace: Any) -> Any:
    """A traceback from the program's first frame on."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def start(folder: str, most: str, interpreter: str, *words: str) -> None:
    """Run a program, and end as it does."""
    recorder = Recorder(folder, int(most), Own())
    atexit.register(recorder.stop)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=recorder.stop)
    sys.orig_argv = [interpreter, *words]
    try:
        run_program([*words], recorder)
    except SystemExit:
        raise
    except BaseException as error:
        trace = _without_agent(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.excepthook = lambda *_: None
        raise


if __name__ == "__main__":
    start(*sys.argv[1:])
