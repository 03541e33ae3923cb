"""kernels.c against NumPy, for every instruction set of this processor; and all that is judged without it."""

from __future__ import annotations

import ctypes
import subprocess
import time
from functools import cache, partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from llamaref import Weights, ops
from llamaref.weights import Across, Factor
from models.options import OPTIONS
from models.small import write_model
from once import once
from optional import needs, program

import llamadiff
from llamadiff.compiled import combined, decoder, library, maths, product, rounding, rows
from llamadiff.engines.reference_model import Model
from llamadiff.llamacpp.dequantize import Dequantizer
from llamadiff.numerics import metrics
from llamadiff.numerics.arithmetic import round_q8_k
from llamadiff.numerics.combinations import COUNT, Combinations, by_numbers
from llamadiff.numerics.extremes import extremes

SOURCE = Path(product.__file__).with_name("kernels.c")
NAME = "blk.0.ffn_down.weight"
EPS = np.finfo(np.float32).eps
SETS = ("any", "avx2", "avx512")
OWN = (
    SETS[: SETS.index(library.instructions() or "any") + 1] if program("cc") else ()
)  # that this processor has, and was compiled for
UNABLE = pytest.param("none", marks=pytest.mark.skip("no kernels with vectors here: apt install gcc; make install"))
KNOWN = ("Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "F16", "BF16", "F32")


def everywhere(monkeypatch, found):
    """This library in place of the installed one."""
    for module in (library, product, rounding, rows, decoder, maths):
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
        return library._declared(ctypes.CDLL(str(folder / "kernels.so")))

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
    """Those that have products."""
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


# -- products -------------------------------------------------------------------------------------------------------


def weights_of(path, kind, n_out, n_in, threads=2):
    """A file with one matrix of a type, of blocks that are finite."""
    number = gguf.GGMLQuantizationType[kind]
    drawn = np.random.default_rng(3).standard_normal((n_out, n_in)).astype(np.float32)
    if kind in ("F32", "F16"):
        data = drawn.astype(np.float16 if kind == "F16" else np.float32)
    elif kind in ("Q6_K", "Q4_K", "Q5_K", "IQ4_XS"):
        size = gguf.GGML_QUANT_SIZES[number][1]
        blocks = np.random.default_rng(4).integers(0, 256, (n_out, n_in // 256, size), np.uint8)
        scales = (0.01 * np.random.default_rng(5).standard_normal((n_out, n_in // 256, 2))).astype(np.float16)
        at = slice(size - 2, size) if kind == "Q6_K" else slice(0, 2 if kind == "IQ4_XS" else 4)
        blocks[..., at] = scales.view(np.uint8)[..., : at.stop - at.start]
        data = blocks.reshape(n_out, -1), number
    else:
        data = gguf.quants.quantize(drawn, number), number
    return Weights(write_model(path, kind="F32", tensors={NAME: data}), threads=threads)


def multiplied(weights):
    return Dequantizer(weights).multiplier(NAME)


def bound(x, w):
    """What float32 may leave of a product, in whatever order it is summed."""
    return 2 * w.shape[1] * EPS * (np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T)


@pytest.mark.parametrize("kind", KNOWN)
def test_products_are_numpys(wide, kind, tmp_path):
    for n_out, n_in in ((64, 256), (200, 768), (1, 512)) + (((65, 288), (130, 96)) if kind in KNOWN[:3] else ()):
        weights = weights_of(tmp_path / f"{n_out}.gguf", kind, n_out, n_in)
        exact, data, drawn = weights.whole(NAME), weights.stored(NAME), np.random.default_rng(0)
        for n in (1, 15, 16, 17, 48, 49, 100):
            x = drawn.standard_normal((n, n_in)).astype(np.float32)
            numbers = drawn.standard_normal((n_out, COUNT)).astype(np.float32)
            across = Across(numbers)
            (found,) = multiplied(weights)(data, [Factor(x, across=across)], weights._shared)
            assert (np.abs(found - x.astype(np.float64) @ exact.T) <= bound(x, exact)).all()
            (gathered,) = across.weights.values()
            assert (np.abs(gathered - exact.T.astype(np.float64) @ numbers) <= bound(exact.T, numbers.T)).all()


def test_a_column_is_the_same_whatever_stands_beside_it_and_whoever_computes(wide, tmp_path):
    path, drawn = tmp_path / "m.gguf", np.random.default_rng(0)
    several = [weights_of(path, "Q4_K", 900, 1024, threads) for threads in (1, 2, 5)]
    x, more = (drawn.standard_normal((n, 1024)).astype(np.float32) for n in (14, 70))
    numbers = drawn.standard_normal((900, COUNT)).astype(np.float32)
    found = []
    for weights in several:
        data, multiply, across = weights.stored(NAME), multiplied(weights), Across(numbers)
        alone = multiply(data, [Factor(x)], weights._shared)[0]
        beside = multiply(data, [Factor(more, across=across), Factor(x.reshape(2, 7, -1))], weights._shared)[1]
        assert np.array_equal(alone, beside.reshape(14, -1))
        found.append((alone, across.weights[0]))
    for alone, gathered in found[1:]:
        assert np.array_equal(alone, found[0][0])
        assert np.array_equal(gathered, found[0][1])


def test_rows_that_are_chosen_or_lie_apart_are_multiplied(wide, tmp_path):
    weights = weights_of(tmp_path / "m.gguf", "Q8_0", 96, 256)
    weights.multiplier = Dequantizer(weights).multiplier
    exact, x = weights.whole(NAME), np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    for some in (slice(5, 70), slice(0, 96, 3), [7, 7, 1]):
        found = weights.product(NAME, x, rows=some)
        assert (np.abs(found - x.astype(np.float64) @ exact[some].T) <= bound(x, exact[some])).all()


def test_what_it_does_not_multiply_it_leaves_to_numpy(wide, tmp_path):
    weights = weights_of(tmp_path / "m.gguf", "Q8_0", 96, 256)
    x, other = np.ones((2, 256), np.float32), Across(np.ones((96, COUNT + 1), np.float32))
    for factors in ([Factor(x, np.ones((2, 8), np.float32))], [Factor(x, across=other)],
                    [Factor(x, across=Across(np.ones((96, COUNT), np.float32)))] * 2):  # fmt: skip
        assert multiplied(weights)(weights.stored(NAME), factors, weights._shared) is None
    wide = Weights(weights.files[0], np.float64)
    wide.multiplier = lambda name: pytest.fail("float64 is NumPy's")
    assert wide.product(NAME, x.astype(np.float64)).dtype == np.float64


def test_values_that_are_not_finite_go_through(wide, tmp_path):
    weights = weights_of(tmp_path / "m.gguf", "F32", 70, 256)
    x = np.ones((4, 256), np.float32)
    x[1, 3], x[2, 5] = np.inf, np.nan
    found = multiplied(weights)(weights.stored(NAME), [Factor(x)], weights._shared)[0]
    assert np.isfinite(found[[0, 3]]).all()
    assert np.isinf(found[1]).all()
    assert np.isnan(found[2]).all()


def test_what_fails_beside_others_at_work_waits_for_them(tmp_path):
    """They write into memory that whoever asked them has."""
    weights, ended = weights_of(tmp_path / "m.gguf", "F32", 64, 256, threads=3), []

    def work():
        time.sleep(0.1)
        ended.append(True)

    def fail():
        raise ValueError

    weights.meanwhile = fail
    with pytest.raises(ValueError):  # noqa: PT011
        weights._shared(work, 3)
    assert ended == [True, True]


def test_a_processor_without_avx2_has_the_products_of_numpy(compiled, tmp_path):
    weights, none = weights_of(tmp_path / "m.gguf", "Q6_K", 64, 256), compiled == "any"
    found = multiplied(weights)(weights.stored(NAME), [Factor(np.ones((2, 256), np.float32))], weights._shared)
    assert (found is None) == (decoder.own("Q6_K") is None) == none


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

        return decoder.Decoder(off, 256, weights.stored(NAME).shape[-1])

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
        assert np.array_equal(rounding.rounded_to_q8_k(x), round_q8_k(x), equal_nan=True)
    assert rounding.rounded_to_q8_k(x[:, ::2]).shape == (64, 256)


# -- maths ----------------------------------------------------------------------------------------------------------


def some(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def same(found, right, **near):
    assert (found.dtype, found.shape) == (right.dtype, right.shape)
    np.testing.assert_allclose(found, right, **near)


NOT_FINITE = (np.inf, -np.inf, np.nan)


@pytest.mark.parametrize("width", [1, 7, 16, 33, 256, 1000])
def test_rms_norm_is_numpys(compiled, width):
    x, weight = 100 * some(2, 5, width), some(width, seed=1)
    x[0, 1], x[0, 2] = 0, 1e-30
    x[1, :3, 0] = NOT_FINITE
    with np.errstate(all="ignore"):
        same(maths.rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5), rtol=EPS)
        same(maths.rms_norm(x[:, ::2], weight, 0), ops.rms_norm(x[:, ::2], weight, 0), rtol=EPS)


@pytest.mark.parametrize("name", ["rope_pairs", "rope_halves"])
@pytest.mark.parametrize("turned", [1, 5, 8, 20])
def test_rope_is_numpys(compiled, name, turned):
    x, angles = some(2, 6, 3, 40), np.random.default_rng(1).uniform(-9, 9, (2, 6, turned))
    x[0, :3, 0, 0] = NOT_FINITE
    mine, right = getattr(maths, name), getattr(ops, name)
    for each in (angles, angles[0]):  # one set of angles a lane, or the same for all
        same(mine(x, np.cos(each), np.sin(each)), right(x, np.cos(each), np.sin(each)), rtol=EPS, atol=1e-6 * EPS)
    same(mine(x[..., ::2, :], np.cos(angles), np.sin(angles)), right(x, np.cos(angles), np.sin(angles))[..., ::2, :],
         rtol=EPS, atol=1e-6 * EPS)  # fmt: skip


@pytest.mark.parametrize("keys", [1, 5, 16, 70, 600])
def test_softmax_is_numpys(compiled, keys):
    before, queries = np.arange(keys), max(1, keys // 3)
    here = before[-queries:]
    for size in (1, 30, 300):  # so large that most probabilities are nothing
        scores = size * some(2, 3, queries, keys)
        found = maths.causal_softmax_of_many(scores, 0.125, here, before)
        same(found, ops.causal_softmax(scores, 0.125, here, before), rtol=1e-4, atol=1e-12)
        assert np.abs(found.sum(axis=-1, dtype=np.float64) - 1).max() < 4 * EPS
        assert not found[..., before > here[:, None]].any()
    scores[0, 0, :, 0], scores[0, 1, 0, :], scores[1, 2, :, :-1] = np.nan, -np.inf, -np.inf
    scores[1, 0, -1, 0] = np.inf
    with np.errstate(all="ignore"):
        found, right = (each.causal_softmax_of_many(scores, 0.125, here, before) for each in (maths, ops))
    same(found, right, rtol=1e-4, atol=1e-12)


def test_softmax_of_keys_in_no_order_or_with_sinks_is_numpys(compiled):
    scores, keys = some(1, 2, 4, 9), np.arange(9)
    for positions, sinks in ((keys[::-1], None), (keys, some(2))):
        found, right = (each.causal_softmax_of_many(scores, 1, keys[-4:], positions, sinks) for each in (maths, ops))
        assert np.array_equal(found, right)
    with np.errstate(all="ignore"):
        assert np.isnan(maths.causal_softmax_of_many(scores, 1, keys[:4], 2 + keys)[:, :, :2]).all()  # sees no key


@pytest.mark.parametrize("count", [1, 15, 16, 1000])
def test_swiglu_is_numpys(compiled, count):
    up = some(3, count, seed=1)
    for size in (1, 30, 1000):
        gate = size * some(3, count)
        same(maths.swiglu(gate, up), ops.swiglu(gate, up), rtol=8 * EPS, atol=1e-35)
    gate[:, 0], gate[:, -1] = NOT_FINITE, (0, -0.0, -87.5)
    with np.errstate(all="ignore"):
        same(maths.swiglu(gate, up), ops.swiglu(gate, up), rtol=8 * EPS, atol=1e-35)
        same(maths.swiglu(gate[:, ::2], up[:, ::2]), ops.swiglu(gate, up)[:, ::2], rtol=8 * EPS, atol=1e-35)


def test_the_exponential_is_right_to_its_last_digits(compiled):
    """Through swiglu, whose gate of -x and up of 1 / x give 1 / (1 + exp(x))."""
    x = np.linspace(1e-3, 80, 1 << 18).astype(np.float32)
    exact = -1 / (1 + np.exp(x.astype(np.float64)))
    found = maths.swiglu(-x, (1 / x.astype(np.float64)).astype(np.float32))
    assert np.abs(found / exact - 1).max() < 4 * EPS


def test_maths_of_other_types_is_numpys(compiled):
    x = some(2, 4, 2, 8)
    for kind in (np.float64, np.float16):
        wide = x.astype(kind)
        assert np.array_equal(maths.rms_norm(wide, wide[0, 0, 0], 1e-5), ops.rms_norm(wide, wide[0, 0, 0], 1e-5))
        assert np.array_equal(maths.swiglu(wide, wide), ops.swiglu(wide, wide))
        assert np.array_equal(maths.rope_pairs(wide, *np.ones((2, 4, 2))), ops.rope_pairs(wide, *np.ones((2, 4, 2))))
    assert np.array_equal(maths.rms_norm(x, x[0, 0], 1e-5), ops.rms_norm(x, x[0, 0], 1e-5))  # one weight a head


MATHS = ("rms_norm", "rope_pairs", "rope_halves", "causal_softmax_of_many", "swiglu")


def computed(by):
    """What functions make of float32."""
    x, here = some(1, 4, 2, 8), np.arange(4)
    cos, sin = np.cos(some(4, 4)), np.sin(some(4, 4))
    return [
        by.rms_norm(x, x[0, 0, 0], 1e-5), by.rope_pairs(x, cos, sin), by.rope_halves(x, cos, sin),
        by.causal_softmax_of_many(some(1, 2, 4, 4), 1, here, here), by.swiglu(x, x),
    ]  # fmt: skip


def test_the_engine_computes_with_what_is_compiled(compiled, small_model, monkeypatch):
    used = Model(small_model()).engine.ops
    assert {name for name, each in vars(used).items() if each is not vars(ops).get(name)} == set(MATHS)
    right = computed(ops)
    for name in MATHS:  # nor does any of them ask NumPy
        monkeypatch.setattr(ops, name, None)
    for found, expected in zip(computed(used), right, strict=True):
        np.testing.assert_allclose(found, expected, rtol=8 * EPS, atol=EPS)


def test_where_nothing_is_compiled_the_engine_computes_with_numpy(monkeypatch):
    everywhere(monkeypatch, None)
    for found, expected in zip(computed(maths.maths()), computed(ops), strict=True):
        assert np.array_equal(found, expected)


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


def test_combinations_are_numpys(compiled, monkeypatch):
    drawn = np.random.default_rng(0)
    x = drawn.standard_normal((1500, 200)).astype(np.float32)
    combinations = Combinations.within([slice(0, 1400), slice(1400, None)], len(x))
    numbers = combinations.of_channels(200)
    *found, look = combinations.both(x)
    found += [by_numbers(x[None], numbers), combinations.rows(x[None, :, :8])]
    assert combined.both(x.astype(np.float64), combinations.of_rows[0], numbers) is None
    assert (look is not None) == (compiled != "any")
    if look is not None:
        assert look.edges[1:] == (x.min(), x.max())
        assert look.edges[0] == pytest.approx(x.sum(dtype=np.float64), abs=1e-9)
        np.testing.assert_allclose(look.squares, np.square(x, dtype=np.float64).sum(axis=1), rtol=1e-13)
    everywhere(monkeypatch, None)
    *right, look = combinations.both(x)
    right += [by_numbers(x[None], numbers), combinations.rows(x[None, :, :8])]
    assert look is None
    for one, other in zip(found, right, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=1e-3)


# -- all of it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "kind", "n"), [
    ("llama", "Q4_0", 14), ("llama", "Q8_0", 250), ("moe", "Q8_0", 40), ("gemma2", "Q4_1", 9), ("qwen2", "F16", 200),
])  # fmt: skip
def test_the_same_is_said_without_it(arch, kind, n, tmp_path, monkeypatch):
    path = write_model(tmp_path / "m.gguf", **{"arch": arch, "kind": kind, **OPTIONS[arch]})
    tokens = [3 + i % 50 for i in range(n)]
    judge = partial(llamadiff.compare, path, tokens=tokens)
    fast = judge()
    everywhere(monkeypatch, None)
    slow = judge()
    assert (fast.verdict, fast.headline) == (slow.verdict, slow.headline)
    assert [row.tap for row in fast.rows] == [row.tap for row in slow.rows]
    for one, other in zip(fast.rows, slow.rows, strict=True):
        assert one.local.verdict == other.local.verdict == "match"
        assert max(one.local.nmse, other.local.nmse) < one.local.limit
