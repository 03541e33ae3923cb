"""A sweep from its plan to its rows: what is done already is kept, the rest is run, each row is stored at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from llamadiff import plugins
from llamadiff.candidates.gguf_file import is_model_file
from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.sweep.case import SweepRow, run_case, unjudged
from llamadiff.ext.sweep.content import contents_of
from llamadiff.ext.sweep.plan import SweepCase, read_plan
from llamadiff.ext.sweep.store import Store
from llamadiff.judge.verdict import worst_of
from llamadiff.system.errors import UserError
from llamadiff.verbs.workers import Died, cores, map_surviving

DEAD = "the processes that ran it were killed, one after the other, perhaps for want of memory; try --jobs 1"
Tell = Callable[[SweepRow, int, int], None]  # a row that is new, how many are done, of how many


@dataclass(frozen=True)
class Sweep:
    """All rows of a plan, in its order; ``kept`` of them were there before. ``concerns``: what is odd about files."""

    folder: Path
    rows: tuple[SweepRow, ...]
    kept: int
    concerns: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The worst of them; UNCHECKED at least where all were there before: nothing was run."""
        return worst_of([row.verdict for row in self.rows], self.kept == len(self.rows))

    @property
    def counts(self) -> Counter[str]:
        """Rows by verdict; those that could not be judged as "refused"."""
        return Counter("refused" if row.refused else row.verdict for row in self.rows)


def run_sweep(plan: Path, folder: Path, tell: Tell, jobs: int = 0, scheduler: str | None = None) -> Sweep:
    """Run what is left of a plan; ``jobs`` cases at a time here (0: as many as cores), or on a Dask ``scheduler``.

    Raises UserError for a plan, a folder or a scheduler that is none.
    """
    cases = {case.key: case for case in read_plan(plan)}
    store = Store(folder)
    parts = contents_of(cases.values())
    rows = {row.key: row for row in store.done(cases) if _holds(row, parts[row.key])}
    kept, left = len(rows), [case for key, case in cases.items() if key not in rows]
    with closing(_rows(left, jobs, scheduler)) as found:
        for new in found:
            row = replace(new, made_of=parts[new.key])
            store.add(row)
            rows[row.key] = row
            tell(row, len(rows), len(cases))
    files = dict.fromkeys(file for case in cases.values() for file in (case.model, case.candidate))
    concerns = tuple(line for file in files if is_model_file(file) for line in _concerns(file))
    return Sweep(folder, tuple(rows[key] for key in cases), kept, concerns)


def _holds(row: SweepRow, made_of: str) -> bool:
    """Whether what came of a case then would come of it now: not where it was refused, or where nothing tells."""
    return made_of != "" and row.made_of == made_of and not row.refused


def _concerns(path: str) -> Iterator[str]:
    """What is odd about a file, as far as a second tells; nothing of one that its cases refuse."""
    with suppress(UserError):
        file = ModelFile(path)
        for lines in plugins.ask_all(lambda each: each.concerns(file)):
            yield from lines


def _rows(cases: Sequence[SweepCase], jobs: int, scheduler: str | None) -> Generator[SweepRow, None, None]:
    """What comes of each case, in whatever order."""
    if not cases:
        return
    if scheduler is not None:
        from llamadiff.ext.sweep.cluster import connected, run_on_cluster

        with connected(scheduler) as client:
            yield from run_on_cluster(client, cases)
        return
    processes = min(jobs or cores(), len(cases))
    threads = max(1, cores() // processes)
    for case, row in map_surviving(partial(run_case, threads=threads), cases, processes):  # they share the cores
        yield unjudged(case, DEAD) if isinstance(row, Died) else row
