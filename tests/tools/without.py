"""The core's tests with a slice deleted: they pass, or the core needs it.

python tests/tools/without.py explain [more of pytest]     one slice
python tests/tools/without.py --turn 17                    one, another with each number, or all at once
python tests/tools/without.py --all                        a table of all, and of the core alone
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXT = ROOT / "llamadiff" / "ext"
SLICES = sorted(path.parent.name for path in EXT.glob("*/__init__.py"))
# What is about the core and nothing else.
CORE = (
    "candidates", "cli", "engines", "house", "judge", "llamacpp", "numerics", "reference", "report", "result",
    "system", "trace", "verbs",
)  # fmt: skip


def copied(folder: Path) -> Path:
    """The files that git knows, or would take, as they are now, and what was compiled."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    compiled = [str(path.relative_to(ROOT)) for path in (ROOT / "llamadiff/numerics/compiled").glob("kernels.*")]
    for name in {*filter(None, listed), *compiled}:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def lines_of(name: str) -> int:
    """Lines of Python of a slice."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in (EXT / name).rglob("*.py"))


def run(names: list[str], more: list[str]) -> tuple[int, str, float]:
    """The core's tests without slices -> pytest's exit code and last line, and the seconds."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="without-") as place:
        folder = copied(Path(place))
        for name in names:
            shutil.rmtree(folder / "llamadiff" / "ext" / name)
        shutil.rmtree(folder / "tests" / "ext")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(folder / "reference")))}
        command = [sys.executable, "-m", "pytest", "-q", "-n", str((os.cpu_count() or 1) + 1), "-m", "not slow"]
        tests = [f"tests/{each}" for each in CORE]
        done = subprocess.run(
            [*command, *(more or tests)], cwd=folder, env=env, capture_output=True, check=False, text=True
        )
    if done.returncode:
        print(done.stdout[-20000:], done.stderr[-1000:], sep="\n")
    words = [line for line in done.stdout.splitlines() if re.search(r" (passed|failed|error)", line)]
    return done.returncode, words[-1] if words else "nothing was run", time.monotonic() - started


def main() -> None:
    """A line of a table for each slice; exit code 1 where a test fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=SLICES)
    parser.add_argument("--turn", type=int)
    parser.add_argument("--all", action="store_true")
    asked, more = parser.parse_known_args()
    every = [*([name] for name in SLICES), SLICES]
    chosen = every if asked.all else [[asked.name]] if asked.name else [every[(asked.turn or 0) % len(every)]]
    print("| slice | lines | the core's tests without it | seconds |", "| --- | --- | --- | --- |", sep="\n")
    failed = False
    for names in chosen:
        code, words, seconds = run(names, more)
        failed = failed or code != 0
        name = names[0] if len(names) == 1 else "all of them"
        print(f"| {name} | {sum(map(lines_of, names)):,} | {words} | {seconds:.0f} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
