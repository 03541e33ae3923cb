"""Opens what a user gives as a candidate: what ``--candidate`` names, a trace in memory, or a Python function.

Every kind of source that has a name is a module of three functions of it: see ``KINDS``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from llamadiff import plugins
from llamadiff.candidates.map_file import load_map
from llamadiff.candidates.name_map import Map, identity_map
from llamadiff.candidates.pieces import Piece, named_row
from llamadiff.candidates.source import CandidateSource, Context, assemble
from llamadiff.candidates.trace_file import apply_map
from llamadiff.engines.model_file import Runnable
from llamadiff.engines.run_spec import How, Run
from llamadiff.llamacpp.request import Settings
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.trace.reader import Trace

CandidateSpec: TypeAlias = Trace | str | Path | Callable[..., Any]  # a trace, what --candidate takes, or a function

# Modules; the first that ``matches`` takes a --candidate, those of slices before these.
KINDS = tuple(f"llamadiff.candidates.{kind}" for kind in ("gguf_file", "command", "dump", "trace_file"))


def open_candidate(candidate: CandidateSpec) -> CandidateSource:
    """A candidate, read. Raises UserError if it stands for nothing, or cannot be read.

    A function is given the token ids, and if it has a parameter ``n_prefill``, how many to run first, the others one by
    one. It returns arrays by name, a Trace, or the path of what it wrote.
    """
    if isinstance(candidate, Trace):
        return CandidateSource(partial(apply_map, candidate), candidate.info.tokens, run=candidate.info)
    if callable(candidate):
        return CandidateSource(partial(_call_candidate, candidate))
    spec = str(candidate)
    return source_of(spec).open_source(spec)


def resolve(spec: str, context: Context) -> Trace:
    """The trace that a ``--candidate`` stands for. Raises UserError if it stands for none."""
    return open_candidate(spec).load(context)


def files_of(spec: str) -> list[Path]:
    """The files that are read for a ``--candidate``."""
    return list(source_of(spec).files(spec))


class Source(Protocol):
    """What the module of a kind of source has."""

    def matches(self, spec: str) -> bool:
        """Whether a ``--candidate`` is of this kind."""

    def files(self, spec: str) -> Iterable[Path]:
        """The files that are read for it. Raises UserError if they cannot be."""

    def open_source(self, spec: str) -> CandidateSource:
        """It, read as far as that is possible before anything is run. Raises UserError if it cannot be."""


def source_of(spec: str) -> Source:
    """The module of the kind of source that a ``--candidate`` names. Raises UserError if it names none."""
    if said := plugins.ask_first(lambda each: each.mistake(spec, "candidate")):
        raise UserError(said)
    of_slices = [kind for kinds in plugins.ask_all(lambda each: each.sources()) for kind in kinds]
    for kind in (*of_slices, *KINDS):
        source = cast("Source", import_module(kind))
        if source.matches(spec):
            return source
    check_regular(Path(spec), "a trace, a dump or a command")
    lacking = " and ".join(each.name for each in plugins.missing_slices())
    raise UserError(
        f"--candidate {spec}: no such trace or dump; give a .safetensors trace, a .pt, a directory of arrays, a log, "
        '"cmd: ./engine --tokens {tokens} --dump {out}", llama.cpp:KEY=VALUE, or transformers:'
        f"{f'; llamadiff doctor says why {lacking} is missing here' if lacking else ''}"
    )


def _call_candidate(run: Callable[..., Any], context: Context) -> Trace:
    name = str(getattr(run, "__name__", type(run).__name__))
    more = {"n_prefill": context.n_prefill} if "n_prefill" in inspect.signature(run).parameters else {}
    given = run(list(context.tokens), **more)
    if isinstance(given, Trace):
        return apply_map(given, context)
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


@dataclass(frozen=True)
class Candidate:
    """A candidate that was read, and how its names are.

    ``spec`` is what was given; ``place``: which llama.cpp it may run, and where; ``trace``: it, where it was loaded
    ahead.
    """

    spec: CandidateSpec
    source: CandidateSource
    mapping: Map
    how: How
    place: Settings
    trace: Trace | None = None

    def tokens_for(self, run: Run) -> Run:
        """The run, of the tokens that the candidate states where it has none.

        Raises UserError if it could state some, and does not.
        """
        if run.prompt is not None or run.tokens:
            return run
        if self.source.untold and not self.source.tokens:
            raise UserError(f"{self.source.untold}; or give the prompt that was run, or --tokens 1,2,3")
        return replace(run, tokens=self.source.tokens)

    def ahead(self, engine: Runnable, run: Run) -> Candidate:
        """Loaded before llama.cpp runs, where that needs no run: so what does not fit is said first."""
        if not self.source.recorded or not run.tokens or run.n_predict:
            return self
        stated = self.source.run
        n_prefill = stated.n_prefill if stated is not None else len(run.tokens)
        return replace(self, trace=self._load(engine, tuple(run.tokens), n_prefill))

    def load_trace(self, engine: Runnable, baseline: Trace) -> Trace:
        """Its trace of what llama.cpp ran."""
        return self.trace or self._load(engine, baseline.info.tokens, baseline.info.n_prefill, baseline)

    def _load(self, engine: Runnable, tokens: tuple[int, ...], n_prefill: int, baseline: Trace | None = None) -> Trace:
        how = self.how
        return self.source.load(
            Context(engine, tokens, n_prefill, self.mapping, how.timeout, how.progress, baseline, self.place)
        )


def read_candidate(candidate: CandidateSpec | None, how: How, place: Settings | None = None) -> Candidate | None:
    """The candidate, if there is one, and the name map, read. Raises UserError for what cannot be."""
    source = open_candidate(candidate) if candidate is not None else None
    mapping = load_map(how.name_map) if how.name_map is not None else identity_map()
    if candidate is None or source is None:
        return None
    return Candidate(candidate, source, mapping, how, place or Settings())
