"""Known bugs put into nodes of a recorded graph: each is found at its tap, and called by its name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from models.random_models import NAMES
from models.small import EMBD, write_model
from proof.nodes import every_site

from llamadiff import Trace
from llamadiff.candidates.reference import record
from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import USUAL, How, Run
from llamadiff.ext.explain.alter import gives
from llamadiff.ext.explain.case import NotRecordedError
from llamadiff.ext.explain.registry import EDITS, FAMILIES, Bug, Edit, define, known_bugs
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.together import REFUSED
from llamadiff.ext.graph.engine import GraphEngine
from llamadiff.ext.graph.graph import GraphNode
from llamadiff.ext.graph.model import GraphModel, by_its_graph
from llamadiff.ext.graph.op import Op
from llamadiff.verbs.judging import judge

TOKENS = (1, 5, 9, 30, 17, 22, 64)
CLAMPED = ("attn_norm", "attn_output_norm")
# what some bugs come to: a norm's input left ungated or unweighed, a factor before a norm that leaves no epsilon
EQUALS = {"gate-after-norm": {"up-missing"}, "product-multiplied": {"norm-epsilon-missing"}}
BELOW = {"clamp-missing"}
# what test_graph_explains.py and proof/unseen show: where there are decode steps, and values that no float16 holds
OF_SEVERAL_BATCHES = {
    "rope-position-restarted", "cache-overwritten", "first-row-fed-twice", "decode-key-unseen", "state-lost"
}  # fmt: skip
OF_ADAPTERS = {"adapter-missing", "adapter-scaled", "adapter-scale-other"}  # tests/ext/file/test_applied.py
OF_HEADS = {  # tests/ext/heads/test_head_mistakes.py
    "embedding-from-other-table", "halves-in-other-order", "head-other", "hidden-state-of-other-token",
    "hidden-state-rounded", "joined-after-a-norm", "joined-elsewhere",
    "refused-draft-kept",
}  # fmt: skip
OF_LARGE_VALUES = {"overflow-in-half", "norm-overflow", "norm-epsilon-in-half", "softmax-overflow"}
PARTS = 5  # of the known bugs: in the quick tests two models meet one part each
KNOWN = known_bugs()  # and with them, EDITS
MODELS = ("llama", "stablelm", "moe", "gemma2", "llama-yarn", "llama-factors")  # that every bug is put into
OTHERS = ("qwen35.F16", "mamba.F16", "mamba2.Q8_0", "bloom.F16", "gpt-oss.Q8_0", "deepseek2.Q8_0", "mpt.Q8_0")


@dataclass(frozen=True)
class Recorded:
    """A model with its graph, and what its own engine records."""

    model: GraphModel
    right: Trace

    def faulty(self, altered: dict, *starts: str) -> Trace:
        """What an engine with altered nodes records, under names that a stranger's engine could have."""
        trace = record(GraphEngine(self.model.graph, self.model.weights, altered), TOKENS, "mine")
        kept = [name for name in trace if "(" not in name and (not starts or name.startswith(starts))]
        return Trace(trace.info, {name: np.array(trace[name]) for name in kept}, trace.dtypes)

    def judged(self, altered: dict, *starts: str, **how):
        return judge(self.model, self.right, self.faulty(altered, *starts), How(**how))

    def find(self, op: str, what: Callable[[GraphNode], bool] = lambda node: True) -> GraphNode:
        """The last node with an op."""
        return [node for node in self.model.graph.nodes if node.op == op and what(node)][-1]

    def reads(self, weight: str) -> Callable[[GraphNode], bool]:
        """Whether a node reads a weight."""
        numbers = {leaf.number for leaf in self.model.graph.leaves.values() if leaf.name == weight}
        return lambda node: not numbers.isdisjoint(node.sources)


@pytest.fixture(scope="module")
def recorded(small_model, random_model, tmp_path_factory):
    kept: dict[str | Path, Recorded] = {}

    def opened(name: str | Path) -> Path:
        if isinstance(name, Path):
            return name
        return random_model(name) if name in NAMES else small_model(name, "F16")

    def get(name: str | Path) -> Recorded:
        if name not in kept:
            path = opened(name)
            output = tmp_path_factory.mktemp("graph") / "b.safetensors"
            model, _ = by_its_graph(path, text_request(ModelFile(path), Run(tokens=TOKENS, patterns=("embd",)), output))
            kept[name] = Recorded(model, record(model.engine, TOKENS, "right"))
        return kept[name]

    return get


def sites(one: Recorded, ops: tuple[str, ...]) -> list[Site]:
    """Every node with one of these ops, as a bug sees it that everything was recorded for."""
    return [site for site in every_site(one.model, one.right, TOKENS) if site.node.op in ops]


@pytest.fixture(scope="module")
def injected(recorded):
    """What is named of a part of the bugs, each put into a model, found out once."""
    kept: dict[tuple[str, int], dict[tuple[str, str], set[str]]] = {}

    def get(name: str, part: int) -> dict[tuple[str, str], set[str]]:
        if (name, part) not in kept:
            kept[name, part] = named_in(recorded(name), part)
        return kept[name, part]

    return get


def possible(edits):
    """Those that a model has what they need for."""
    with suppress(NotRecordedError):
        yield from edits


def named_in(one: Recorded, part: int) -> dict[tuple[str, str], set[str]]:
    """One in PARTS of the bugs put into the model: (bug, variant) -> the causes that were named."""
    out: dict[tuple[str, str], set[str]] = {}
    for bug, ops, edits in [known for known in EDITS if not KNOWN[known[0]].harmless][part::PARTS]:
        tried: set[str] = set()
        for site in sites(one, ops):
            for edit in possible(edits(site)):
                if edit.variant in tried or len(tried) > 3:
                    continue
                value = 0.0 if isinstance(edit, Edit) else 1.37 * float(edit.sought.low * edit.sought.high**3) ** 0.25
                own, more = (edit.alter, edit.more) if isinstance(edit, Edit) else (edit.make(value), edit.more(value))
                altered = {site.node.number: own, **more}
                try:
                    lost = any(np.isnan(values).all() for values in one.faulty(altered).values())
                except REFUSED:  # this node cannot take it
                    continue
                if lost:  # it is no mistake on these values
                    continue
                result = one.judged(altered)
                if result.wrong:  # else this model cannot show it there
                    tried.add(edit.variant)
                    causes = {cause.name for found in result.diagnosis[:1] for cause in found.causes}
                    out.setdefault((bug, edit.variant), set()).update(causes or {"unknown"})
    return out


@pytest.mark.parametrize(("name", "part"), [*product((*MODELS, *OTHERS), range(PARTS))])
def test_a_bug_at_a_node_is_named(name, part, injected):
    """One that comes to another where more was recorded may be called that."""
    found = injected(name, part)
    assert len({bug for bug, _ in found}) > 25 / PARTS - 2
    assert not [(key, causes) for key, causes in found.items() if "unknown" in causes]
    missed = {key: causes for key, causes in found.items() if key[0] not in causes}
    assert all(causes & EQUALS.get(bug, set()) for (bug, _), causes in missed.items()), missed


@pytest.mark.slow
def test_every_bug_of_nodes_shows_in_some_model(injected):
    shown = {bug for name in (*MODELS, *OTHERS) for part in range(PARTS) for bug, _ in injected(name, part)}
    blocks = {bug for bug, known in KNOWN.items() if known.family == "misread"}  # test_misread.py
    harmless = {bug for bug, known in KNOWN.items() if known.harmless}
    elsewhere = {*BELOW, *OF_SEVERAL_BATCHES, *OF_LARGE_VALUES, *OF_ADAPTERS, *OF_HEADS}
    assert {bug for bug, _, _ in EDITS} - shown - blocks - harmless <= elsewhere


# the same by hand: what is injected here shares nothing with what looks for it


def altered_params(place: int, value: float, kind=np.float32):
    def alter(n: Op) -> Op:
        numbers = np.frombuffer(n.params, kind).copy()
        numbers[place] = value
        return replace(n, params=numbers.tobytes())

    return alter


def first(n: Op) -> np.ndarray:
    return n.x()


BY_HAND = {
    "rope-layout": ("llama", "ROPE", altered_params(2, 2, np.int32)),
    "rope-base": ("llama", "ROPE", altered_params(5, 123456.0)),
    "rope-missing": ("qwen3", "ROPE", first),
    "norm-epsilon": ("llama", "RMS_NORM", altered_params(0, 0.0371)),
    "norm-missing": ("llama", "RMS_NORM", first),
    "norm-mean-kept": ("stablelm", "NORM", lambda n: n.x() / np.sqrt(np.mean(n.x() ** 2, -1, keepdims=True) + 1e-5)),
    "attention-scale-other": ("llama", "SOFT_MAX", altered_params(0, 0.0777)),
    "softcap-missing": ("gemma2", "TANH", None),
    "activation-other": ("llama", "SWIGLU", lambda n: replace(n, name="REGLU")),
    "multiplier-missing": ("granite", "SCALE", altered_params(0, 1.0)),
    "multiplier-other": ("granite", "SCALE", altered_params(0, 0.5)),
    "router-not-normalised": ("moe", "DIV", first),
}  # fmt: skip


@pytest.mark.parametrize("cause", BY_HAND)
def test_a_bug_made_by_hand_is_named(cause, recorded):
    name, op, alter = BY_HAND[cause]
    one = recorded(name)
    node = one.find(op)
    altered = {node.number: alter}
    if alter is None:  # a cap's three nodes
        above = next(other for other in one.model.graph.nodes if node.number in other.sources)
        altered = dict.fromkeys((node.sources[0], node.number, above.number), first)
    result = one.judged(altered)
    found = result.diagnosis[0]
    assert cause in [each.name for each in found.causes], result.summary
    assert found.tap == result.first_divergence.tap
    assert found.nmse < 1e-9


def test_of_equal_experts_any_may_be_chosen(recorded):
    """What tells is how likely they are, not their numbers."""
    one = recorded("moe")
    likely, order = one.find("SOFT_MAX", lambda node: "moe" in node.name), one.find("ARGSORT")
    equal = {likely.number: gives(np.ones_like), order.number: gives(lambda x: x[..., ::-1])}
    assert [row.tap for row in one.judged(equal).wrong] == [likely.label]


def test_a_clamp_left_out_is_named(recorded, tmp_path):
    """DBRX clamps the fused projection."""
    norms = {f"blk.{i}.{name}.weight": np.ones(EMBD, np.float32) for i in (0, 1) for name in CLAMPED}
    extra = {"attention.clamp_kqv": 0.5, "attention.layer_norm_epsilon": 1e-5}
    how = {"experts": 4, "fused_qkv": True, "pre_norm": False, "extra": extra, "tensors": norms}
    one = recorded(write_model(tmp_path / "dbrx.gguf", "dbrx", **how))
    node = one.find("CLAMP", lambda node: node.shape[-1] > 100)
    result = one.judged({node.number: first})
    assert result.diagnosis[0].causes[0].name == "clamp-missing", result.summary


def test_positions_that_restart_in_decode_steps_are_named(recorded):
    one = recorded("llama")
    info = replace(one.right.info, n_prefill=4)
    node = one.find("ROPE")

    def restarted(n: Op) -> Op:
        where = replace(n.sources[1], values=np.array([0, 1, 2, 3, 0, 0, 0]).reshape(n.x(1).shape))
        return replace(n, sources=(n.sources[0], where, *n.sources[2:]))

    faulty = one.faulty({node.number: restarted})
    sides = [Trace(info, {name: x[name] for name in x}, x.dtypes) for x in (one.right, faulty)]
    result = judge(one.model, *sides, USUAL)
    assert [cause.name for cause in result.diagnosis[0].causes] == ["rope-position-restarted"]


def test_a_constant_is_solved_for(recorded):
    one = recorded("llama")
    node = one.find("ROPE")
    found = one.judged({node.number: altered_params(5, 31416.0)}).diagnosis[0].causes[0]
    assert found.value == pytest.approx(31416.0, rel=1e-3)
    assert "uses base 31416" in found.says


def test_weights_and_biases_are_told_apart(recorded):
    one = recorded("qwen2")
    bias = one.find("ADD", one.reads("blk.1.attn_k.bias"))
    result = one.judged({bias.number: first})
    assert (result.first_divergence.tap, result.diagnosis[0].causes[0].name) == ("Kcur_proj-1", "bias-missing")
    assert "leaves out blk.1.attn_k.bias" in result.summary


def test_a_bug_is_named_through_what_was_not_recorded(recorded):
    one = recorded("qwen3")
    node = one.find("ROPE")
    result = one.judged({node.number: altered_params(2, 0, np.int32)}, "embd", "l_out", "result")
    cause = result.diagnosis[0].causes[0]
    assert (result.first_divergence.tap, cause.name, cause.at) == ("l_out-1", "rope-layout", "Kcur_rope-1")


def test_one_bug_in_every_layer_is_one_diagnosis(recorded):
    one = recorded("llama")
    ropes = {node.number: altered_params(2, 2, np.int32) for node in one.model.graph.nodes if node.op == "ROPE"}
    result = one.judged(ropes)
    assert [found.causes[0].name for found in result.diagnosis] == ["rope-layout"]
    assert len(result.diagnosis[0].taps) == 4
    assert "in both layers" in result.summary


def test_what_is_no_known_bug_is_unknown(recorded):
    one = recorded("llama")
    node = one.find("RMS_NORM")
    rng = np.random.default_rng(3)
    result = one.judged({node.number: lambda n: n.x() * rng.standard_normal(n.x().shape).astype(np.float32)})
    assert result.wrong
    assert not any(found.causes for found in result.diagnosis)


def test_every_bug_has_one_home_and_one_sentence():
    sentences = [(bug.about, bug.fix) for bug in KNOWN.values()]
    assert len(set(sentences)) == len(KNOWN)
    assert {bug for bug, _, _ in EDITS} == set(KNOWN)
    for name, bug in KNOWN.items():
        assert bug.family in FAMILIES, name
        assert bug.about.endswith("."), name
        assert len(bug.fix) > 8, name
        assert set(bug.ops) == {op for of, ops, _ in EDITS if of == name for op in ops}, name
    with pytest.raises(ValueError, match="rope-layout is defined in rope and in norms"):
        define(Bug("rope-layout", "It again.", "find its home", "", "norms"))
