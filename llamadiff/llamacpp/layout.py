"""Where a ggml library keeps the fields of ``struct ggml_tensor`` (ggml.h): found by making tensors that are known.

ggml has no accessors for shapes, strides, sources and parameters, and the structure differs between its versions. Each
field holds a value in some of the tensors made here that no other field has in all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from mmap import mmap
from typing import Any, cast

from llamadiff.system.errors import UserError

NAME = 64  # bytes, GGML_MAX_NAME
_F32, _F16, _I32 = 0, 1, 26  # GGUF's numbers of types
_SHAPE, _STEPS, _OFFSET, _SCALE = (3, 5, 7, 11), (4, 12, 60, 420), 164, 1.2345
_FIRST_OPS = 64  # ops of so low a number have a name in every version
Address = ctypes.c_void_p
Images = Mapping[str, bytes]  # the bytes of each tensor made


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", Address), ("no_alloc", ctypes.c_bool)]


FUNCTIONS: Mapping[str, tuple[Any, ...]] = {  # name -> result, arguments
    "ggml_init": (Address, InitParams),
    "ggml_free": (None, Address),
    "ggml_tensor_overhead": (ctypes.c_size_t,),
    "ggml_new_tensor_4d": (Address, Address, ctypes.c_int, *[ctypes.c_int64] * 4),
    "ggml_add": (Address, Address, Address, Address),
    "ggml_scale": (Address, Address, Address, ctypes.c_float),
    "ggml_view_1d": (Address, Address, Address, ctypes.c_int64, ctypes.c_size_t),
    "ggml_set_name": (Address, Address, ctypes.c_char_p),
    "ggml_set_input": (None, Address),
    "ggml_get_name": (Address, Address),
    "ggml_get_data": (Address, Address),
    "ggml_op_name": (ctypes.c_char_p, ctypes.c_int),
    "ggml_backend_cpu_buffer_type": (Address,),
    "ggml_backend_alloc_ctx_tensors_from_buft": (Address, Address, Address),
    "ggml_backend_buffer_free": (None, Address),
}


def declare(lib: Any, functions: Mapping[str, tuple[Any, ...]], called: str = "ggml") -> None:
    """Give functions of a library their types. Raises UserError for one that it lacks."""
    for name, (result, *arguments) in functions.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            without = ", so its tensors cannot be read" if called == "ggml" else ""
            raise UserError(f"this {called} has no {name}{without}; use another version") from None
        function.restype, function.argtypes = result, arguments


def tensor_structure(lib: Any) -> type[ctypes.Structure]:
    """``struct ggml_tensor`` as this library has it; only fields that are read are named.

    Raises UserError that names the fields whose place was not found.
    """
    declare(lib, FUNCTIONS)
    with ggml_context(lib) as context, ggml_context(lib, no_alloc=True) as elsewhere:
        made = _make_tensors(lib, context)
        made["held"] = _tensor(lib, elsewhere, _F32)
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(elsewhere, lib.ggml_backend_cpu_buffer_type())
        try:
            size = lib.ggml_tensor_overhead()
            images = {name: ctypes.string_at(address, size) for name, address in made.items()}
            found = {name: tuple(places) for name, places in _places(lib, made, images, buffer).items()}
        finally:
            lib.ggml_backend_buffer_free(buffer)
    unclear = [name for name, places in found.items() if len(places) != 1]
    if unclear:
        raise UserError(
            f"ggml_tensor.{', '.join(unclear)}: not found in this ggml's tensors; use another version of llama.cpp"
        )
    return structure_at({name: places[0] for name, places in found.items()})


@contextmanager
def ggml_context(lib: Any, no_alloc: bool = False) -> Iterator[Any]:
    """Where tensors are made, in memory of zeros: what lies behind one of them could be taken for a field.

    ``no_alloc``: without room for their values.
    """
    memory = mmap(-1, 1 << 20)
    context = lib.ggml_init(InitParams(len(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory)), no_alloc))
    try:
        yield context
    finally:
        lib.ggml_free(context)


def _tensor(lib: Any, context: Any, kind: int) -> Any:
    return lib.ggml_new_tensor_4d(context, kind, *_SHAPE)


def _make_tensors(lib: Any, context: Any) -> dict[str, Any]:
    """Tensors in which each field has a value of its own -> their addresses."""
    a, b, half, whole = (_tensor(lib, context, kind) for kind in (_F32, _F32, _F16, _I32))
    lib.ggml_set_input(b)
    lib.ggml_set_name(a, b"a tensor")
    return {
        "a": a, "b": b, "half": half, "whole": whole,
        "add": lib.ggml_add(context, a, b),
        "scale": lib.ggml_scale(context, a, _SCALE),
        "view": lib.ggml_view_1d(context, a, 4, _OFFSET),
    }  # fmt: skip


def _places(lib: Any, made: Mapping[str, Any], images: Images, buffer: Any) -> dict[str, Iterator[int]]:
    """Field -> the offsets where it may be."""
    size_t, none = ctypes.c_size_t, dict.fromkeys(made, 0)
    kinds = {"half": _F16, "whole": _I32}
    data = {name: lib.ggml_get_data(made[name]) for name in ("a", "b", "half", "whole", "held")}
    first_sources = _where(images, Address, {"add": made["a"], "scale": made["a"], "view": made["a"], "a": None})
    return {
        "type": _where(images, ctypes.c_int, none | kinds),
        "buffer": _where(images, Address, dict.fromkeys(made) | {"held": buffer}),
        "ne": _find_run(images["a"], ctypes.c_int64, _SHAPE),
        "nb": _find_run(images["a"], size_t, _STEPS),
        "op": _op_places(lib, images),
        "op_params": _where(images, ctypes.c_float, {"scale": ctypes.c_float(_SCALE).value, "a": 0.0, "add": 0.0}),
        "flags": _where(images, ctypes.c_int32, none | {"b": 1}),
        "src": (place for place in first_sources if _value_at(images["add"], Address, place + 8) == made["b"]),
        "view_src": _where(images, Address, {"view": made["a"], "add": None, "scale": None, "a": None}),
        "view_offs": _where(images, size_t, none | {"view": _OFFSET}),
        "data": _where(images, Address, data),
        "name": iter([lib.ggml_get_name(made["a"]) - made["a"]]),
    }


def _value_at(image: bytes, kind: Any, place: int) -> Any:
    return kind.from_buffer_copy(image, place).value if place + ctypes.sizeof(kind) <= len(image) else None


def _where(images: Images, kind: Any, wanted: Mapping[str, Any]) -> Iterator[int]:
    """The offsets at which every tensor named has the value wanted of it."""
    step = ctypes.sizeof(kind)
    for place in range(0, min(map(len, images.values())) - step + 1, step):
        if all(_value_at(images[name], kind, place) == value for name, value in wanted.items()):
            yield place


def _find_run(image: bytes, kind: Any, values: tuple[int, ...]) -> Iterator[int]:
    """The offsets at which values follow each other."""
    step = ctypes.sizeof(kind)
    for place in _where({"": image}, kind, {"": values[0]}):
        if [_value_at(image, kind, place + step * number) for number in range(len(values))] == list(values):
            yield place


def _op_places(lib: Any, images: Images) -> Iterator[int]:
    """Where a tensor has the number of the op that made it: told by the op's name."""
    names = {"add": b"ADD", "scale": b"SCALE", "view": b"VIEW", "a": b"NONE"}
    for place in _where(images, ctypes.c_int, {"a": 0, "b": 0}):
        numbers = {name: _value_at(images[name], ctypes.c_int, place) for name in names}
        if not all(0 <= number < _FIRST_OPS for number in numbers.values()):
            continue
        if all(lib.ggml_op_name(number) == names[name] for name, number in numbers.items()):
            yield place


def structure_at(places: Mapping[str, int]) -> type[ctypes.Structure]:
    """A structure with these fields at their offsets; sources and parameters reach to the field after them."""
    tensor: Any = type("Tensor", (ctypes.Structure,), {})
    pointer: Any = ctypes.POINTER(tensor)
    ordered = sorted(places.items(), key=lambda item: item[1])
    ends = {name: end for (name, _), (_, end) in pairwise(ordered)}

    def room(name: str) -> int:
        return ends.get(name, places[name]) - places[name]

    kinds: dict[str, Any] = {
        "type": ctypes.c_int, "op": ctypes.c_int, "flags": ctypes.c_int32, "buffer": Address, "data": Address,
        "ne": ctypes.c_int64 * 4, "nb": ctypes.c_size_t * 4, "op_params": ctypes.c_int32 * (room("op_params") // 4),
        "src": pointer * (room("src") // 8), "view_src": pointer, "view_offs": ctypes.c_size_t,
        "name": ctypes.c_char * NAME,
    }  # fmt: skip
    fields, end = list[tuple[str, Any]](), 0
    for name, place in ordered:
        if place > end:
            fields.append((f"_before_{name}", ctypes.c_char * (place - end)))
        fields.append((name, kinds[name]))
        end = place + ctypes.sizeof(kinds[name])
    tensor._pack_ = 1
    tensor._fields_ = fields
    return cast(type[ctypes.Structure], tensor)
