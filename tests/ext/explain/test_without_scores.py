"""Taps whose inputs were not recorded, as scores of long prompts: what explains an op does without them."""

from __future__ import annotations

import numpy as np
import pytest
from llamaref import Engine
from models.options import OPTIONS
from models.small import write_model

from llamadiff import Run, Trace, compare
from llamadiff.candidates.reference import record
from llamadiff.llamacpp.request import LONG

TOKENS = tuple(int(token) for token in np.random.default_rng(3).integers(3, 90, LONG + 1))


def test_what_is_off_behind_scores_that_nobody_recorded(tmp_path):
    path = write_model(tmp_path / "m.gguf", **{**OPTIONS["llama"], "layers": 1, "extra": {"context_length": 1024}})
    trace = record(Engine(path), TOKENS, "mine")
    arrays = {name: np.array(trace[name]) for name in ("kqv_out-0", "result_output")}
    arrays["kqv_out-0"][7] *= np.float32(1.5)
    found = compare(path, Run(tokens=TOKENS), Trace(trace.info, arrays, dict.fromkeys(arrays, "F32")))
    assert found.verdict in ("wrong", "unchecked")
    assert next(row.tap for row in found.rows if row.verdict != "match") == "kqv_out-0"


def test_experts_chosen_by_what_was_not_recorded(small_model):
    path = small_model("qwen3moe")
    trace = record(Engine(path), TOKENS[:8], "mine")
    arrays = {name: np.array(trace[name]) for name in ("l_out-0", "ffn_moe_topk-1", "result_output")}
    arrays["ffn_moe_topk-1"] = np.roll(arrays["ffn_moe_topk-1"], 1, axis=0)
    found = compare(path, Run(tokens=TOKENS[:8]), Trace(trace.info, arrays, dict.fromkeys(arrays, "F32")))
    assert found.first_divergence.tap == "ffn_moe_topk-1"


@pytest.mark.parametrize(("tokens", "said"), [(1, False), (6, True)])
def test_other_channels_are_told_by_several_tokens(tokens, said, small_model):
    """Of one value, one of many channels has the like by chance."""
    path = small_model("llama", kind="F32")
    trace = record(Engine(path), TOKENS[:8], "mine")
    arrays = {name: np.array(trace[name]) for name in ("ffn_norm-0", "ffn_gate-0", "ffn_up-0", "ffn_swiglu-0")}
    up, act = arrays["ffn_up-0"], arrays["ffn_swiglu-0"]
    act[-tokens:, 7] = act[-tokens:, 7] / up[-tokens:, 7] * up[-tokens:, 40]
    found = compare(path, Run(tokens=TOKENS[:8]), Trace(trace.info, arrays, dict.fromkeys(arrays, "F32")))
    assert ("of channel" in found.headline) == said
