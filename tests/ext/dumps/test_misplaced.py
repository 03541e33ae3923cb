"""A slip of recording is not a slip of computing: taps that hold what others are, and bugs that look alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.small import write_model
from proof.injected import BUGS
from proof.injected.base import TOKENS, together
from proof.injected.runs import record_faulty
from proof.strangers.engine import NONE
from traces import only

from llamadiff import UserError
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import How
from llamadiff.ext.dumps.misplaced import find_misplaced
from llamadiff.judge.run import run_passes
from llamadiff.judge.study import Assumed, Bench, Study
from llamadiff.result.comparison import Comparison
from llamadiff.trace.reader import Trace
from llamadiff.verbs import judging

Arrays = dict[str, np.ndarray]
OUTPUTS = ("embd", "l_out-", "result_output")
OTHERS = (3, 1, 60, 61, 62, 8, 9, 11, 80, 44, 30, 2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("three") / "m.gguf", layers=3)


@pytest.fixture(scope="module")
def judged(path: Path) -> Callable[[Trace], Comparison]:
    model, right = Model(path), record_faulty(NONE, path)
    return lambda trace: judging.judge(model, right, trace, How(diagnose=False))


@pytest.fixture(scope="module")
def found(path: Path) -> Callable[[Trace], Study | None]:
    """What is found of a run that was judged once."""
    bench = Bench(Model(path), record_faulty(NONE, path), How(), lambda: None)

    def find(trace: Trace) -> Study | None:
        passes = run_passes(bench.model, bench.baseline, trace, bench.how)
        assert passes.wrong("candidate")
        return find_misplaced(bench, Study(Assumed(trace), passes))

    return find


def as_trace(trace: Trace, arrays: Mapping[str, Any]) -> Trace:
    return Trace(trace.info, arrays, dict.fromkeys(arrays, "F32"))


def from_1(values: Arrays) -> Arrays:
    split = {name: name.rpartition("-") for name in values}
    return {f"{word}-{int(layer) + 1}" if word else name: values[name] for name, (word, _, layer) in split.items()}


def hidden_states(values: Arrays) -> Arrays:
    """As transformers counts them: the first is the embedding."""
    return {"l_out-0": values["embd"], **from_1(values)}


def one_buffer(values: Arrays) -> Arrays:
    return {name: values["l_out-2"] if name.startswith("l_out") else x for name, x in values.items()}


def swapped(values: Arrays) -> Arrays:
    other = {"attn_norm": "ffn_norm", "ffn_norm": "attn_norm"}
    split = {name: name.rpartition("-") for name in values}
    return {name: values[f"{other[word]}-{layer}"] if (word := split[name][0]) in other and (layer := split[name][2])
            else x for name, x in values.items()}  # fmt: skip


def a_row_early(values: Arrays) -> Arrays:
    return {name: x if name.startswith("kq") and x.ndim == 3 else np.roll(x, -1, 0) for name, x in values.items()}


def unwritten(values: Arrays) -> Arrays:
    return {name: 0 * x if name.startswith("l_out") else x for name, x in values.items()}


def one_unwritten(values: Arrays) -> Arrays:
    return {**values, "ffn_up-0": 0 * values["ffn_up-0"]}


SLIPS = {
    "counted from 1": (from_1, (), "layers are counted from 1: attn_norm-1 to attn_norm-3 hold the values of "
                       "attn_norm-0 to attn_norm-2, and so do 18 more kinds of taps; name them from 0"),
    "outputs from 1": (from_1, OUTPUTS, "layers are counted from 1: l_out-1 to l_out-3 hold the values of "
                       "l_out-0 to l_out-2; name them from 0"),
    "hidden states": (hidden_states, OUTPUTS, "layers are counted from 1: "),
    "one buffer": (one_buffer, (), "l_out-0, l_out-1 hold the values of l_out-2: one buffer, written twice"),
    "one buffer of outputs": (one_buffer, OUTPUTS, "l_out-0, l_out-1 hold the values of l_out-2: one buffer"),
    "swapped": (swapped, (), "names are mixed up: attn_norm-0 to attn_norm-2 hold the values of ffn_norm-0 to "),
    "a row early": (a_row_early, (), "rows are 1 token early: row 0 of embd, attn_norm-0, Qcur_proj-0 and "),
    "unwritten": (unwritten, (), "l_out-0 to l_out-2 are all 0: nothing was written there"),
    "one unwritten": (one_unwritten, (), "ffn_up-0 is all 0: nothing was written there"),
    "unwritten outputs": (unwritten, OUTPUTS, "l_out-0 to l_out-2 are all 0: nothing was written there"),
}  # fmt: skip


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_of_recording_is_seen(name, path, found):
    slip, kept, words = SLIPS[name]
    right = record_faulty(NONE, path)
    values = {tap: right[tap] for tap in (only(right, *kept) if kept else right)}
    study = found(as_trace(right, slip(values)))
    assert study is not None
    assert study.assumed.slips[0].startswith(words)
    assert not study.passes.wrong("candidate")


def test_a_slip_of_recording_is_said_first_and_accuses_no_op(path, judged):
    right = only(record_faulty(NONE, path), *OUTPUTS)
    result = judged(as_trace(right, from_1({name: right[name] for name in right})))
    assert (result.verdict, result.wrong) == ("unchecked", ())
    assert result.headline == SLIPS["outputs from 1"][2]
    assert result.next_steps == ("record each tap under the name of what it holds, and compare again",)


def test_behind_a_slip_a_bug_is_found(path, judged):
    """It is WRONG then, at the op, and the slip stands under it."""
    faulty = record_faulty(BUGS["rope: base 500000"], path)
    result = judged(as_trace(faulty, from_1({name: faulty[name] for name in faulty})))
    assert result.verdict == "wrong"
    assert {row.tap.split("-")[0] for row in result.wrong} == {"Qcur_rope", "Kcur_rope"}
    assert result.proof[0].startswith("layers are counted from 1: ")


@pytest.mark.parametrize(
    ("bug", "kept"),
    [("embedding: row before", ()), ("embedding: next row", ()), ("embedding: row 0 for all", OUTPUTS),
     ("norm: none at all", ()), ("norm: none at the end", ()), ("no residual", ("l_out-",)), ("no residual", ()),
     ("other layer: FFN", ()), ("K and V swapped", ()), ("Q to halves", ()), ("logits a row late", ())],
)  # fmt: skip
def test_a_bug_is_no_slip(bug, kept, path, found):
    faulty = record_faulty(BUGS[bug], path)
    assert found(only(faulty, *kept) if kept else faulty) is None


def test_several_bugs_are_no_slip(path, found):
    several = together(BUGS["norm: epsilon times 10"], BUGS["rope: base 500000"], BUGS["no residual"])
    assert found(record_faulty(several, path, TOKENS)) is None


def test_zeros_are_refused(path, judged):
    right = record_faulty(NONE, path)
    with pytest.raises(UserError, match="every value of the 60 taps that were recorded is 0: "):
        judged(as_trace(right, {name: 0 * right[name] for name in right}))


def test_another_runs_dump_is_refused(path, judged):
    other = record_faulty(NONE, path, OTHERS)
    stated = as_trace(record_faulty(NONE, path), {name: other[name] for name in other})
    with pytest.raises(UserError, match=r"ran other tokens: from token 0 on it has \[3 .*is of another run"):
        judged(stated)
