"""Prompts whose attention scores are not made whole: computed in blocks, recorded only when asked for."""

from __future__ import annotations

import numpy as np
import pytest
from llamaref import Engine, engine
from models.small import write_model
from models.small_others import phi3

from llamadiff import compare
from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How, Run
from llamadiff.judge.coverage import BEGINNING
from llamadiff.llamacpp.request import LONG
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import diff

TOKENS = tuple(int(token) for token in np.random.default_rng(3).integers(3, 90, 40))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    window = {"attention.sliding_window": 9, "attn_logit_softcapping": 20.0, "attention.key_length": 64,
              "attention.value_length": 64}  # fmt: skip
    return {
        "llama": write_model(folder / "llama.gguf", kind="Q8_0", extra={"context_length": 512}),
        "gemma2": write_model(folder / "gemma2.gguf", "gemma2", "F16", post_norm=True, tied=True, extra=window),
    }


class Unwatched(engine.Tap):
    """Keeps the logits' input alone."""

    def __call__(self, name, x):
        if name == "result_norm":
            self.found = x
        return x


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
@pytest.mark.parametrize("positions", [range(40), [*range(20), *range(100, 120)], [5, 3, 1, *range(7, 44)]])
def test_attention_in_blocks_is_attention(arch, positions, paths, monkeypatch):
    whole, blocks = Unwatched(), Unwatched()
    Engine(paths[arch]).forward(TOKENS, positions, tap=whole)
    monkeypatch.setattr(engine, "SCORES", 1)
    Engine(paths[arch]).forward(TOKENS, positions, tap=blocks)
    assert np.abs(blocks.found - whole.found).max() < 1e-5 * np.abs(whole.found).max()


def test_a_blocked_run_with_a_fault_in_attention_names_its_span(paths, monkeypatch):
    class Scaled(Engine):
        def attention(self, i, q, *args, **kwargs):
            return super().attention(i, q * (2.0 if i == 1 else 1.0), *args, **kwargs)

    right = without_scores(record(Engine(paths["llama"]), TOKENS, "right"))
    wrong = without_scores(record(Scaled(paths["llama"]), TOKENS, "wrong"))
    monkeypatch.setattr(engine, "SCORES", 1)
    assert diff(right, right, paths["llama"]).verdict == "match"
    found = diff(right, wrong, paths["llama"])
    assert [row.tap for row in found.wrong] == ["kqv_out-1"]
    assert found.wrong[0].span == ("kq-1", "kq_soft_max-1")


def without_scores(trace):
    kept = {name: trace[name] for name in trace if not name.startswith(("kq-", "kq_soft_max-"))}
    return Trace(trace.info, kept, dict.fromkeys(kept, "F32"))


@pytest.mark.parametrize("n", [LONG, LONG + 1])
def test_llama_cpps_scores_are_recorded_up_to_a_length(n, paths, tmp_path):
    tokens = [int(token) for token in np.random.default_rng(4).integers(3, 90, n)]
    found = compare(paths["llama"], tokens)
    assert found.verdict == "match"
    taps = {row.tap for row in found.rows}
    assert ("kq-0" in taps) == ("kq_soft_max-1" in taps) == (n <= LONG)
    assert ("kq-0" in found.missing) == (n > LONG)


def test_scores_of_a_long_prompt_are_recorded_when_asked_for(paths):
    tokens = [int(token) for token in np.random.default_rng(4).integers(3, 90, LONG + 10)]
    found = compare(paths["llama"], Run(tokens=tokens, patterns=["kq*"]))
    assert {row.tap for row in found.rows} == {
        f"{word}-{i}" for word in ("kq", "kq_soft_max", "kqv_out") for i in (0, 1)
    }
    assert found.verdict == "noise"  # over what was not asked for


def test_the_free_run_of_a_long_prompt_is_the_beginning_of_the_whole_one(paths, tmp_path):
    tokens = [int(token) for token in np.random.default_rng(4).integers(3, 90, LONG + 1)]
    short, whole = compare(paths["llama"], tokens), compare(paths["llama"], tokens, save=tmp_path)
    assert (short.free_tokens, whole.free_tokens) == (BEGINNING, len(tokens))
    assert short.verdict == whole.verdict == "match"
    assert f"over the first {BEGINNING} tokens" in short.summary
    assert "over the first" not in whole.summary
    for a, b in zip(short.rows, whole.rows, strict=True):
        assert (a.verdict, a.local.arithmetic) == (b.verdict, b.local.arithmetic)
        own = 3e-13 if a.local.sketched else 1e-13  # float32 rounds what is combined, too
        assert a.local.nmse == pytest.approx(b.local.nmse, rel=0.5, abs=own)
        np.testing.assert_allclose(a.drift.per_token, b.drift.per_token[:BEGINNING], rtol=1e-3, atol=1e-13)
    last, same = short.rows[-1], whole.rows[-1]
    assert 0.3 < last.expected_drift / same.expected_drift < 3
    assert (short.logits.rows, short.logits.after, whole.logits.after) == (BEGINNING, BEGINNING, len(tokens))


def test_a_short_free_run_has_the_room_of_the_whole_prompt(tmp_path):
    """LongRoPE chooses its factors by the tokens there are; a baseline may not say how many it made room for."""
    path = write_model(
        tmp_path / "m.gguf", **phi3(**{"rope.scaling.original_context_length": 64, "context_length": 512})
    )
    tokens = [int(token) for token in np.random.default_rng(4).integers(3, 90, LONG + 9)]
    right = without_scores(record(Engine(path), tokens, "right"))
    found = diff(right, right, path)
    assert found.verdict == "match"
    assert found.rows[-1].distance["candidate"] < 1e-11


def test_a_fault_late_in_a_long_prompt_is_found(paths):
    """The free run does not come as far; the candidate's lanes do."""

    class Late(Engine):
        def norm(self, x, name):
            x = super().norm(x, name)
            if name == "blk.1.attn_norm":
                x[..., LONG:, :] *= np.float32(3)
            return x

    tokens = [int(token) for token in np.random.default_rng(4).integers(3, 90, LONG + 9)]
    right = without_scores(record(Engine(paths["llama"]), tokens, "right"))
    wrong = without_scores(record(Late(paths["llama"]), tokens, "wrong"))
    found = diff(right, wrong, paths["llama"], how=How(diagnose=False))
    assert [row.tap for row in found.wrong] == ["attn_norm-1"]
    local = found.wrong[0].local
    assert [i for i, error in enumerate(local.per_token) if error > local.limit] == list(range(LONG, LONG + 9))
    assert found.rows[-1].ratio_to_noise > 10
    assert set(found.rows[-1].distance) == {"baseline", "candidate"}
    clean = diff(right, right, paths["llama"])
    assert clean.verdict == "match"
    assert clean.free_tokens == BEGINNING


def test_a_row_beyond_the_free_run_is_not_compared_with_it(paths, tmp_path):
    tokens = [int(token) for token in np.random.default_rng(4).integers(3, 90, LONG + 9)]
    right = record(Engine(paths["llama"]), tokens, "right")
    np.save(tmp_path / "result_output@-1.npy", right["result_output"][-1])
    (tmp_path / "tokens.txt").write_text(" ".join(map(str, tokens)), encoding="utf-8")
    found = compare(paths["llama"], candidate=tmp_path)
    assert found.verdict in ("match", "noise")
    assert (found.rows[-1].tap, set(found.rows[-1].distance), found.logits.rows) == ("result_output", {"baseline"}, 1)
