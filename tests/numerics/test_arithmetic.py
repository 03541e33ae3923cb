"""The roundings against gguf-py's and ggml's own quantizers, and the metrics against their formulas."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from llamaref import ops
from llamaref.config import Rope

from llamadiff.numerics import arithmetic, eight_bits, halves, metrics
from llamadiff.numerics.angles import ggml_angles
from llamadiff.numerics.types import NUMBERS

RNG = np.random.default_rng(3)
X = (RNG.standard_normal((5, 512)) * np.exp(RNG.standard_normal((5, 1)))).astype(np.float32)


def test_16_bit_roundings():
    assert np.array_equal(halves.round_f16(X), X.astype(np.float16).astype(np.float32))
    quantized = gguf.quants.quantize(X, gguf.GGMLQuantizationType.BF16)
    assert np.array_equal(halves.round_bf16(X), gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType.BF16))
    assert np.isnan(halves.round_bf16(np.array([np.nan], np.float32))).all()
    assert np.isinf(halves.round_f16(np.array([1e6], np.float32))).all()


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_float16_is_rounded_to_the_nearest_even_number_down_to_its_smallest(kind):
    every = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(kind)
    ties = (every[:-1] + every[1:]) / 2
    x = np.concatenate([every, ties, np.nextafter(ties, kind(0)), np.nextafter(ties, kind(1e9)), [0.0, np.inf]])
    x = np.concatenate([x, -x]).astype(kind)
    assert halves.round_f16(x).tobytes() == x.astype(np.float16).astype(kind).tobytes()


def test_q8_0_is_gguf_pys_up_to_ties():
    quantized = gguf.quants.quantize(X, gguf.GGMLQuantizationType.Q8_0)
    expected = gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType.Q8_0)
    different = eight_bits.round_q8_0(X) != expected
    assert different.mean() < 0.002  # gguf-py rounds halves away from zero, and divides where ggml multiplies


def test_q8_k_keeps_the_peak_and_127_steps():
    rounded = arithmetic.round_q8_k(X).reshape(-1, 256)
    blocks = X.reshape(-1, 256)
    peak = np.abs(blocks).max(axis=1)
    assert np.abs(rounded).max(axis=1) == pytest.approx(peak, rel=1e-6)
    assert (np.abs(rounded - blocks).max(axis=1) <= peak / 127 * 0.501 + 1e-7).all()


@pytest.mark.parametrize(
    "rounding", [eight_bits.round_q8_0, arithmetic.round_q8_k, halves.round_bf16, halves.round_f16]
)
def test_zeros_stay_and_rounding_twice_changes_nothing(rounding):
    assert not rounding(np.zeros((2, 256), np.float32)).any()
    once = rounding(X)
    assert metrics.nmse(rounding(once), once, 0) < 1e-6


def test_q8_1_sums_are_the_error_of_a_sum_kept_in_float16():
    sums = eight_bits.q8_1_sums(X)
    assert sums.shape == (5, 16)
    exact = eight_bits.round_q8_0(X).reshape(5, 16, 32).sum(axis=2)
    assert np.abs(sums).max() > 0
    assert np.abs(sums).max() <= np.abs(exact).max() * 2.0**-9


def test_ggmls_angles_are_the_exact_ones_in_single_precision():
    for rope in (Rope(64, 10000.0), Rope(64, 5e5, factor=4.0, yarn=True, n_ctx_orig=512), Rope(32, 1e4, factor=2.0)):
        positions = np.arange(0, 200, 7)
        factors = np.linspace(1, 4, rope.n_rot // 2)
        for exact, rounded in zip(
            ops.rope_angles(rope, positions, factors), ggml_angles(rope, positions, factors), strict=True
        ):
            assert rounded.dtype == np.float32
            assert rounded == pytest.approx(exact, abs=200 * 1e-6)
            assert np.abs(rounded - exact).max() > 0


@pytest.mark.parametrize(("x", "kind"), [(X, "f32"), (halves.round_f16(X), "f16"), (halves.round_bf16(X), "bf16")])
def test_the_precision_of_a_dump_is_seen(x, kind):
    assert arithmetic.precision(x) == kind


def test_difference_is_its_formulas():
    b = np.array([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
    c = b + np.array([[0.1, 0.0, 0.0], [0.0, -0.3, 0.0]])
    d = metrics.difference(c, b, 0)
    assert d.nmse == pytest.approx(0.1 / 91)
    assert d.per_token == pytest.approx((0.01 / 14, 0.09 / 77))
    assert d.cosine == pytest.approx((b * c).sum() / np.sqrt((b * b).sum() * (c * c).sum()))
    assert d.max_abs == pytest.approx(0.3)
    assert d.mean_drift == pytest.approx(-0.2 / 6)
    assert (d.worst.token, d.worst.index, d.worst.baseline, d.worst.candidate) == (1, (1, 1), 5.0, 4.7)


def test_rows_run_along_the_axis_given():
    b, c = np.ones((2, 3, 4)), np.ones((2, 3, 4))
    c[1, 2, 0] = 2
    assert metrics.difference(c, b, 1).per_token == (0.0, 0.0, 1 / 8)
    assert metrics.difference(c, b, 1).worst.token == 2


def test_values_that_are_not_finite():
    b = np.array([[1.0, np.nan, np.inf, 2.0]])
    assert metrics.nmse(b, b, 0) == 0
    for bad in (np.nan, np.inf):
        c = b.copy()
        c[0, 3] = bad
        d = metrics.difference(c, b, 0)
        assert d.nmse == np.inf
        assert d.worst.index == (0, 3)
    s = metrics.stats(b)
    assert (s.nan, s.inf, s.max, s.mean) == (1, 1, 2.0, 1.5)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_a_large_tap_is_looked_at_in_blocks_as_a_small_one_is_at_once(axis, bad, monkeypatch):
    b = RNG.standard_normal((70, 90, 50)).astype(np.float32)
    c = b + np.float32(1e-3) * RNG.standard_normal(b.shape).astype(np.float32)
    c[33, 44, 7] += np.float32(3)
    b[3, 4, 5] = c[3, 4, 5] = c[60, 1, 2] = np.float32(bad)
    whole = metrics.difference(c, b, axis), metrics.stats(b)
    monkeypatch.setattr(metrics, "BLOCK", 1 << 14)
    monkeypatch.setattr(metrics, "FINE", 1 << 13)
    assert len(metrics.Rows(b, axis).blocks) > 10
    blocks = metrics.difference(c, b, axis), metrics.stats(b)
    np.testing.assert_equal(vars(blocks[0].worst), vars(whole[0].worst))
    np.testing.assert_allclose(blocks[0].per_token, whole[0].per_token, rtol=1e-12)
    for name in ("nmse", "cosine", "max_abs", "mean_drift"):
        assert getattr(blocks[0], name) == pytest.approx(getattr(whole[0], name), rel=1e-9)
    assert blocks[1].extremes is whole[1].extremes is None  # of the layers' outputs alone
    for name in vars(whole[1]).keys() - {"extremes"}:
        assert getattr(blocks[1], name) == pytest.approx(getattr(whole[1], name), rel=1e-9)


def test_empty_and_zero_taps():
    nothing = metrics.Rows(np.zeros((0, 3)))
    assert (nothing.squares.size, nothing.errors(metrics.Rows(np.zeros((0, 3)))).size) == (0, 0)
    assert metrics.stats(nothing).rms == 0
    assert metrics.stats(np.array([np.nan])).rms == 0
    assert metrics.nmse(np.zeros((2, 2)), np.zeros((2, 2)), 0) == 0
    assert metrics.nmse(np.ones((2, 2)), np.zeros((2, 2)), 0) == np.inf


def test_kl_divergence():
    p, q = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    assert metrics.kl_divergence(p + 7, q - 3) == pytest.approx(0.25 * np.log(2))
    assert metrics.kl_divergence(p, p) == 0


def test_ggmls_numbers_are_gguf_pys():
    assert {kind.name: kind for kind in gguf.GGMLQuantizationType} == NUMBERS
