"""The installed llama.cpp without some of its functions, or with such as answer nothing: for llama.cpp's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llamadiff.llamacpp import child_main, interface, library
from llamadiff.llamacpp.interface import Library
from llamadiff.system.libraries import Loaded

OPENER, DEAF = "lacking:lacking", "lacking:deaf"  # as llama.cpp's process is told what loads a build


class _Silent:
    """A function that gives nothing: no text, no address, zero."""

    def __init__(self, function: Any) -> None:
        self.restype, self.argtypes = function.restype, function.argtypes

    def __call__(self, *_: object) -> Any:
        nothing = self.restype() if self.restype is not None else None
        return getattr(nothing, "value", nothing)  # a null pointer has none


class Without:
    """A library without the ``names`` that are ``absent``, and with ``silent`` functions."""

    def __init__(self, lib: Any, absent: frozenset[str], silent: Mapping[str, Any]) -> None:
        self._lib, self._absent, self._silent = lib, absent, silent

    def __getattr__(self, name: str) -> Any:
        if name in self._absent:
            raise AttributeError(name)
        return self._silent.get(name) or getattr(self._lib, name)


def lacking(words: str) -> Library:
    """llama-cpp-python's without the functions that ``words`` names; those behind a - answer nothing instead."""
    absent = frozenset(word for word in words.split() if not word.startswith("-"))
    silent = dict[str, Any]()
    made = Library.__init__

    def without(lib: Any) -> Any:
        silent.update({word[1:]: _Silent(getattr(lib, word[1:])) for word in words.split()
                       if word.startswith("-") and word[1:] not in silent and hasattr(lib, word[1:])})  # fmt: skip
        return Without(lib, absent, silent)

    def made_without(self: Library, lib: Any, name: str) -> None:
        made(self, without(lib), name)

    load = library.load
    Library.__init__ = made_without  # type: ignore[method-assign]
    interface.Loaded = lambda path: without(Loaded(path))  # type: ignore[assignment, misc]
    library.load = lambda stem: without(load(stem))  # type: ignore[assignment]
    return child_main._llama_cpp_python()


def deaf(words: str) -> Library:
    """llama-cpp-python's that makes contexts with other settings than it is given: ``type_k=1``, ggml's F16."""
    name, _, value = words.partition("=")
    found = child_main._llama_cpp_python()
    context = found.context
    found.context = lambda model, room, observe: context(  # type: ignore[method-assign]
        model, replace(room, **{name: int(value)}), observe
    )
    return found
