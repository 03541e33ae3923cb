"""Where the time of ``llamadiff compare`` goes: ``profiled.py [CASE] [--save FILE.txt]``, a summary of all threads.

The case is bench.py's, SHAPE:TYPE:TOKENS. It runs twice, and cProfile watches the second time. A function's own time is
what its thread spent there: waiting for a lock is time too, and shows as ``acquire``.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import threading
import time
from pathlib import Path
from typing import Any

from bench import Case

import llamadiff

MAIN, TOP = "tinyllama:Q4_K_M:14", 30


def profiled(path: Path, tokens: list[int]) -> str:
    """One comparison under the profiler -> its phases, CPU time and most expensive functions."""
    profiles = [cProfile.Profile()]

    def watch(*_: Any) -> None:
        """Called by a new thread: from here on it has a profiler of its own."""
        profiles.append(cProfile.Profile())
        profiles[-1].enable()

    threading.setprofile(watch)
    cpu = time.process_time()
    profiles[0].enable()
    comparison = llamadiff.compare(path, tokens)
    profiles[0].disable()
    cpu = time.process_time() - cpu
    threading.setprofile(None)  # type: ignore[arg-type]
    out = io.StringIO()
    phases = ", ".join(f"{name} {value:.2f}" for name, value in comparison.timing.items())
    out.write(f"{comparison.verdict}: {phases}\n{cpu:.2f} s of CPU in this process, {len(profiles)} threads\n")
    stats = pstats.Stats(*profiles, stream=out).strip_dirs()
    stats.sort_stats("tottime").print_stats(TOP)
    stats.sort_stats("cumtime").print_stats(TOP)
    return out.getvalue()


def main() -> None:
    """Profile, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="?", default=MAIN, metavar="CASE")
    parser.add_argument("--save", type=Path, metavar="FILE.txt")
    options = parser.parse_args()
    case = Case.parse(options.case)
    path, tokens = case.path(), case.ids()
    llamadiff.compare(path, tokens)
    text = profiled(path, tokens)
    print(text)
    if options.save is not None:
        options.save.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
