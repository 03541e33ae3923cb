"""A large tap of a mapped file is read without its pages becoming this process's memory."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from optional import needs_slices
from threadpoolctl import threadpool_limits

from llamadiff.numerics.metrics import Rows
from llamadiff.system import pages

ROWS, WIDTH = 768, 1 << 13  # 24 MiB


@pytest.fixture
def mapped(tmp_path, monkeypatch):
    """A function that maps a file of values anew, and the values, which are many."""
    monkeypatch.setattr(pages, "LARGE", 1 << 24)
    values = np.random.default_rng(0).standard_normal((ROWS, 64)).astype(np.float32).repeat(WIDTH // 64, axis=1)
    values.tofile(tmp_path / "tap")
    return lambda: np.memmap(tmp_path / "tap", np.float32, "r", shape=values.shape), values


def of_files():
    """Mapped pages that count as this process's memory, in MiB."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) / 1024


def combined(kind, x):
    """A tensor's rows, or its channels, as they are verified by sketch."""
    from llamadiff.ext.verify.combinations import Combinations

    return getattr(Combinations.within([slice(0, None)], len(x)), kind)(x)


READ = {
    "sums and extremes": lambda x: [*Rows(x).extremes],
    "rows combined": partial(combined, "rows"),
    "channels combined": partial(combined, "channels"),
}
CASES = [pytest.param(what, marks=[needs_slices("verify")] * ("combined" in what)) for what in READ]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells it")
@pytest.mark.parametrize("what", CASES)
def test_what_was_read_is_let_go(what, mapped):
    open_it, values = mapped
    x, before = open_it(), of_files()
    with threadpool_limits(1, "blas"):  # as the judge reads
        found = READ[what](x)
        taken = of_files() - before
        right = READ[what](values)
    assert taken < values.nbytes / (1 << 20) / 3
    np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-2)
    assert float(np.asarray(x).sum()) == float(values.sum())  # it is still there
    assert of_files() - before > values.nbytes / (1 << 20) / 2
    pages.let_go(x)
    assert of_files() - before < values.nbytes / (1 << 20) / 3


def test_a_small_array_or_one_in_memory_is_read_at_once(mapped):
    open_it, values = mapped
    assert [*pages.in_parts(open_it()[:400])] == [slice(0, 400)]
    assert [*pages.in_parts(values)] == [slice(0, ROWS)]
    pages.let_go(values)
    parts = [*pages.in_parts(open_it())]
    assert len(parts) > 4
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(ROWS))
