"""A server that keeps too much of earlier requests: it is found, and named; a right one says that it was asked."""

from __future__ import annotations

import json
from itertools import takewhile
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
from between import between
from optional import needs
from waiting import HANG

from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.server.answers import Answers, Probe, read_answers
from llamadiff.ext.server.compare import _Case
from llamadiff.ext.server.history import AT_ONCE, HOWS, PREDICTED, mixtures, probe, prompts_of
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.system.errors import UserError
from llamadiff.system.progress import silent
from llamadiff.trace.taps import LOGITS
from llamadiff.verbs.verbs import compare

TEXT = "Once upon a time there was a little girl named Lily."
LAST = 3  # requests, which are asked at once


class Remembers:
    """What stands before a right server, and keeps what it should not."""

    def __init__(self, url: str, mistake: str, count: int = 0) -> None:
        self.url, self.mistake, self.before, self.left = url, mistake, [], count

    def request(self, path: str, body: Any) -> Any:
        if path != "/completion":
            return body
        prompt = list(body["prompt"])
        self.left -= 1
        same = len([*takewhile(bool, (a == b for a, b in zip(self.before, prompt, strict=False)))])
        wanted = prompt
        if self.mistake == "too far" and 1 < same < len(prompt) - 2 and len(self.before) > same + 2:
            wanted = self.before[: same + 2] + prompt[same + 2 :]
        if self.mistake == "another's" and 1 < len(prompt) <= len(self.before) and same < len(prompt) - 1:
            wanted = [*self.before]
        if self.mistake == "at once" and self.left < LAST:
            wanted = prompt[:1] + prompt[:0:-1]
        self.before = prompt
        return {**body, "prompt": wanted}

    def change(self, path: str, answer: Any) -> Any:
        """A draft of one token that was rejected stays before the fourth predicted one."""
        rows = answer.get("completion_probabilities", ()) if path == "/completion" else ()
        if self.mistake == "draft" and len(rows) > 3:
            ids = [each["id"] for each in rows[:3]]
            body = {"prompt": [*self.before, *ids, 7], "n_predict": len(rows) - 3, "n_probs": 20, "temperature": 0.0}
            with urlopen(Request(self.url + path, json.dumps(body).encode()), timeout=HANG) as said:
                rows[3:] = json.load(said)["completion_probabilities"]
        return answer


def judged(url: str, mistake: str, count: int = 0):
    remembers = Remembers(url, mistake, count)
    with between(url, remembers.change, remembers.request) as address:
        return compare(shipped_model(), Run(prompt=None, tokens=IDS), address, How(timeout=HANG)), -remembers.left


IDS = (1, 501, 503, 261, 502, 404, 280, 261, 340, 310)


@needs("node")
@pytest.mark.parametrize(
    ("mistake", "how", "cause"),
    [
        (
            "too far",
            "after another prompt that begins alike",
            "it keeps 7 tokens of another prompt in its cache, of which 5",
        ),
        ("another's", "after another prompt that begins alike", "it answers as after another prompt"),
        ("draft", f"with {PREDICTED} predicted tokens (after 13 of 18 tokens)", ""),
        ("at once", AT_ONCE, ""),
    ],
)
def test_what_is_kept_too_long_is_found(served, mistake, how, cause):
    url = served()
    right, count = judged(url, "")
    assert right.verdict in ("match", "noise")
    assert any(f"asked {', '.join(HOWS)}: it says the same" in line for line in right.proof)
    result, _ = judged(url, mistake, count)
    assert result.verdict == "wrong"
    assert f"depend on what else it is asked: asked {how}" in result.headline
    assert cause in result.headline
    assert "compare token ids" in result.next_steps[0]


@needs("node")
def test_what_was_not_asked_is_said(served):
    result = compare(shipped_model(), Run(prompt=TEXT), served("--api", "ollama"), How(timeout=HANG))
    assert result.verdict in ("match", "noise")
    assert any("it was not asked with 8 predicted tokens" in line and "texts alone" in line for line in result.proof)


class Llama:
    """Logits that depend on all ids before."""

    file = SimpleNamespace(values=1)

    def __init__(self) -> None:
        self.baseline = {LOGITS: self.logits(IDS)}

    def logits(self, ids, spec=""):
        rows = [np.random.default_rng(ids[: n + 1]).normal(size=30) for n in range(len(ids))]
        return np.array(rows) + 1e-5 * len(spec)


def said(ids: tuple[int, ...], size: int) -> dict[int, float]:
    return dict(enumerate(Llama().logits(ids)[size - 1][:20]))


ALIKE = (*IDS[:5], 9, 8, 7, 6, 5)


@pytest.mark.parametrize(
    ("asked", "answered", "says"),
    [
        (ALIKE, ALIKE, ""),
        (IDS[:6], IDS[:6], ""),
        (ALIKE, (*IDS[:8], 6, 5), "it keeps 8 tokens of another prompt in its cache, of which 5 are this one's"),
        (ALIKE, IDS, "it answers as after another prompt"),
        (IDS[:6], (3, 4), "and asked in order it is right"),
    ],
)
def test_the_past_is_judged_and_named(asked, answered, says):
    probes = (Probe("again", asked, {len(asked): said(answered, len(answered))}, (IDS,)),)
    rows = {n: said(IDS, n) for n in range(1, len(IDS) + 1)}
    case = _Case(Llama(), Answers("s", "llama-server", IDS, len(IDS), rows, probes=probes), How())
    found = case._of_its_past()
    assert (found is None) == (says == "")
    assert found is None or found.says.endswith(says)


def test_prompts_share_what_they_should():
    whole, alike, other = prompts_of(range(100))
    assert (len(whole), alike[:32], other[0]) == (64, whole[:32], 0)
    assert len({whole, alike, other}) == 3
    assert not any(a == b for a, b in zip(whole[32:], alike[32:], strict=True))
    assert prompts_of([1, 5, 5, 5, 5, 5])[1] == (1, 5, 5, 5, 5, 5)  # no other order is there


def test_short_prompts_and_faults_are_said():
    class Refuses:
        def after(self, prompt, count=1):
            raise UserError("the server: is busy")

    assert probe(Refuses(), None, (1, 2, 3), silent) == ((), "a prompt of 3 tokens is too short")
    assert probe(Refuses(), None, range(9), silent) == ((), "the server: is busy")


def test_what_may_have_been_kept():
    found = dict(mixtures(Probe("again", (1, 2, 3, 4, 5), {}, ((1, 2, 9, 8),)), 5))
    assert found["it keeps 4 tokens of another prompt in its cache, of which 2 are this one's"] == (1, 2, 9, 8, 5)
    assert (1, 2, 9, 8) in found.values()


def test_probes_are_kept(tmp_path):
    probes = (Probe("again", (1, 2), {2: {0: -1.0, 5: -2.0}}, ((3,),)),)
    answers = Answers("s", "llama-server", (1, 2), 2, probes=probes, unasked="why")
    path = tmp_path / "s.answers.json"
    path.write_text(json.dumps(answers.to_json()), "utf-8")
    assert read_answers(path).probes == probes
    path.write_text(
        path.read_text("utf-8").replace('"tokens": [1, 2], "rows": {"2": [[', '"tokens": [1, 2], "rows": {"9": [[')
    )
    with pytest.raises(UserError, match="a probe has entries past its tokens"):
        read_answers(path)
