"""``variants --only mtp=N``: right runs are not accused, and every mistake of speculative decoding is named."""

from __future__ import annotations

import json

import numpy as np
import pytest
from command import run
from ext.heads import head_models
from ext.heads.head_runs import TOKENS
from once import once

from llamadiff.engines.run_spec import Run
from llamadiff.ext.heads import speculation
from llamadiff.ext.heads.draft_judge import Judge
from llamadiff.ext.heads.speculation import Round, Speculation
from llamadiff.ext.state.variants import run_variants

IDS = ",".join(map(str, TOKENS))
AGREE = tuple(f"{name}.agrees" for name in head_models.AGREEING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return once(tmp_path_factory, "heads", head_models.write)


@pytest.fixture
def drafted(folder, monkeypatch):
    """drafted("glm4moe", "mtp=3", "RefusedStay"): the variant's row, of a run with such a mistake."""

    def get(model, name="mtp=3", mistake="", n_predict=0, tokens=TOKENS):
        if mistake:
            monkeypatch.setattr(speculation, "ERRAND", f"ext.heads.faulty_drafting:run_{mistake}")
        return run_variants(folder / f"{model}.gguf", Run(tokens=tokens, n_predict=n_predict), names=[name]).rows[1]

    return get


MODELS = (*head_models.NAMES, *AGREE, "glm4moe.F16", "glm4moe.Q8_0", "glm4moe.agrees.Q8_0")


@pytest.mark.parametrize("model", ["glm4moe.agrees", "glm4moe.agrees.Q8_0", "qwen3next.agrees", "step35.agrees"])
def test_a_right_run_is_not_accused(model, drafted):
    row = drafted(model)
    assert (row.verdict, row.wrong, row.failed) == ("match", (), "")
    assert 0 < row.accepted < row.drafted
    assert row.counted == f"accepted {row.accepted} of {row.drafted}"
    assert row.judged >= row.drafted + 16


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_right_runs_of_all_heads_are_not_accused(model, drafts, drafted):
    row = drafted(model, f"mtp={drafts}")
    assert (row.verdict in ("match", "noise"), row.wrong, row.failed) == (True, (), "")


MISTAKES = [
    ("RefusedStay", "glm4moe.agrees", " sees the key of draft"),
    ("RefusedStay", "qwen35.agrees", " sees the key of draft"),
    ("RefusedStay", "glm4moe.agrees.Q8_0", " sees the key of draft"),
    ("FirstRefusedStays", "glm4moe.agrees", " sees the key of draft"),
    ("LastRefusedStays", "glm4moe.agrees", "refused in an earlier round"),
    ("DraftedStay", "glm4moe.agrees", "sees keys of the round before twice: as they were when it drafted"),
    ("OfLastRefused", "glm4moe.agrees", "goes out from the hidden state of the last draft that was refused"),
    ("OfLastRefused", "qwen35.agrees", "goes out from the hidden state of the last draft that was refused"),
    ("StateWithoutPending", "qwen3next.agrees", "as it is made with the hidden state of the last draft that was"),
    ("OfFirstVerified", "glm4moe.agrees", "goes out from the hidden state of the first token of the verified batch"),
    ("OfTwoBefore", "glm4moe.agrees", "goes out from the hidden state of the token two before"),
    ("OfTheHead", "glm4moe.agrees", "goes out from the head's own hidden state, not from the trunk's"),
    ("OfZeros", "glm4moe.agrees", "goes out from a hidden state of zeros"),
    ("OfItself", "glm4moe.agrees", "goes out from the hidden state of the token itself"),
    ("ChainOfTrunk", "glm4moe.agrees", "is made with the trunk's hidden state of the token before all drafts again"),
    ("ChainOfFirst", "glm4moe.agrees", "is made with the hidden state of the first draft again"),
    ("ChainOfZeros", "glm4moe.agrees", "is made with a hidden state of zeros"),
    ("AcceptedAsDrafted", "glm4moe.agrees", "sees keys of accepted drafts as they were drafted"),
    ("OnePosition", "glm4moe.agrees", "as the first one is: positions do not go on from draft to draft"),
    ("PositionBefore", "glm4moe.agrees", "is at position 11, where 12 is right"),
    ("PositionAfter", "qwen35.agrees", "is at position 13, where 12 is right"),
    ("TokenBefore", "glm4moe.agrees", "is made with the embedding of the token before"),
    ("TokenBeforeFirst", "glm4moe.agrees", "is made with the embedding of the token before"),
    ("NoKeys", "glm4moe.agrees", "sees no key of the text before the last token"),
    ("NoKeysOfPrompt", "glm4moe.agrees", "sees no key of the text before the last token"),
    ("OneHead", "step35.agrees", "is made by head 1 of 2, and is another's"),
    ("HiddenInEightBits", "glm4moe.agrees", "is made with the trunk's hidden states rounded to 8 bits"),
    ("HiddenInBfloat", "glm4moe.agrees", "is made with the trunk's hidden states rounded to bfloat16"),
    ("HiddenInHalf", "glm4moe", "is made with the trunk's hidden states rounded to float16"),
    ("NothingTakenBack", "glm4moe.agrees", "llama_decode failed with code -1 in the head's context, at position 12"),
    ("NothingTakenBack", "qwen35.agrees", "llama_decode failed with code -1 in the head's context, at position 12"),
    ("DraftsNotTakenBack", "glm4moe.agrees", "llama_decode failed with code -1 in the head's context, at position 12"),
    ("OneTooFew", "glm4moe.agrees", "llama_decode failed with code -1 in the head's context"),
    ("OneTooMany", "qwen35.agrees", "the head's cache ends at position"),
    ("AnotherToken", "glm4moe.agrees", "and the trunk's logits say"),
    ("AnotherDraft", "glm4moe.agrees", "and the head's logits say"),
    ("OneMoreAccepted", "glm4moe.agrees", "are accepted, and the trunk goes on with"),
    ("OneLessAccepted", "glm4moe.agrees", "are accepted, and the trunk goes on with"),
    ("CountedTokens", "glm4moe.agrees", "it counts"),
    ("TrunkOfAnotherToken", "glm4moe.agrees", "the trunk's logits behind position"),
    ("StateNotRestored", "qwen3next.agrees", "is refused in the trunk's context, as it goes on"),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "model", "says"), MISTAKES, ids=[f"{a}-{b}" for a, b, _ in MISTAKES])
def test_a_mistake_is_found_and_named(mistake, model, says, drafted):
    row = drafted(model, mistake=mistake)
    assert row.verdict == "wrong", row
    assert says in " ".join(row.wrong), row.wrong


# What was thought of when all of this was done: found, and not named.
LATER = [
    ("OtherCacheOfTheHead", "glm4moe", "has logits that are"),
    ("LastKeyIsLost", "qwen35.agrees", "the head's cache ends at position 20, where 21 is right: tokens are lost"),
    ("RowsOneOff", "glm4moe.agrees", "the trunk's logits behind position"),
    ("HeadIsTurnedOtherwise", "glm4moe.agrees", "has logits that are"),
    ("DraftsAreSorted", "glm4moe.agrees", "the trunk's logits behind position"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "model", "says"), LATER, ids=[name for name, *_ in LATER])
def test_a_mistake_of_later_is_found(mistake, model, says, drafted):
    row = drafted(model, mistake=mistake)
    assert row.verdict == "wrong"
    assert says in " ".join(row.wrong)


def test_a_prompt_of_several_parts_is_one(drafted):
    tokens = tuple(1 + 7 * n % 127 for n in range(520))
    row = drafted("glm4moe", "mtp=2", n_predict=2, tokens=tokens)
    assert (row.verdict, row.wrong) == ("match", ())
    row = drafted("glm4moe", "mtp=2", "ChunksAreUnconnected", n_predict=2, tokens=tokens)
    assert "as if each 512 tokens began anew" in row.headline, row


def test_refused_keys_are_seen_where_the_cache_rounds(drafted):
    """And a right run is not accused there."""
    name = "mtp=3,kv=f16,flash_attn=on"
    row = drafted("glm4moe.agrees", name)
    assert (row.verdict in ("match", "noise"), row.wrong) == (True, ())
    assert " sees the key of draft" in drafted("glm4moe.agrees", name, "RefusedStay").headline


def test_a_cache_that_rounds_is_not_accused(drafted):
    """Which way a value falls hangs on its batch, and a chain of drafts carries it on."""
    row = drafted("hy_v3", "mtp=7,kv=f16", tokens=(0,))
    assert (row.verdict in ("match", "noise"), row.wrong) == (True, ())


def test_tokens_that_were_generated_are_generated_again(drafted):
    row = drafted("glm4moe.agrees", "mtp=2", n_predict=5)
    assert (row.verdict, row.wrong) == ("match", ())
    assert 2 * 2 <= row.drafted <= 2 * 5


def test_the_command_says_it(folder, tmp_path):
    path, out = folder / "glm4moe.agrees.gguf", tmp_path / "v.json"
    done = run("variants", path, "--tokens", IDS, "--only", "mtp=3", "-o", f"json:{out}")
    assert done.returncode == 0, done.stderr
    row = json.loads(out.read_text("utf-8"))["variants"][1]
    assert (row["variant"], row["verdict"]) == ("mtp=3", "match")
    line = next(line for line in done.stdout.splitlines() if line.startswith("mtp=3"))
    assert line.split()[:6] == ["mtp=3", "MATCH", "accepted", str(row["accepted"]), "of", str(row["drafted"])]


def test_the_command_says_what_is_wrong(folder, monkeypatch):
    monkeypatch.setattr(speculation, "ERRAND", "ext.heads.faulty_drafting:run_RefusedStay")
    done = run("variants", folder / "glm4moe.agrees.gguf", "--tokens", IDS, "--only", "mtp=3")
    assert done.returncode == 1
    assert "WRONG  1 of 2 variants are wrong" in done.stdout
    assert "mtp=3: the 1st draft behind position" in done.stdout


@pytest.mark.parametrize(("spec", "says"), [
    ("mtp=3", "has no head that predicts a token more (nextn_predict_layers)"),
    ("mtp=0", "mtp=0: expected a whole number from 1 to 16"),
    ("mtp=3,batch=2", "mtp=3,batch=2: mtp and batch are two ways; give one"),
    ("mtp=3,schedule=9", "mtp=3,schedule=9: mtp and schedule are two ways; give one"),
])  # fmt: skip
def test_what_cannot_be_drafted_is_refused_in_a_line(spec, says, small_model):
    done = run("variants", small_model("llama", "F16"), "--tokens", "1,5", "--only", spec)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert says in done.stderr


def test_a_candidate_is_no_speculative_run(folder):
    done = run("compare", folder / "glm4moe.gguf", "--tokens", IDS, "--candidate", "llama.cpp:mtp=3")
    assert done.returncode == 2
    assert "runs tokens of its own; llamadiff variants --only mtp=3 does that" in done.stderr


# -- a run that is made up: a vocabulary of four, a trunk and a head that have the same logits everywhere --------------

LOGITS = np.array([[0.0, 3.0, 1.0, 2.0]], np.float32)


def judged(run: Speculation, right: np.ndarray = LOGITS, one_by_one: np.ndarray | None = None):
    """What is said of a run where trunk and head alone give ``right`` everywhere; token by token perhaps another."""
    asking = Judge(run, 0.0).questions()
    question = next(asking)
    try:
        while True:
            count = len(question["tokens"]) - question["first"] if question["of"] == "trunk" else 1
            is_other = one_by_one is not None and question["name"].startswith("ones")
            question = asking.send(np.repeat(one_by_one if is_other else right, count, axis=0))
    except StopIteration as end:
        return end.value


def made_up(logits: np.ndarray = LOGITS, drafts: int = 2, accepted: int = 2, token: int = 1) -> Speculation:
    one = Round(
        2, (token,) * drafts, (token,) * (drafts + 1), accepted, (1, 2 + accepted, 2 + accepted),
        np.repeat(logits, drafts, axis=0), np.repeat(logits, drafts + 1, axis=0),
    )  # fmt: skip
    return Speculation((0, 2), token, logits, (one,), drafts, accepted)


def test_a_run_that_is_made_up_is_right():
    found = judged(made_up())
    assert (found.verdict, found.faults, found.ties, found.judged) == ("match", (), (), 4 + 2)


def test_a_token_that_rounding_decides_is_a_tie():
    near, nearer = LOGITS.copy(), LOGITS.copy()
    near[0, 3], nearer[0, 3] = 3 - 1e-6, 3 + 1e-6
    found = judged(made_up(nearer, token=3), near)
    assert (found.verdict in ("match", "noise"), found.faults) == (True, ())
    assert len(found.ties) == 4 + 2
    assert "the text goes on with 3 at position 2; alone it would be 1" in found.ties[0]


def test_a_token_that_is_further_off_is_wrong():
    other = LOGITS.copy()
    other[0, 3] = 4
    found = judged(made_up(other, token=3))
    assert found.verdict == "wrong"
    assert "the trunk's logits behind position 1 are" in found.faults[0]


def test_what_hangs_on_rounding_is_looked_at_again():
    """An expert's choice, say: token by token another one is right, and it is the run's."""
    other = LOGITS.copy()
    other[0, 3] = 4
    found = judged(made_up(other, token=3), LOGITS, other)
    assert (found.verdict in ("match", "noise"), found.faults) == (True, ())


def test_logits_that_are_no_numbers_are_wrong():
    other = LOGITS.copy()
    other[0, 0] = np.nan
    assert judged(made_up(other)).verdict == "wrong"
