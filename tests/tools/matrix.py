"""The quick tests on machines that this one can pass for: other BLAS kernels, no compiler, no root, a bare Debian.

``matrix.py [--whole] [--turn N | CORNER ...]``: each corner runs a fifth of the tests, the next one another fifth;
all of them with ``--whole``; ``--turn N`` is one corner and all tests. A table says what was tried; exit code 1 if a
test failed. What cannot be tried here, for want of a network for one, fails nothing: the turn goes to the next corner.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

sys.path[:0] = [str(Path(__file__).parents[1])]

from places import ROOT  # noqa: E402

from tools import debian  # noqa: E402
from tools.parts import MissingPartError  # noqa: E402

PARTS = 5
NOBODY = 65534
PROCESSES = os.environ.get("PROCESSES", str((os.cpu_count() or 1) + 1))
SUMMARY = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")


@dataclass(frozen=True)
class Corner:
    """What is otherwise there: variables; another place; nothing compiled; no root; a home that cannot be written."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    needs: str = ""  # a flag of the processor
    place: str = ""
    own_python: bool = False  # in that place
    compiled: bool = True
    is_root: bool = True
    home: int = 0o700
    release: str = ""  # of Debian, made from nothing

    def lacks(self) -> str:
        """Why it cannot be tried here."""
        if self.release:
            return debian.lacking()
        return "" if self.needs in {"", *flags()} else f"no {self.needs} here"


def _blas(name: str, needs: str) -> Corner:
    return Corner(f"BLAS: {name}", {"OPENBLAS_CORETYPE": name}, needs)


CORNERS = (
    _blas("Prescott", "pni"), _blas("Nehalem", "sse4_2"), _blas("Sandybridge", "avx"), _blas("Haswell", "avx2"),
    _blas("Zen", "avx2"), _blas("SkylakeX", "avx512f"),
    *(Corner(f"BLAS: threads: {count}", {"OPENBLAS_NUM_THREADS": count}) for count in ("1", "2", "5")),
    Corner("NumPy without vector extensions", {"NPY_DISABLE_CPU_FEATURES": " ".join(
        name for name in __cpu_dispatch__ if __cpu_features__[name])}),
    Corner("no C compiler", {"CC": "false", "CXX": "false"}, place="without compiler", compiled=False),
    Corner("locale C, ASCII, Chatham time", {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0",
                                             "TZ": "Pacific/Chatham"}),
    Corner("a path with a space and an \u00e9", place="l\u00e0 bas \u00e9t\u00e9",
           own_python=True),
    Corner("not root", place="somebody's", is_root=False),
    Corner("not root, HOME read-only", place="nobody's", is_root=False, home=0o500),
    Corner("Debian 12 from nothing", release="bookworm", compiled=False),
    Corner("Debian 13 from nothing", release="trixie", compiled=False),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What pytest counted in a corner, what pip downloaded for it, and the end of what was printed."""

    corner: Corner
    counts: dict[str, int]
    seconds: float
    words: str
    megabytes: int = 0

    @property
    def good(self) -> bool:
        failed = set(self.counts) & {"failed", "error", "errors"}
        return self.counts.get("passed", 0) > 0 and not failed and self.megabytes < debian.MEGABYTES


def run(corner: Corner, part: str, folder: Path) -> Outcome:
    """The tests of a ``part``, "3/5", as that corner has them."""
    if corner.release:
        return _run_in_debian(corner, part, folder)
    root = _copied(corner, folder / corner.place) if corner.place else ROOT
    python = _python_at(root) if corner.own_python else sys.executable
    home = folder / "home"
    home.mkdir(exist_ok=True)
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "reference")]), "OMP_WAIT_POLICY": "passive",
        "LLAMADIFF_TESTS": part, "TMPDIR": str(temporary), **corner.variables,
    }  # fmt: skip
    before: list[str] = []
    if not corner.is_root:
        environment |= {"HOME": str(home), "XDG_CACHE_HOME": "", "USER": "nobody", "LOGNAME": "nobody"}
        if os.geteuid() == 0:
            before = _as_nobody()
            _give(folder)
    home.chmod(corner.home)
    command = [*before, python, "-m", "pytest", "-q", "-n", PROCESSES, "--dist", "worksteal", "-m", "not slow",
               "-o", "faulthandler_timeout=600", "-p", "no:cacheprovider", "tests"]  # fmt: skip
    started = time.monotonic()
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, check=False)
    out, err = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
    counts = {kind: int(count) for count, kind in SUMMARY.findall(out.splitlines()[-1] if out else "")}
    return Outcome(corner, counts, time.monotonic() - started, out[-20000:] + err[-2000:])


def _run_in_debian(corner: Corner, part: str, folder: Path) -> Outcome:
    started = time.monotonic()
    ran = debian.run(corner.release, folder / "debian", lambda place: _copied(corner, place), part)
    counted = [line for line in ran.words.splitlines() if re.search(r"^=+ .*\d+ passed", line)]
    counts = {kind: int(count) for count, kind in SUMMARY.findall("".join(counted[-1:]))}
    failed = {"failed": 1} if ran.code and "failed" not in counts else {}  # make did, somewhere else
    return Outcome(corner, counts | failed, time.monotonic() - started, ran.words[-20000:], ran.megabytes)


def _copied(corner: Corner, place: Path) -> Path:
    """What is under version control, somewhere else."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8"
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    for library in (ROOT / "llamadiff" / "numerics" / "compiled").glob("*.so") if corner.compiled else ():
        shutil.copy2(library, place / "llamadiff" / "numerics" / "compiled")
    return place


# As pip writes a command whose Python has a space in its path: a shell runs what Python takes for a string.
COMMAND = """#!/bin/sh
'''exec' {python} "$0" "$@"
' '''
import sys
from llamadiff.__main__ import main
sys.exit(main())
"""


def _python_at(root: Path) -> str:
    """An environment in that place, with the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    (packages,) = (root / ".venv" / "lib").glob("python*/site-packages")
    (packages / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n", "utf-8")
    python, command, go = (root / ".venv" / "bin" / name for name in ("python", "llamadiff", "go"))
    command.write_text(COMMAND.format(python=shlex.quote(str(python)).replace("'", '"')), "utf-8")
    command.chmod(0o755)
    go.symlink_to(Path(sys.executable).with_name("go"))
    return str(python)


def _as_nobody() -> list[str]:
    """Words that give up root. Where this Python lies in a home of root's, it may still be read."""
    words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    if subprocess.run([*words, sys.executable, "-c", start], capture_output=True, check=False).returncode:
        words += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    return words


def _give(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def flags() -> set[str]:
    """What this processor can."""
    return set(Path("/proc/cpuinfo").read_text("utf-8").split())


def table(outcomes: list[Outcome], left: dict[str, str]) -> str:
    """Markdown."""
    rows = [f"| {each.corner.name} | {'green' if each.good else 'RED'} | {_counted(each)} | {each.seconds:.0f} |"
            for each in outcomes]  # fmt: skip
    rows += [f"| {name} | not tried: {why} | | |" for name, why in left.items()]
    return "\n".join(["| corner | | tests | seconds |", "| --- | --- | --- | --- |", *rows])


def _counted(outcome: Outcome) -> str:
    counts = ", ".join(f"{count} {kind}" for kind, count in outcome.counts.items())
    return f"{counts}, {outcome.megabytes} MB by pip" if outcome.corner.release else counts


def main() -> None:
    """Run the corners and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corners", nargs="*", metavar="CORNER", help="a part of a corner's name")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--turn", type=int)
    options = parser.parse_args()
    chosen = [each for each in CORNERS if not options.corners or any(word in each.name for word in options.corners)]
    left = {each.name: why for each in chosen if (why := each.lacks())}
    able = [each for each in chosen if each.name not in left]
    if options.turn is not None:
        turn = options.turn % len(able)
        able, left = able[turn:] + able[:turn], {}
    outcomes: list[Outcome] = []
    for number, corner in enumerate(able):
        if options.turn is not None and outcomes:
            break
        part = f"{number % PARTS}/{PARTS}" if not options.whole and options.turn is None else "0/1"
        print(f"{corner.name} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
            try:
                outcomes.append(run(corner, part, Path(folder)))
            except MissingPartError as error:
                left[corner.name] = str(error)
                continue
        if not outcomes[-1].good:
            print(outcomes[-1].words, flush=True)
    print(table(outcomes, left))
    sys.exit(not all(outcome.good for outcome in outcomes))


if __name__ == "__main__":
    main()
