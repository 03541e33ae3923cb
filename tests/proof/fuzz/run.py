"""Run cases of readers: each must succeed or raise UserError, in 5 s of work and 500 MB.

python tests/proof/fuzz/run.py --cases 10000            every reader
python tests/proof/fuzz/run.py npz model --cases 1000
python tests/proof/fuzz/run.py npz --case 1234          one again, with its traceback
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from random import Random

SECONDS = 5.0
MEMORY = 500 << 20
HANGS = 300  # seconds of the clock, after which a case is given up
ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "reference"), str(ROOT / "tests")]


class LateError(BaseException):
    """A case that does not end."""


@dataclass
class Result:
    """What became of a reader's cases."""

    reader: str
    cases: int = 0
    refused: int = 0
    slowest: float = 0.0
    slowest_case: int = -1
    peak_mb: float = 0.0
    failures: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def run(name: str, numbers: range | list[int], show: bool = False) -> Result:
    from proof.fuzz.readers import READERS, world

    world()
    result, before = Result(name), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in numbers:
        folder = Path(tempfile.mkdtemp(prefix="llamadiff-fuzz-"))
        try:
            read = READERS[name](Random(f"{name} {number}"), folder)
            fault = tried(read, result, number)
        finally:
            shutil.rmtree(folder)
        if fault is not None:
            result.failures.append(f"{name} --case {number}: {fault if show else fault.splitlines()[-1][:300]}")
    result.peak_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return result


def tried(read: object, result: Result, number: int) -> str | None:
    """What is wrong with the way in which one case ended."""
    from llamadiff.system.errors import UserError

    result.cases += 1
    said, fault, line = StringIO(), None, None
    limit_memory(address_space() + MEMORY)
    started = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, HANGS)
    try:
        with redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("error")
            read()
    except UserError as error:
        result.refused += 1
        line = str(error)
        result.lines.append(line)
    except BaseException:
        fault = traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        limit_memory(resource.RLIM_INFINITY)
    seconds = time.process_time() - started
    if seconds > result.slowest:
        result.slowest, result.slowest_case = seconds, number
    if seconds > SECONDS:
        return f"{fault or ''}{seconds:.1f} s"
    if line is not None and (len(line) > 4000 or not line):
        return f"a line of {len(line)} characters: {line[:200]!r}"
    return fault or (f"said {said.getvalue()!r}" if said.getvalue() else None)


def address_space() -> int:
    """Bytes of address space in use."""
    return int(Path("/proc/self/statm").read_text("utf-8").split()[0]) * os.sysconf("SC_PAGE_SIZE")


def limit_memory(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def watch() -> None:
    """A case that does not end is given up."""

    def late(_number: int, _frame: object) -> None:
        raise LateError

    signal.signal(signal.SIGALRM, late)


def main() -> int:
    from proof.fuzz.readers import READERS, SLOW, world

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*", default=[], choices=[*READERS, []])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--case", type=int)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    world()
    watch()
    failed = False
    for name in asked.readers or READERS:
        numbers = range(max(1, asked.cases // SLOW.get(name, 1))) if asked.case is None else [asked.case]
        result = run(name, numbers, asked.case is not None)
        failed |= bool(result.failures)
        if asked.json:
            print(json.dumps(asdict(result)), flush=True)
        else:
            print(f"{name:10} {result.cases:6} cases, {result.refused:6} refused, slowest {result.slowest:.2f} s "
                  f"(--case {result.slowest_case}), {result.peak_mb:.0f} MB more, {len(result.failures)} failed",
                  *result.failures[:20], sep="\n    ", flush=True)  # fmt: skip
    shutil.rmtree(world().folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
