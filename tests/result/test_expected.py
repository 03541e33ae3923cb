"""Tokens that are asked for are in the table of logits, whatever their ranks, with both sides' values."""

from __future__ import annotations

import json

import numpy as np
from command import run
from places import ROOT

from llamadiff.trace.reader import Trace

TRACE = ROOT / "captures" / "tiny.Q4_K_M.safetensors"


def differ(*options):
    return run("diff", TRACE, TRACE, *options)


def test_expected_tokens_have_logit_and_rank_on_both_sides():
    logits = np.asarray(Trace.open(TRACE)["result_output"][-1])
    tokens = json.loads(differ("--expect", "15,656", "-o", "json:-").stdout)["logits"]["expected"]
    assert [token["id"] for token in tokens] == [15, 656]
    for token in tokens:
        rank = 1 + int((logits > logits[token["id"]]).sum())
        assert (token["rank"], token["candidate_rank"]) == (rank, rank)
        assert token["baseline"] == token["candidate"] == float(logits[token["id"]])


def test_expected_tokens_stand_under_the_first_ten_once():
    shown = differ("--expect", "15,656", "--full").stdout.splitlines()
    table = shown[next(i for i, line in enumerate(shown) if line.split()[:2] == ["rank", "id"]) + 1 :]
    ids = [line.split()[1] for line in table if line.startswith(" ") and line.split()[0].isdigit()]
    assert len(ids) == 11
    assert (ids[0], ids[-1]) == ("656", "15")


def test_expected_tokens_are_in_the_short_report_too():
    assert "token 15 " in differ("--expect", "15,656").stdout
    assert "token 15 " not in differ().stdout


def test_a_token_beyond_the_vocabulary_is_refused():
    done = differ("--expect", "99999")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "llamadiff: --expect 99999: there are 704 logits, of tokens 0 to 703\n"
    assert '--expect: "x" is not a token id' in differ("--expect", "x").stderr
