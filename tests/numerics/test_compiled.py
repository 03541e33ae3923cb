"""kernels.c against NumPy, for every instruction set of this processor; and all that is judged without it."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache, partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from models.matrix import NAME, weights_of
from models.options import OPTIONS
from models.small import write_model
from once import once
from optional import needs, program

import llamadiff
from llamadiff.llamacpp.dequantize import Dequantizer
from llamadiff.numerics import metrics
from llamadiff.numerics.arithmetic import round_q8_k
from llamadiff.numerics.compiled import decoder, library, rows
from llamadiff.numerics.extremes import extremes

SOURCE = Path(library.__file__).with_name("kernels.c")
SETS = ("any", "avx2", "avx512")
OWN = (
    SETS[: SETS.index(library.instructions() or "any") + 1] if program("cc") else ()
)  # that this processor has, and was compiled for
UNABLE = pytest.param("none", marks=pytest.mark.skip("no kernels with vectors here: apt install gcc; make install"))


def everywhere(monkeypatch, found):
    """This library in place of the installed one."""
    for module in (library, rows, decoder):
        monkeypatch.setattr(module, "library", lambda: found)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """kernels.c for one instruction set."""

    def compiled_for(name, folder):
        command = ["cc", "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-DONLY={name.upper()}"]
        subprocess.run([*command, str(SOURCE), "-o", str(folder / "kernels.so")], check=True)

    @cache
    def get(name):
        folder = once(tmp_path_factory, f"kernels-{name}", partial(compiled_for, name))
        return library._declare_functions(ctypes.CDLL(str(folder / "kernels.so")))

    return get


def use(name, built, monkeypatch):
    """Everything with the kernels of one instruction set, whichever this processor would choose."""
    everywhere(monkeypatch, built(name))
    return name


@pytest.fixture(params=OWN or [UNABLE])
def compiled(request, built, monkeypatch):
    return use(request.param, built, monkeypatch)


@pytest.fixture(params=OWN[1:] or [UNABLE])
def wide(request, built, monkeypatch):
    """Those that decode."""
    return use(request.param, built, monkeypatch)


@needs("cc")
def test_the_kernels_are_compiled_wherever_there_is_a_compiler():
    assert library.instructions() in SETS


@pytest.mark.parametrize("name", SETS)
def test_each_instruction_set_is_met_somewhere(name):
    if name not in OWN:
        pytest.skip(f"this processor, or its compiler, has no {name}: another one tests it")


def test_where_no_file_can_be_loaded_there_is_no_library(monkeypatch, tmp_path):
    library.library.cache_clear()
    try:
        monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
        assert library.library() is None
        ending = library.EXTENSION_SUFFIXES[0]
        (tmp_path / f"kernels{ending}").write_bytes(b"no library")
        library.library.cache_clear()
        assert library.library() is None
        assert library.instructions() is None
    finally:
        library.library.cache_clear()


# -- decoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "size", "at"), [("Q4_K", 144, 0), ("Q4_K", 144, 2), ("Q6_K", 210, 208)])
def test_every_scale_is_decoded_as_gguf_py_does(wide, kind, size, at):
    blocks = np.random.default_rng(0).integers(0, 256, (1 << 16, size), np.uint8)
    blocks[:, at : at + 2] = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    found = decoder.Decoder(decoder.own(kind), 256, size)(blocks)
    with np.errstate(all="ignore"):
        right = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(found, right, equal_nan=True)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_a_decoder_of_its_own_that_is_off_is_not_used(wide, kind, monkeypatch, tmp_path):
    weights = weights_of(tmp_path / "m.gguf", kind, 64, 256)
    assert Dequantizer(weights).decoder(NAME).function is decoder.own(kind)

    def wrong(self, kind):
        right = decoder.own(kind)

        def off(blocks, values, count):
            right(blocks, values, count)
            ctypes.cast(values, ctypes.POINTER(ctypes.c_float))[count - 1] += 1

        return decoder.Decoder(off, 256, weights.read_raw(NAME).shape[-1])

    monkeypatch.setattr(Dequantizer, "_own", wrong)
    dequantizer = Dequantizer(weights)
    assert dequantizer.decoder(NAME).function is not decoder.own(kind)
    assert (dequantizer.trusted, dequantizer.refused) == ({NAME}, set())  # ggml's is


# -- rounding -------------------------------------------------------------------------------------------------------


def test_rounding_to_q8_k_is_numpys(compiled):
    drawn = np.random.default_rng(0)
    x = (drawn.standard_normal((64, 512)) * np.exp(8 * drawn.standard_normal((64, 1)))).astype(np.float32)
    x[0] = 0
    x[1] = np.round(x[1])  # largest values that occur several times, of either sign
    x[2, :6] = [3, -3, 1.5, -1.5, 0.5, 2]
    x[2, 6:] = 0
    x[3, :6] = [-3, 3, 1.5, -1.5, 0.5, 2]
    x[3, 6:] = 0
    x[4], x[5, 7], x[6, 9], x[7, 300] = 1e-42, np.inf, np.nan, -np.inf
    x[8] = np.arange(512) - 254.5  # halves of steps
    with np.errstate(all="ignore"):
        assert np.array_equal(decoder.rounded_to_q8_k(x), round_q8_k(x), equal_nan=True)
    assert decoder.rounded_to_q8_k(x[:, ::2]).shape == (64, 256)


# -- comparing ------------------------------------------------------------------------------------------------------


def layouts():
    """Tensors of many layouts, each beside one that is nearly the same, as Rows see them."""
    drawn = np.random.default_rng(0).standard_normal
    for width in (1, 7, 8, 9, 31, 64, 1000):
        yield drawn((5, width)).astype(np.float32)
    whole = drawn((4, 6, 40)).astype(np.float32)
    yield whole
    yield np.moveaxis(whole, 1, 0)  # scores [head, query, key] by queries
    yield whole[:, :, :33]
    yield np.moveaxis(whole, 1, 0)[:, :, 3:20]
    yield whole[:, ::2, ::2]
    yield whole[:, :, ::2]
    yield whole[:, :3]
    yield whole[1:3, 2]
    yield np.moveaxis(whole, 0, 2)
    yield drawn((300, 1200)).astype(np.float32)  # more than one block of metrics.Rows


def test_what_rows_are_asked_is_what_numpy_finds(compiled, monkeypatch):
    noise = np.random.default_rng(1).standard_normal
    for a in layouts():
        b = (a + 1e-3 * noise(a.shape)).astype(np.float32)
        gaps = rows.gaps(a, b)
        left, right = (x.astype(np.float64).reshape(len(a), -1) for x in (a, b))
        np.testing.assert_allclose(gaps.squares, ((left - right) ** 2).sum(axis=1), rtol=1e-13)
        assert (gaps.largest, gaps.place) == (np.abs(left - right).max(), np.abs(left - right).argmax())
        for found, wide in ((rows.look(a), left), (gaps.left, left), (gaps.right, right)):
            total, *ends = found.edges
            np.testing.assert_allclose(found.squares, (wide**2).sum(axis=1), rtol=1e-13)
            assert ends == [wide.min(), wide.max()]
            assert total == pytest.approx(wide.sum(), abs=1e-12 * np.abs(wide).sum())


@pytest.mark.parametrize("count", [1, 7, 64, 1000])
def test_moments_are_numpys(compiled, count, monkeypatch):
    x = (np.random.default_rng(count).standard_normal((3, count)) ** 3 + 0.3).astype(np.float32)
    x[1] *= -1
    mean = float(x.mean(dtype=np.float64))
    found = extremes(x, mean)
    assert rows.moments(x, mean) is not None
    unseen = x.copy()
    for value in (np.nan, np.inf, -np.inf):
        unseen[2, -1] = value
        assert extremes(unseen, mean) is None
    everywhere(monkeypatch, None)
    right = extremes(x, mean)
    assert (found.peak, found.token, found.channel, found.times) == (
        right.peak, right.token, right.channel, right.times
    )  # fmt: skip
    assert found.kurtosis == pytest.approx(right.kurtosis, rel=1e-12)


def test_values_it_does_not_know_are_left_to_numpy(compiled):
    x = np.zeros((4, 6), np.float32)
    for other in (x.astype(np.float16), x.astype(np.float64), x[:0]):
        assert rows.look(other) is None
        assert rows.gaps(other, other) is None
        assert rows.moments(other, 0.0) is None
    assert rows.moments(x[:, ::2], 0.0) is None


def findings(a, b):
    """All that a comparison asks of two tensors."""
    c, d = metrics.Rows(a), metrics.Rows(b)
    return metrics.difference_of(c, d), metrics.stats(c), metrics.stats(d)


def test_a_comparison_is_the_same_without_it(monkeypatch):
    """Also of what is not finite, on one side or on both, and of sides of very unlike sizes."""
    drawn, cases = np.random.default_rng(2), []
    for a in layouts():
        b = (a + 1e-3 * drawn.standard_normal(a.shape)).astype(np.float32)
        cases.append((a, b))
        for value, other in ((np.inf, 1), (np.nan, np.nan), (np.inf, np.inf), (1, -np.inf)):
            c, d = a.copy(), b.copy()
            c[0].reshape(-1)[0], d[0].reshape(-1)[0] = value, other
            cases.append((c, d))
        cases += [(a, a), (a, 0 * a), (1e20 * a, b), (a, -a)]
    with np.errstate(all="ignore"):
        fast = [findings(*case) for case in cases]
        everywhere(monkeypatch, None)
        for (found, *own), case in zip(fast, cases, strict=True):
            right, *slow = findings(*case)
            assert found.nmse == pytest.approx(right.nmse, rel=1e-11)
            assert found.cosine == pytest.approx(right.cosine, abs=1e-9, nan_ok=True)
            assert found.per_token == pytest.approx(right.per_token, rel=1e-11)
            assert (found.max_abs, found.worst) == (right.max_abs, right.worst)
            assert found.mean_drift == pytest.approx(
                right.mean_drift, rel=1e-6, abs=1e-15 * float(np.nanmax(np.abs(case)))
            )
            for one, other in zip(own, slow, strict=True):
                assert (one.min, one.max, one.nan, one.inf) == (other.min, other.max, other.nan, other.inf)
                assert (one.rms, one.mean) == pytest.approx((other.rms, other.mean), rel=1e-9)


# -- all of it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "kind", "n"), [
    ("llama", "Q4_0", 14), ("llama", "Q8_0", 250), ("moe", "Q8_0", 40), ("gemma2", "Q4_1", 9), ("qwen2", "F16", 200),
])  # fmt: skip
def test_the_same_is_said_without_it(arch, kind, n, tmp_path, monkeypatch):
    path = write_model(tmp_path / "m.gguf", **{"arch": arch, "kind": kind, **OPTIONS[arch]})
    tokens = [3 + i % 50 for i in range(n)]
    judge = partial(llamadiff.compare, path, tokens)
    fast = judge()
    everywhere(monkeypatch, None)
    slow = judge()
    assert (fast.verdict, fast.headline) == (slow.verdict, slow.headline)
    assert [row.tap for row in fast.rows] == [row.tap for row in slow.rows]
    for one, other in zip(fast.rows, slow.rows, strict=True):
        assert one.local.verdict == other.local.verdict == "match"
        assert max(one.local.nmse, other.local.nmse) < one.local.limit
