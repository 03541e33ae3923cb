"""A llama.cpp with BLAS (OpenBLAS, Apple's Accelerate): products of many tokens by floats that are not rounded.

A right run is right, whatever its batches; and no bug passes for the arithmetic of the other batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from explaining import CASES
from llamaref import Engine
from proof.injected.base import Injection
from proof.injected.runs import opened
from proof.strangers import engine as faulty
from proof.strangers.arithmetic import Arithmetic, half

from llamadiff.candidates.reference import Recorder
from llamadiff.numerics import cpu
from llamadiff.numerics.policies import NATIVE
from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import diff

X86 = "CPU : AVX2 = 1 | LLAMAFILE = 1 | "
MAC = "MTL : EMBED_LIBRARY = 1 | CPU : NEON = 1 | ARM_FMA = 1 | FP16_VA = 1 | LLAMAFILE = 1 | ACCELERATE = 1 | "
BATCHES = (40,), (33, 8), (32, 32, 1, 1), (7, 32, 31, 40)


class WithBlas(Recorder):
    """Records a run as such a llama.cpp computes it: of large batches nothing is rounded, of others what a CPU does."""

    def __init__(self, batches: tuple[int, ...]) -> None:
        super().__init__()
        ends = [*accumulate(batches, initial=0)]
        self.small = [slice(*of) for of in pairwise(ends) if of[1] - of[0] < 32]

    def operands(self, kind: str, *arrays: Any) -> tuple[Any, ...]:
        if kind not in cpu.PARTNER or not self.small:
            return arrays
        x, *others = (np.array(array) for array in arrays)
        (rounded, *_) = Carrier([(NATIVE, {})]).operands(kind, x)
        for rows in self.small:
            x[:, rows] = rounded[:, rows]
        return x, *others


def tokens_of(batches: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((37 * i + 5) % 90 for i in range(sum(batches)))


def recorded(engine: Engine, batches: tuple[int, ...], build: str = X86) -> Trace:
    recorder, tokens = WithBlas(batches), tokens_of(batches)
    engine.forward(tokens, tuple(range(len(tokens))), tap=recorder)
    return traced(recorder.arrays, batches, build)


def traced(taps: Mapping[str, Any], batches: tuple[int, ...], build: str = X86, name: str = "llama.cpp") -> Trace:
    kinds = {tap: "F32" if x.dtype.kind == "f" else "I32" for tap, x in taps.items()}
    more = {"n_prefill": batches[0], "batches": batches} if len(batches) > 1 else {"n_prefill": sum(batches)}
    said = {"name": name, "settings": {}, "build": build}
    return Trace(Info(tokens_of(batches), tuple(range(sum(batches))), producer=said, **more), taps, kinds)


def with_blas(kind: str) -> Arithmetic:
    """The same in an engine that shares no code with the judge."""
    rounded = {"F16": half, "Q8_0": avx_q8_0}[kind]
    return Arithmetic("BLAS", "", activations=lambda x: rounded(x) if len(x) < 32 else x)


def avx_q8_0(x: Any) -> Any:
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    most = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True), np.float32(1e-30))
    return (np.rint(blocks * (127 / most)) * half(most / 127)).reshape(x.shape)


@pytest.mark.parametrize("batches", BATCHES, ids=str)
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_right_run_is_right_in_any_batches(kind, batches, small_model):
    trace = recorded(Engine(small_model("llama", kind)), batches)
    result = diff(trace, trace, small_model("llama", kind))
    assert result.verdict == "match"
    assert max(row.local.nmse for row in result.rows) < 1e-12


def test_so_is_one_of_a_cpu_that_adds_float16_in_float16(small_model):
    """Apple's: BLAS adds in float32."""
    trace = recorded(Engine(small_model()), (40,), MAC)
    assert diff(trace, trace, small_model()).verdict == "match"


@pytest.mark.parametrize("batches", [(32, 32, 1, 1), (7, 32, 31, 40)], ids=str)
def test_they_are_told_apart_by_their_size(batches, small_model, monkeypatch):
    """As decode steps of one arithmetic they would be wrong."""
    trace = recorded(Engine(small_model("llama", "Q8_0")), batches)
    monkeypatch.setattr(cpu, "BLAS_ROWS", 1 << 20)
    assert diff(trace, trace, small_model("llama", "Q8_0")).verdict == "wrong"


def test_batches_of_a_kind_are_one():
    """An arithmetic for each batch would fit too much."""
    assert cpu.phases((0, 40), 40) == (slice(40, None), slice(0, 40))
    assert cpu.phases((0, 9, 10, 11), 9) == (slice(9, None), slice(0, 9))
    assert cpu.phases((0, 7, 14, 21), 21) == (slice(21, None), slice(0, 21))
    assert cpu.phases((0, 32, 64, 68, 69), 32) == (slice(64, None), slice(32, 64), slice(0, 32))


FAULTS = [
    (bug, kind) for bug, model, kind in CASES if model == "llama" and not (bug.harmless or bug.choice or bug.decode)
]


@pytest.mark.parametrize(
    ("bug", "kind"),
    [pytest.param(*case, id=f"{case[0].name}-{case[1]}", marks=[pytest.mark.slow] * (place % 6 > 0))
     for place, case in enumerate(FAULTS)],
)  # fmt: skip
def test_a_bug_on_top_is_found(bug: Injection, kind: str, small_model):
    path, batches = small_model("llama", kind), (33, 8)
    taps = faulty.Engine(opened(path), with_blas(kind), bug).run(tokens_of(batches), batches=batches)
    result = diff(recorded(Engine(path), batches), traced(taps, batches, name="mine"), path)
    assert result.verdict == "wrong"
    assert result.first_divergence.tap.partition("-")[0] in bug.words
