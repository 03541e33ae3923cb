"""What a user gives as a candidate, read before anything is run: a trace, a spec of ``--candidate``, or a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from llamadiff.candidates.map_file import load_map
from llamadiff.candidates.name_map import Map, identity_map
from llamadiff.candidates.source import Context, Opened
from llamadiff.engines.model_file import Runnable
from llamadiff.engines.run_spec import How, Run
from llamadiff.llamacpp.request import Settings
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace

Candidate: TypeAlias = Trace | str | Path | Callable[..., Any]  # a trace, what --candidate takes, or a function


@dataclass(frozen=True)
class Brought:
    """A candidate that was read, and how its names are.

    ``spec`` is what was given; ``place``: which llama.cpp it may run, and where; ``trace``: it, where it was loaded
    ahead.
    """

    spec: Candidate
    source: Opened
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

    def ahead(self, engine: Runnable, run: Run) -> Brought:
        """Loaded before llama.cpp runs, where that needs no run: so what does not fit is said first."""
        if not self.source.recorded or not run.tokens or run.n_predict:
            return self
        stated = self.source.run
        n_prefill = stated.n_prefill if stated is not None else len(run.tokens)
        return replace(self, trace=self._load(engine, tuple(run.tokens), n_prefill))

    def loaded(self, engine: Runnable, baseline: Trace) -> Trace:
        """Its trace of what llama.cpp ran."""
        return self.trace or self._load(engine, baseline.info.tokens, baseline.info.n_prefill, baseline)

    def _load(self, engine: Runnable, tokens: tuple[int, ...], n_prefill: int, baseline: Trace | None = None) -> Trace:
        how = self.how
        return self.source.load(
            Context(engine, tokens, n_prefill, self.mapping, how.timeout, how.progress, baseline, self.place)
        )


def bring(candidate: Candidate | None, how: How, place: Settings | None = None) -> Brought | None:
    """The candidate, if there is one, and the name map, read. Raises UserError for what cannot be."""
    from llamadiff.candidates.opening import open_candidate  # here: it brings every kind of source

    source = open_candidate(candidate) if candidate is not None else None
    mapping = load_map(how.name_map) if how.name_map is not None else identity_map()
    if candidate is None or source is None:
        return None
    return Brought(candidate, source, mapping, how, place or Settings())
