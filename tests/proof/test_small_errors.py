"""Errors of any size in an engine that rounds nowhere: none is taken for rounding, and small ones are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llamadiff.engines.run_spec import How
from llamadiff.result.comparison import Comparison
from llamadiff.verbs.verbs import diff
from proof.injected import BUGS
from proof.strangers import recording
from proof.strangers.arithmetic import BY_NAME
from proof.strangers.crossing import SHAPES, baseline, model_file, opened, size_of
from proof.strangers.engine import Bug, Engine
from proof.unlisted.bugs import TOKENS

LAYER = 1
SEEN = {"dense": 1e-9, "sparse": 1e-9, "logits": 1e-8}  # NMSE of the first recorded tap that no dump may hide
OPS = ("attn_norm", "Vcur_proj", "Kcur_rope", "kqv_out", "attn_out", "ffn_norm", "ffn_up", "ffn_out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small")


def judged(
    bug: Bug, shape: str, folder: Path, diagnose: bool = False, arithmetic: str = "float32"
) -> tuple[Comparison, float]:
    """What is said of a run, and the NMSE of the first recorded tap that the mistake changes much."""
    path = model_file(folder, "llama", "F32")
    right, taps = (Engine(opened(path), BY_NAME[arithmetic], each).run(TOKENS) for each in (Bug("none"), bug))
    kept = recording.only(taps, SHAPES[shape]) if SHAPES[shape] else recording.without_cache(taps)
    errors = [size_of(values, right[name], name).whole for name, values in kept.items()]
    trace = recording.save(folder / "candidate.safetensors", kept, TOKENS)
    found = diff(baseline(path, TOKENS, len(TOKENS)), trace, path, how=How(diagnose=diagnose))
    return found, next((error for error in errors if error > 1e-12), 0.0)


def scaled(word: str, factor: float) -> Bug:
    """One op of one layer, its output times a factor."""
    return Bug("scaled", {}, {word: lambda e, x: x * np.float32(factor) if e.layer == LAYER else x})


@pytest.mark.parametrize("shape", SEEN)
@pytest.mark.parametrize("word", OPS)
def test_a_factor_of_one_op_is_never_rounding(word: str, shape: str, folder: Path) -> None:
    """From 1 + 2^-2 down to what the dump cannot show: never MATCH or NOISE above it, and WRONG where all is there."""
    for k in range(2, 15, 3):
        found, error = judged(scaled(word, 1 + 2.0**-k), shape, folder)
        if error > SEEN[shape]:
            assert found.verdict in (("wrong",) if shape != "logits" else ("wrong", "unchecked")), (k, error, found)


@pytest.mark.parametrize("word", ["attn_out", "ffn_out"])
@pytest.mark.parametrize("factor", [1.01, 1.001])
def test_a_small_factor_is_named_from_layer_outputs(word: str, factor: float, folder: Path) -> None:
    found, _ = judged(scaled(word, factor), "sparse", folder, diagnose=True)
    assert found.leading is not None
    assert found.leading.tap == f"l_out-{LAYER}"
    causes = {cause.name: cause.value for cause in found.diagnosis[0].causes}
    assert causes
    assert causes.keys() <= {"product-multiplied", "residual-multiplied", "scores-scaled"}
    assert all(value == pytest.approx(factor, rel=1e-4) for value in causes.values())


def test_what_is_unclear_says_what_to_write_next(folder: Path) -> None:
    found, _ = judged(scaled("attn_out", 1.001), "logits", folder)
    assert found.verdict == "unchecked"
    assert "nothing shows that stranger rounds so much" in found.summary
    assert found.next_steps[-2:] == (
        "write l_out-0 to l_out-1 next: each is judged by itself then",
        "or run it with --explain 600: it replays every known bug through these taps",
    )


@pytest.mark.parametrize("arithmetic", ["float32", "lanes", "bf16", "int8 of 32", "cache Q8_0", "angles bf16"])
@pytest.mark.parametrize("shape", SEEN)
def test_a_right_engine_is_not_accused(arithmetic: str, shape: str, folder: Path) -> None:
    found, _ = judged(Bug("none"), shape, folder, diagnose=True, arithmetic=arithmetic)
    assert found.verdict != "wrong"


@pytest.mark.parametrize("shape", ["sparse", "dense"])
def test_an_engine_that_rounds_alike_in_all_layers_is_right(shape: str, folder: Path) -> None:
    """What all layers show is its arithmetic."""
    found, _ = judged(Bug("none"), shape, folder, arithmetic="bf16")
    assert found.verdict == "noise"


@pytest.mark.parametrize(
    ("bug", "cause"),
    [
        ("RoPE on V", "rope-on-v"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (
            ("tanh", "activation-other"), ("norm: no weight", "norm-weight-missing"),
            ("residual from the layer before", None), (None, None),
        )),
    ],
)  # fmt: skip
def test_a_bug_is_named_from_the_logits_of_an_engine_that_rounds_to_8_bits(
    bug: str | None, cause: str | None, folder: Path
) -> None:
    """By how much less it leaves than anything else: what it leaves is the engine's rounding."""
    path = model_file(folder, "llama", "F16")
    taps = Engine(opened(path), BY_NAME["int8 of 32"], BUGS[bug] if bug else Bug("none")).run(TOKENS)
    trace = recording.save(folder / "logits.safetensors", recording.only(taps, recording.LOGITS), TOKENS)
    found = diff(baseline(path, TOKENS, len(TOKENS)), trace, path, how=How(explain=60.0))
    named = [each.name for d in found.diagnosis for each in d.causes]
    assert (cause in named) if cause else not named
    assert found.verdict == ("unchecked" if bug is None else "wrong")
