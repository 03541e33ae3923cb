"""The cases of a sweep on a Dask cluster that is there: its workers run them, this process keeps what comes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from llamadiff.ext.sweep.case import SweepRow, run_case, unjudged
from llamadiff.ext.sweep.plan import SweepCase
from llamadiff.system.errors import UserError
from llamadiff.trace.stated import reason

PATIENCE = 20.0  # seconds that a scheduler may take to answer


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """A client of the scheduler. Raises UserError if distributed is not installed, or nobody answers."""
    if find_spec("distributed") is None:
        raise UserError(f"--scheduler {address}: needs Dask: pip install 'dask[distributed]'")
    from distributed import Client

    try:
        client = Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise UserError(f"--scheduler {address}: no Dask scheduler answers there ({reason(error)})") from None
    try:
        if not client.scheduler_info()["workers"]:
            raise UserError(f"--scheduler {address}: has no workers; start some: dask worker {address}")
        yield client
    finally:
        client.close()


def run_on_cluster(client: Any, cases: Sequence[SweepCase]) -> Iterator[SweepRow]:
    """What comes of each case, as soon as it is there. A case of which workers die is a row that says so."""
    from distributed import as_completed

    futures = {client.submit(run_case, case, key=f"llamadiff-{case.key}", pure=False): case for case in cases}
    for future in as_completed(list(futures), loop=client.loop):
        case, error = futures[future], future.exception()
        yield future.result() if error is None else unjudged(case, _reason(error))
        future.release()


def _reason(error: BaseException) -> str:
    """Why no worker could finish a case."""
    from distributed import KilledWorker

    if isinstance(error, KilledWorker):
        return "the workers that ran it died, one after the other"
    return f"a worker could not run it ({reason(error)}); llamadiff must be installed where the workers are"
