"""Generated tokens: a candidate's own are run, and it is said where they part from llama.cpp's, and by whose doing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamadiff import UserError, compare
from llamadiff.engines.run_spec import How, Run
from llamadiff.judge.preflight.checks import tokens_apart
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import diff, record
from proof.decoding.bugs import DECODING
from proof.decoding.engine import PREFILL, Generating, save
from proof.decoding.ways import PROMPT
from proof.strangers.engine import Bug
from proof.strangers.model import read

STEPS = 4


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Trace:
    """llama.cpp's own run of the prompt."""
    return record(shipped_model(), Run(PROMPT, n_predict=STEPS), tmp_path_factory.mktemp("theirs") / "t.safetensors")


def written(path: Path, tokens: tuple[int, ...], n_prompt: int, bug: str = "none") -> Path:
    """A trace of an engine that is given all its tokens."""
    engine = Generating(read(shipped_model()), len(tokens), DECODING[bug])
    engine.feed(tokens, [n_prompt, *[1] * (len(tokens) - n_prompt)])
    return save(path, engine, tokens, n_prompt)


def sampled(theirs: Trace) -> tuple[int, ...]:
    """The prompt, a token that llama.cpp takes too, one that is nobody's first, and another."""
    n = theirs.info.n_prefill
    second = int(np.argsort(theirs["result_output"][n])[-3])
    return (*theirs.info.tokens[: n + 1], second, 5)


def test_sampling_is_told_from_ops(theirs: Trace, tmp_path: Path):
    n, ids = theirs.info.n_prefill, sampled(theirs)
    result = compare(
        shipped_model(), Run(PROMPT, n_predict=STEPS), candidate=written(tmp_path / "m.safetensors", ids, n)
    )
    assert result.verdict == "match"
    assert tuple(token for token, _ in result.tokens) == ids
    found = result.parting
    assert found is not None
    assert (found.step, found.token) == (2, n + 1)
    assert (found.baseline.id, found.candidate.id) == (theirs.info.tokens[n + 1], ids[n + 1])
    assert found.wanted is not None
    assert found.wanted.id == found.baseline.id
    row = theirs["result_output"][n]
    assert found.baseline.baseline == pytest.approx(float(row[found.baseline.id]))
    assert (
        f"at the 2nd generated token llama.cpp takes '{found.baseline.text}' ({row.max():.2f}), yours '"
        in result.summary
    )
    assert result.summary.endswith("its sampling is to blame for that, not its ops")


def test_wrong_ops_choose_their_own_tokens(theirs: Trace, tmp_path: Path):
    n = theirs.info.n_prefill
    engine = Generating(read(shipped_model()), n + STEPS, DECODING["rows of another layer"])
    ids = engine.generate(theirs.info.tokens[:n], PREFILL, STEPS)
    path = save(tmp_path / "m.safetensors", engine, ids, n)
    result = compare(shipped_model(), Run(PROMPT, n_predict=STEPS), candidate=path)
    assert result.parting is not None
    assert result.parting.wanted is None
    assert result.summary.endswith(f"({result.parting.candidate.candidate:.2f}), its own largest")
    assert result.parting == compare(shipped_model(), candidate=path).parting


def test_a_text_that_was_given_is_nobodys_choice(theirs: Trace, tmp_path: Path):
    path = written(tmp_path / "m.safetensors", (*theirs.info.tokens[:6], 9, 11, 4), 6)
    result = compare(shipped_model(), candidate=path)
    assert (result.verdict, result.parting) == ("match", None)


def test_of_two_traces_what_the_candidate_generated_is_judged(theirs: Trace, tmp_path: Path):
    n, ids = theirs.info.n_prefill, sampled(theirs)
    mine = written(tmp_path / "m.safetensors", ids, n, "positions lag")
    result = diff(theirs, mine, shipped_model())
    assert (result.verdict, tuple(token for token, _ in result.tokens)) == ("wrong", ids)
    assert result.diagnosis[0].causes[0].name == "rope-position-restarted"
    assert result.parting is not None
    assert (result.parting.step, result.parting.candidate.id) == (2, ids[n + 1])
    for refused in (replace(theirs.info, producer={"name": "another"}), replace(theirs.info, n_prefill=len(ids))):
        with pytest.raises(UserError, match="other tokens"):
            diff(theirs.saying(refused), mine, shipped_model())


def test_another_prompt_is_still_refused(theirs: Trace, tmp_path: Path):
    ids = (*theirs.info.tokens[:3], 7, *theirs.info.tokens[4:])
    path = written(tmp_path / "m.safetensors", ids, theirs.info.n_prefill)
    with pytest.raises(UserError, match="other tokens: from token 3 on"):
        compare(shipped_model(), Run(PROMPT, n_predict=STEPS), candidate=path)


def test_what_goes_on_is_no_chat_template():
    longer = (1, 5, 6, 7, 8, 9)
    assert "state n_prefill = 3" in tokens_apart(None, longer[:3], longer)
    assert "it ends after 3" in tokens_apart(None, longer, longer[:3])
    assert "template" not in tokens_apart(None, longer[:3], longer) + tokens_apart(None, longer, longer[:3])


@pytest.mark.parametrize("batches", [(8, 1, 1, 1), (3, 3, 2, 1, 1, 1), (1,) * 11])
@pytest.mark.parametrize("engine", ["numpy", "graph"])
def test_llama_cpp_runs_the_batches_that_a_trace_states(batches, engine: str, theirs: Trace, tmp_path: Path):
    stranger = Generating(read(shipped_model()), 11)
    stranger.feed(theirs.info.tokens[:11], batches)
    path = save(tmp_path / "m.safetensors", stranger, theirs.info.tokens[:11], 8)
    result = compare(shipped_model(), candidate=path, save=tmp_path / "kept", how=How(engine=engine))
    assert (result.verdict, result.n_prefill, result.batches) == ("match", 8, batches)
    assert np.diff(Trace.open(tmp_path / "kept" / "baseline.safetensors").info.edges).tolist() == list(batches)


def changed(path: Path, **said: object) -> Trace:
    trace = Trace.open(path)
    return trace.saying(replace(trace.info, **said))


def test_positions_count_from_where_the_trace_says(theirs: Trace, tmp_path: Path):
    further = Bug("further", {"theta": lambda e, right, positions: right(positions + 20)})
    engine = Generating(read(shipped_model()), 10, further)
    engine.feed(theirs.info.tokens[:10], [8, 1, 1])
    path = save(tmp_path / "m.safetensors", engine, theirs.info.tokens[:10], 8)
    result = compare(shipped_model(), candidate=changed(path, positions=tuple(range(20, 30))))
    assert result.verdict == "match"
    assert compare(shipped_model(), candidate=path).verdict == "wrong"


def test_stated_positions_that_restart_are_a_finding(theirs: Trace, tmp_path: Path):
    path = written(tmp_path / "m.safetensors", theirs.info.tokens[:10], 8, "positions restart")
    result = compare(shipped_model(), candidate=changed(path, positions=(*range(8), 0, 0)))
    assert result.verdict == "wrong"
    assert "positions: from token 8 on positions 0, 0 are stated, and 8, 9 are right" in result.summary
    assert result.diagnosis[0].causes[0].name == "rope-position-restarted"


def test_positions_that_are_wrong_from_the_start_are_refused(theirs: Trace, tmp_path: Path):
    path = written(tmp_path / "m.safetensors", theirs.info.tokens[:10], 8)
    with pytest.raises(UserError, match="other positions"):
        compare(shipped_model(), candidate=changed(path, positions=(0, 0, *range(8))))


def said_of(said: Mapping[str, object], tmp_path: Path) -> Trace:
    import json

    from safetensors.numpy import save_file

    about = {"schema": "llamadiff.trace/1", "tokens": [1, 2, 3, 4], **said}
    save_file({"embd": np.zeros((4, 2), np.float32)}, tmp_path / "t.safetensors", {"llamadiff": json.dumps(about)})
    return Trace.open(tmp_path / "t.safetensors")


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([3], "batches of 3 tokens in all for 4 tokens"),
        ([4, 0], "is 0; expected a whole number >= 1"),
        ([2.0, 2], "is 2.0; expected a whole number"),
        (4, "batches is 4; expected a list"),
    ],
)
def test_batches_that_cannot_be_are_refused(batches: object, message: str, tmp_path: Path):
    with pytest.raises(UserError, match=message):
        said_of({"batches": batches}, tmp_path)


@pytest.mark.parametrize(
    ("said", "edges", "n_prefill"),
    [
        ({}, (0, 4), 4),
        ({"n_prefill": 2}, (0, 2, 3, 4), 2),
        ({"batches": [2, 1, 1]}, (0, 2, 3, 4), 2),
        ({"batches": [2, 2]}, (0, 2, 4), 4),
        ({"batches": [1, 1, 1, 1]}, (0, 1, 2, 3, 4), 1),
        ({"batches": [1, 1, 1, 1], "n_prefill": 3}, (0, 1, 2, 3, 4), 3),
    ],
)
def test_edges_are_those_of_the_batches(
    said: Mapping[str, object], edges: tuple[int, ...], n_prefill: int, tmp_path: Path
):
    info = said_of(said, tmp_path).info
    assert (info.edges, info.n_prefill) == (edges, n_prefill)
    assert info.head(3).edges == (*(edge for edge in edges if edge < 3), 3)
