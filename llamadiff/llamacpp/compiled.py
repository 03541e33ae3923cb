"""llama.cpp of any build, through a shim that is compiled against its headers (shim.c)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path

from llamadiff.llamacpp.build_tree import BuildTree, find
from llamadiff.llamacpp.interface import OBSERVE, Handle, Library, Loading, Observe, Room
from llamadiff.llamacpp.layout import Address, declare, structure_at
from llamadiff.llamacpp.shim import loaded

_INT, _INTS = ctypes.c_int32, ctypes.POINTER(ctypes.c_int32)


class _Field(ctypes.Structure):
    """struct shim_field."""

    _fields_ = [("name", ctypes.c_char_p), ("offset", ctypes.c_uint64)]


class _Room(ctypes.Structure):
    """struct shim_room."""

    _fields_ = [(field.name, _INT) for field in fields(Room)]


_SHIM = {
    "shim_load_backends": (None, ctypes.c_char_p),
    "shim_model": (Address, ctypes.c_char_p, _INT, _INT, _INT, Address),
    "shim_context": (Address, Address, ctypes.POINTER(_Room), OBSERVE),
    "shim_decode": (_INT, Address, _INT, _INTS, _INTS, _INTS),
}


def opened(folder: str) -> Compiled:
    """The llama.cpp of a directory. Raises UserError for one that cannot be used."""
    return Compiled(find(Path(folder)))


class Compiled(Library):
    """A llama.cpp that was built elsewhere."""

    def __init__(self, tree: BuildTree) -> None:
        super().__init__(loaded(tree), f"llama.cpp in {tree.folder.name}")
        declare(self.lib, _SHIM, "shim")
        self.lib.shim_load_backends(os.fsencode(tree.library.parent))

    def structure(self) -> type[ctypes.Structure]:
        fields = ctypes.cast(ctypes.addressof(_Field.in_dll(self.lib, "shim_fields")), ctypes.POINTER(_Field))
        places, number = dict[str, int](), 0
        while fields[number].name:
            places[fields[number].name.decode()] = fields[number].offset
            number += 1
        return structure_at(places)

    def load(self, path: bytes, loading: Loading) -> Handle:
        return self.lib.shim_model(path, loading.layers, loading.repack, loading.vocab_only, loading.device)

    def context(self, model: Handle, room: Room, observe: Observe | None) -> Handle:
        self.callback = OBSERVE(observe) if observe is not None else OBSERVE()  # kept alive with the context
        return self.lib.shim_context(model, ctypes.byref(_Room(*astuple(room))), self.callback)

    def decode(self, context: Handle, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int]) -> int:
        many = _INT * len(tokens)
        return int(self.lib.shim_decode(context, len(tokens), many(*tokens), many(*positions), many(*sequences)))
