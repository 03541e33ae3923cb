"""Values where CPUs round to eight bits differently, and what this one makes of them. For llama.cpp's process."""

from __future__ import annotations

import array
import base64
import ctypes
import random
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from llamadiff.llamacpp.layout import declare
from llamadiff.llamacpp.library import load
from llamadiff.numerics.types import NUMBERS
from llamadiff.system.errors import UserError

# ggml's numbers of the types, values in a block and its bytes. Q8_0: a scale in float16, 32 whole numbers; Q8_K: a
# scale in float32, 256 whole numbers, 16 sums of them in 16 bits
TYPES: Mapping[str, tuple[int, int, int]] = {"Q8_0": (8, 32, 34), "Q8_K": (15, 256, 292)}
BLOCKS = 32
MOST_TYPES = 1 << 12  # more than any fork has
SURE = 29  # up to this number every ggml that can be asked has a type
_FROM_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _CpuTraits(ctypes.Structure):
    """The first fields of struct ggml_type_traits_cpu (ggml-cpu.h)."""

    _fields_ = [("from_float", ctypes.c_void_p), ("vec_dot", ctypes.c_void_p), ("vec_dot_type", ctypes.c_int)]


_OF_CPU = {"ggml_get_type_traits_cpu": (ctypes.POINTER(_CpuTraits), ctypes.c_int)}
_OF_TYPES = {  # name -> result, arguments
    "ggml_type_name": (ctypes.c_char_p, ctypes.c_int),
    "ggml_blck_size": (ctypes.c_int64, ctypes.c_int),
    "ggml_type_size": (ctypes.c_size_t, ctypes.c_int),
}
_ASKS = {"ggml_validate_row_data": (ctypes.c_bool, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)}
# ``rounded``: type -> what is made of the values, in base64; ``partners``: type of weights -> the type that activations
# are rounded to for a product by it
Rounding = Mapping[str, Mapping[str, str]]
NO_ANSWER: Rounding = {"rounded": {}, "partners": {}}


def near_halves(size: int) -> array.array[float]:
    """Blocks whose values lie half-way between two steps, as near as float32 comes, one after the other."""
    draw, found = random.Random(1), array.array("f")  # noqa: S311
    for _ in range(BLOCKS):
        peak = draw.uniform(0.1, 10)
        found.append(peak)
        found.extend((step * 4 % 124 + 0.5) * peak / 127 for step in range(size - 1))
    return found


def rounding_of(lib: Any = None) -> Rounding:
    """How the CPU of a ggml rounds: llama-cpp-python's, or that of another ``lib``."""
    try:
        functions = load("ggml-cpu") if lib is None else lib
        declare(functions, _OF_CPU)
    except (UserError, AttributeError):
        return NO_ANSWER

    def traits(number: int, field: str) -> Any:
        found = functions.ggml_get_type_traits_cpu(number)
        return getattr(found.contents, field) if found else None

    return rounding_by(functions, partial(traits, field="from_float"), partial(traits, field="vec_dot_type"))


def rounding_by(lib: Any, from_float: Callable[[int], int | None], partner: Callable[[int], int | None]) -> Rounding:
    """The same by what a type's number has: the address of the function that rounds to it, its partner's number.

    Nothing is said of types that this ggml keeps in blocks of another form than GGUF's.
    """
    try:
        declare(lib, _OF_TYPES)
    except UserError:
        return NO_ANSWER
    types = {kind: number for kind, number in NUMBERS.items() if _name(lib, number) == kind}
    rounded = dict[str, str]()
    for kind, (number, *form) in TYPES.items():
        is_alike = kind in types and form == [lib.ggml_blck_size(number), lib.ggml_type_size(number)]
        if is_alike and (function := from_float(number)):
            rounded[kind] = _blocks_by(function, *form)
    numbers = {kind: partner(number) or 0 for kind, number in types.items()}
    is_read = numbers.get("F32") == NUMBERS["F32"] and 0 < numbers.get("Q8_0", 0) < MOST_TYPES  # and no other field
    return {"rounded": rounded, "partners": {kind: _name(lib, to) for kind, to in numbers.items() if is_read and to}}


def _name(lib: Any, number: int) -> str:
    """A type's name, in capitals; empty where there is none: ggml looks numbers up in a table without asking."""
    known = number in NUMBERS.values() and (number <= SURE or _is_type(lib, number))
    return (lib.ggml_type_name(number) or b"").decode().upper() if known else ""


def _is_type(lib: Any, number: int) -> bool:
    """Whether a ggml has a type of this number, as the one function says that does ask; it divides by its size."""
    try:
        declare(lib, _ASKS)
    except UserError:
        return False
    return lib.ggml_type_size(number) > 0 and bool(lib.ggml_validate_row_data(number, None, 0))


def _blocks_by(from_float: int, values: int, size: int) -> str:
    """What a function at an address makes of the values, in base64."""
    x, function = _probe(values), _FROM_FLOAT(from_float)
    given, made = (ctypes.c_float * len(x)).from_buffer(x), ctypes.create_string_buffer(BLOCKS * size)
    function(given, made, len(x))
    return base64.b64encode(made.raw).decode()


_probe = cache(near_halves)
