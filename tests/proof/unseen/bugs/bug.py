"""What a mistake is: the names that are right for it, and the methods of the engine that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bug:
    """A mistake. ``causes``: the known bugs that describe it, written down from what it is, before anything was run.

    ``decode``: the last tokens are decode steps. ``unlike``: architectures where it is no mistake, or another.
    """

    name: str
    causes: frozenset[str]
    methods: Mapping[str, Callable[..., Any]]
    decode: bool = False
    unlike: tuple[str, ...] = ()


def bug(
    name: str, causes: str, decode: bool = False, unlike: tuple[str, ...] = (), **methods: Callable[..., Any]
) -> Bug:
    """``methods``: of the engine, what each computes instead."""
    return Bug(name, frozenset(causes.split()), methods, decode, unlike)
