"""llama.cpp of any build, through a shim that is compiled against its headers (shim.c)."""

from __future__ import annotations

import ctypes
import os
import pkgutil
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path
from typing import Any

from llamadiff.ext.builds.build_tree import BuildTree, find
from llamadiff.ext.builds.shims import Shim, kept
from llamadiff.ext.builds.structures import writes_are_seen, written
from llamadiff.llamacpp.interface import MOST_PARTS, OBSERVE, Handle, Ids, Library, Loading, Observe, Room
from llamadiff.llamacpp.layout import Address, declare, structure_at
from llamadiff.llamacpp.library import GGML, behind, find_beside
from llamadiff.llamacpp.probes import Rounding, rounding_by
from llamadiff.system import libraries
from llamadiff.system.errors import UserError
from llamadiff.system.libraries import Loaded, file_with

_INT, _INTS = ctypes.c_int32, ctypes.POINTER(ctypes.c_int32)


class _Field(ctypes.Structure):
    """struct shim_field."""

    _fields_ = [("name", ctypes.c_char_p), ("offset", ctypes.c_uint64)]


class _Room(ctypes.Structure):
    """struct shim_room."""

    _fields_ = [(field.name, ctypes.c_float if field.name.startswith("rope") else _INT) for field in fields(Room)]


_PADDING = 8  # bytes behind a structure's last field: fewer than this
_OTHERS = "they are of another version; give those that belong to it"
_SHIM = {
    "shim_misplaced": (ctypes.c_char_p,),
    "shim_load_backends": (None, ctypes.c_char_p),
    "shim_model": (Address, ctypes.c_char_p, _INT, _INT, _INT, Address, _INT, Address),
    "shim_context": (Address, Address, ctypes.POINTER(_Room), OBSERVE),
    "shim_tokenizes_by_model": (_INT,),
    "shim_decode": (_INT, Address, _INT, _INTS, _INTS, _INTS, _INTS),
}


class Compiled(Library):
    """The llama.cpp of a directory, built elsewhere. Raises UserError for one that cannot be used."""

    def __init__(self, folder: str) -> None:
        tree = find(Path(folder))
        super().__init__(loaded(tree), f"llama.cpp in {tree.folder.name}")
        declare(self.lib, _SHIM, "shim")
        _hold_to_headers(tree, self.lib)
        self.lib.shim_load_backends(os.fsencode(tree.library.parent))
        self.repacks = not tree.words().isdisjoint(REPACKING)

    def structure(self) -> type[ctypes.Structure]:
        return structure_at(_table(self.lib, "shim_fields"))

    def load(self, path: bytes, loading: Loading) -> Handle:
        if loading.repack and not self.repacks:
            raise UserError(
                f"repack=on: {self.name} has no {REPACKING[0]} in its llama.h, and would not apply it; leave it out"
            )
        devices = (ctypes.c_void_p * (1 + len(loading.devices)))(*loading.devices)  # kept while the model is loaded
        parts = (ctypes.c_float * MOST_PARTS)(*loading.parts) if loading.parts else None
        return self.lib.shim_model(
            path, loading.layers, loading.repack, loading.vocab_only, devices, loading.split, parts
        )

    def context(self, model: Handle, room: Room, observe: Observe | None) -> Handle:
        self.callback = OBSERVE(observe) if observe is not None else OBSERVE()  # kept alive with the context
        return self.lib.shim_context(model, ctypes.byref(_Room(*astuple(room))), self.callback)

    def rounding(self) -> Rounding:
        """As llama.cpp of late says it; an earlier one, or a fork, by the shim."""
        if not hasattr(self.lib, "shim_partner"):
            return super().rounding()
        declare(self.lib, {"shim_partner": (_INT, _INT), "shim_from_float": (Address, _INT)}, "shim")
        return rounding_by(self.lib, self.lib.shim_from_float, self.lib.shim_partner)

    def tokenizer(self, model: Handle) -> Handle:
        return model if self.lib.shim_tokenizes_by_model() else super().tokenizer(model)

    def decode(self, context: Handle, tokens: Ids, positions: Ids, sequences: Ids, logits: Ids) -> int:
        many = _INT * len(tokens)
        given = (many(*each) for each in (tokens, positions, sequences, logits))
        return int(self.lib.shim_decode(context, len(tokens), *given))


def _table(shim: Any, name: str) -> dict[str, int]:
    """A table of the shim's: name -> number."""
    fields = ctypes.cast(ctypes.addressof(_Field.in_dll(shim, name)), ctypes.POINTER(_Field))
    found = dict[str, int]()
    while fields[len(found)].name:
        field = fields[len(found)]
        found[field.name.decode()] = field.offset
    return found


def _hold_to_headers(tree: BuildTree, shim: Any) -> None:
    """Raises UserError if llama.cpp fills in other parameters than its headers have: settings would go astray."""
    misplaced = shim.shim_misplaced()
    if misplaced is not None:
        raise UserError(f"{tree.library}: has no {misplaced.decode()} where its headers have it: {_OTHERS}")
    for function, size in _table(shim, "shim_sizes").items() if writes_are_seen() else ():
        end = 1 + max(written(shim, function))
        if not size - _PADDING < end <= size:
            raise UserError(f"{tree.library}: {function} fills in {end} bytes, and its headers have {size}: {_OTHERS}")


NEEDED = ("cb_eval",)  # a field without which nothing can be seen
REPACKING = ("use_extra_bufts", "repack_tensors")  # fields of which one turns it on; without either, a build does not
_HAS = re.compile(rb"\bHAS_(\w+)")


def loaded(tree: BuildTree) -> Any:
    """The shim of a build, with llama.cpp and ggml behind it. Raises UserError if it cannot be made or loaded."""
    needed = _needed(tree)
    words = tree.words()
    lacking = [name for name in NEEDED if name not in words]
    if lacking:
        raise UserError(f"{tree.folder}: its llama.h has no {lacking[0]}, which a run needs; use a later llama.cpp")
    flags = flags_of(words, tree.words("llama.h"))
    headers = (path.read_bytes() for path in tree.headers)
    return kept(shim_of(tree, flags), headers, [*flags, *_about(tree)], partial(_loaded, tree, needed))


def flags_of(words: Collection[str], fields: Collection[str]) -> list[str]:
    """What tells shim.c what it asks headers for: functions among all ``words``, fields among those of llama.h."""
    source = pkgutil.get_data("llamadiff.ext.builds", "shim.c") or b""
    asked = sorted({match.decode() for match in _HAS.findall(source)})
    return [f"-DHAS_{name}" for name in asked if name in (words if name.startswith(("ggml_", "llama_")) else fields)]


def _loaded(tree: BuildTree, needed: Sequence[ctypes.CDLL], shim: Path) -> Any:
    try:
        return Loaded(shim, needed)
    except OSError as error:
        raise UserError(f"{tree.library}: {_unloadable(str(error))}") from None


def _needed(tree: BuildTree) -> tuple[ctypes.CDLL, ...]:
    """What is behind the shim, loaded: libllama, and ggml's libraries beside it.

    Raises UserError, before anything is compiled, for one that is not of this machine, or lacks what it needs.
    """
    try:
        library = Loaded(tree.library)
    except OSError as error:
        raise UserError(
            f"{tree.library}: cannot be loaded on this machine ({_without_path(error, tree)}); give a build for it"
        ) from None
    for name, function in GGML.items():
        near, used = find_beside(tree.library, name), file_with(library, function)
        if near.is_file() and used is not None and used.resolve().parent != near.resolve().parent:
            raise UserError(
                f"{tree.library}: loads {used}, not the one beside it, as a build does that was copied or moved; "
                f"build in {tree.folder}, or set {libraries.HERE.variable}={tree.library.parent}"
            )
    return library, *behind(tree.library)


def _without_path(error: OSError, tree: BuildTree) -> str:
    return str(error).removeprefix(f"{tree.library}: ")


def _unloadable(said: str) -> str:
    """What dlopen said of the shim: as a rule, a function that the headers promise and the library lacks."""
    match = re.search(r"undefined symbol: (\w+)", said)
    if match:
        return f"has no {match[1]}, which its headers have; build llama.cpp anew, or give the headers that belong to it"
    return f"the shim for it cannot be loaded ({said[:200]})"


def shim_of(tree: BuildTree, flags: Sequence[str]) -> Shim:
    """The shim of a build's headers and libraries."""
    linking = [flag.format(folder=tree.library.parent) for flag in libraries.HERE.flags]
    includes = [f"-I{folder}" for folder in tree.includes]
    return Shim(
        "shim.c", (*linking, "-O1", "-w", *includes, *flags), tuple(str(_import(tree, path)) for path in _linked(tree)),
        "--llama-cpp", "to read this build's structures",
        lambda said: f"{tree.folder}: the shim does not compile against its headers: {said}; use another version",
    )  # fmt: skip


def _linked(tree: BuildTree) -> tuple[Path, ...]:
    """libllama, and those of ggml's libraries that lie beside it and that the shim calls itself."""
    near = (find_beside(tree.library, name) for name in ("ggml", "ggml-base"))
    return tree.library, *(path for path in near if path.is_file())


def _import(tree: BuildTree, library: Path) -> Path:
    """What is linked in a library's stead, its import library, where the system has such and the build holds it."""
    stem = library.name.partition(".")[0].removeprefix("lib")
    names = (name.format(stem) for name in libraries.HERE.imports)
    return next((found for name in names for found in sorted(tree.folder.rglob(name))), library)


def _about(tree: BuildTree) -> Iterator[str]:
    """What tells a build's libraries from others: their place, size and times. The shim holds nothing of them."""
    yield str(tree.library)
    for path in _linked(tree):
        about = path.stat()
        yield f"{about.st_size} {about.st_mtime_ns} {about.st_ino}"
