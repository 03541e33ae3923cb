"""The heads of llama.cpp's own models are right, and so is an engine that was written by hand."""

from __future__ import annotations

from dataclasses import replace
from string import ascii_letters

import numpy as np
import pytest
from command import run
from ext.heads import head_models
from ext.heads.head_runs import TOKENS, HeadRun, of_head
from ext.heads.numpy_head import run_with
from once import once

from llamadiff.candidates.opening import read_candidate
from llamadiff.engines.run_spec import How
from llamadiff.ext.heads.compare import judge_heads
from llamadiff.ext.heads.given import faults
from llamadiff.ext.heads.head_library import HeadLibrary
from llamadiff.ext.heads.head_reader import CHOSEN, OF_TRUNK, TAKEN
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace

IDS = ",".join(map(str, TOKENS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return once(tmp_path_factory, "heads", head_models.write)


@pytest.fixture(scope="module")
def ran(folder):
    """ran("glm4moe"): llama.cpp's run of such a model's heads."""
    kept: dict[str, HeadRun] = {}

    def get(name: str) -> HeadRun:
        if name not in kept:
            kept[name] = HeadRun.of(folder / f"{name}.gguf")
        return kept[name]

    return get


@pytest.mark.parametrize("name", [*head_models.NAMES, "glm4moe.F16", "glm4moe.Q8_0"])
def test_llama_cpps_heads_are_right(name, ran):
    result = ran(name).judged()
    assert (result.verdict, result.wrong) == ("match", ())
    judged = {row.tap for row in result.rows}
    assert {OF_TRUNK, "mtp_eh_proj-2"} <= judged
    assert {"result_output", "h_nextn", TAKEN} <= {tap.rpartition("-")[0] or tap for tap in judged}


def test_several_heads_are_told_apart(ran):
    taps = {tap.name for tap in ran("step35").engine.taps}
    assert {"mtp_h_input-2", "mtp_h_input-3", "result_output-2", "result_output-3", "h_nextn-3"} <= taps


def test_the_trunks_logits_are_no_part_of_it(ran):
    one = ran("glm4moe")
    weights = {leaf.name for node in one.engine.graph.nodes for leaf in map(one.engine.graph.leaves.get, node.sources)
               if leaf is not None}  # fmt: skip
    assert "output.weight" not in weights
    assert {"output_norm.weight", "blk.2.nextn.shared_head_head.weight"} <= weights


def test_a_head_takes_the_hidden_state_of_the_token_before(ran):
    one = ran("qwen35").baseline
    assert np.array_equal(one[TAKEN][1:], one[OF_TRUNK][:-1])
    assert not one[TAKEN][0].any()


@pytest.mark.parametrize(("kind", "verdicts"), [("", ("match",)), (".F16", ("match", "noise")),
                                                (".Q8_0", ("match", "noise"))])  # fmt: skip
def test_an_engine_written_by_hand_is_right(kind, verdicts, ran):
    one = ran(f"glm4moe{kind}")
    taps = run_with(one.path, TOKENS)
    for some in (taps, of_head(taps), {"result_output": taps["result_output"]}):
        result = one.judged(some)
        assert result.verdict in verdicts, result.headline
        assert result.wrong == ()
        assert len(result.rows) == len(some)


def test_hidden_states_in_sixteen_bits_are_noise(ran):
    one = ran("glm4moe")
    half = lambda self, h: np.concatenate([0 * h[:1], h[:-1].astype(np.float16).astype(np.float32)])  # noqa: E731
    assert one.judged(run_with(one.path, TOKENS, taken=half)).verdict == "noise"


NAMES = {
    "mtp_tok_embd-2": "model.layers.2.embed_tokens", "mtp_hnorm-2": "model.layers.2.hnorm",
    "mtp_enorm-2": "mtp.pre_fc_norm_embedding", "mtp_eh_proj-2": "mtp.fc", "mtp_concat-2": "mtp_concat",
    "mtp_attn_norm-2": "model.layers.2.input_layernorm", "mtp_attn_out-2": "attn_out-2",
    "mtp_shared_head_norm": "model.layers.2.shared_head.norm", "result_output": "model.layers.2.shared_head.head",
}  # fmt: skip


def test_other_names_are_known(ran):
    one = ran("glm4moe")
    taps = run_with(one.path, TOKENS)
    result = one.judged({name: taps[own] for own, name in NAMES.items()})
    assert result.extra == ()
    assert result.verdict == "match", result.headline
    assert len(result.rows) == len(NAMES)


@pytest.mark.parametrize("lacking", [(), ("mtp_hnorm-2",)], ids=["all", "a row less"])
def test_names_that_nobody_knows_are_found_by_values(lacking, ran):
    """Those that the vocabulary has not, too; a tensor of another shape is no tap."""
    one = ran("glm4moe")
    own = of_head(run_with(one.path, TOKENS))
    letters = ascii_letters[: len(own)]
    names = {name: f"w{letter}.2" if name.endswith("-2") else letter for letter, name in zip(letters, own, strict=True)}
    result = one.judged({names[tap]: x[1:] if tap in lacking else x for tap, x in own.items()}, name_map="auto")
    assert result.verdict == "match", result.headline
    assert result.extra == tuple(names[tap] for tap in lacking)
    assert len(result.rows) == len(own) - len(lacking)


def test_an_engine_without_a_row_for_the_first_token_is_told_so(ran, tmp_path):
    """It pairs nothing with the first token, and has a row less of everything."""
    one = ran("glm4moe")
    arrays = {name: values[1:] for name, values in of_head(run_with(one.path, TOKENS)).items()}
    trace = Trace(one.baseline.info, arrays, dict.fromkeys(arrays, "F32"))
    result = judge_heads(one.engine, one.baseline, read_candidate(trace, How()), How())
    assert result.verdict == "wrong"
    assert "your engine ran 11 tokens, 12 are stated" in result.headline


def with_values(trace: Trace, **values: np.ndarray) -> Trace:
    arrays = {name: trace[name] for name in trace} | values
    return Trace(trace.info, arrays, dict.fromkeys(arrays, "F32"))


def test_a_head_that_llama_cpp_fed_otherwise_is_seen(ran):
    """As if its own hidden state had been put beside each token."""
    one = ran("glm4moe")
    fed = with_values(one.baseline, **{TAKEN: one.baseline[OF_TRUNK]})
    result = judge_heads(one.engine, fed, None, How())
    assert result.verdict == "wrong"
    assert result.wrong[0].tap == TAKEN
    assert "takes the hidden state of the token itself" in result.headline


def test_other_inputs_of_a_head_are_seen(ran):
    graph = ran("glm4moe").engine.graph
    first = graph.labelled[OF_TRUNK].number + 1
    assert faults(graph, first) == []
    for op, change, says in (
        ("GET_ROWS", lambda x: np.roll(x, -1), "given token ids 17 in place 0, where 1 is right"),
        ("ROPE", lambda x: x + 1, "given positions 1 in place 0, where 0 is right"),
        ("SOFT_MAX", np.zeros_like, "mask lets token 0 see key 1"),
        ("SOFT_MAX", lambda x: np.full_like(x, -np.inf), "mask hides token 0 from itself"),
    ):
        node = next(node for node in graph.nodes if node.op == op and node.number > first)
        number = node.sources[1]
        other = replace(graph, given={**graph.given, number: change(graph.given[number])})
        assert says in faults(other, first)[0]


def test_the_command_says_it(folder, tmp_path):
    path = folder / "glm4moe.gguf"
    done = run("heads", path, "--tokens", IDS)
    assert (done.returncode, done.stdout.split()[0]) == (0, "MATCH")
    dump = tmp_path / "mine"
    dump.mkdir()
    wrong = run_with(path, TOKENS, joined=lambda self, e, h: np.concatenate([h, e], axis=-1))
    for name, values in of_head(wrong).items():
        np.save(dump / f"{name}.npy", values)
    done = run("heads", path, "--tokens", IDS, "--candidate", dump)
    assert done.returncode == 1
    assert "joins mtp_hnorm-2 before mtp_enorm-2" in done.stdout


@pytest.mark.parametrize(("model", "ids", "says"), [
    ("plain", IDS, "has no head that predicts a token more (nextn_predict_layers)"),
    ("glm4moe", "1", "a head pairs a token with the one before it; give at least 2 tokens"),
])  # fmt: skip
def test_what_has_no_head_is_refused_in_a_line(model, ids, says, folder, small_model):
    path = small_model("llama", "F16") if model == "plain" else folder / f"{model}.gguf"
    done = run("heads", path, "--tokens", ids)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert says in done.stderr


def test_another_run_is_refused(ran):
    one = ran("glm4moe")
    info = replace(one.baseline.info, tokens=(2, *TOKENS[1:]))
    other = Trace(info, {"result_output": one.baseline["result_output"]}, {"result_output": "F32"})
    with pytest.raises(UserError, match="ran other tokens"):
        judge_heads(one.engine, one.baseline, read_candidate(other, How()), How())


class Build:
    """A llama.cpp that is called through a shim."""

    name = "llama.cpp in build"


def test_a_llama_cpp_of_another_way_in_is_refused():
    with pytest.raises(UserError, match=r"heads are run by an installed llama\.cpp; leave out --llama-cpp DIR"):
        HeadLibrary(Build())


def test_a_candidate_that_has_no_heads_values_is_refused(folder):
    done = run("heads", folder / "glm4moe.gguf", "--tokens", IDS, "--candidate", "llama.cpp:kv=q8_0")
    assert done.returncode == 2
    assert "heads are compared with a trace, a dump or a command; give one of these" in done.stderr


def test_drafts_that_the_trunk_goes_on_with_are_counted(ran):
    one = ran("glm4moe")
    chosen = np.array(one.baseline.info.producer[CHOSEN])
    taps = run_with(one.path, TOKENS)
    own = int(np.sum(taps["result_output"].argmax(axis=-1) == chosen))
    assert f"goes on with {own} of the 12 tokens that llama.cpp's head drafts" in one.judged().summary
    drafts = np.zeros_like(taps["result_output"])
    drafts[np.arange(12), np.where(np.arange(12) < 7, chosen, (chosen + 1) % 128)] = 1
    assert "and with 7 of the candidate's" in one.judged({**taps, "result_output": drafts}).summary


def test_the_trunk_chooses_what_it_computes(ran):
    """Its logits are no tap of a head's run; an engine written by hand has them from its hidden states."""
    one = ran("glm4moe")
    logits = one.baseline[OF_TRUNK] @ one.engine.weights.whole("output.weight").T
    assert one.baseline.info.producer[CHOSEN] == logits.argmax(axis=-1).tolist()


def test_a_heads_tensors_are_not_odd(folder):
    """Though gguf-py's table of the architecture lacks them."""
    assert "has no such tensor" not in run("weights", folder / "qwen3next.gguf").stdout
