"""Values where CPUs round to eight bits differently, and what this one makes of them. For llama.cpp's process."""

from __future__ import annotations

import array
import base64
import ctypes
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

from llamadiff.llamacpp.library import load
from llamadiff.system.errors import UserError

# ggml's numbers of the types, values in a block and its bytes. Q8_0: a scale in float16, 32 whole numbers; Q8_K: a
# scale in float32, 256 whole numbers, 16 sums of them in 16 bits
TYPES: Mapping[str, tuple[int, int, int]] = {"Q8_0": (8, 32, 34), "Q8_K": (15, 256, 292)}
BLOCKS = 32


class _CpuTraits(ctypes.Structure):
    """The first field of struct ggml_type_traits_cpu (ggml-cpu.h)."""

    _fields_ = [("from_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64))]


def near_halves(size: int) -> array.array[float]:
    """Blocks whose values lie half-way between two steps, as near as float32 comes, one after the other."""
    draw, found = random.Random(1), array.array("f")  # noqa: S311
    for number in range(BLOCKS):
        peak = draw.uniform(0.1, 10) if number else 127.0
        found.append(peak)
        found.extend((step * 4 % 124 + 0.5) * peak / 127 for step in range(size - 1))
    return found


def rounded_probes(lib: Any = None) -> dict[str, str]:
    """By type, the blocks that ggml (llama-cpp-python's, or another ``lib``) makes of them, in base64; none if it
    cannot be asked.
    """
    try:
        functions = load("ggml-cpu") if lib is None else lib
        traits = functions.ggml_get_type_traits_cpu
    except (UserError, AttributeError):
        return {}
    traits.restype, traits.argtypes = ctypes.POINTER(_CpuTraits), [ctypes.c_int]
    return {name: base64.b64encode(_blocks(traits(number).contents.from_float, values, size)).decode()
            for name, (number, values, size) in TYPES.items()}  # fmt: skip


def _blocks(from_float: Any, values: int, size: int) -> bytes:
    x = _probe(values)
    given, made = (ctypes.c_float * len(x)).from_buffer(x), ctypes.create_string_buffer(BLOCKS * size)
    from_float(given, made, len(x))
    return made.raw


_probe = cache(near_halves)
