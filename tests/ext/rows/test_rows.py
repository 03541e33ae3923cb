"""Of a long prompt some rows are judged, and what is said is said of their tokens."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from command import run
from llamaref import Engine, ops
from models.options import OPTIONS
from models.small import write_model

from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.rows import choose
from llamadiff.ext.rows.choose import BESIDE, FIRST, LAST, chosen, in_words, is_asked, ranges
from llamadiff.ext.rows.positions import looked_at
from llamadiff.llamacpp.request import Settings
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace
from llamadiff.trace.writer import TraceWriter
from llamadiff.verbs.verbs import compare

IDS = tuple(int(n) for n in np.random.default_rng(7).integers(0, 96, 300))
ROWS = (0, 1, 2, 7, 8, 50, 127, 128, 255, 256, 257, 298, 299)
HOW = How(rows=in_words(ROWS))


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """long_model("qwen2", "Q8_0"): the path of such a model, with room for the prompt."""
    folder = tmp_path_factory.mktemp("models")

    def get(name="llama", kind="F16"):
        options, path = dict(OPTIONS[name]), folder / f"{name}.{kind}.gguf"
        extra = {**options.pop("extra", {}), "context_length": 4096}
        return path if path.exists() else write_model(path, kind=kind, extra=extra, **options)

    return get


def faulty(path, bug=None, ids=IDS, **more):
    """The whole run of an engine that says what its cache is kept in."""
    maths = {**vars(ops), **more, **(bug or {})}
    trace = record(Engine(path, maths=SimpleNamespace(**maths)), ids, "mine")
    return trace.with_settings(type_k="F32", type_v="F32")


def of_rows(trace, rows=ROWS, lacking=()):
    """What an engine dumps that keeps some rows, and its cache."""
    arrays = {name: trace[name] if name.startswith("kv_") else trace[name][list(rows)] for name in trace
              if not name.startswith(("kq-", "kq_soft_max-", *lacking))}  # fmt: skip
    tokens = tuple(trace.info.tokens[row] for row in rows)
    info = replace(trace.info, tokens=tokens, positions=tuple(rows), n_prefill=len(rows))
    return Trace(info, arrays, dict.fromkeys(arrays, "F32"))


def test_both_sides_of_edges_and_the_ends_are_chosen():
    rows = chosen("auto:3000", 5000)
    assert {*range(FIRST)} <= {*rows}
    assert {*range(5000 - LAST, 5000)} <= {*rows}
    for edge in (256, 2048, 3000, 4096):
        assert {*range(edge - BESIDE, edge + BESIDE)} <= {*rows}, edge
    assert rows == tuple(sorted({*rows})) == chosen("auto:3000", 5000)
    assert chosen("auto", 20) == tuple(range(20))


def test_rows_are_written_as_they_are_read():
    assert in_words((0, 1, 2, 9, 12, 13)) == "0-2, 9, 12-13"
    assert in_words((0, 2, 4, 6), 2) == "0, 2 and 2 more"
    assert chosen("0-2,9,12-13", 13) == (0, 1, 2, 9, 12)
    assert ranges("3-1") is None
    assert ranges("x") is None


def test_all_of_a_short_prompt_is_judged():
    assert not is_asked(None, "Once upon a time", 0)
    assert not is_asked("all", "Once " * 9000, 0)
    assert is_asked(None, "Once " * 9000, 0)
    assert is_asked(None, None, 2049)
    assert is_asked("0-3", None, 5)


@pytest.mark.parametrize(("name", "kind"), [("llama", "F16"), ("qwen3", "F16"), ("gemma2", "Q8_0"), ("phi3", "Q4_0")])
def test_llama_cpp_is_right_in_some_rows(name, kind, long_model):
    """Its last layer computes no other rows than those that have logits."""
    result = compare(long_model(name, kind), Run(tokens=IDS), how=HOW)
    assert result.verdict in ("match", "noise"), result.summary
    assert {"ffn_inp-1", "l_out-1", "result_output"} <= {row.tap for row in result.rows}
    assert all(row.shape[0] == len(ROWS) for row in result.rows)
    assert len(result.tokens) == len(ROWS)


def test_taps_that_are_asked_for_are_judged_in_some_rows(long_model):
    result = compare(long_model(), Run(tokens=IDS, patterns=("l_out-*",)), how=HOW)
    assert [row.tap for row in result.rows] == ["l_out-0", "l_out-1"]
    assert result.verdict in ("match", "noise")


def test_rows_of_decode_steps_are_judged(long_model):
    result = compare(long_model(), Run(tokens=IDS, n_predict=2), how=How(rows="0,5,299-301"))
    assert result.verdict == "match", result.summary
    assert (len(result.tokens), result.n_prefill) == (5, 3)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_cache_is_read_in_its_own_type(kind, long_model):
    settings = Settings(type_k=kind, type_v="F16")
    result = compare(long_model(), Run(tokens=IDS, settings=settings), how=HOW)
    assert result.verdict in ("match", "noise"), result.summary


def test_right_rows_pass(long_model):
    path = long_model()
    for trace in (faulty(path), of_rows(faulty(path))):
        result = compare(path, Run(tokens=IDS), trace, HOW)
        assert result.verdict in ("match", "noise"), result.summary


def test_a_wrong_base_is_named_from_rows_alone(long_model):
    path = long_model()
    bug = {"rope_angles": lambda rope, at, factors: ops.rope_angles(replace(rope, base=4 * rope.base), at, factors)}
    result = compare(path, Run(tokens=IDS), of_rows(faulty(path, bug)), HOW)
    assert result.verdict == "wrong"
    assert "uses base 40000, where 10000 is right" in result.headline
    assert [row.tap for row in result.wrong][:2] == ["Qcur_rope-0", "Kcur_rope-0"]


def test_what_goes_wrong_late_is_said_of_its_tokens(long_model):
    """Keys that are not seen any more: the first four, by tokens from 200 on."""

    def forgets(scores, scale, at, keys, *more):
        lost = (at[:, None] >= 200) & (keys[None, :] < 4)
        return ops.causal_softmax(np.where(lost, np.float32(-1e30), scores), scale, at, keys, *more)

    path = long_model()
    bug = {"causal_softmax": forgets, "causal_softmax_of_many": forgets}
    result = compare(path, Run(tokens=IDS), of_rows(faulty(path, bug)), HOW)
    first = result.first_divergence
    assert (result.verdict, first.tap) == ("wrong", "kqv_out-0")
    assert "only tokens 255 to 299 are wrong" in [fact.says for fact in first.local.facts]
    assert "see no key before key 4, where all are right" in result.headline
    assert first.local.token >= 255
    assert first.local.index[0] == first.local.token


def test_a_cache_that_holds_another_row_is_wrong(long_model):
    """The row is right on its way into the cache, and what attention reads is not."""
    path = long_model()
    trace = of_rows(faulty(path))
    keys = np.array(trace["kv_k-1"])
    keys[128] = keys[127]
    arrays = {name: keys if name == "kv_k-1" else trace[name] for name in trace}
    result = compare(path, Run(tokens=IDS), Trace(trace.info, arrays, trace.dtypes), HOW)
    assert (result.verdict, result.first_divergence.tap) == ("wrong", "kv_k-1")


def test_what_is_lacking_is_said_in_one_line(long_model, tmp_path):
    path = long_model()
    whole = faulty(path)
    some = of_rows(whole)
    with pytest.raises(UserError, match="has kv_k-0 of 0 tokens: attention reads K and V of all 300"):
        compare(path, Run(tokens=IDS), of_rows(whole, lacking=("kv_k",)), HOW)
    with pytest.raises(UserError, match=r"the candidate has no rows 3; write those too"):
        compare(path, Run(tokens=IDS), whole.lacking([]).head(3), replace(HOW, rows="0-3"))
    other = (*IDS[:50], 1 + IDS[50], *IDS[51:])
    with pytest.raises(UserError, match="at position 50, and"):
        compare(path, Run(tokens=other), some, HOW)
    with pytest.raises(UserError, match="--rows abc: expected rows such as"):
        compare(path, Run(tokens=IDS), how=How(rows="abc"))
    with pytest.raises(UserError, match="--rows 300-310: none of them is in the prompt, which has 300 tokens"):
        compare(path, Run(tokens=IDS), how=How(rows="300-310"))
    with pytest.raises(UserError, match="--rows 0-3: rows are those of a trace, a dump or a command"):
        compare(path, Run(tokens=IDS), how=How(rows="0-3", engine="graph"))
    file = tmp_path / "rows.safetensors"
    with TraceWriter(file) as writer:
        for name in some:
            writer.add(name, some[name])
        writer.finish(some.info)
    done = run("compare", path, file)
    assert done.returncode == 2
    assert "has some rows of a prompt: give the whole prompt too" in done.stderr
    assert run("compare", path, "--tokens", ",".join(map(str, IDS)), "--candidate", file).returncode == 0


def test_a_model_that_keeps_something_else_is_refused(long_model):
    with pytest.raises(UserError, match="--rows goes by K and V of all tokens, and mamba2 keeps something else"):
        compare(long_model("mamba2"), Run(tokens=IDS), how=HOW)


def test_without_being_asked_all_rows_of_such_a_model_are_judged(long_model, monkeypatch):
    monkeypatch.setattr(choose, "LONG", 100)
    result = compare(long_model("mamba2"), Run(tokens=IDS[:130]))
    assert (result.verdict, len(result.tokens)) == ("match", 130)
    assert len(compare(long_model(), Run(tokens=IDS)).tokens) < len(IDS)


def test_a_command_is_told_which_rows_to_dump(long_model, tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(
        "import sys\n"
        "ids, rows = open(sys.argv[1]).read().split(','), sys.argv[2]\n"
        "sys.exit(f'{len(ids)} ids, rows {rows}')\n"
    )
    command = f"cmd: {sys.executable} {script} {{tokens_file}} {{rows}} {{out}}"
    with pytest.raises(UserError, match="300 ids, rows 0-2,7-8,50,127-128,255-257,298-299"):
        compare(long_model(), Run(tokens=IDS), command, HOW)


def test_the_command_prints_what_compare_judges(long_model):
    done = run("rows", long_model(), "3000")
    assert done.stdout.strip() == in_words(chosen("auto", 3000)).replace(" ", "")


def test_what_may_be_missed_is_said():
    assert looked_at((0, 1, 9), 500, 0).endswith("what is wrong in others alone is not seen")
    assert "of 5,000 tokens 2 were judged, with K and V of all: 0-1" in looked_at((0, 1), 5000, 64)
    assert looked_at((0,), 5000, 64).endswith("what is wrong in fewer than 7% of the others may not be seen")
