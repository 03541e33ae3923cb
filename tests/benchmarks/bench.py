"""Times ``llamadiff.compare`` against llama.cpp's own decode of the same tokens, on a synthetic model.

``bench.py [--shape tinyllama] [--type Q4_K_M] [--tokens 14] [--runs 5] [--save FILE.json]``. Every measurement is a
process of its own, the two kinds take turns, and medians are reported. No time is asserted; a run that fails is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from synthesize import MIXES, SHAPES, write

HERE = Path(__file__).parent
CACHE = Path(tempfile.gettempdir()) / "llamadiff-bench"
MB = 1e6
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes in a unit of ru_maxrss

Measures = dict[str, Any]


def synthesized(shape: str, mix: str) -> Path:
    """The model, from the cache if this very synthesize.py has written it."""
    version = hashlib.sha256((HERE / "synthesize.py").read_bytes()).hexdigest()[:8]
    path = CACHE / f"{shape}-{mix}-{version}.gguf"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        for stale in CACHE.glob(f"{shape}-{mix}-????????.gguf"):
            stale.unlink()
        write(SHAPES[shape], mix, path)
    return path


def some_tokens(shape: str, count: int) -> list[int]:
    """BOS, then ordinary words."""
    rng = np.random.default_rng(0)
    return [1, *rng.integers(3 + 256, SHAPES[shape].n_vocab, count - 1).tolist()]


def run(script: str, path: Path, tokens: Sequence[int]) -> Measures:
    """What a script says of itself, with the wall time of its whole process; peaks in bytes."""
    command = [sys.executable, str(HERE / script), str(path), ",".join(map(str, tokens))]
    started = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - started
    if ended.returncode != 0:
        sys.exit(f"{script} failed with code {ended.returncode}:\n{ended.stderr[-2000:]}")
    measures = json.loads(ended.stdout)
    peaks = {name: measures[name] * RSS_UNIT for name in measures if name.endswith("peak")}
    return {**measures, **peaks, "wall_s": wall}


def measure(path: Path, tokens: Sequence[int], runs: int, console: Console) -> dict[str, list[Measures]]:
    """All runs of both kinds, in turns: whatever else the machine does falls on both."""
    results: dict[str, list[Measures]] = {"decode": [], "compare": []}
    for number in range(runs):
        for kind, measured in results.items():
            with console.status(f"{kind}, run {number + 1} of {runs}"):
                measured.append(run(f"{kind}_once.py", path, tokens))
    return results


def rows(results: dict[str, list[Measures]]) -> Iterator[tuple[str, list[float], str | None]]:
    """A row of the table: what, its seconds in each run, and the measure that holds its peak memory."""
    decode, compare = results["decode"], results["compare"]

    def seconds(runs: list[Measures], name: str) -> list[float]:
        return [one[name] for one in runs]

    yield "llama.cpp: load", seconds(decode, "load_s"), None
    yield "llama.cpp: decode", seconds(decode, "decode_s"), "decode.peak"
    yield "compare, end to end", seconds(compare, "wall_s"), None
    yield "  start, imports", [one["wall_s"] - one["total_s"] for one in compare], None
    yield "  open, capture", seconds(compare, "capture_s"), "compare.child_peak"
    yield "  engine, verdicts", seconds(compare, "engine_s"), "compare.peak"
    yield "  result", seconds(compare, "compare_s"), None


def table_of(results: dict[str, list[Measures]], title: str, size: int) -> Table:
    """Medians, ranges, ratios to llama.cpp's decode, and peak memory above the file's size."""
    table = Table(title=title)
    table.add_column("case")
    for heading in ("median s", "range s", "x decode", "MB above file"):
        table.add_column(heading, justify="right")
    unit = median(one["decode_s"] for one in results["decode"])
    for name, seconds, peak in rows(results):
        middle = median(seconds)
        memory = "" if peak is None else f"{(peak_of(results, peak) - size) / MB:.0f}"
        extent = f"{min(seconds):.2f} - {max(seconds):.2f}"
        table.add_row(name, f"{middle:.3f}", extent, f"{middle / unit:.1f}", memory)
    return table


def peak_of(results: dict[str, list[Measures]], place: str) -> float:
    kind, name = place.split(".")
    return float(median(one[name] for one in results[kind]))


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {"platform": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version(), "load": load}


def main() -> None:
    """Synthesize, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama")
    parser.add_argument("--type", choices=MIXES, default="Q4_K_M")
    parser.add_argument("--tokens", type=int, default=14)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    console = Console()
    with console.status("synthesizing the model"):
        path = synthesized(options.shape, options.type)
    before, size = machine(), path.stat().st_size
    results = measure(path, some_tokens(options.shape, options.tokens), options.runs, console)
    title = f"{options.shape} {options.type}, {size / MB:.0f} MB, {options.tokens} tokens, {options.runs} runs"
    console.print(table_of(results, title, size))
    console.print(f"{before['cpus']} CPUs, load before {before['load']}; {results['compare'][-1]['summary']}")
    if options.save is not None:
        report = {"shape": options.shape, "type": options.type, "tokens": options.tokens, "file_bytes": size}
        report |= {"machine": before, "seconds": {name.strip(): median(s) for name, s, _ in rows(results)}}
        options.save.write_text(json.dumps({**report, "runs": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
