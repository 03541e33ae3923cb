"""What is checked before the layers: tokens, hyper-parameters, dumped weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from llamaref import Engine
from optional import needs_slices

from llamadiff import UserError
from llamadiff.candidates.reference import record
from llamadiff.engines.reference_model import Model
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import diff

TOKENS = (1, 17, 5, 80, 42, 9, 33)


def with_tokens(trace, tokens):
    info = replace(trace.info, tokens=tuple(tokens), positions=tuple(range(len(tokens))), n_prefill=len(tokens))
    return Trace(info, {}, {})


@pytest.fixture(scope="module")
def right(small_model):
    return record(Engine(small_model()), TOKENS, "engine")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((1, 17, 5, 81, 42, 9, 33), r"from token 3 on it has \[81 .*the baseline \[80 "),
        ((2, 18, 6, 81, 43, 10, 34), "every id is one too large"),
        ((7, 8, 1, 17, 5, 80, 42, 9, 33, 7), "a chat template was applied there"),
        ((5, 80, 42), "a chat template was applied here"),
    ],
)
def test_tokens_apart_say_why(tokens, message, right, small_model):
    with pytest.raises(UserError, match=message):
        diff(right, with_tokens(right, tokens), small_model())


@pytest.mark.parametrize(
    ("drop", "message"), [(True, "lacks the beginning-of-text token 1"), (False, "token 1 once more")]
)
def test_a_missing_or_doubled_bos_is_named(drop, message, right, tmp_path):
    from models.small import write_model

    path = write_model(tmp_path / "m.gguf", bos=1)
    with pytest.raises(UserError, match=message):
        diff(right, with_tokens(right, TOKENS[1:] if drop else (1, *TOKENS)), path)


def with_parameters(trace, **stated):
    producer = {**trace.info.producer, "hyperparameters": stated}
    return Trace(replace(trace.info, producer=producer), {name: trace[name] for name in trace}, trace.dtypes)


def test_stated_hyper_parameters_are_held_against_the_file(right, small_model):
    good = with_parameters(right, **{"attention.layer_norm_rms_epsilon": 1e-5, "block_count": 2})
    result = diff(right, good, small_model())
    assert (result.verdict, result.preflight[1].verdict) == ("match", "match")
    bad = with_parameters(right, **{"attention.layer_norm_rms_epsilon": 1e-6, "block_count": 2})
    result = diff(right, bad, small_model())
    assert result.verdict == "wrong"
    assert "layer_norm_rms_epsilon = 1e-06; the file says 1e-05" in result.summary
    assert not result.wrong


@needs_slices("file")
def test_dumped_weights_are_compared(right, small_model):
    path = small_model("llama", "Q8_0")
    trace = record(Engine(path), TOKENS, "engine")
    weight = Model(path).engine.w.whole("blk.0.attn_q.weight")

    def judged(values):
        arrays = {**{name: trace[name] for name in trace}, "weights/blk.0.attn_q.weight": values}
        return diff(trace, Trace(trace.info, arrays, dict.fromkeys(arrays, "F32")), path)

    assert judged(weight).verdict == "match"
    result = judged(np.ascontiguousarray(weight.T))
    assert result.verdict == "wrong"
    assert "weights/blk.0.attn_q.weight: transposed" in result.summary
