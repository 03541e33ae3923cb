"""A stranger's kernel, tried on a saved op and on cases around it, and judged on each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

import numpy as np

from llamadiff.ext.graph.check import NO_FUNCTION, open_places
from llamadiff.ext.graph.op import Array, Op, function_of
from llamadiff.ext.graph.repro import SavedInputs, load_inputs, save_inputs, save_results
from llamadiff.ext.replay.cases import Case, cases_of
from llamadiff.ext.replay.common import common_trait
from llamadiff.ext.replay.kernel_judged import Fit, Rounding, fit
from llamadiff.ext.replay.kernel_result import CaseRun, KernelRun, Place
from llamadiff.ext.replay.kernel_run import OP, Failed, Kernel, result_of
from llamadiff.ext.replay.shown import inputs_of
from llamadiff.judge.verdict import NODES, UNCHECKED, of_node, of_refusal
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress, silent

MOST_CASES = 100  # of an op
AT_ONCE, MOST_AT_ONCE = 64, 1 << 23  # cases in memory and on the disk at a time, and how many values they may have


@dataclass(frozen=True)
class Trial:
    """How kernels are tried: the seed that makes cases, the seconds for one, and a folder for those that are wrong."""

    seed: int = 0
    timeout: float = 60.0
    keep: Path | None = None
    progress: Progress = silent


@dataclass(frozen=True)
class _Posed:
    """A case with the right answer."""

    case: Case
    n: Op
    rounding: Rounding


def try_kernel(path: Path, kernel: Kernel, trial: Trial) -> KernelRun:
    """Run a kernel on a saved op and on the cases around it.

    Raises UserError for a file that is no op or of an op that cannot be judged, and for a kernel that gives nothing on
    the op as it was saved.
    """
    inputs = load_inputs(path)
    if function_of(inputs.op.name) is None:
        raise UserError(f"{path}: {NO_FUNCTION} {inputs.op.name} that could judge a kernel; give another op")
    runs = list[CaseRun]()
    posed = _posed(path, _cases(path, inputs, trial.seed))
    with scratch_directory() as place:
        for some in _at_once(posed):
            trial.progress(f"{kernel.spec[:60]}: case {len(runs) + 1}")
            for each, folder, failed in _ran(kernel, some, Path(place), trial.timeout):
                result = failed or result_of(folder, each.n)
                if isinstance(result, Failed) and not runs:
                    raise UserError(f"{path}: {kernel.spec} {result.says}; {result.meant}")
                runs.append(_judged(path, each, result, trial))
                rmtree(folder, ignore_errors=True)
    return KernelRun(
        path, inputs.name, inputs.op.name, kernel.spec, kernel.label, trial.seed, tuple(runs), common_trait(runs)
    )


def _cases(path: Path, inputs: SavedInputs, seed: int) -> Iterator[Case]:
    try:
        yield from cases_of(inputs, seed)
    except Exception as error:  # a file from a stranger may say of sizes and parameters anything
        raise _uncomputed(path, error) from None


def _uncomputed(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: cannot be computed ({type(error).__name__}: {str(error)[:200]}); save it anew")


def _at_once(posed: Iterable[_Posed]) -> Iterator[list[_Posed]]:
    """As many cases at a time as one process of a Python kernel gets."""
    some, values = list[_Posed](), 0
    for each in posed:
        some.append(each)
        values += sum(_sizes(each.n)) + each.rounding.plain.size
        if len(some) == AT_ONCE or values > MOST_AT_ONCE:
            yield some
            some, values = [], 0
    if some:
        yield some


def _posed(path: Path, cases: Iterable[Case]) -> Iterator[_Posed]:
    """Cases with what is right there; one that was generated and has no finite answer is left out."""
    for case in cases:
        n = case.op
        try:
            rounding = Rounding.of(n)
        except Exception as error:  # operands of a kind that the op's function does not take
            if case.number:
                continue
            raise _uncomputed(path, error) from None
        if not case.number or not (np.isnan(rounding.plain) | np.isposinf(rounding.plain)).any():
            yield _Posed(case, n, rounding)


def _ran(
    kernel: Kernel, posed: Sequence[_Posed], place: Path, timeout: float
) -> Iterator[tuple[_Posed, Path, Failed | None]]:
    folders = [place / str(each.case.number) for each in posed]
    for each, folder in zip(posed, folders, strict=True):
        folder.mkdir()
        save_inputs(folder / OP, each.case.inputs)
    yield from zip(posed, folders, kernel.run(folders, timeout), strict=True)


def _judged(path: Path, posed: _Posed, found: Array | Failed, trial: Trial) -> CaseRun:
    case, n = posed.case, posed.n
    common = (case.number, case.title, case.sizes, case.values, inputs_of(n), sum(_sizes(n)))
    if isinstance(found, Failed):
        return CaseRun(*common, of_refusal(died=not found.refused), problem=found.says, next_step=found.meant,
                       path=_kept(path, posed, None, trial))  # fmt: skip
    best = fit(n, found, posed.rounding)
    opened = int(open_places(n, posed.rounding.plain, found).sum()) if best.right.dtype.kind == "f" else 0
    verdict = of_node(float(best.beyond.max(initial=0.0)), 1.0, opened).verdict
    place = place_of(best) if (best.beyond > NODES).any() else None
    kept = _kept(path, posed, found, trial) if place is not None else None
    problem = f"gives {opened} values where NaN or Inf is right" if verdict == UNCHECKED else ""
    return CaseRun(*common, verdict, best.arithmetic, place, problem, path=kept)


def _sizes(n: Op) -> Iterator[int]:
    return (s.values.size for s in n.sources if s is not None)


def kept_name(path: Path, number: int, seed: int) -> str:
    """What a wrong case's file is called."""
    return f"{path.stem}-case{number:02d}-seed{seed}.safetensors"


def kept_names(paths: Iterable[Path], seed: int) -> list[str]:
    """Those of all cases that ops may have."""
    return list(dict.fromkeys(kept_name(path, number, seed) for path in paths for number in range(1, MOST_CASES)))


def _kept(path: Path, posed: _Posed, found: Array | None, trial: Trial) -> Path | None:
    """A wrong case in a file of its own, with what the kernel gave, if anything; the saved op has one."""
    if posed.case.number == 0:
        return path
    if trial.keep is None:
        return None
    target = trial.keep / kept_name(path, posed.case.number, trial.seed)
    right = posed.rounding.plain
    right = right.astype(np.float32) if right.dtype == np.float64 else right
    save_results(target, posed.case.inputs, right, np.zeros_like(right) if found is None else found)
    return target


def place_of(best: Fit) -> Place:
    """Where a result is wrong."""
    width = best.beyond.shape[-1]
    wrong = (best.beyond > NODES).reshape(-1, width)
    rows, columns = np.nonzero(wrong.any(axis=1))[0], np.nonzero(wrong.any(axis=0))[0]
    worst = np.unravel_index(int(best.beyond.argmax()), best.beyond.shape)
    first = int(rows[0])
    right, found, limit = (float(side[worst]) for side in (best.right, best.found, best.limits))
    return Place(
        int(wrong.sum()), wrong.size, first, int(np.nonzero(wrong[first])[0][0]), _span(rows, len(wrong), "row"),
        _span(columns, width, "column"), tuple(map(int, worst)), found, right, abs(found - right),
        float(np.sqrt(NODES * limit)),
    )  # fmt: skip


def _span(places: Array, count: int, word: str) -> str:
    """Which rows have something wrong, where not all have: ``row 32 alone``, ``rows 16 to 18``."""
    first, last = int(places[0]), int(places[-1])
    if len(places) == count:
        return ""
    if first == last:
        return f"{word} {first} alone"
    return f"{word}s {first} to {last}" if len(places) == last - first + 1 else f"{len(places)} of {count} {word}s"
