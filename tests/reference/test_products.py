"""Products by weights of every type, plainly and in threads: what NumPy makes of the decoded matrix."""

from __future__ import annotations

import numpy as np
import pytest
from llamaref import ModelError
from llamaref import weights as llamaref_weights
from models.matrix import NAME, weights_of

from llamadiff.llamacpp.dequantize import Dequantizer

EPS = np.finfo(np.float32).eps
KNOWN = ("Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "F16", "BF16", "F32")


def bound(x, w):
    """What float32 may leave of a product, in whatever order it is summed."""
    return 2 * w.shape[1] * EPS * (np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T)


def drawn(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(llamaref_weights, "BLOCK_WEIGHTS", 1 << 14)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", KNOWN)
def test_products_are_numpys(kind, tmp_path):
    weights = weights_of(tmp_path / "m.gguf", kind, 200, 768)
    exact = weights.whole(NAME)
    for shape in ((1, 768), (2, 17, 768)):
        x = drawn(*shape)
        plain = weights.product(NAME, x)
        assert (np.abs(plain - x.astype(np.float64) @ exact.T) <= bound(x, exact)).all()
        for threads in (1, 2, 5):  # nor does it depend on how many there are
            Dequantizer.of(weights, threads)
            assert np.array_equal(weights.product(NAME, x), plain)


@pytest.mark.usefixtures("small_blocks")
def test_what_blocks_add_to_their_minima_is_multiplied_by_these(tmp_path):
    weights = weights_of(tmp_path / "m.gguf", "Q5_1", 96, 256)
    x, sums = drawn(3, 256), drawn(3, 8)
    added = weights.product(NAME, x, sums) - weights.product(NAME, x)
    np.testing.assert_allclose(added, sums @ weights.minima(NAME, weights.read_raw(NAME)).T, atol=1e-4)
    assert np.abs(added).max() > 0.1


@pytest.mark.usefixtures("small_blocks")
def test_rows_that_are_chosen_or_lie_apart_are_multiplied(tmp_path):
    weights = weights_of(tmp_path / "m.gguf", "Q8_0", 96, 256)
    exact, x = weights.whole(NAME), drawn(3, 256)
    for some in (slice(5, 70), slice(0, 96, 3), [7, 7, 1]):
        found = weights.product(NAME, x, rows=some)
        assert (np.abs(found - x.astype(np.float64) @ exact[some].T) <= bound(x, exact[some])).all()


def test_values_that_are_not_finite_go_through(tmp_path):
    weights, x = weights_of(tmp_path / "m.gguf", "F32", 70, 256), np.ones((4, 256), np.float32)
    x[1, 3], x[2, 5] = np.inf, np.nan
    found = weights.product(NAME, x)
    assert np.isfinite(found[[0, 3]]).all()
    assert np.isinf(found[1]).all()
    assert np.isnan(found[2]).all()


def test_activations_of_another_width_are_refused(tmp_path):
    weights = weights_of(tmp_path / "m.gguf", "F32", 70, 256)
    with pytest.raises(ModelError, match="rows of 256 weights cannot multiply activations of 255"):
        weights.product(NAME, np.ones((4, 255), np.float32))


def test_what_fails_in_a_thread_is_raised(tmp_path):
    weights = weights_of(tmp_path / "m.gguf", "F32", 70, 256)
    Dequantizer.of(weights, 3)

    def fail(*_):
        raise ValueError("of a thread")

    with pytest.raises(ValueError, match="of a thread"):
        list(weights.by_blocks(NAME, fail))
