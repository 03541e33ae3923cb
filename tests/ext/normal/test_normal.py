"""Is it normal: alike on both sides, which is the model, or not, which is the code, since layer n."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run as command
from models.options import OPTIONS
from models.small import write_model
from proof.decoding.engine import Generating
from proof.strangers import recording
from proof.strangers.arithmetic import BY_NAME
from proof.strangers.engine import Engine
from proof.strangers.model import read
from tools.benchmarks.synthesize import SHAPES, write

import llamadiff
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.graph.backend import judge_graph
from llamadiff.ext.normal.normal import MASSIVE, USUAL, is_it_normal
from llamadiff.judge.finding import Local
from llamadiff.numerics.extremes import extremes
from llamadiff.numerics.metrics import Stats, with_extremes
from llamadiff.result.comparison import Comparison
from llamadiff.result.normal import Answer
from llamadiff.result.rows import Row
from llamadiff.verbs import verbs

SHIPPED = Path(llamadiff.__file__).parent / "shipped"
TOKENS = (1, 17, 5, 80, 42, 9, 33, 64, 5, 2, 71, 28)
LAYERS = 5
MODELS = ("shipped.F16", "shipped.Q4_K_M", "mini.F16", "mini.Q4_K_M", "gemma2", "qwen2", "olmo2")


# -- the sentences -----------------------------------------------------------------------------------------------------


def local(nmse: float = 0.0, verdict: str = "match") -> Local:
    return Local(nmse, "F32", 1e-9, 1e-9, verdict, 0, (0, 0), 1.0, 1.0, (nmse,), ())


def outputs(baseline: tuple[float, ...], candidate: tuple[float, ...], **changed: Any) -> list[Row]:
    def side(rms: float) -> Stats:
        return Stats(rms, 0.0, -rms, rms, 0, 0)

    def row(layer: int, b: float, c: float) -> Row:
        made = Row(tap=f"l_out-{layer}", layer=layer, op="ADD", shape=(3, 8), verdict="match", local=local(),
                   baseline=side(b), candidate=side(c))  # fmt: skip
        return replace(made, **changed)

    return [row(layer, b, c) for layer, (b, c) in enumerate(zip(baseline, candidate, strict=True))]


def rms_of(rows: list[Row]) -> Answer:
    return is_it_normal(rows, "llama.cpp", "mine")[0]


def test_growth_that_both_sides_have_is_the_models():
    answer = rms_of(outputs((0.015, 0.3, 1.9), (0.015, 0.301, 1.9)))
    assert answer.says == (
        "rms of llama.cpp grows 127 times (0.015 to 1.9) from layer 0 to layer 2, on both sides: "
        "it is the model, and no sign of a fault"
    )
    assert (answer.since, answer.code) == (None, False)


def test_growth_that_one_side_has_is_the_codes_where_an_op_is_wrong():
    rows = outputs((1, 2, 1.5), (1, 2, 9))
    wrong = replace(rows[1], tap="ffn_norm-1", verdict="wrong", local=local(0.5, "wrong"))
    answer = rms_of([rows[0], wrong, *rows[1:]])
    assert answer.says.endswith("from layer 2 on, 9 there and not 1.5: it is the code, since layer 1")
    assert (answer.since, answer.code) == (1, True)


def test_what_no_wrong_op_explains_is_rounding():
    answer = rms_of(outputs((1, 2, 1.5), (1, 2, 1.6)))
    assert answer.says.endswith("no op is wrong, so that it is rounding")
    assert (answer.since, answer.code) == (2, False)


def test_nothing_is_called_normal_by_no_one_who_has_not_judged():
    assert "was not judged" in rms_of(outputs((1, 9), (1, 9), local=None)).says
    assert rms_of(outputs((1, 9), (1, 9), verdict="wrong")).says.endswith("what is wrong does not show in it")
    off = outputs((1, 9), (1, 9), baseline_local=local(1.0, "wrong"))
    assert rms_of(off).says.endswith("but the baseline is wrong itself")
    assert is_it_normal(outputs((1,), (1,)), "a", "b") == ()


def test_a_massive_activation_is_told_with_its_channel_and_token():
    """Channel 1415 of the first token, as it is published of LLaMA2-7B."""
    x = np.random.default_rng(1).normal(0, 0.2, (4, 4096))
    x[0, 1415] = 2600.0
    rows = outputs((1, 1), (1, 1))
    rows = [replace(row, **{side: with_extremes(getattr(row, side), x) for side in ("baseline", "candidate")})
            for row in rows]  # fmt: skip
    answer = next(each for each in is_it_normal(rows, "llama.cpp", "mine") if each.word == "max")
    assert answer.says.startswith("massive activation of llama.cpp is 2600, ")
    assert "at channel 1415 of token 0 in layer 0, on both sides: it is the model" in answer.says
    assert extremes(x / 100, x.mean() / 100).peak < MASSIVE


def test_a_graph_that_is_judged_alone_has_one_side(small_model):
    """Each node is computed from llama.cpp's inputs: that both grow alike would say nothing."""
    assert judge_graph(small_model(), Run(tokens=TOKENS)).normal == ()


def test_extremes_are_those_of_the_definition():
    x = np.random.default_rng(2).normal(size=(50, 200))
    found = extremes(x, x.mean())
    gap = x - x.mean()
    assert found.kurtosis == pytest.approx((gap**4).mean() / (gap**2).mean() ** 2)
    assert x[found.token, found.channel] == found.peak
    assert found.times == pytest.approx(abs(found.peak) / np.median(np.abs(x[found.token])))
    for value in (np.nan, np.inf):
        some = np.array([[1.0, value], [2.0, 3.0]])
        assert extremes(some, 2.0) is None
        assert extremes(some, some.mean()) is None


def test_what_is_usual_is_cited():
    for usual in USUAL:
        assert any(year in usual.source for year in ("2023", "2024", "2025"))


# -- models: alike -----------------------------------------------------------------------------------------------------


def model_of(name: str, folder: Path) -> Path:
    word, _, kind = name.partition(".")
    if word == "shipped":
        return SHIPPED / f"tiny.{kind}.gguf"
    path = folder / f"{name}.gguf"
    if word == "mini":
        write(SHAPES["mini"], kind, path)
        return path
    return write_model(path, kind="F16", **OPTIONS[word])


@pytest.mark.parametrize("name", MODELS)
def test_of_a_right_run_all_is_the_models(name, tmp_path):
    result = verbs.compare(model_of(name, tmp_path), Run(tokens=TOKENS))
    assert result.verdict == "match"
    all_the_models(result)


def test_of_a_trained_model_all_is_the_models():
    all_the_models(verbs.compare(SHIPPED / "tiny.F16.gguf", Run("Once upon a time")))


def all_the_models(result: Comparison) -> None:
    assert [answer.word for answer in result.normal] == ["rms", "mean", "max", "kurtosis"]
    for answer in result.normal:
        assert answer.since is None, answer.says
        assert answer.says.endswith("on both sides: it is the model, and no sign of a fault")


# -- three engines, each with a bug from one layer on ------------------------------------------------------------------


class NormEngine(Engine):
    """Forgets a norm's weight, from layer 2 on."""

    def norm_weight(self, stem: str) -> Any:
        weight = super().norm_weight(stem)
        return np.ones_like(weight) if stem == "ffn_norm" and self.layer >= 2 else weight


class ResidualEngine(Engine):
    """Adds the residual twice, in layer 3."""

    def add(self, branch: Any, residual: Any) -> Any:
        return super().add(branch, 2 * residual if self.layer == 3 else residual)


class ScaleEngine(Generating):
    """Multiplies V by four, in layer 1."""

    def product(self, x: Any, stem: str) -> Any:
        return super().product(x, stem) * (4 if stem == "attn_output" and self.layer == 1 else 1)


def ran_at_once(model: Path, engine: type[Engine]) -> dict[str, Any]:
    return engine(read(model), BY_NAME["float32"]).run(TOKENS)


def ran_in_batches(model: Path, engine: type[Generating]) -> dict[str, Any]:
    made = engine(read(model), len(TOKENS))
    made.feed(TOKENS, [len(TOKENS)])
    return recording.without_cache(made.taps())


RUNS = {
    "a norm": ("llama", ran_at_once, Engine, NormEngine, 2),
    "a residual": ("qwen3moe", ran_at_once, Engine, ResidualEngine, 3),
    "a scale": ("llama", ran_in_batches, Generating, ScaleEngine, 1),
}


def judged(model: Path, taps: dict[str, Any], folder: Path) -> Comparison:
    trace = recording.save(folder / "mine.safetensors", taps, TOKENS, name="mine")
    return verbs.compare(model, Run(tokens=TOKENS), str(trace), How(diagnose=False))


@pytest.mark.parametrize("what", RUNS)
def test_the_layer_since_which_it_is_the_code_is_right(what, tmp_path):
    arch, ran, right, wrong, since = RUNS[what]
    model = write_model(tmp_path / "model.gguf", kind="F32", layers=LAYERS, **OPTIONS[arch])
    all_the_models(judged(model, ran(model, right), tmp_path))
    answers = judged(model, ran(model, wrong), tmp_path).normal
    parted = [answer for answer in answers if answer.since is not None]
    assert parted, answers
    for answer in parted:
        assert answer.code
        assert answer.since == since, answer.says
        assert f"it is the code, since layer {since}" in answer.says


# -- reports -----------------------------------------------------------------------------------------------------------


def test_every_format_answers(tmp_path):
    found = command("compare", SHIPPED / "tiny.F16.gguf", "Once upon a time", "--full", "-o", f"json:{tmp_path / 'j'}",
                    "-o", f"markdown:{tmp_path / 'm'}", "-o", f"html:{tmp_path / 'h'}")  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "normal? rms of llama.cpp grows" in found.stdout
    assert "Massive Activations in Large Language Models" in " ".join(found.stdout.split())
    answers = json.loads((tmp_path / "j").read_text("utf-8"))["normal"]
    assert [each["word"] for each in answers] == ["rms", "mean", "max", "kurtosis"]
    assert "Is it normal?" in (tmp_path / "m").read_text("utf-8")
    assert "on both sides: it is the model" in (tmp_path / "h").read_text("utf-8")
