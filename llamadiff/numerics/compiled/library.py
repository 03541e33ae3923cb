"""The compiled library, where the installation made one."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_PLACE, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_ARGUMENTS = {
    "llamadiff_instructions": (),
    "llamadiff_q4_k": (_PLACE, _PLACE, _COUNT),
    "llamadiff_q6_k": (_PLACE, _PLACE, _COUNT),
    "llamadiff_round_q8_k": (_PLACE, _COUNT, _PLACE),
    "llamadiff_look": (_PLACE, _COUNT, _COUNT, _COUNT, _PLACE, _PLACE),
    "llamadiff_moments": (_PLACE, _COUNT, _NUMBER, _PLACE, _PLACE),
    "llamadiff_gaps": (_PLACE, _PLACE, _COUNT, _COUNT, _COUNT, _PLACE, _PLACE, _PLACE, _PLACE),
}


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """kernels.c, compiled for this Python; None where there is no such file, or it cannot be loaded."""
    for ending in EXTENSION_SUFFIXES:
        with suppress(OSError):
            return _declare_functions(ctypes.CDLL(str(Path(__file__).with_name(f"kernels{ending}"))))
    return None


def _declare_functions(found: ctypes.CDLL) -> ctypes.CDLL:
    """The library with its functions' arguments known, so that numbers may be given as they are."""
    for name, arguments in _ARGUMENTS.items():
        if hasattr(found, name):
            getattr(found, name).argtypes = arguments
    found.llamadiff_instructions.restype = ctypes.c_char_p
    return found


def instructions() -> str | None:
    """The instruction set that it uses on this processor: avx512, avx2, or any; None where nothing is compiled."""
    found = library()
    return None if found is None else str(found.llamadiff_instructions().decode())
