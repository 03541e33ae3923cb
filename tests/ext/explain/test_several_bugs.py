"""Several bugs at once are several sentences: counted, the largest first, and found beside one another in a span."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from explaining import Explained
from models.small import write_model
from proof.injected import BUGS
from proof.injected.base import TOKENS, together
from proof.injected.runs import record_faulty
from proof.strangers.engine import Bug
from traces import only

from llamadiff.result.comparison import Comparison

STARRED = (
    "embd", "attn_norm", "Qcur_proj", "Vcur_proj", "Qcur_rope", "Kcur_rope", "kq_soft_max", "kqv_out", "attn_out",
    "ffn_inp", "ffn_out", "l_out", "result_output",
)  # fmt: skip
OUTPUTS = ("embd", "l_out", "result_output")
BASE, GELU, EPSILON = "rope: base 500000", "GELU", "norm: epsilon times 10"
ROTATES = "RoPE, layers 0, 1: uses base 500000, where 10000 is right"
GATE = "SwiGLU, layers 0, 1: takes GELU (erf) of the gate; this model takes SiLU"


@pytest.fixture(scope="module")
def judged(small_model) -> Callable[..., Comparison]:
    explained = Explained(small_model)

    def judge(bugs: tuple[str, ...], *kept: str) -> Comparison:
        faulty = record_faulty(together(*(BUGS[bug] for bug in bugs)), small_model("llama", "F16"), TOKENS)
        return explained.judged("llama", "F16", only(faulty, *kept) if kept else faulty)

    return judge


@pytest.mark.parametrize(
    ("bugs", "kept", "headline"),
    [
        ((BASE, GELU, EPSILON), (), f"3 bugs: {ROTATES}; {GATE}; RMSNorm, layers 0, 1: uses epsilon 0.0001, "
         "where 1e-05 is right"),
        ((BASE, GELU, EPSILON), STARRED, f"3 bugs: {ROTATES}; {GATE} (at ffn_swiglu-0); RMSNorm by attn_norm.weight, "
         "layers 0, 1: uses epsilon 0.0001, where 1e-05 is right"),
        ((BASE,), STARRED, ROTATES),
        ((BASE,), OUTPUTS, f"{ROTATES} (at Qcur_rope-0)"),
    ],
    ids=["all", "starred", "one", "outputs"],
)  # fmt: skip
def test_bugs_are_counted_the_largest_first(bugs, kept, headline, judged):
    result = judged(bugs, *kept)
    assert result.headline == headline
    assert max(d.nmse for d in result.diagnosis) < 1e-11  # to rounding, beside the others too


TILED = "matrix product, layers 0, 1: reads KV head h % 2 for query head h; this model reads h // 2 (at kq-0)"
PLUS_ONE = "multiplies by 1 + output_norm.weight; the file's weight is used as it is"


@pytest.mark.parametrize(
    ("bugs", "said"),
    [
        ((BASE, GELU, EPSILON), (f"{ROTATES} (at Qcur_rope-0)", f"{GATE} (at ffn_swiglu-0)", "uses epsilon 0.0001")),
        (("rope: base 12345", "quick GELU", "norm: weight plus one"), ("base 12345", "quick GELU", PLUS_ONE)),
        (("heads tiled", "scale missing", "gate and up swapped"), (TILED, "does not scale", "not blk.0.ffn_gate")),
    ],
    ids=["small", "solved", "large"],
)  # fmt: skip
def test_three_bugs_are_found_in_the_outputs_of_layers_alone(bugs, said, judged):
    result = judged(bugs, *OUTPUTS, "result_norm")
    assert result.headline.startswith("3 bugs: ")
    assert [each for each in said if each not in result.headline] == []
    assert max(d.nmse for d in result.diagnosis) < 1e-11
    assert {d.beside for d in result.diagnosis} <= {0, 2}


def test_two_bugs_are_found_in_a_feed_forward_of_which_the_output_was_recorded(judged):
    kept = ("embd", "attn_norm", "Qcur", "Kcur", "Vcur", "kq", "attn_out", "ffn_inp", "ffn_norm", "l_out", "result")
    result = judged((GELU, "gate and up swapped"), *kept)
    assert result.headline == (
        "2 bugs: matrix product, layers 0, 1: multiplies by blk.0.ffn_up.weight, not blk.0.ffn_gate.weight "
        f"(at ffn_gate-0); {GATE} (at ffn_swiglu-0)"
    )
    assert "replaying that beside 1 more gives its values to an NMSE of " in result.summary
    assert "or it applies the activation to up, and multiplies by the gate (at ffn_swiglu-0)" in result.summary


@pytest.mark.parametrize("known", [(), (BASE,)], ids=["alone", "beside a known one"])
def test_what_no_known_bugs_make_is_not_put_together_of_some(known, small_model):
    """A mistake that is no known one: several would take some of it away, and leave more than rounding."""
    odd = Bug("odd", {"branch": lambda e, right, y: right(y) + 0.3 * right(y)[..., ::-1] * np.sin(right(y))})
    result = Explained(small_model).judged("llama", "F16", only(
        record_faulty(together(odd, *(BUGS[bug] for bug in known)), small_model("llama", "F16"), TOKENS), *OUTPUTS
    ))  # fmt: skip
    assert (result.verdict, [d for d in result.diagnosis if d.known]) == ("wrong", [])
    assert "write Qcur_rope-0, Vcur_proj-0, ffn_inp-0, ffn_up-0 next: they say between which the fault is" in (
        result.next_steps
    )


def test_what_stays_dark_beside_a_known_bug_is_counted(judged):
    result = judged(
        (BASE, GELU, "no residual", EPSILON), "embd", "attn_norm", "Qcur_proj", "Qcur_rope", "l_out", "result"
    )
    assert result.headline.startswith("4 bugs: ")
    assert {"rope-base", "activation-other", "residual-missing", "norm-epsilon"} == {
        d.causes[0].name for d in result.diagnosis
    }


@pytest.mark.parametrize(("size", "more"), [(1e3, "; in other layers it would not show"), (1e-2, "")])
def test_a_bug_that_other_layers_would_hide_is_not_said_of_one_alone(size, more, tmp_path):
    """Epsilon is nothing beside large activations; where it would show, the layer is all that is meant."""
    large = np.random.default_rng(4).standard_normal((256, 512)).astype(np.float32) * np.float32(size)
    path = write_model(tmp_path / "m.gguf", kind="F32", tensors={"blk.0.ffn_down.weight": large})
    epsilon = Bug("epsilon", {"epsilon": lambda e, right: right() * (10 if more or not e.layer else 1)})
    result = Explained(lambda *_: path).judged("llama", "F32", record_faulty(epsilon, path, TOKENS))
    says = [cause.says for d in result.diagnosis for cause in d.causes if d.tap == "attn_norm-0"]
    assert says == [f"uses epsilon 0.0001, where 1e-05 is right{more}"]
