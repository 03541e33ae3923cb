"""One unlisted mistake run and judged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from llamaref import Engine as Judging
from threadpoolctl import threadpool_limits

from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How
from llamadiff.result.comparison import Comparison
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import compare, diff
from proof.strangers import recording
from proof.strangers.arithmetic import BY_NAME
from proof.strangers.crossing import model_file, opened
from proof.strangers.engine import Engine
from proof.strangers.model import File
from proof.unlisted.bugs import TOKENS, Unlisted
from proof.unlisted.true import Op, is_true
from proof.unlisted.truth.op import numbers

Array = np.ndarray
INSIDE = re.compile(r"in (\S+-\d+) (.*)")  # what is said of a tap that was not recorded


@dataclass(frozen=True)
class Judged:
    """What the judge made of a mistake."""

    mistake: Unlisted
    comparison: Comparison
    file: File
    taps: Mapping[str, Array]
    arithmetic: str

    @property
    def tap(self) -> str | None:
        """The tap that leads the report."""
        return self.comparison.leading.tap if self.comparison.leading else None

    @property
    def causes(self) -> tuple[str, ...]:
        """What known bugs are said to have done, in these words."""
        return tuple(cause.says for d in self.comparison.diagnosis if d.tap == self.tap for cause in d.causes)

    @property
    def false(self) -> list[str]:
        """What was read back, of any tap, and does not hold."""
        right = Engine(self.file, BY_NAME[self.arithmetic]).run(TOKENS, given=self.taps)
        read = [(tap, fact) for d in self.comparison.diagnosis for tap, facts in d.read.items() for fact in facts]
        said = [(tap, fact, INSIDE.fullmatch(fact.says)) for tap, fact in read]
        inner = [(m[1], replace(fact, says=m[2])) if m else (tap, fact) for tap, fact, m in said]
        ops = [
            Op(self.file, tap, self.taps[tap], right[tap], self.taps, replace(fact, says=says), rows)
            for tap, fact in inner
            for says, rows in [_of_rows(fact.says)]
        ]
        return [f"{op.tap}: {op.fact.says}" for op in ops if not is_true(op, TOKENS)]

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is said of the leading error."""
        return self.comparison.profile


def _of_rows(says: str) -> tuple[str, tuple[int, ...] | None]:
    """What is said, and of which rows, if not of all."""
    if (found := re.fullmatch(r"(.*), from token (\d+) on alone", says)) is not None:
        return found[1], tuple(range(int(found[2]), len(TOKENS)))
    if (found := re.fullmatch(r"(.*), for tokens? (.*) alone", says)) is not None:
        return found[1], tuple(numbers(found[2]))
    return says, None


@lru_cache(maxsize=8)
def _baseline(path: Path) -> Trace:
    trace = record(Judging(path), TOKENS, "engine")
    return Trace(replace(trace.info, n_prefill=len(TOKENS)), {name: trace[name] for name in trace}, trace.dtypes)


def judged(mistake: Unlisted, folder: Path, arithmetic: str = "float32", shown: Sequence[str] = ("",)) -> Judged:
    """Record a run with the mistake, and have it judged by the taps that begin so."""
    path, taps, trace = _recorded(mistake, folder, arithmetic)
    if shown != ("",):
        recording.save(trace, recording.only(taps, shown), TOKENS)
    return Judged(mistake, diff(_baseline(path), trace, path), opened(path), taps, arithmetic)


def is_said(sentence: str, among: Iterable[str]) -> bool:
    """Whether a sentence is among others, but for last digits and the order of a sum's terms."""
    words, numbers = _words_and_numbers(sentence)
    return any(words == w and numbers == pytest.approx(n, rel=2e-3) for w, n in map(_words_and_numbers, among))


def _words_and_numbers(sentence: str) -> tuple[list[str], list[float]]:
    all_words = sentence.replace(",", "").split()
    numbers = [word for word in all_words if re.fullmatch(r"-?[\d.]+", word)]
    return sorted(word for word in all_words if word not in numbers), [float(number) for number in numbers]


def compared(mistake: Unlisted, folder: Path, engine: str) -> Comparison:
    """The same against llama.cpp, by another judge."""
    path, _, trace = _recorded(mistake, folder)
    return compare(path, TOKENS, candidate=trace, how=How(engine=engine))


def _recorded(mistake: Unlisted, folder: Path, arithmetic: str = "float32") -> tuple[Path, Mapping[str, Array], Path]:
    """A model, what an engine with the mistake records of it, and the trace of that."""
    path = model_file(folder, mistake.model, mistake.kind)
    with threadpool_limits(1, "blas"):
        taps = recording.without_cache(Engine(opened(path), BY_NAME[arithmetic], mistake.bug).run(TOKENS))
    return path, taps, recording.save(folder / "candidate.safetensors", taps, TOKENS)
