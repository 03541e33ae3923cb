"""The kill matrix: which test finds which mutant, and the fewest tests that find them all.

    python tests/tools/mutants.py follow                   the lines and the seconds of each test: an hour
    python tests/tools/mutants.py kill [--count N]         each mutant before tests that run it: seconds each
    python tests/tools/mutants.py choose                   tests/quick.json, which `make test` runs
    python tests/tools/mutants.py survivors                mutants that nothing found, to be looked at

A mutant is one edit of one expression. It is shown to the tests that run its line (or, where a file's import runs that,
the file), quick ones first, until two find it. The quick suite shows the most that its seconds can: each mutant that
anything finds, twice where two do; lines that are run, and functions of tests. What was found lies in build/mutants;
coverage is what has to be installed besides.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

sys.path[:0] = [str(Path(__file__).parents[1])]

from places import ROOT  # noqa: E402
from quick import CHOSEN, split_test_id  # noqa: E402

from tools.without import copied  # noqa: E402

FOLDER = ROOT / "build" / "mutants"
SOURCES = ("llamadiff", "reference/llamaref")
SEED = 1
KILLERS = 2  # that each mutant is to have
LEAST = 0.02  # seconds that any test costs: to be collected, named, reported
LINE, FUNCTION, MUTANT = 1.0, 5.0, 1000.0  # what it is worth that a line is run, a function of tests, a mutant found
BUDGET = 60.0  # seconds of tests that a mutant is shown to, by what they took before
PATIENCE = (40.0, 4.0)  # seconds before a mutant hangs: so many, and so many times what its tests took before
PART = re.compile(r" \((setup|call|teardown)\)$")  # of a test, as pytest says it to its children
NOT_SHOWN = ("tests/house/", "tests/prose/", "tests/tools/")  # they read the source, or start suites
RC = """[run]
source =
    {sources}
data_file = {folder}/lines
parallel = true
patch = _exit
context = ${{PYTEST_CURRENT_TEST}}
"""
# In every process that is followed: a child that is killed ends by itself first, so that its lines are written down.
START = """
import os
if os.environ.get("COVERAGE_PROCESS_START"):
    import contextlib, coverage, subprocess
    coverage.process_startup()
    kill = subprocess.Popen.kill
    def end_and_kill(process):
        if process.stdin is not None:
            with contextlib.suppress(Exception):
                process.stdin.close()
                process.wait(10)
        kill(process)
    subprocess.Popen.kill = end_and_kill
"""


@dataclass(frozen=True)
class Mutant:
    """One edit: what stands ``before`` at an offset of a file's bytes becomes ``after``."""

    file: str
    line: int
    offset: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.before} -> {self.after}"

    def apply(self, root: Path) -> None:
        """Write the file under ``root`` with this edit."""
        source = (ROOT / self.file).read_bytes()
        end = self.offset + len(self.before.encode())
        assert source[self.offset : end] == self.before.encode()
        (root / self.file).write_bytes(source[: self.offset] + self.after.encode() + source[end:])


# -- mutants -----------------------------------------------------------------------------------------------------------

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.MatMult: ast.Add,
}  # fmt: skip


def edits(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What may stand in a node's place, by mutation testing's usual operators."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in COMPARED:
            yield node, ast.Compare(left, [COMPARED[type(op)]()], right)
        case ast.BinOp(left, op, right) if type(op) in COMPUTED and not _is_text(left) and not _is_text(right):
            yield node, ast.BinOp(left, COMPUTED[type(op)](), right)
        case ast.BoolOp(op, values):
            yield node, ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield node, operand
        case ast.Constant(bool() as value):
            yield node, ast.Constant(not value)
        case ast.Constant(int() as value):
            yield node, ast.Constant(value + 1)
        case ast.Constant(float() as value):
            yield node, ast.Constant(value * 1.5 or 1.0)
        case ast.If(test) | ast.IfExp(test):
            yield test, ast.Constant(True)
            yield test, ast.Constant(False)
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            yield value, ast.Constant(None)
        case ast.Expr(ast.Call() as call):
            yield call, ast.Constant(None)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All of a file; none within annotations, which nothing runs."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        for old, new in edits(node):
            if old.end_lineno == old.lineno:
                offset = starts[old.lineno - 1] + old.col_offset
                before = source[offset : starts[old.lineno - 1] + (old.end_col_offset or 0)].decode()
                yield Mutant(str(path.relative_to(ROOT)), old.lineno, offset, before, f"({ast.unparse(new)})")
        for name, value in ast.iter_fields(node):
            if name not in {"annotation", "returns", "type_params"} and not isinstance(node, ast.JoinedStr):
                parts = value if isinstance(value, list) else [value]
                waiting += [part for part in parts if isinstance(part, ast.AST)]


def all_mutants() -> list[Mutant]:
    """Every edit of every file, in an order that chance decided once."""
    files = sorted(path for source in SOURCES for path in (ROOT / source).rglob("*.py"))
    found = sorted((each for path in files for each in mutants_of(path)), key=lambda each: each.name)
    random.Random(SEED).shuffle(found)
    return found


# -- following the tests -----------------------------------------------------------------------------------------------


def follow(words: Sequence[str]) -> int:
    """Run the tests with their lines written down."""
    site = FOLDER / "site"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(START, "utf-8")
    (FOLDER / "seconds").mkdir(exist_ok=True)
    sources = "\n    ".join(str(ROOT / source) for source in SOURCES)
    (FOLDER / "rc").write_text(RC.format(sources=sources, folder=FOLDER), "utf-8")
    env = {
        **os.environ, "COVERAGE_PROCESS_START": str(FOLDER / "rc"), "FOLLOWED": str(FOLDER / "seconds"),
        "LLAMADIFF_QUICK": "all",
        "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT, ROOT / "reference", ROOT / "tests"))),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.followed", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, check=False)
    subprocess.run([sys.executable, "-m", "coverage", "combine", "--rcfile", FOLDER / "rc", "-q"], cwd=ROOT, check=True)
    return done.returncode


def seconds() -> dict[str, float]:
    """Processor seconds of each test that passed, its children's too."""
    found: dict[str, float] = {}
    for path in sorted((FOLDER / "seconds").glob("*.jsonl")):
        for said in map(json.loads, path.read_text("utf-8").splitlines()):
            if said["outcome"] == "passed":
                found[said["test"]] = said["seconds"]
    return found


def lines() -> dict[str, set[tuple[str, int]]]:
    """The lines of each test."""
    from coverage import CoverageData

    data = CoverageData(str(FOLDER / "lines"))
    data.read()
    found: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for file in data.measured_files():
        name = str(Path(file).relative_to(ROOT))
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                found[PART.sub("", context)].add((name, line))
    found.pop("", None)
    return found


def tests_of_lines(took: Collection[str]) -> dict[tuple[str, int], set[str]]:
    """The tests to which a line matters: those that run it; those that run its file, where importing that runs it."""
    found = defaultdict[tuple[str, int], set[str]](set)
    for test, run in lines().items():
        if test in took and not test.startswith(NOT_SHOWN):
            for line in run:
                found[line].add(test)
    of_files = defaultdict[str, set[int]](set)
    for file, line in found:
        of_files[file].add(line)
    for file, own in of_files.items():
        called = own & {
            line for node in ast.walk(ast.parse((ROOT / file).read_bytes()))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
        }  # fmt: skip
        users = set[str]().union(*(found[file, line] for line in called))
        for line in own - called:
            found[file, line] |= users
    return found


# -- killing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fate:
    """What became of a mutant: the tests that it was shown to found it, or did not; ``all``: there are no others."""

    mutant: Mutant
    killers: Sequence[str]
    shown: int
    all: bool


def run_over(mutant: Mutant, tests: Collection[str], took: Mapping[str, float], place: Path) -> Fate:
    """Run tests over a mutant, until enough have found it."""
    chosen: list[str] = []
    spent = 0.0
    for test in sorted(tests, key=lambda each: (took[each], each)):
        if chosen and spent + took[test] > BUDGET:
            break
        chosen.append(test)
        spent += took[test] + LEAST
    mutant.apply(place)
    with tempfile.TemporaryDirectory() as said:
        env = {
            **os.environ, "FOLLOWED": said, "LLAMADIFF_QUICK": "all", "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (place, place / "reference", place / "tests"))),
        }  # fmt: skip
        named = Path(said) / "tests"
        named.write_text("\n".join(chosen), "utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.followed",
                   f"--maxfail={KILLERS}", f"--basetemp={said}/temporary", f"@{named}"]  # fmt: skip
        started = subprocess.Popen(command, cwd=place, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        try:
            started.wait(PATIENCE[0] + PATIENCE[1] * spent)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        outcomes = {}
        for path in Path(said).glob("*.jsonl"):
            for each in map(json.loads, path.read_text("utf-8").splitlines()):
                outcomes[each["test"]] = each["outcome"]
    (place / mutant.file).write_bytes((ROOT / mutant.file).read_bytes())
    if not outcomes and started.returncode not in (0, 1):  # nothing can be collected: whichever comes first
        outcomes = dict.fromkeys(chosen[:KILLERS], "failed")
    killers = [test for test, outcome in outcomes.items() if outcome not in {"passed", "skipped"}]
    return Fate(mutant, killers, len(outcomes), len(chosen) == len(tests))


def kill(count: int, workers: int) -> None:
    """Show the first ``count`` mutants that any test runs, but those that were shown before."""
    took = seconds()
    by_line = tests_of_lines(took)
    record = FOLDER / "fates.jsonl"
    known = {Mutant(**said["mutant"]).name for said in read(record)}
    mutants = [each for each in all_mutants() if by_line.get((each.file, each.line))][:count]
    todo = [each for each in mutants if each.name not in known]
    print(f"{len(mutants)} mutants, {len(todo)} to be shown", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, record.open("a", encoding="utf-8") as file:
        places = SimpleQueue[Path]()
        for number in range(workers):
            places.put(copied(Path(folder) / str(number)))

        def one(mutant: Mutant) -> Fate:
            place = places.get()
            try:
                return run_over(mutant, by_line[mutant.file, mutant.line], took, place)
            finally:
                places.put(place)

        with ThreadPoolExecutor(workers) as pool:
            for fate in pool.map(one, todo):
                file.write(json.dumps(asdict(fate)) + "\n")
                file.flush()
                print(f"{len(fate.killers)} of {fate.shown}  {fate.mutant.name}", flush=True)


def read(record: Path) -> list[dict[str, object]]:
    """The fates that are known."""
    return [json.loads(line) for line in record.read_text("utf-8").splitlines()] if record.is_file() else []


# -- choosing ----------------------------------------------------------------------------------------------------------


def cover(
    shows: Mapping[str, Collection[object]],
    cost: Mapping[str, float],
    wanted: Mapping[object, tuple[int, float]],
    budget: float,
) -> list[str]:
    """The tests that show most for their cost first, until the next one would be more than is left of the ``budget``.

    ``wanted``: how often a thing is to be shown, and what that is worth. Greedy (Chvatal 1979; Khuller, Moss and Naor
    1999 for a budget).
    """
    left = {thing: times for thing, (times, _) in wanted.items()}
    chosen: list[str] = []

    def worth(test: str) -> float:
        return sum(wanted[each][1] for each in shows[test] if left[each] > 0) / (cost[test] + LEAST)

    queue = [(-worth(test), test) for test in shows]
    heapq.heapify(queue)
    while queue:
        _, test = heapq.heappop(queue)
        now = worth(test)
        if now and queue and now < -queue[0][0]:
            heapq.heappush(queue, (-now, test))
        elif now and cost[test] + LEAST <= budget:
            budget -= cost[test] + LEAST
            chosen.append(test)
            for each in shows[test]:
                left[each] -= 1
    return chosen


def choose(budget: float) -> None:
    """Write tests/quick.json: of each function of tests the cases that are quick."""
    took, run = seconds(), lines()
    shows: dict[str, set[object]] = {test: set(run.get(test, ())) for test in took}
    wanted: dict[object, tuple[int, float]] = {line: (1, LINE) for its in shows.values() for line in its}
    for said in read(FOLDER / "fates.jsonl"):
        mutant = Mutant(**said["mutant"])
        for test in shows.keys() & said["killers"]:
            shows[test].add(mutant)
            wanted[mutant] = KILLERS, MUTANT
    for test, its in shows.items():
        file, function, _ = split_test_id(test)
        its.add((file, function))
        wanted[file, function] = 1, FUNCTION
        if file.startswith(NOT_SHOWN):  # they are about no line: each is its own reason
            its.add(test)
            wanted[test] = 1, FUNCTION
    chosen = cover(shows, took, wanted, budget)
    files: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for test in sorted(took):
        file, function, _ = split_test_id(test)
        files[file].setdefault(function, [])
    for test in sorted(chosen):
        file, function, case = split_test_id(test)
        files[file][function].append(case)
    kept = json.dumps(files, ensure_ascii=True, separators=(",", ":")).replace('},"tests/', '},\n"tests/')
    CHOSEN.write_text(f"{kept}\n", "utf-8")
    shown: set[object] = set().union(*(shows[test] for test in chosen))
    print(f"{len(chosen)} of {len(took)} tests, {sum(took[test] for test in chosen):.0f} of {sum(took.values()):.0f} s")
    for kind, about in ((Mutant, "mutants that something finds"), (tuple, "lines and functions")):
        of_kind = {each for each in wanted if isinstance(each, kind)}
        print(f"{len(of_kind & shown)} of {len(of_kind)} {about}")


def survivors() -> Iterable[str]:
    """Mutants that no test found of all that run their line."""
    for said in read(FOLDER / "fates.jsonl"):
        if not said["killers"]:
            yield f"{said['shown']}{'' if said['all'] else ' and more'}  {Mutant(**said['mutant']).name}"


def main() -> None:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("follow", "kill", "choose", "survivors"))
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=400.0, help="of a processor, that quick tests may take")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options, words = parser.parse_known_args()
    if options.step == "follow":
        sys.exit(follow(words))
    elif options.step == "kill":
        kill(options.count, options.workers)
    elif options.step == "choose":
        choose(options.seconds)
    else:
        print(*survivors(), sep="\n")


if __name__ == "__main__":
    main()
