"""Shared libraries as a system has them: names, how one is linked and loaded, where a function is."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Libraries:
    """Patterns of a library's ``names``, the likeliest first; the ``variable`` that says where to look for one.

    ``modules``: patterns of what a program loads while it runs, where that is called otherwise.

    One is linked by ``compiler`` where CC names none, with its ``flags``, and with ``imports`` in others' stead.
    ``before`` is the variable that puts one before all of a program's own, with what must stand ``beside`` it.
    """

    names: tuple[str, ...]
    compiler: str
    flags: tuple[str, ...]
    variable: str
    imports: tuple[str, ...] = ()
    before: str = ""
    beside: tuple[tuple[str, str], ...] = ()
    modules: tuple[str, ...] = ()

    def name(self, stem: str) -> str:
        """What a library is called."""
        return self.names[0].format(stem)

    @property
    def suffix(self) -> str:
        return Path(self.names[0]).suffix


_UNIX = ("-shared", "-fPIC", "-Wl,-rpath,{folder}")
LINUX = Libraries(("lib{}.so", "lib{}.so.*", "lib{}.v*.so"), "cc", _UNIX, "LD_LIBRARY_PATH", before="LD_PRELOAD")
MACOS = Libraries(
    ("lib{}.dylib", "lib{}.*.dylib"), "cc", _UNIX, "DYLD_LIBRARY_PATH", before="DYLD_INSERT_LIBRARIES",
    beside=(("DYLD_FORCE_FLAT_NAMESPACE", "1"),), modules=("lib{}.so",),
)  # fmt: skip
WINDOWS = Libraries(("{}.dll", "lib{}.dll"), "clang", ("-shared",), "PATH", ("{}.lib", "lib{}.dll.a"))
HERE = {"darwin": MACOS, "win32": WINDOWS}.get(sys.platform, LINUX)


class Loaded(ctypes.CDLL):
    """A library by its whole path. What it lacks is looked for in those ``behind`` it: Windows itself would not.

    Raises OSError for one that cannot be loaded.
    """

    def __init__(self, path: Path, behind: Sequence[ctypes.CDLL] = ()) -> None:
        if sys.platform == "win32":
            os.add_dll_directory(str(path.parent))
        self.behind = behind
        super().__init__(str(path))

    def __getitem__(self, name: Any) -> Any:
        try:
            return super().__getitem__(name)
        except AttributeError:
            for library in self.behind:
                with suppress(AttributeError):
                    return library[name]
            raise


class _DlInfo(ctypes.Structure):
    """What dladdr says (<dlfcn.h>)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    )


def file_with(library: ctypes.CDLL, function: str) -> Path | None:
    """The file that a function of a library, or of what it loads, is in; None if there is no such function.

    On Windows always None: a library there loads those beside it before any other.
    """
    try:
        return file_at(ctypes.cast(library[function], ctypes.c_void_p))
    except AttributeError:
        return None


def file_at(address: ctypes.c_void_p) -> Path | None:
    """The file that code at an address was loaded from; None where that cannot be told, as on Windows."""
    if HERE is WINDOWS:
        return None
    place = _DlInfo()
    return Path(os.fsdecode(place.file)) if ctypes.CDLL(None).dladdr(address, ctypes.byref(place)) else None
