"""What a page shows of a tensor, of a run's tokens and of its cache: small, with the worst element kept."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace

import numpy as np
import pytest
from faulty import BUGS
from proof.injected.runs import record_faulty
from report.made_up import local, row
from traces import TOKENS

from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.page import closeup as numerics
from llamadiff.ext.page.closeup import Closeup, closeup, coarse, levels
from llamadiff.ext.page.pictured import MOST, pictured
from llamadiff.ext.page.timeline import row_verdict, slots, steps
from llamadiff.numerics.metrics import Rows, worst_of
from llamadiff.verbs import verbs


def seen(recorded, right, axes=("token", "embd"), axis=0):
    sides = Rows(recorded, axis), Rows(right, axis)
    return closeup(*sides, axes, worst_of(*sides)[1].index)


def cells(found: Closeup) -> np.ndarray:
    return np.frombuffer(b64decode(found.errors.levels), np.uint8).reshape(found.errors.rows, found.errors.columns)


@pytest.mark.parametrize("place", [(0, 0), (499, 2999), (250, 1), (77, 1234)])
def test_of_a_large_tensor_the_worst_element_is_kept(place):
    right = np.random.default_rng(0).standard_normal((500, 3000)).astype(np.float32)
    recorded = right + np.float32(1e-6)
    recorded[place] += 3
    found = seen(recorded, right)
    shown = cells(found)
    assert (found.errors.rows, found.errors.columns) == (numerics.MOST_ROWS, numerics.MOST_COLUMNS)
    assert found.errors.of == (500, 3000)
    assert found.worst == place
    row, column = place[0] * shown.shape[0] // 500, np.searchsorted(np.arange(128) * 3000 // 128, place[1], "right") - 1
    assert np.argwhere(shown == shown.max()).tolist() == [[row, column]]
    assert abs(np.log10(3) - (int(shown.max()) - 1) * 20 / 254 + 16) < 0.05
    at = place[1] - found.window.start
    assert found.window.recorded[at] - found.window.expected[at] == pytest.approx(3, abs=1e-5)
    assert len(found.window.expected) == numerics.WINDOW
    assert int(np.argmax(found.per_row)) == place[0] * len(found.per_row) // 500


def test_scores_are_shown_by_the_head_of_the_worst_element():
    right = np.random.default_rng(1).standard_normal((3, 7, 9))
    recorded = right.copy()
    recorded[2, 5, 4] += 1
    found = seen(recorded, right, ("head", "query", "key"), axis=1)
    assert (found.axes, found.within, found.worst) == (("query", "key"), "head 2", (5, 4))
    assert np.argwhere(cells(found)).tolist() == [[5, 4]]
    assert [error > 0 for error in found.heads] == [False, False, True]


def test_heads_of_a_rotation_have_an_error_each():
    right = np.random.default_rng(2).standard_normal((5, 4, 8))
    recorded = right.copy()
    recorded[:, 3] *= -1
    found = seen(recorded, right, ("token", "head", "dim"))
    assert found.heads == (0.0, 0.0, 0.0, pytest.approx(4))
    assert found.axes == ("token", "head*dim")
    assert set(np.argwhere(cells(found))[:, 1]) == set(range(24, 32))


def test_what_is_not_finite_is_the_worst_and_in_no_histogram():
    right = np.ones((2, 4))
    recorded = right.copy()
    recorded[1, 2] = np.nan
    found = seen(recorded, right)
    assert cells(found)[1, 2] == 255
    assert sum(found.histogram.recorded) == 7
    assert sum(found.histogram.expected) == 8


def test_histograms_of_large_tensors_are_sampled_and_have_the_worst_row(monkeypatch):
    monkeypatch.setattr(numerics, "SAMPLED", 100)
    right = np.random.default_rng(3).standard_normal((90, 10))
    recorded = right.copy()
    recorded[41, 7] = 1e6
    found = seen(recorded, right)
    assert sum(found.histogram.expected) < 200
    assert found.histogram.high == 1e6
    assert found.histogram.recorded[-1] == 1


@pytest.mark.parametrize("value", [0.0, 1e300, -1e308, 5e-324, 1.0])
def test_histograms_of_equal_and_of_extreme_values(value):
    recorded = np.full((2, 3), value)
    recorded[0, 0] = -value
    found = seen(recorded, np.full((2, 3), value))
    assert (sum(found.histogram.expected), sum(found.histogram.recorded)) == (6, 6)
    assert found.histogram.low <= found.histogram.high


def test_levels_are_even_steps_of_the_logarithm():
    assert levels(np.array([0.0, 1e-16, 1e-30, 1e4, np.inf, np.nan])).tolist() == [0, 1, 1, 255, 255, 0]
    assert coarse(np.arange(1000.0)[None], 10)[0].tolist() == [99.0 + 100 * n for n in range(10)]


def test_nothing_is_shown_of_nothing():
    assert closeup(Rows(np.zeros((0, 3))), Rows(np.zeros((0, 3))), ("token", "embd"), ()) is None


# what a comparison keeps


@pytest.fixture(scope="module")
def faulty(small_model):
    return record_faulty(BUGS[0], small_model(), TOKENS, name="my-engine")


def compared(model, candidate=None, **how):
    return verbs.compare(model, Run(tokens=TOKENS), candidate, How(**how))


def test_a_plain_run_keeps_nothing(small_model, faulty):
    result = compared(small_model(), faulty)
    assert not any(row.closeup for row in result.rows)
    assert result.logits.positions == ()


def test_closeups_are_of_wrong_taps_their_neighbours_and_each_kind(small_model, faulty):
    result = compared(small_model(), faulty, pictures=True)
    have = {row.tap for row in result.rows if row.closeup}
    assert {row.tap for row in result.wrong} <= have
    assert {"Vcur_proj-0", "attn_norm-0", "result_output", "embd"} <= have
    assert {tap.rsplit("-", 1)[0] for tap in have} == {row.tap.rsplit("-", 1)[0] for row in result.rows}
    first = next(row for row in result.rows if row.tap == "Qcur_rope-0")
    assert (first.closeup.worst[0], first.closeup.axes[0]) == (first.local.token, "token")
    assert max(first.closeup.per_row) == pytest.approx(max(first.local.per_token))
    assert compared(small_model(), faulty).verdict == result.verdict


def test_a_graph_has_closeups_of_its_nodes(small_model):
    result = compared(small_model(), engine="graph", pictures=True)
    kept = [row for row in result.rows if row.closeup]
    assert len(kept) > 10
    assert kept[0].closeup.axes == ("row", "value")
    assert not any(row.closeup for row in compared(small_model(), engine="graph").rows)


def test_two_traces_without_a_model_have_closeups_too(small_model, faulty):
    from llamadiff.verbs.drift_only import drift_only

    right = record_faulty(BUGS[1], small_model(), TOKENS, name="other")
    result = drift_only(right, faulty, How(pictures=True))
    first = next(row for row in result.rows if row.verdict == "unchecked")
    assert first.closeup is not None
    assert first.closeup.worst[0] == first.drift.worst.token
    assert len(result.logits.positions) == len(TOKENS)


def test_positions_are_those_of_every_row(small_model, faulty):
    found = compared(small_model(), faulty, pictures=True).logits
    assert len(found.positions) == found.rows == len(TOKENS)
    assert found.positions[-1].kl == found.kl
    assert sum(position.agrees for position in found.positions) == found.agreeing
    assert found.positions[-1].baseline == (found.top[0].id, found.top[0].text)


def test_no_more_is_kept_than_a_page_holds():
    seen_once = seen(np.ones((1, 2)), np.zeros((1, 2)))
    rows = [replace(row(f"ffn_out-{n}", local(1.0)), closeup=seen_once) for n in range(3 * MOST)]
    assert 0 < sum(each.closeup is not None for each in pictured(rows, ())) <= MOST


# along the tokens


def test_the_worst_op_of_each_token_and_its_verdict():
    a = replace(row("kq-0"), local=replace(local(), per_token=(1e-14, 1e-13, float("nan"))))
    wrong = replace(local(1.0), per_token=(1e-14, 1.0, 1e-15), hides_row=1e-5)
    b = replace(row("kq-1"), local=wrong, verdict="wrong")
    last = replace(row("result_output"), local=replace(local(), per_token=(2e-10,)), verdict="noise")
    found = steps([a, b, last], 4)
    assert found[0] is None
    assert [(step.tap, step.verdict) for step in found[1:3]] == [("kq-0", "match"), ("kq-1", "wrong")]
    assert found[3].verdict == "unchecked"
    assert row_verdict(b, 1e-7) == "noise"
    assert row_verdict(b, 1e-4) == "wrong"


def test_slots_are_held_to_what_was_written_where_the_cache_was_recorded():
    def of(tap, *errors, verdict="match"):
        own = replace(local(max(errors)), per_token=errors, verdict=verdict)
        return replace(row(tap, own), verdict=verdict)

    keys = [of("Kcur_rope-0", 1.0, 1.0, verdict="wrong"), of("kv_k-0", 0.0, 0.0)]
    keys.append(of("kv_k-1", 0.0, 1.0, verdict="wrong"))
    k, v = slots([*keys, of("Vcur_proj-0", 0.0, 1e-14), of("Vcur_proj-1", 0.0, 0.0)])
    assert (k.side, k.word, k.stored, k.verdict, k.wrong) == ("K", "kv_k", True, "wrong", ((1, 1),))
    assert (v.side, v.word, v.stored, v.verdict, v.wrong) == ("V", "Vcur_proj", False, "match", ())
    assert np.frombuffer(b64decode(k.errors.levels), np.uint8).reshape(2, 2).tolist()[0] == [0, 0]
