"""Times ``llamadiff compare`` beside llama.cpp's own decode, transformers and the least that float32 can take.

``bench.py [CASE ...] [--runs 5] [--minutes 9] [--save FILE.json]``; a case is SHAPE:TYPE:TOKENS (tinyllama:Q4_K_M:14),
``standard`` or ``matrix``. Models are synthesized. Every measurement is a process of its own, the kinds take turns, and
medians are reported. A case is run less often where its share of the time is spent. CPU time stands beside the clock:
where a machine has other work, it moves less. No time is asserted; a run that fails is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
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
TOKENS = (1, 14, 128, 512, 2048)
STANDARD = [
    *(f"tinyllama:Q4_K_M:{count}" for count in TOKENS),
    *(f"tinyllama:{kind}:14" for kind in ("F16", "Q8_0", "Q6_K")),
    "qwen2.5-0.5b:Q4_K_M:14", "llama-3.2-1b:Q4_K_M:14", "llama-2-7b:Q4_K_M:14",
]  # fmt: skip
BYTECODE = CACHE / "bytecode"  # as pip leaves it beside what it installs; a checkout may have none
WITH_TRANSFORMERS = "tinyllama:Q4_K_M:14"  # which they load once: it takes a minute

COMPARE, CANDIDATE = "compare", "candidate"  # the command, alone and with one; the other kinds are scripts beside this
KINDS = ("decode", "limit", COMPARE, CANDIDATE)

Measures = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model's shape, the type of its weights, and how many tokens are run."""

    shape: str
    mix: str
    tokens: int

    @classmethod
    def parse(cls, text: str) -> Case:
        shape, mix, tokens = text.split(":")
        if shape not in SHAPES or mix not in MIXES:
            raise ValueError(f"{text}: shapes are {', '.join(SHAPES)}; types are {', '.join(MIXES)}")
        return cls(shape, mix, int(tokens))

    def __str__(self) -> str:
        return f"{self.shape}:{self.mix}:{self.tokens}"

    def path(self) -> Path:
        """The model, from the cache if this very synthesize.py has written it."""
        version = hashlib.sha256((HERE / "synthesize.py").read_bytes()).hexdigest()[:8]
        path = CACHE / f"{self.shape}-{self.mix}-{version}.gguf"
        if not path.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            for stale in CACHE.glob(f"{self.shape}-{self.mix}-????????.gguf"):
                stale.unlink()
            write(SHAPES[self.shape], self.mix, path)
        return path

    def ids(self) -> list[int]:
        """BOS, then ordinary words."""
        rng = np.random.default_rng(0)
        return [1, *rng.integers(3 + 256, SHAPES[self.shape].n_vocab, self.tokens - 1).tolist()]


def cases(words: Iterable[str]) -> Iterator[Case]:
    """The cases that a command line names. Raises ValueError."""
    for word in words:
        if word == "standard":
            yield from map(Case.parse, STANDARD)
        elif word == "matrix":
            yield from (Case(shape, mix, count) for shape in SHAPES if shape != "mini"
                        for mix in MIXES for count in TOKENS)  # fmt: skip
        else:
            yield Case.parse(word)


def run(kind: str, path: Path, tokens: Sequence[int], candidate: Path) -> Measures:
    """What a script says of itself, with the wall time of its whole process; the peak in bytes.

    ``candidate``: a trace of the same tokens.
    """
    ids = ",".join(map(str, tokens))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        script = [str(HERE / f"{kind}_once.py"), str(path), ids]
        command = ["-m", "llamadiff", COMPARE, str(path), "--tokens", ids, "-o", f"json:{report}"]
        command += ["--candidate", str(candidate)] if kind == CANDIDATE else []
        started, cpu = time.perf_counter(), _cpu_of_children()
        ended = subprocess.run(
            [sys.executable, *(command if kind in (COMPARE, CANDIDATE) else script)],
            capture_output=True, check=False, env=_environment(), encoding="utf-8",
        )  # fmt: skip
        spent = {"wall_s": time.perf_counter() - started, "cpu_s": _cpu_of_children() - cpu}
        if ended.returncode != 0:
            sys.exit(f"{kind} failed with code {ended.returncode}:\n{ended.stderr[-2000:]}")
        if kind in (COMPARE, CANDIDATE):
            timing = json.loads(report.read_text("utf-8"))["timing"]
            return {**timing, "peak": timing["peak_rss_mb"] * (1 << 20), **spent}
    measures = json.loads(ended.stdout)
    peak = {"peak": measures["peak"] * RSS_UNIT} if "peak" in measures else {}
    return {**measures, **peak, **spent}


def recorded(path: Path, tokens: Sequence[int], folder: str) -> Path:
    """The reference engine's own run, to be judged as anybody's."""
    command = ["-m", "llamadiff", COMPARE, str(path), "--tokens", ",".join(map(str, tokens)), "-o", f"{folder}/"]
    subprocess.run([sys.executable, *command], capture_output=True, check=True, env=_environment())
    return Path(folder) / "engine.safetensors"


def _environment() -> dict[str, str]:
    """This process's, but for where bytecode is kept."""
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(BYTECODE)}


def warm_up() -> None:
    """Run every kind once, so that the bytecode of all that it imports is there, as an installed package has it."""
    for count in (14, 128):
        case = Case("mini", "Q4_K_M", count)
        with tempfile.TemporaryDirectory() as folder:
            candidate = recorded(case.path(), case.ids(), folder)
            for kind in KINDS:
                run(kind, case.path(), case.ids(), candidate)


def _cpu_of_children() -> float:
    """Seconds of the processes that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(case: Case, runs: int, seconds: float, console: Console) -> dict[str, list[Measures]]:
    """All runs of all kinds, in turns: whatever else the machine does falls on each of them. No turn is begun that
    would most likely end after so many seconds, but for the first.
    """
    results: dict[str, list[Measures]] = {kind: [] for kind in (*KINDS, "transformers")}
    with tempfile.TemporaryDirectory() as folder:
        with console.status(f"{case}: the model, and a candidate"):
            path, tokens = case.path(), case.ids()
            candidate = recorded(path, tokens, folder)
        started = time.perf_counter()
        for number in range(runs):
            if number and (time.perf_counter() - started) * (number + 1) / number > seconds:
                break
            is_peers = number == 0 and str(case) == WITH_TRANSFORMERS and find_spec("transformers")
            for kind in [*KINDS, *(["transformers"] if is_peers else [])]:
                with console.status(f"{case}: {kind}, run {number + 1} of {runs}"):
                    results[kind].append(run(kind, path, tokens, candidate))
    return results


def middle(results: dict[str, list[Measures]], kind: str, name: str) -> float:
    """The median over the runs; NaN if there was none."""
    return median(one[name] for one in results[kind]) if results[kind] else float("nan")


def summary(case: Case, results: dict[str, list[Measures]]) -> dict[str, float]:
    """Seconds, ratios and memory of one case."""
    size = case.path().stat().st_size
    total, decode = middle(results, COMPARE, "wall_s"), middle(results, "decode", "decode_s")
    cpu = middle(results, COMPARE, "cpu_s")
    limit = middle(results, "limit", "read_s") + middle(results, "limit", "matmul_s")
    phases = {name: middle(results, "compare", f"{name}_s") for name in ("capture", "engine", "compare", "total")}
    loading = middle(results, "transformers", "load_s")
    weights = middle(results, "limit", "weights")
    judged = middle(results, CANDIDATE, "wall_s")
    return {
        "with": judged, "x alone": judged / total, "MB with": (middle(results, CANDIDATE, "peak") - size) / MB,
        "total": total, "start": total - phases["total"], "capture": phases["capture"], "engine": phases["engine"],
        "report": phases["compare"], "decode": decode, "decode again": middle(results, "decode", "again_s"),
        "load": middle(results, "decode", "load_s"), "limit": limit, "transformers": loading,
        "runs": len(results[COMPARE]), "cpu": cpu, "x cpu": cpu / middle(results, "decode", "decode_cpu_s"),
        "x decode": total / decode, "x again": total / middle(results, "decode", "again_s"), "x limit": total / limit,
        "x faster": loading / total, "MB": (middle(results, COMPARE, "peak") - size) / MB,
        "ms a token": 1e3 * total / case.tokens, "s a G weights": total / (weights / 1e9),
    }  # fmt: skip


COLUMNS = {
    "runs": "{:.0f}", "total": "{:.2f}", "cpu": "{:.2f}",
    "start": "{:.2f}", "capture": "{:.2f}", "engine": "{:.2f}", "report": "{:.2f}",
    "with": "{:.2f}", "x alone": "{:.2f}", "decode": "{:.3f}",
    "x decode": "{:.1f}", "x cpu": "{:.1f}", "x again": "{:.1f}", "x limit": "{:.1f}",
    "x faster": "{:.0f}", "MB": "{:.0f}", "MB with": "{:.0f}",
    "ms a token": "{:.0f}", "s a G weights": "{:.2f}",
}  # fmt: skip
NOTES = (
    "seconds, medians: total is the process from start to end, cpu what all its processes used of the processors, "
    "engine the passes that run free, replay and judge. "
    "with: total with a right candidate; x alone: against that without one. "
    "x decode: against llama.cpp's decode of the prompt, the first of a fresh process; x cpu: cpu against what that "
    "used; x again: against the same with "
    "everything warm. x limit: against reading the file and one float32 matmul pass. x faster: than "
    "transformers loads the file. MB: peak of either process, above the file's size."
)


def table_of(summaries: dict[Case, dict[str, float]]) -> Table:
    """A row for each case."""
    table = Table(title="llamadiff compare, medians of the runs")
    for heading in ("model", "type", "tokens", *COLUMNS):
        table.add_column(heading, justify="left" if heading in ("model", "type") else "right", no_wrap=True)
    for case, values in summaries.items():
        cells = ["" if np.isnan(values[name]) else form.format(values[name]) for name, form in COLUMNS.items()]
        table.add_row(case.shape, case.mix, str(case.tokens), *cells)
    return table


def _progress(case: Case, values: dict[str, float], number: int, of: int, seconds: float) -> str:
    """One case that is done, in a line."""
    ratios = f"{values['x decode']:.1f} x decode, {values['x cpu']:.1f} x its CPU time"
    return f"{number} of {of}  {case}: {values['total']:.1f} s, {ratios} ({seconds:.0f} s)"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {"platform": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version(), "load": load}


def main() -> None:
    """Synthesize, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=["standard"], metavar="CASE")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.0, help="for all cases together, models aside")
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    try:
        wanted = list(cases(options.cases))
    except ValueError as error:
        parser.error(str(error))
    console, before, left = Console(), machine(), 60 * options.minutes
    results: dict[Case, dict[str, list[Measures]]] = {}
    summaries: dict[Case, dict[str, float]] = {}
    warm_up()
    for number, case in enumerate(wanted, 1):
        started = time.perf_counter()
        results[case] = measure(case, options.runs, left / (len(wanted) - number + 1), console)
        summaries[case], seconds = summary(case, results[case]), time.perf_counter() - started
        left -= sum(one["wall_s"] for runs in results[case].values() for one in runs)
        console.print(_progress(case, summaries[case], number, len(wanted), seconds))
    Console(width=max(console.width, 230)).print(table_of(summaries))
    console.print(f"{NOTES}\n{before['cpus']} CPUs, load before {before['load']}")
    if options.save is not None:
        rows = [{**vars(case), "median": summaries[case], "runs": results[case]} for case in wanted]
        options.save.write_text(json.dumps({"machine": before, "cases": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
