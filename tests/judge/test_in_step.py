"""Two passes of the engine in step: to the bit what each gives alone, with every weight decoded once; no pass waits in
vain.
"""

from __future__ import annotations

from collections import Counter
from threading import Thread

import numpy as np
import pytest
from llamaref import Engine, ModelError
from llamaref.weights import Factor
from models.options import OPTIONS
from models.small import write_model

from llamadiff.judge.in_step import in_step

LONG, SHORT = tuple(range(3, 23)), (3, 9, 4)


@pytest.fixture
def engine(request, tmp_path):
    arch = request.param
    return Engine(write_model(tmp_path / "m.gguf", **{"arch": arch, "kind": "Q8_0", **OPTIONS[arch]}))


def decoded(engine):
    """How often each place of the file is decoded from here on."""
    count, decode = Counter(), engine.w.decoded

    def decoder(name):
        def counted(rows):
            count[name, rows.__array_interface__["data"][0]] += 1
            return decode(name, rows)

        return counted

    engine.w.decoder = decoder
    return count


def in_time(work):
    """What work returns, or the error that it raises; a failure if it hangs."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert found, "it hangs"
    return found[0]


@pytest.mark.parametrize("engine", ["llama", "moe", "deepseek2"], indirect=True)
def test_each_pass_gives_what_it_gives_alone(engine):
    alone = engine.forward(LONG), engine.forward(SHORT)
    for _ in range(3):
        both = in_time(lambda: in_step(engine, lambda e: e.forward(LONG), lambda e: e.forward(SHORT)))
        assert np.array_equal(both[0], alone[0])
        assert np.array_equal(both[1], alone[1])


def test_joined_factors_differ_in_last_digits_alone(tmp_path):
    """Of a file with minima in its blocks, too: one factor adds to each block's sum, the other does not."""
    for kind in ("Q8_0", "Q4_1"):
        w, name = Engine(write_model(tmp_path / f"{kind}.gguf", kind=kind)).w, "blk.0.ffn_up.weight"
        width = w.shape(name)[-1]
        drawn = np.random.default_rng(0).standard_normal
        x, more = drawn((2, 3, width)).astype(np.float32), drawn((4, width)).astype(np.float32)
        sums = drawn((2, 3, width // 32)).astype(np.float32) if kind == "Q4_1" else None
        alone = w.product(name, x, sums), w.product(name, more)
        for found, right in zip(w.products(name, [Factor(x, sums), Factor(more)], joined=True), alone, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)
        assert sums is None or np.abs(alone[0] - w.product(name, x)).max() > 0.1


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_a_weight_that_both_need_is_decoded_once(engine):
    count = decoded(engine)
    in_time(lambda: in_step(engine, lambda e: e.forward(LONG), lambda e: e.forward(SHORT)))
    assert set(count.values()) == {1}
    engine.forward(LONG)
    assert set(count.values()) == {2}


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_a_part_that_one_pass_runs_again_it_runs_alone(engine):
    def twice(e):
        step = e.step(LONG)
        x = e.begin(LONG, step)
        for i in range(e.n_layer):
            e.layer(i, x, e.step(LONG))
            x = e.layer(i, x, step)
        return e.end(x, step)

    count, alone = decoded(engine), (engine.forward(LONG), engine.forward(SHORT))
    count.clear()
    both = in_time(lambda: in_step(engine, twice, lambda e: e.forward(SHORT)))
    assert np.array_equal(both[0], alone[0])
    assert np.array_equal(both[1], alone[1])
    assert {number for (name, _), number in count.items() if name.startswith("blk.")} == {2}


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_the_error_of_a_pass_that_fails_is_raised(engine, fails):
    def broken(e):
        step = e.step(LONG)
        e.layer(0, e.begin(LONG, step), step)
        raise ModelError("no second layer")

    passes = [lambda e: e.forward(SHORT)] * 2
    passes[fails] = broken
    error = in_time(lambda: in_step(engine, *passes))
    assert isinstance(error, ModelError)
    assert str(error) == "no second layer"
