"""Products verified by sketch: what is wrong is found as if all had been computed; what is right costs a sketch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from llamaref import Engine, Weights
from llamaref.sums import WeightProduct
from models.options import OPTIONS, write_long
from models.small import write_model

from llamadiff import compare
from llamadiff.candidates.reference import Recorder
from llamadiff.engines.run_spec import USUAL
from llamadiff.ext.verify import combinations, sketches
from llamadiff.ext.verify.by_sketch import PART_SHARE, WHOLE_SHARE, Sketching
from llamadiff.ext.verify.combinations import COUNT, SPAN, Combinations, ErrorSquares, seldom
from llamadiff.judge.allowance import ROW, VALUE
from llamadiff.judge.lanes import Lane
from llamadiff.numerics import metrics
from llamadiff.numerics.arithmetic import round_to
from llamadiff.report.json import to_object
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import check

MATCH = 1e-10
ALL = [slice(0, None)]
WEIGHT = "blk.0.ffn_up.weight"


def uncomputed():
    pytest.fail("a product that is seen through combinations is not computed")


def tokens(n):
    return tuple(int(token) for token in np.random.default_rng(3).integers(3, 90, n))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cache(lambda arch, kind: write_long(tmp_path_factory.mktemp("m") / "m.gguf", arch, kind))


# -- the estimate -------------------------------------------------------------------------------------------------

SHAPES = {
    "dense": lambda rng: rng.standard_normal((40, 30)),
    "one value": lambda rng: np.eye(40, 30) * (np.arange(40)[:, None] == 3),
    "two equal values": lambda rng: np.isin(np.arange(40), (3, 9))[:, None] * (np.arange(30) == 5),
    "one row": lambda rng: (np.arange(40) == 7)[:, None] * np.ones(30),
    "one channel": lambda rng: np.ones((40, 1)) * (np.arange(30) == 7),
    "rank one": lambda rng: np.outer(rng.standard_normal(40), rng.standard_normal(30)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_estimate_has_no_bias_and_misses_no_more_than_is_derived(shape, monkeypatch):
    error = np.asarray(SHAPES[shape](np.random.default_rng(0)), float)
    true, seen = np.square(error).sum(), []
    for seed in range(600):
        monkeypatch.setattr(combinations, "SEED", seed)
        drawn = Combinations.within(ALL, 40)
        found = ErrorSquares.of(drawn.rows(error), drawn.channels(error))
        seen.append((found.channels.sum() / true, found.rows.sum() / true))
    for side in np.transpose(seen):
        assert abs(side.mean() - 1) < 5 * np.sqrt(2 / COUNT / len(side))
        for share in (0.3, 0.5, 0.7):
            assert np.mean(side < share) <= seldom(share) + 3 * np.sqrt(seldom(share) / len(side))


ROUNDED = 1e-13  # of its square: what float32 leaves of a combination


@pytest.mark.parametrize(
    ("limit", "share", "rounded", "sides"),
    [
        (MATCH, WHOLE_SHARE, ROUNDED, 2),
        (ROW * MATCH, PART_SHARE, ROUNDED, 1),
        (VALUE * MATCH, PART_SHARE, SPAN * ROUNDED, 1),
    ],
)
def test_what_passes_is_as_seldom_as_docs_say(limit, share, rounded, sides):
    """Of 600 products of a run, each with four arithmetics under which it might pass, rounding against all."""
    at_most = (np.sqrt(share * limit) + np.sqrt(rounded)) ** 2
    assert 600 * 4 * seldom(at_most / limit) ** sides < 1e-9


def test_spans_end_where_phases_do():
    assert Combinations.within([slice(1100, None), slice(0, 1100)], 1103).spans == (
        slice(0, SPAN), slice(SPAN, 1100), slice(1100, 1103),
    )  # fmt: skip


# -- one product --------------------------------------------------------------------------------------------------


def seen(right, lanes, product, changed):
    drawn = Combinations.within(ALL, len(right))
    sketching = Sketching.of(product, (drawn.rows(product.x), None), drawn, lanes)
    return sketching.seen("baseline", metrics.Rows(changed), MATCH, ALL)


@pytest.fixture(scope="module")
def product(path):
    """A product of 2,048 rows under two arithmetics, and what it is under the second."""
    weights = Weights(path("llama", "Q8_0"))
    x = np.random.default_rng(5).standard_normal((2048, 256)).astype(np.float32)
    both = np.stack([x, round_to(x, "Q8_0")])
    lanes = [Lane("baseline", "f32"), Lane("baseline", "native")]
    return weights.product(WEIGHT, both)[1], lanes, WeightProduct(uncomputed, weights, WEIGHT, both)


def test_a_right_product_is_seen_to_be_right(product):
    found = seen(*product, product[0])
    assert found.policies == ["native"]
    assert found.fitting_policies(MATCH, ALL) == (frozenset({"native"}),)
    assert found.nmse < 1e-12
    assert max(found.per_row) < 1e-11
    assert found.errors["f32"].sum() > 1e-6 * found.sizes.sum()


PLACES = [(0, 0), (1023, 511), (1024, 100), (2047, 3), (777, 300)]


@pytest.mark.parametrize(("row", "channel"), PLACES)
def test_what_is_off_by_ten_times_its_limit_is_not_clearly_right(row, channel, product):
    right = product[0]
    rms = float(np.sqrt(np.mean(np.square(right))))
    noise = np.random.default_rng(1).standard_normal(right.shape).astype(np.float32)
    many = np.sqrt(10 * MATCH * right.size)  # all of what the whole tensor may have, ten times over
    offs = {
        "value": (slice(row, row + 1), slice(channel, channel + 1), np.sqrt(10 * VALUE * MATCH)),
        "row": (slice(row, row + 1), slice(None), np.sqrt(10 * ROW * MATCH)),
        "channel": (slice(None), slice(channel, channel + 1), many / np.sqrt(len(right))),
        "head": (slice(None), slice(channel // 64 * 64, channel // 64 * 64 + 64), many / np.sqrt(len(right) * 64)),
        "all": (slice(None), slice(None), np.sqrt(10 * MATCH)),
    }
    for name, (rows, channels, size) in offs.items():
        changed = right.copy()
        changed[rows, channels] += np.float32(size * rms) * np.sign(noise[rows, channels])
        assert seen(right, *product[1:], changed) is None, name


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_clearly_right(value, product):
    changed = product[0].copy()
    changed[700, 40] = value
    assert seen(product[0], *product[1:], changed) is None


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1"])
def test_minima_and_a_bias_are_combined_too(kind, path):
    from llamadiff.numerics.eight_bits import q8_1_sums

    weights = Weights(path("llama", kind))
    x = np.random.default_rng(5).standard_normal((1, 100, 256)).astype(np.float32)
    sums, bias = q8_1_sums(x), np.linspace(-1, 1, 512, dtype=np.float32)
    product = WeightProduct(uncomputed, weights, WEIGHT, round_to(x, "Q8_1"), sums, bias=bias)
    right = weights.product(WEIGHT, product.x, sums)[0] + bias
    drawn = Combinations.within(ALL, 100)
    combined = drawn.rows(product.x), drawn.rows(sums)
    lanes = [Lane("baseline", "native")]
    about = "baseline", metrics.Rows(right), MATCH, ALL
    assert Sketching.of(product, combined, drawn, lanes).seen(*about) is not None
    for left_out in (replace(product, sums=np.zeros_like(sums)), replace(product, bias=np.zeros_like(bias))):
        combined = drawn.rows(left_out.x), drawn.rows(left_out.sums)
        assert Sketching.of(left_out, combined, drawn, lanes).seen(*about) is None


# -- whole runs ---------------------------------------------------------------------------------------------------


class WithoutScores(Recorder):
    def __call__(self, name, x):
        return x if name.startswith(("kq-", "kq_soft_max-")) else super().__call__(name, x)

    def is_wanted(self, name):
        return False


def recorded(engine, n):
    """A run without its attention scores, which grow as the square of the tokens."""
    kept = WithoutScores()
    engine.forward(tokens(n), range(n), tap=kept)
    return Trace(Info(tokens(n), tuple(range(n)), n), kept.arrays, dict.fromkeys(kept.arrays, "F32"))


def words_of(comparison):
    return {row.tap.rsplit("-", 1)[0] for row in comparison.rows if row.local is not None and row.local.sketched}


PRODUCTS = {"Qcur_proj", "Kcur_proj", "Vcur_proj", "attn_out", "ffn_gate", "ffn_up", "ffn_out", "result_output"}


@pytest.mark.parametrize("n", [32, 33])
def test_products_are_verified_by_sketch_from_a_length_on(n, path):
    found = compare(path("llama", "Q8_0"), tokens(n))
    assert found.verdict == "match"
    assert words_of(found) == (PRODUCTS if n > 32 else set())
    said = to_object(found)["by_sketch"]
    assert said == (None if n == 32 else {"taps": 15, "combinations": COUNT, "span": SPAN, "seed": 1})


@pytest.mark.parametrize("arch", sorted(OPTIONS))
def test_every_architecture_is_judged_alike_by_sketch(arch, small_model, monkeypatch):
    """The same verdicts and arithmetics, and errors of the same size; what a sketch stood for is what its tap has."""
    model = small_model(arch)
    short = compare(model, tokens(40))
    monkeypatch.setattr(sketches, "LEAST", 1 << 30)
    whole = compare(model, tokens(40))
    assert short.verdict == whole.verdict
    assert not words_of(whole)
    for a, b in zip(short.rows, whole.rows, strict=True):
        assert (a.tap, a.verdict, a.local.arithmetic) == (b.tap, b.verdict, b.local.arithmetic)
        if not a.local.sketched:
            assert repr(a.local) == repr(b.local)  # NaN included
        assert a.local.nmse == pytest.approx(b.local.nmse, rel=0.9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("arch", ["gemma2", "granite"])
def test_logits_that_are_neither_scaled_nor_capped_are_wrong(arch, small_model):
    """What is a weight's product, and would not be more, is not seen to be right."""
    path = small_model(arch)
    right, weights = recorded(Engine(path), 40), Weights(path)
    head = "output.weight" if "output.weight" in weights else "token_embd.weight"
    plain = {"result_output": weights.product(head, right["result_norm"])}
    mine = Trace(right.info, {**{name: right[name] for name in right}, **plain}, dict.fromkeys(right, "F32"))
    assert [row.tap for row in check(mine, path).wrong] == ["result_output"]


@pytest.fixture(scope="module")
def long_run(path):
    """kind -> the model and what a right engine has of 2,048 tokens."""
    return cache(lambda kind: (path("llama", kind), recorded(Engine(path("llama", kind)), 2048)))


HOW = replace(USUAL, diagnose=False)
PARTS = {
    "token": (np.s_[1500], ROW),
    "head": (np.s_[:, :64], 1.0),
    "channel": (np.s_[:, 5], 1.0),
    "element": (np.s_[1500, 5], VALUE),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("what", PARTS)
@pytest.mark.parametrize("word", ["Qcur_proj-1", "ffn_out-0", "result_output"])
def test_a_part_of_2048_tokens_is_judged_as_if_all_were_computed(word, what, kind, long_run, monkeypatch):
    """Off by ten times its limit: ROW and VALUE times a match's, or all that the whole tensor may have."""
    (model, right), (place, share) = long_run(kind), PARTS[what]
    values = right[word].copy()
    share = share if share > 1 else values.size / values[place].size
    values[place] += np.float32(np.sqrt(10 * share * MATCH * np.mean(np.square(values))))
    wrong = Trace(right.info, {**right, word: values}, right.dtypes)
    found = check(wrong, model, HOW)
    row = next(row for row in found.rows if row.tap == word)
    assert not row.local.sketched
    assert words_of(found) >= PRODUCTS - {word.partition("-")[0]}
    assert kind != "F32" or found.wrong[0].tap == word  # what follows it does not follow from it
    monkeypatch.setattr(sketches, "LEAST", 1 << 30)
    same = next(row for row in check(wrong, model, HOW).rows if row.tap == word)
    assert repr(row.local) == repr(same.local)


@pytest.mark.slow
def test_8192_tokens_of_a_small_model_are_judged(tmp_path):
    model = write_model(tmp_path / "m.gguf", kind="Q8_0", heads=1, kv_heads=1, extra={"context_length": 8192})
    found = compare(model, tokens(8192))
    assert found.verdict == "match"
    assert words_of(found) == PRODUCTS
    assert len(found.rows[-1].local.per_token) == 8192
