"""Known bugs in architectures that nothing else injects them into: each is found at its tap, by its name."""

from __future__ import annotations

import pytest

from llamadiff.ext.explain.registry import EDITS, known_bugs
from proof.injected import IN_OTHERS
from proof.injected.base import DECODE, OF_HEADS
from proof.unseen.architectures import MODELS
from proof.unseen.crossing import Models

NAMED = 0.97  # of the mistakes that show in an architecture
# of each family one, and what llama.cpp's graph did not name before it was asked of it
QUICK = (
    ("gemma3", "window ignored"),
    ("gpt2", "positions: from 2, as in OPT"),
    ("bloom", "no mask"),
    ("bloom", "softmax over heads"),
    ("bloom", "cache: rows of layer 0"),
    ("falcon", "side by side: no attention"),
    ("gpt2", "positions: steps lag by one"),
    ("phi3", "halves of gate and up interleaved"),
    ("phi3", "scores of unrotated Q"),
    ("gpt-oss", "experts: by place"),
    ("gpt-oss", "bias: the next expert's"),
    ("gpt-oss", "sinks left out"),
    ("gpt-oss", "clamped SwiGLU: one not added"),
    ("gpt-oss", "rope: scaling ignored but for its magnitude"),
    ("gpt-oss", "router: softmax of all for that of the chosen"),
    ("qwen3moe", "experts: first token's"),
    ("deepseek2", "experts: halves of gate and up swapped"),
    ("mamba2", "state space: not kept between batches"),
    ("mamba2", "convolution: not kept between batches"),
    ("mamba2", "state space: decays once more between batches"),
    ("mamba2", "state space: a batch's first token twice"),
    ("mamba2", "state space: an older batch's"),
    ("mamba2", "convolution: an older batch's"),
    ("mamba2", "state space: a batch's writes do not decay"),
    ("mamba2", "state space: x of the token before"),
    ("mamba2", "state space: no B"),
    ("mamba2", "state space: groups in turns"),
    ("deepseek2", "router: groups by their best expert"),
    ("mamba2", "state space: steps of at most 0.1"),
    ("granitehybrid", "state space: steps of at least 0.5"),
    ("lfm2", "short convolution: no gate before"),
    ("granitehybrid", "logits of the token before"),
)
# known bugs of ops, sizes and files that these models do not have; proof/injected and test_graph_bugs.py have them
ELSEWHERE = {
    "adapter-missing", "adapter-scale-other", "adapter-scaled",
    "norm-overflow", "norm-epsilon-in-half", "softmax-overflow", "overflow-in-half", "cache-too-short",
    "first-row-fed-twice", "weight-scale-ignored", "rope-partial-ignored", "l2-norm-missing", "softcap-missing",
    "softcap-other", "delta-net-wrong", "clamp-missing", "rope-yarn-original", "rope-long-factors", *OF_HEADS,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("unseen"))


@pytest.mark.parametrize("decode", [0, DECODE])
@pytest.mark.parametrize("arch", MODELS)
def test_a_right_run_is_right_at_every_tap(arch: str, decode: int, models: Models):
    result = models.judged(arch, decode=decode)
    judged = {row.tap for row in result.rows if row.local is not None}
    assert judged == set(models.taps(arch))
    assert [row.tap for row in result.rows if row.verdict != "match"] == []
    assert not result.diagnosis


@pytest.mark.parametrize(("arch", "name"), QUICK)
def test_a_mistake_is_named(arch: str, name: str, models: Models):
    case = models.case(arch, IN_OTHERS[name])
    assert case is not None
    assert models.outcome(case).trouble == ""


def test_a_part_of_what_was_recorded_is_not_read_back(models: Models):
    """K's rotated part is read from a product that holds more."""
    result = models.judged("deepseek2", IN_OTHERS["rope: scaling ignored but for its magnitude"])
    assert {"q_pe-0", "k_pe-0"} <= {row.tap for row in result.wrong}
    assert all(found.causes == () for found in result.diagnosis if found.tap == "k_pe-0")


@pytest.mark.slow
@pytest.mark.parametrize("arch", MODELS)
def test_the_mistakes_in_an_architecture_are_named(arch: str, models: Models):
    outcomes = [models.outcome(case) for case in models.cases(arch)]
    troubles = {outcome.case.bug.name: outcome.trouble for outcome in outcomes if outcome.trouble}
    assert all(outcome.is_at_the_tap() for outcome in outcomes), troubles
    assert not any(outcome.is_false() for outcome in outcomes), troubles
    assert sum(outcome.is_named() for outcome in outcomes) >= NAMED * len(outcomes), troubles


@pytest.mark.slow
def test_every_mistake_shows_somewhere(models: Models):
    shown = {case.bug.name for arch in MODELS for case in models.cases(arch)}
    assert shown == IN_OTHERS.keys()


def test_every_known_bug_of_nodes_is_injected_here_or_elsewhere():
    known = known_bugs()
    mistakes = {bug for bug, _, _ in EDITS if not known[bug].harmless and known[bug].family != "misread"}
    injected = frozenset().union(*(bug.others for bug in IN_OTHERS.values()))
    assert injected <= mistakes
    assert mistakes - injected <= ELSEWHERE
