"""CPUs that add float16's numbers in float16: right runs are right to the last bit, and bugs on top are found.

The kernels are written here anew from ggml's sources (simd-mappings.h, vec.cpp, llamafile/sgemm.cpp), a step at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from explaining import INJECTED
from llamaref import Engine
from proof.injected.runs import opened
from proof.strangers import engine as faulty
from proof.strangers.arithmetic import BY_NAME

from llamadiff.candidates.reference import Recorder
from llamadiff.ext.cpus import half_sums
from llamadiff.ext.cpus.device import ON_CPU, replayed
from llamadiff.ext.cpus.half_sums import FIXED, WAYS, Lanes
from llamadiff.ext.graph.op import Op, Operand
from llamadiff.numerics import cpu
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import check, diff

M1 = "CPU : NEON = 1 | ARM_FMA = 1 | FP16_VA = 1 | DOTPROD = 1 | LLAMAFILE = 1 | REPACK = 1 | "
TOKENS = (1, 17, 5, 80, 42, 9, 33, 64, 5, 2, 71, 28)
PREFILL = 9


def fma(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """vfmaq_f16: a * b + total, rounded once."""
    return np.float16(total.astype(np.float64) + a.astype(np.float64) * b.astype(np.float64))


def eight(register: np.ndarray) -> np.ndarray:
    """The sum of a register of float16, in float32: low and high half, then neighbours."""
    quarter = np.float32(register[..., :4]) + np.float32(register[..., 4:])
    return (quarter[..., 0] + quarter[..., 1]) + (quarter[..., 2] + quarter[..., 3])


def by_rows(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """ggml_vec_dot_f16 of each row by each of w: four registers."""
    registers = [np.zeros((len(x), len(w), 8), np.float16) for _ in range(4)]
    whole = x.shape[1] // 32 * 32
    for start in range(0, whole, 32):
        for number in range(4):
            some = slice(start + 8 * number, start + 8 * number + 8)
            registers[number] = fma(registers[number], x[:, None, some], w[None, :, some])
    total = np.float64(eight((registers[0] + registers[2]) + (registers[1] + registers[3])))
    for channel in range(whole, x.shape[1]):
        total += np.float32(x[:, None, channel]) * np.float32(w[None, :, channel])
    return np.float32(total)


def by_tiles(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """tinyBLAS of llamafile: one register."""
    register = np.zeros((len(x), len(w), 8), np.float16)
    for start in range(0, x.shape[1], 8):
        register = fma(register, x[:, None, start : start + 8], w[None, :, start : start + 8])
    return eight(register)


def product(x: np.ndarray, w: np.ndarray, rows: int) -> np.ndarray:
    """x [row, in] by w [out, in], of which ``rows`` are run at once."""
    tiled = rows >= 8 and x.shape[1] % 8 == 0 and len(w) % 4 == 0
    return (by_tiles if tiled else by_rows)(np.float16(x), np.float16(w))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("channels", [32, 64, 96, 8, 40, 7])
@pytest.mark.parametrize("rows", [1, 7, 8, 12])
def test_a_product_is_what_the_kernels_give(channels, rows):
    x, w = np.float16(normal(rows, channels)), np.float16(normal(8, channels))
    lanes = cpu.lanes_of(cpu.IN_HALF_TILES, rows, channels, len(w))
    assert np.array_equal(Lanes(lanes).added(np.float32(w), np.float32(x)), product(x, w, rows))


def test_tiles_are_made_of_eight_rows_and_a_multiple_of_four_outputs():
    assert [cpu.lanes_of(cpu.IN_HALF_TILES, *shape) for shape in [(8, 64, 4), (7, 64, 4), (8, 64, 6), (8, 65, 4)]] == [
        8, 32, 32, 32,
    ]  # fmt: skip
    assert cpu.lanes_of(cpu.IN_HALF, 8, 64, 4) == 32
    assert cpu.lanes_of(cpu.IN_FLOAT, 8, 64, 4) == 0


@pytest.mark.parametrize(
    ("features", "sums"),
    [
        (M1, cpu.IN_HALF_TILES),
        ("CPU : NEON = 1 | FP16_VA = 1 | ", cpu.IN_HALF),
        ("CPU : NEON = 1 | FP16_VA = 0 | LLAMAFILE = 1 | ", cpu.IN_FLOAT),
        ("CPU : NEON = 1 | FP16_VA = 1 | SVE = 1 | SVE_CNT = 32 | LLAMAFILE = 1 | ", cpu.IN_FLOAT),
        ("CPU : AVX = 1 | AVX512 = 1 | LLAMAFILE = 1 | ", cpu.IN_FLOAT),
        ("", cpu.UNKNOWN),
    ],
)
def test_what_a_cpu_does_is_known_by_its_features(features, sums):
    assert cpu.sums_of(features) == sums


# nodes


def node(rows: int, channels: int = 96, outputs: int = 12) -> tuple[Op, np.ndarray]:
    w, x = np.float32(np.float16(normal(outputs, channels))), normal(rows, channels)
    n = Op("MUL_MAT", (1, 1, rows, outputs), "f32", b"", (Operand(w[None, None], "f16"), Operand(x[None, None])))
    return n, product(x, w, rows)[None, None]


@pytest.mark.parametrize("rows", [1, 5, 9])
def test_a_node_is_followed_to_the_last_bit(rows):
    n, found = node(rows)
    best = replayed(n, found, None, 1e-10, None)
    assert (best.nmse, best.rounding, best.arithmetic) == (0, 0, ON_CPU)


def experts() -> tuple[Op, np.ndarray]:
    w, x, ids = np.float32(np.float16(normal(3, 12, 96))), normal(9, 96), np.array([[0, 2], [1, 0], [2, 1]] * 3)
    sources = Operand(w[None], "f16"), Operand(x[None, :, None]), Operand(ids[None, None].astype(np.int32), "i32")
    found = np.stack([np.stack([product(row[None], w[i], 1)[0] for i in own]) for row, own in zip(x, ids, strict=True)])
    return Op("MUL_MAT_ID", (1, 9, 2, 12), "f32", b"", sources), found[None]


def test_experts_are_added_row_by_row():
    n, found = experts()
    assert replayed(n, found, None, 1e-10, None).nmse == 0


FAULTS = {
    "a weight is off by a thousandth": lambda x, w: (
        x,
        w * np.where(np.arange(w.size).reshape(w.shape) == 5, 1.002, 1),
    ),
    "the last channel is left out": lambda x, w: (x[:, :-1], w[:, :-1]),
    "the first row reads the second": lambda x, w: (x[[1, 1, *range(2, len(x))]], w),
    "a scale is a thousandth too large": lambda x, w: (x * 1.002, w),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rows", [5, 9])
def test_a_fault_below_the_loss_is_found(fault, rows):
    n, _ = node(rows)
    x, w = n.x(1)[0, 0], n.x()[0, 0]
    found = product(*FAULTS[fault](x, w), rows)
    best = replayed(n, found[None, None], None, 1e-10, None)
    assert best.nmse > 1e-9
    assert best.arithmetic != ON_CPU


def test_of_very_many_products_some_are_followed_and_the_rest_may_lose_as_much(monkeypatch):
    n, found = node(9, outputs=40)
    monkeypatch.setattr(half_sums, "MOST", 1)
    monkeypatch.setattr(half_sums, "LEAST", 16)
    best = replayed(n, found, None, 1e-10, None)
    assert best.rounding / 10 < best.nmse < 2 * best.rounding
    found[..., 3] *= np.float32(1.05)
    assert replayed(n, found, None, 1e-10, None).arithmetic != ON_CPU


# traces


class OnArm(Recorder):
    """Records a run as a CPU computes it that multiplies float16: decode steps after ``prefill`` tokens row by row."""

    def __init__(self, prefill: int) -> None:
        super().__init__()
        self.prefill = prefill

    def operands(self, kind: str, *arrays: Any) -> tuple[Any, ...]:
        if kind != "F16":
            return arrays
        return tuple(np.float32(np.float16(x)) if x.dtype.kind == "f" else x for x in arrays)

    def accumulate(self, y: Any, kind: str, parts: Any, start: int = 0, by_row: bool = False) -> Any:
        """What a fault adds to a right product stays, on top of what the kernel gives."""
        if kind != "F16":
            return y
        half, plain = np.array(y), np.array(y)
        for part in parts(0):
            x, w = part.x, np.float32(part.w)
            edges = [(i, i + 1) for i in range(len(x))] if by_row else [
                (0, self.prefill), *((i, i + 1) for i in range(self.prefill, len(x)))
            ]  # fmt: skip
            half[0][part.place] = np.concatenate([product(x[a:b], w, b - a) for a, b in edges])
            plain[0][part.place] = x @ w.T
        return np.where(np.isclose(y, plain, rtol=1e-4, atol=1e-5), half, y + (half - plain))


def recorded(engine: Engine, prefill: int = PREFILL, build: str = M1, name: str = "llama.cpp") -> Trace:
    recorder = OnArm(prefill)
    engine.forward(TOKENS, tuple(range(len(TOKENS))), tap=recorder)
    return traced(recorder.arrays, prefill, build, name)


def traced(taps: Any, prefill: int = PREFILL, build: str = M1, name: str = "llama.cpp") -> Trace:
    kinds = {tap: "F32" if x.dtype.kind == "f" else "I32" for tap, x in taps.items()}
    producer = {"name": name, "settings": {}, "build": build} if build else {"name": name}
    return Trace(Info(TOKENS, tuple(range(len(TOKENS))), prefill, None, producer, {}), taps, kinds)


class FaultyOnArm(faulty.Engine):
    """An engine that shares no code with the judge, on such a CPU."""

    def product(self, x: Any, stem: str) -> Any:
        router = stem == "ffn_gate_inp"  # of float32
        return x @ self.loaded(stem).T if router else super().product(x, stem)

    def multiplied(self, x: Any, w: Any) -> Any:
        return product(x, w, len(x))

    def experts(self, x: Any, stem: str, chosen: Any) -> Any:
        w = self.loaded(stem)
        each = [[product(x[t, n][None], w[e], 1)[0] for n, e in enumerate(row)] for t, row in enumerate(chosen)]
        return np.array(each)


@pytest.fixture(scope="module")
def right(small_model):
    """right(arch, prefill): the model's file, and a right run of it."""
    known: dict[tuple[str, int], tuple[Any, Trace]] = {}

    def of(arch: str, prefill: int = PREFILL) -> tuple[Any, Trace]:
        if (arch, prefill) not in known:
            path = small_model(arch, "F16")
            known[arch, prefill] = path, recorded(Engine(path), prefill)
        return known[arch, prefill]

    return of


@pytest.mark.parametrize("prefill", [PREFILL, 4])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "moe", "stablelm"])
def test_a_right_run_is_right_to_the_last_bit(arch, prefill, right):
    path, trace = right(arch, prefill)
    result = diff(trace, trace, path)
    assert result.verdict == "match"
    sums = ("ffn_out",) if arch == "moe" else ()  # of experts' results: no product
    products = [row for row in result.rows if row.op.startswith("MUL_MAT") and row.weight_type == "F16"]
    products = [row for row in products if row.tap.partition("-")[0] not in sums]
    assert {row.local.arithmetic for row in products} == {"F16, sums in F16"}
    assert max(row.local.nmse for row in products) < 1e-13
    assert max(row.local.limit for row in products) < 1e-9


def test_the_same_run_of_a_cpu_that_adds_in_float32_is_wrong(right):
    """No limit is wider than it was."""
    path, trace = right("llama")
    x86 = trace.under(replace(trace.info, producer={**trace.info.producer, "build": "CPU : AVX2 = 1 | LLAMAFILE = 1"}))
    assert diff(x86, trace, path).headline.startswith("llama.cpp's Qcur_proj-0 is off on its own inputs")
    assert "off" not in diff(trace, trace, path).headline


def test_where_llama_cpp_does_not_say_how_it_adds_nothing_is_wrong(right):
    """Nor is it taken for right: what float32 does not give is UNCHECKED."""
    path, trace = right("llama")
    silent = trace.under(replace(trace.info, producer={**trace.info.producer, "build": ""}))
    alone = check(silent, path)
    assert alone.verdict == "unchecked"
    assert {row.weight_type for row in alone.rows if row.verdict == "unchecked"} == {"F16"}
    assert "adds float16's numbers is not known" in alone.headline
    assert check(trace, path).verdict == "match"


@pytest.mark.parametrize("prefill", [PREFILL, 4])
def test_an_engine_that_does_not_say_how_it_adds_shows_it(prefill, right):
    path, trace = right("llama", prefill)
    own = recorded(Engine(path), prefill, build="", name="mine")
    result = diff(trace, own, path)
    assert result.verdict == "match"
    assert "adds products of F16 numbers in float16" in result.summary
    assert max(row.local.nmse for row in result.rows) < 1e-13


@pytest.mark.parametrize("way", [way for way in FIXED if "lanes" not in way])
def test_a_way_is_known_from_what_it_gives(way):
    x, w = np.float32(np.float16(normal(6, 64))), np.float32(np.float16(normal(10, 64)))
    y = FIXED[way].added(w, x)
    kernel = half_sums.Kernel("")
    assert way in kernel.orders_shown(y, [half_sums.Matrix(w, x, ...)])
    assert kernel.orders_shown(x @ w.T, [half_sums.Matrix(w, x, ...)]) == set()
    assert way in WAYS


LARGE = "llama-large"  # its values are beyond float16, and so are its sums on such a CPU
BUGS = [
    case for case in INJECTED
    if case.values[1:] != (LARGE, "F16") and case.values[2] == "F16"
    and not (case.values[0].harmless or case.values[0].choice)
]  # fmt: skip
FEW = [case for place, case in enumerate(BUGS) if place % 4 == 0]


@pytest.mark.parametrize(("injection", "model", "kind"), [
    pytest.param(*case.values, marks=[] if case in FEW else pytest.mark.slow, id=case.id) for case in BUGS
])  # fmt: skip
def test_a_bug_on_such_a_cpu_is_found(injection, model, kind, right):
    path, trace = right(model)
    taps = FaultyOnArm(opened(path), BY_NAME["float32"], injection).run(TOKENS, PREFILL)
    result = diff(trace, traced(taps), path)
    assert result.verdict == "wrong"
    assert result.first_divergence.tap.partition("-")[0] in injection.words
