"""A Python function as a candidate: it is given token ids, and gives its tensors by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llamadiff.candidates.opening import resolve
from llamadiff.candidates.pieces import Piece, named_row
from llamadiff.candidates.source import Context, Opened, assemble
from llamadiff.candidates.trace_file import mapped
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace

Function = Callable[..., Any]


def of_function(run: Function) -> Opened:
    """A function of the token ids; it may have a parameter ``n_prefill``: how many to run first, the others one by one.

    It returns arrays by name, a Trace, or the path of what it wrote.
    """
    return Opened(partial(_loaded, run))


def _loaded(run: Function, context: Context) -> Trace:
    name = str(getattr(run, "__name__", type(run).__name__))
    more = {"n_prefill": context.n_prefill} if "n_prefill" in inspect.signature(run).parameters else {}
    given = run(list(context.tokens), **more)
    if isinstance(given, Trace):
        return mapped(given, context)
    if isinstance(given, (str, Path)):
        return resolve(str(given), context)
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise UserError(f"{name}: gave {kind}; expected arrays by the names of taps, a Trace, or the path of a file")
    return assemble((_piece(key, value) for key, value in given.items()), context, {"name": name})


def _piece(name: object, value: Any) -> Piece:
    """One tensor. Raises UserError for what is no array of numbers."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise UserError(f"{name}: is of type {array.dtype}; expected an array of numbers")
    word, row = named_row(str(name))
    return Piece(word, array, row)
