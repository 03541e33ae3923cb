"""One run of a stranger held to the judge: the models, what is true of the run, and what was made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from llamaref import Engine as Judging
from models.options import OPTIONS
from models.small import write_model
from threadpoolctl import threadpool_limits

from llamadiff.candidates.reference import record
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import How
from llamadiff.result.comparison import Comparison
from llamadiff.result.rows import Row
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import parse
from llamadiff.verbs.verbs import diff
from proof.injected import BUGS
from proof.injected.base import TOKENS, Injection
from proof.strangers import recording
from proof.strangers.arithmetic import BY_NAME, Arithmetic, bfloat, half
from proof.strangers.engine import NONE, Bug, Engine, is_scores
from proof.strangers.model import File, read

Array = np.ndarray
EVERY_KIND = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
RIGHT_MODELS = ("llama", "qwen2", "qwen3", "moe")
SHAPES = {"dense": (), "sparse": recording.SPARSE, "logits": recording.LOGITS}
INFLATED = 4.0  # how much more may be stated to hide in a wrong trace than in the same without what is wrong
# NMSE of what no report can see: float32 sums in another order, and one rounding to 16 bits
ROUNDING = {"f32": 1e-10, "f16": 2.0**-22 / 3, "bf16": 2.0**-16 / 3}
PEAK = 8.0  # how many times the rms a tap's largest values are
NOTHING = 1e-14  # an op's error that is none: what float32 leaves where an engine computes in float64


# -- models --------------------------------------------------------------------------------------------------------


def model_file(folder: Path, model: str, kind: str, seed: int = 1) -> Path:
    """A small model, written once."""
    path = folder / f"{model}.{kind}.{seed}.gguf"
    if path.exists():
        return path
    if kind not in ("Q4_K", "Q6_K"):
        return write_model(path, kind=kind, seed=seed, **OPTIONS[model])
    shapes = model_file(folder, model, "F32", seed)
    tensors = {
        name: (_blocks(values.shape, kind, seed), gguf.GGMLQuantizationType[kind])
        for name, values in read(shapes).tensors.items()
        if values.ndim > 1 and "ffn_gate_inp" not in name
    }
    return write_model(path, kind="F32", seed=seed, **{**OPTIONS[model], "tensors": tensors})


def _blocks(shape: tuple[int, ...], kind: str, seed: int) -> Array:
    """Bytes of random blocks of a K type, which gguf-py cannot make: weights of about 1 / sqrt(in)."""
    rng = np.random.default_rng([seed, *shape])
    count, size = int(np.prod(shape)) // 256, {"Q4_K": 144, "Q6_K": 210}[kind]
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    typical = {"Q4_K": 1 / 250, "Q6_K": 1 / 1370}[kind] / np.sqrt(shape[-1])
    d = (typical * rng.uniform(0.7, 1.3, count)).astype(np.float16).view(np.uint8).reshape(count, 2)
    if kind == "Q4_K":
        blocks[:, :2], blocks[:, 2:4] = d, (d.view(np.float16) * np.float16(7.5)).view(np.uint8)
    else:
        blocks[:, -2:] = d
    return blocks.reshape(*shape[:-1], -1)


@lru_cache(maxsize=32)
def opened(path: Path) -> File:
    return read(path)


@lru_cache(maxsize=64)
def baseline(path: Path, tokens: tuple[int, ...], n_prefill: int) -> Trace:
    """The trusted trace: the package's own engine's."""
    trace = record(Judging(path), tokens, "engine")
    return Trace(replace(trace.info, n_prefill=n_prefill), {name: trace[name] for name in trace}, trace.dtypes)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Tokens: those of the other tests, or random ones."""
    if seed == 0 and length <= len(TOKENS):
        return TOKENS[:length]
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 96, length))


# -- one run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Case:
    """A stranger's run: everything that decides it. ``shape``: which taps are recorded (SHAPES)."""

    arithmetic: Arithmetic
    model: str = "llama"
    kind: str = "F16"
    bug: str | None = None
    shape: str = "dense"
    seed: int = 0
    length: int = len(TOKENS)
    decode: int = 0
    precision: str = "f32"
    model_seed: int = 1

    def __repr__(self) -> str:
        return self.name

    @property
    def injection(self) -> Injection | None:
        return BUGS[self.bug] if self.bug else None

    @property
    def name(self) -> str:
        words = [self.arithmetic.name, self.bug, self.model, self.kind, self.shape, self.precision]
        words += [f"s{self.seed}"] * bool(self.seed) + [f"n{self.length}"] * (self.length != len(TOKENS))
        words += [f"d{self.decode}"] * bool(self.decode) + [f"m{self.model_seed}"] * (self.model_seed != 1)
        return " | ".join(word for word in words if word)


class Size(NamedTuple):
    """Of an error: the NMSE of the tensor and of the worst row, and the worst value's, in the tap's rms."""

    whole: float
    row: float
    value: float

    def with_room_for(self, precision: str) -> Size:
        """At least what the roundings of one tap to 16 bits may be taken for, if it is kept in them."""
        once = ROUNDING[precision]
        room = Size(once, once, float(PEAK * np.sqrt(once)))
        return self if precision == "f32" else Size(*map(max, self, room))

    def above(self, limits: Size, factor: float = 1.0) -> bool:
        """Whether any of the three is beyond ``factor`` times its limit."""
        return not all(size <= factor * limit for size, limit in zip(self, limits, strict=True))


@dataclass(frozen=True, repr=False)
class Outcome:
    """What the judge made of a run. ``truth``: the error that the bug makes at each tap, against the right op under the
    same arithmetic, on the same inputs. ``untouched``: what is stated to hide in a right run of that arithmetic."""

    case: Case
    comparison: Comparison
    truth: Mapping[str, Size]
    untouched: Mapping[str, Size]

    def __repr__(self) -> str:
        return self.case.name

    @property
    def first(self) -> Row | None:
        return self.comparison.first_divergence

    @property
    def faulty(self) -> dict[str, Size]:
        """The taps that the bug is at."""
        return {name: size for name, size in self.truth.items() if size.above(Size(NOTHING, np.inf, np.inf))}

    @property
    def due(self) -> Row | None:
        """The first tap whose error is above what could hide there."""
        return next((row for row in self.comparison.rows if self._is_due(row)), None)

    def _is_due(self, row: Row) -> bool:
        size, right = self.truth.get(row.tap), self.untouched.get(row.tap)
        return size is not None and (size.above(stated(row)) or (right is not None and size.above(right, INFLATED)))

    @property
    def accused(self) -> str | None:
        """The first tap that is called wrong, where it is a right one."""
        return self.first.tap if self.first and self.first.tap not in self.faulty else None

    @property
    def beside(self) -> tuple[str, ...]:
        """Right taps that are called wrong beside the bug's."""
        return tuple(row.tap for row in self.comparison.wrong if row.tap not in self.faulty)

    @property
    def missed(self) -> str | None:
        """A tap that should have been the first to be called wrong, at the latest."""
        names = [row.tap for row in self.comparison.rows]
        if self.due is None or (self.first and names.index(self.first.tap) <= names.index(self.due.tap)):
            return None
        return self.due.tap

    @property
    def causes(self) -> tuple[str, ...]:
        """What the first wrong tap's cause is called: several, where they are the same on this model."""
        found = next((d for d in self.comparison.diagnosis if self.first and d.tap == self.first.tap), None)
        return tuple(cause.name for cause in found.causes) if found else ()

    @property
    def misnamed(self) -> bool:
        """Whether a bug that is found at its tap is called by other bugs' names alone."""
        injection = self.case.injection
        if injection is None or self.first is None or self.first.tap not in self.faulty or not self.causes:
            return False
        return injection.cause not in {name for cause in self.causes for name in cause.split(" + ")}


def stated(row: Row) -> Size:
    """What the report says could hide in a tap."""
    if row.local is None:
        return Size(np.inf, np.inf, np.inf)
    return Size(row.local.hides, row.local.hides_row, row.local.hides_value)


def applies(arithmetic: Arithmetic, bug: Bug, model: str) -> bool:
    """Whether an engine with this arithmetic can have the bug. On a model of large values sums in float16 overflow."""
    if model == "llama-large" and arithmetic.name.startswith("half sums"):
        return False
    return bug.needs.isdisjoint(arithmetic.lacks) and (not arithmetic.only or model in arithmetic.only)


def bug_of(case: Case) -> Bug:
    return BUGS[case.bug] if case.bug else NONE


def taps_of(case: Case, path: Path) -> dict[str, Array]:
    """What the stranger records of a run."""
    taps = Engine(opened(path), case.arithmetic, bug_of(case)).run(*_tokens(case))
    if SHAPES[case.shape]:
        return recording.only(taps, SHAPES[case.shape])
    return taps if case.seed % 2 else recording.without_cache(taps)


def _tokens(case: Case) -> tuple[tuple[int, ...], int]:
    return prompt(case.seed, case.length), case.length - _decode(case)


def _decode(case: Case) -> int:
    return case.injection.decode if case.injection is not None else case.decode


def truth_of(case: Case, path: Path, taps: Mapping[str, Array]) -> dict[str, Size]:
    """Every tap against the right engine of the same arithmetic on the same recorded inputs."""
    if case.bug is None:
        return {}
    right = Engine(opened(path), case.arithmetic).run(*_tokens(case), given=taps)
    return {name: size_of(values, right[name], name) for name, values in taps.items() if name in right}


def size_of(values: Array, right: Array, name: str) -> Size:
    """How far values are from right ones, where they are defined; infinite where one side alone is not finite."""
    a, b = (np.asarray(side, np.float64).reshape(values.shape) for side in (values, right))
    if name.startswith("kq-"):
        seen = np.tri(a.shape[1], a.shape[2], a.shape[2] - a.shape[1], dtype=bool)
        a, b = np.where(seen, a, 0), np.where(seen, b, 0)
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        gap = np.where(same, 0, np.nan_to_num((a - b) ** 2, nan=np.inf))
        square = np.where(np.isfinite(b), b, 0) ** 2
        axis = int(is_scores(name))
        error, reference = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1).sum(axis=1) for x in (gap, square))
        rows = [_ratio(float(e), float(r)) for e, r in zip(error, reference, strict=True)]
        whole, typical = _ratio(float(error.sum()), float(reference.sum())), float(reference.sum()) / b.size
        return Size(whole, max(rows), float(np.sqrt(_ratio(float(gap.max()), typical))))


def _ratio(error: float, reference: float) -> float:
    return 0.0 if error == 0 else error / reference if reference else np.inf


def nmse(values: Array, right: Array, name: str) -> float:
    """sum((a-b)^2) / sum(b^2) of what is defined."""
    return size_of(values, right, name).whole


def judged(case: Case, folder: Path, diagnose: bool = True) -> Outcome:
    """Record a run, and have it judged; without ``diagnose`` causes are looked for only where a right op is accused,
    which a harmless one may explain."""
    path = model_file(folder, case.model, case.kind, case.model_seed)
    with threadpool_limits(1, "blas"):  # such small products gain nothing from two
        taps = taps_of(case, path)
        truth = truth_of(case, path, taps)
    right = stated_when_right(replace(case, bug=None, decode=_decode(case)), folder) if case.bug else {}
    right = {name: size.with_room_for(kept_in(taps[name])) for name, size in right.items() if name in taps}
    tokens, n_prefill = _tokens(case)
    trace = recording.save(folder / "candidate.safetensors", taps, tokens, n_prefill, case.precision)
    right_trace = baseline(path, tokens, n_prefill)
    outcome = Outcome(case, diff(right_trace, trace, path, how=How(diagnose=diagnose)), truth, right)
    if diagnose or not outcome.beside:
        return outcome
    return replace(outcome, comparison=diff(right_trace, trace, path))


def rounding_of(case: Case, folder: Path) -> dict[str, float]:
    """How far a right run's ops are from exact ones of the same layout, on the same recorded inputs: NMSE.

    At least what the precision explains in which a tap's values are kept, or those that it is computed from: no trace
    shows whether its engine went on with what was written, or with what was rounded for that. Where all recorded
    products have 16 bits, those that were not recorded may have them.
    """
    path = model_file(folder, case.model, case.kind, case.model_seed)
    taps = taps_of(case, path)
    exact = replace(BY_NAME["float64"], layout=case.arithmetic.layout, online=case.arithmetic.online)
    right = Engine(opened(path), exact).run(*_tokens(case), given=taps)
    floats = {name: values for name, values in taps.items() if values.dtype.kind == "f"}
    inputs = Model(path).inputs
    products = [ROUNDING[kept_in(values)] for name, values in floats.items() if is_product(name)]
    written = max(ROUNDING[case.precision], min(products, default=0.0))
    kept = {name: max(written, ROUNDING[kept_in(values)]) for name, values in floats.items()}

    def read(name: str) -> set[str]:
        """The recorded taps that one is computed from."""
        return {tap for i in inputs(parse(name)) for tap in ({i} if i in taps else read(i))}

    return {
        name: max(nmse(values, right[name], name), kept[name], *(kept.get(i, 0.0) for i in read(name)))
        for name, values in floats.items()
    }


def is_product(tap: str) -> bool:
    """Whether a tap is a product with weights."""
    found = parse(tap)
    return found is not None and found.kind.weight is not None and found.kind.op.startswith("MUL_MAT")


def kept_in(values: Array) -> str:
    """The coarsest precision that has all values."""
    values = values.astype(np.float32)
    for name, rounding in (("bf16", bfloat), ("f16", half)):
        if np.array_equal(rounding(values), values, equal_nan=True):
            return name
    return "f32"


@lru_cache(maxsize=256)
def stated_when_right(case: Case, folder: Path) -> dict[str, Size]:
    """What could hide in the taps of a right run, as its report says."""
    return {row.tap: stated(row) for row in judged(case, folder, diagnose=False).comparison.rows}


def kind_of(tap: str) -> str:
    found = parse(tap)
    return found.kind.word if found else tap
