"""Every sentence that can be said of an op: each known bug at each op that has it, each describer of each tap.

Walked over the table of bugs and over taps of models, and not listed: a new bug, or a new describer, is in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import pytest
from ext.heads import head_models
from ext.heads.head_runs import HeadRun
from models.other_files import with_adapter
from models.random_models import NAMES
from once import once
from proof.nodes import every_site

from llamadiff import Trace
from llamadiff.candidates.reference import record
from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import USUAL, Run
from llamadiff.ext.explain.case import NotRecordedError
from llamadiff.ext.explain.registry import ANY, EDITS, Constant, known_bugs
from llamadiff.ext.explain.site import Site
from llamadiff.ext.file.blocks.fields import FIELDS
from llamadiff.ext.file.blocks.known import KNOWN as BLOCKS
from llamadiff.ext.graph.model import GraphModel, by_its_graph
from llamadiff.result.diagnosis import Diagnosis
from llamadiff.verbs.judging import judge
from llamadiff.words import diagnosis_text
from llamadiff.words.advice import advice
from llamadiff.words.repairs import repairs_of

TOKENS = (1, 5, 9, 30, 17, 22, 64)
KNOWN = known_bugs()
# between them they reach every bug, at every op of theirs that a graph of llama.cpp's has
MODELS = (
    "gpt-oss.Q8_0", "qwen35.F16", "starcoder2.Q5_K_M", "granitehybrid.Q8_0", "mpt.Q8_0", "falcon.Q8_0", "llama.Q8_0",
    "phi3.Q6_K", "mamba.F16", "deepseek2", "lfm2.F16", "smollm3.Q4_0", "olmo2.BF16", "qwen2.F16",
    "gemma2", "stablelm", "moe", "granite", "llama-yarn", "llama-linear", "phi3-long", "llama, adapted",
    "glm4moe, its head",
)  # fmt: skip
ADAPTED = ", adapted"  # the model with an adapter
HEADED = ", its head"  # the model with the head that drafts, in one graph
UNTOLD = re.compile(
    r"\bNone\b|\bnan\b|\binf times|(node|leaf)_\d|\bin ;|  |\bof ,|^\s|\s$|\(\)|,,|\{|(\b\w+ \d+) should be \2\b"
    r"|\b(is|are|comes?|count) 1 times|times 0\b"
)
NODE = re.compile(r"node_\d+ \(\w+\)")  # a tap of a graph that has no other name
NAMES_WITH_BRACES = re.compile(r"model\.layers\.\{\}")  # llama.cpp's, of lfm2


@dataclass(frozen=True)
class Said:
    """What is said of one bug at one node."""

    bug: str
    op: str
    says: str
    fix: str
    value: str = ""  # of a constant: the one that the engine has
    own: str = ""


def is_told(text: str) -> bool:
    """Whether a sentence has all its parts: no value that is none, no number of a node, nothing empty."""
    return UNTOLD.search(NAMES_WITH_BRACES.sub("layer", text)) is None


@pytest.fixture(scope="module")
def graph_of(small_model, random_model, tmp_path_factory):
    """A model with its graph, and what its own engine records."""
    kept: dict[str, tuple[GraphModel, Trace]] = {}

    def get(name: str) -> tuple[GraphModel, Trace]:
        if name.endswith(HEADED) and name not in kept:
            path = once(tmp_path_factory, "heads", head_models.write) / f"{name.removesuffix(HEADED)}.gguf"
            model = HeadRun.of(path, TOKENS).engine
            kept[name] = model, record(model.engine, TOKENS, "right")
        if name not in kept:
            path = random_model(name) if name in NAMES else small_model(name.removesuffix(ADAPTED), "F16")
            output = tmp_path_factory.mktemp("graph") / "b.safetensors"
            run = with_adapter(path, output.parent) if name.endswith(ADAPTED) else Run()
            run = replace(run, tokens=TOKENS, patterns=("embd",))
            model, _ = by_its_graph(path, text_request(ModelFile(path, settings=run.settings), run, output))
            kept[name] = model, record(model.engine, TOKENS, "right")
        return kept[name]

    return get


@pytest.fixture(scope="module")
def sentences(graph_of) -> list[Said]:
    """What every bug says at every node that it can be at; at ops that no model has, at a node of another name."""
    said, reached = list[Said](), set[tuple[str, str]]()
    sites = [site for name in MODELS for site in every_site(*graph_of(name), TOKENS, n_prefill=4, kept=True)]
    for site in sites:
        said += _at(site)
    reached = {(each.bug, each.op) for each in said}
    for bug, ops, edits in EDITS:
        like = [site for site in sites if site.node.op in ops]
        for op in {*ops} - {ANY} - {op for of, op in reached if of == bug}:
            for site in like:
                other = replace(site, node=replace(site.node, op=op))
                said += _of(bug, other, edits)
    return said


def _at(site: Site) -> Iterator[Said]:
    overflowing = replace(site, case=replace(site.case, recorded=np.array([np.inf])))
    for bug, ops, edits in EDITS:
        if {site.node.op, ANY} & set(ops):
            yield from _of(bug, overflowing if bug == "overflow-in-half" else site, edits)


def _of(bug: str, site: Site, edits) -> Iterator[Said]:
    try:
        for edit in edits(site):
            fix = edit.fix or KNOWN[bug].fix
            if isinstance(edit, Constant):
                value = 1.37 * (edit.own or 1.0)
                yield Said(bug, site.node.op, edit.sought.says(value, edit.own), fix, f"{value:.3g}", f"{edit.own:.3g}")
            else:
                yield Said(bug, site.node.op, edit.says, fix)
    except NotRecordedError:
        return


def test_every_bug_is_reached_at_every_op(sentences):
    """But for blocks of types that none of these models has, which are walked below, and a square after ReLU."""
    reached = {(each.bug, each.op) for each in sentences}
    missed = {(bug, op) for bug, ops, _ in EDITS for op in ops if op != ANY and (bug, op) not in reached}
    blocks = {known.name for known in BLOCKS} | {"tensor-offset-wrong"}
    assert {each for each in missed if each[0] not in blocks} <= {("activation-other", "SQR")}
    assert {bug for bug, _ in reached} | blocks == set(KNOWN)


def test_every_sentence_of_a_bug_has_all_its_parts(sentences):
    assert {each for each in sentences if not (is_told(each.says) and is_told(each.fix))} == set()


def test_no_fix_is_what_the_engine_does(sentences):
    """What it does, up to what the model does, does not stand in the fix: that says the other thing."""
    softmax = "takes a softmax over all experts; this model over the chosen ones"
    assert _is_repeated(softmax, "take the softmax over all experts, then choose")
    assert {each for each in sentences if _is_repeated(each.says, each.fix)} == set()


def test_a_fix_has_the_models_constant_and_not_the_engines(sentences):
    constants = [each for each in sentences if each.value]
    assert len({each.bug for each in constants}) > 10
    assert [each for each in constants if each.value in each.fix] == []
    of_models = [each for each in constants if each.own not in ("0", "1")]
    assert {each.bug for each in of_models} >= {
        "rope-base",
        "norm-epsilon",
        "attention-scale-other",
        "multiplier-other",
    }
    assert [each for each in of_models if not _has(each.own, each.fix)] == []


def _has(number: str, text: str) -> bool:
    return any(f"{float(found):.3g}" == number for found in re.findall(r"\d[\d.]*(?:e[-+]?\d+)?", text.rstrip(".")))


def _does(says: str) -> str:
    """What the engine does, without what the model does in its place."""
    return re.split(r"; this model|; the model|; this layer|, not |, where | for this model|; YaRN|; positions", says)[
        0
    ]


def _is_repeated(says: str, fix: str) -> bool:
    """Whether the words of what is done stand in the fix, one after another."""
    does, needs = (f" {' '.join(_words(text))} " for text in (_does(says), fix))
    return does in needs


def _words(text: str) -> list[str]:
    """Words of a clause: verbs and nouns without their s, names and numbers whole; no articles."""
    words = [word.removesuffix("s") for word in re.findall(r"[^\s,;:()]+", text.lower())]
    return [word for word in words if word not in ("a", "the")]


MIRRORED = {  # what is done in one model is what another one needs: the two say it the other way round
    "rope-layout": ("llama-yarn", "stablelm"), "rope-yarn-magnitude": ("llama-yarn", "llama-linear"),
    "router-other-gate": ("gpt-oss.Q8_0", "moe"), "activation-other": ("gemma2", "llama-yarn"),
}  # fmt: skip


@pytest.mark.parametrize("bug", MIRRORED)
def test_both_directions_of_a_bug_have_their_own_fix(bug, graph_of):
    fixes = [
        {each.fix for site in every_site(*graph_of(name), TOKENS) for each in _at(site) if each.bug == bug}
        for name in MIRRORED[bug]
    ]
    assert all(fixes)
    assert fixes[0].isdisjoint(fixes[1])


def test_an_attention_factor_that_is_left_out_is_said_so(graph_of):
    """LongRoPE's, of the file: 1.2. YaRN has nothing to do with it."""
    said = {
        (each.says, each.fix)
        for site in every_site(*graph_of("phi3-long"), TOKENS)
        for each in _at(site)
        if each.bug == "rope-yarn-magnitude"
    }
    assert said == {
        ("leaves out the attention factor; this model multiplies cos and sin by 1.2", "multiply cos and sin by 1.2")
    }


def test_every_misreading_of_every_type_has_its_own_words():
    said = [
        (kind, each.says, each.fix or known.fix) for kind in FIELDS for known in BLOCKS for each in known.of(kind, 4)
    ]
    assert {kind for kind, _, _ in said} >= {"Q4_0", "Q2_K", "Q3_K", "Q6_K"}
    assert [each for each in said if not (is_told(each[1]) and is_told(each[2]))] == []
    assert [each for each in said if _is_repeated(*each[1:])] == []


# -- what is read back, and what an error looks like ---------------------------------------------------------------


def _one_channel(x, by):
    out = np.array(x)
    out[..., out.shape[-1] // 2] = by(out[..., out.shape[-1] // 2])
    return out


def _part_zero(x):
    out = np.array(x)
    out[:, out.shape[1] // 2] = 0
    return out


ERRORS = {
    "zeros": np.zeros_like,
    "not finite": lambda x: np.full_like(x, np.nan),
    "some not finite": lambda x: _one_channel(x, lambda part: part * np.inf),
    "a channel of zeros": lambda x: _one_channel(x, np.zeros_like),
    "a channel nearly right": lambda x: _one_channel(x, lambda part: part * np.float32(1.0004)),
    "a part of zeros": _part_zero,
    "nearly right": lambda x: x * np.float32(1.0003),
    "another order": lambda x: x[..., [0, 2, 3, 1, *range(4, x.shape[-1])]] if x.shape[-1] > 3 else x[..., ::-1],
    "large": lambda x: x * np.float32(1e30),
}  # fmt: skip
APART = 3  # taps, of which one is wrong: others are right, and are what it reads


@pytest.mark.parametrize("error", ERRORS)
def test_every_sentence_about_a_tap_has_all_its_parts(error, graph_of):
    assert _untold(*graph_of("moe"), error, first=[*ERRORS].index(error) % APART) == []


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", ["moe", "gemma2", "stablelm", "llama.Q8_0", "falcon.Q8_0"])
def test_every_sentence_about_every_tap_has_all_its_parts(name, error, graph_of):
    assert [text for first in range(APART) for text in _untold(*graph_of(name), error, first)] == []


def _untold(model: GraphModel, right: Trace, error: str, first: int) -> list[str]:
    """What is said of a run without all its parts, where one tap in a few is wrong."""
    taps = [tap for tap in right if not tap.endswith("-1") and not tap.startswith("ffn_moe_topk")]
    with np.errstate(all="ignore"):
        wrong = {tap: np.asarray(ERRORS[error](np.asarray(right[tap])), right[tap].dtype) for tap in taps[first::APART]}
    faulty = Trace(right.info, {**{tap: right[tap] for tap in right}, **wrong}, right.dtypes)
    result = judge(model, right, faulty, USUAL)
    texts = [result.headline, *result.proof, *result.profile, *result.next_steps]
    texts += [text for repair in repairs_of(result) for text in (repair.fix, repair.says) if text]
    texts += [text for row in result.wrong for text in (advice(row), *(fact.says for fact in row.local.facts))]
    return [text for text in texts if not is_told(NODE.sub("tap", text))]


def test_attention_of_zeros_is_said_to_be_zeros(graph_of):
    model, right = graph_of("llama-yarn")
    names = takewhile(
        lambda name: name != "attn_out-0", right
    )  # what is computed from it would show a slip of recording
    faulty = Trace(right.info, {n: right[n] * (0 if n.startswith("kqv_out") else 1) for n in names}, right.dtypes)
    result = judge(model, right, faulty, USUAL)
    assert result.headline == "weighted sum of values, layer 0: all of its values are zero"
    assert [(d.tap, d.causes) for d in result.diagnosis if d.known] == []


def test_an_expert_is_called_one(graph_of):
    model, right = graph_of("moe")
    wrong = np.array(right["ffn_moe_gate-0"])
    wrong[:, 1] = 0
    faulty = Trace(right.info, {**{tap: right[tap] for tap in right}, "ffn_moe_gate-0": wrong}, right.dtypes)
    facts = [fact.says for row in judge(model, right, faulty, USUAL).wrong for fact in row.local.facts]
    assert "chosen expert 1 is all zero" in facts


def test_taps_of_no_layer_are_said_without_one():
    """Nodes without a name of their own: it was "in ;"."""
    names = ["Qcur-0 (add)", "Qcur-1 (add)"]
    d = Diagnosis(names[0], dict.fromkeys(names, 0.0), dict.fromkeys(names, 1.0), ())
    assert diagnosis_text.where(d, [*names, "Qcur-0", "Qcur-1"]) == "Qcur"
