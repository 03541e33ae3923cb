"""Every node of the models on other builds and devices of llama.cpp: those that `make backends` has made."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from models import small
from models.random_models import NAMES
from tools.asking import asked, note, tokens, without_its_tokenizer
from tools.backends import PARTS, named
from tools.parts import Usage

from llamadiff.llamacpp.shipped import shipped_model

pytestmark = [pytest.mark.backends, pytest.mark.slow]
SHIPPED = shipped_model(quantized=True)
CPU = Path("/proc/cpuinfo")
NAMED = named(os.environ.get("PARTS", "").split())  # make backends PARTS=arm
SMALL = "small.F32"  # a feed-forward part of 172, which no vector divides, as stories260K has it
MODELS = [SHIPPED.stem, SMALL, *NAMES]
WAYS = {
    "F32 cache": (), "F16 cache": ("--llama-cpp", "kv=f16"),
    "F16 cache, flash": ("--llama-cpp", "kv=f16,flash_attn=on"),
    "Q8_0 cache, flash": ("--llama-cpp", "kv=q8_0,flash_attn=on"), "repacked": ("--llama-cpp", "repack=on"),
}  # fmt: skip

# Wrong, and really so. ggml-vulkan's tanh, 1 - 2 / (exp(2x) + 1), is off by 6e-8 near zero, where it is x. On CPUs that
# multiply in float16, older versions kept sums in it (simd-mappings.h, GGML_F16_DOT_STEP of later ones).
REALLY_WRONG = {("vulkan", "gemma2.F16"): ["TANH"] * 3}
if CPU.is_file() and "avx512_fp16" in CPU.read_text("utf-8"):
    REALLY_WRONG |= {("plain", f"{model}.F16"): ["MUL_MAT"] * 2 for model in ("mamba", "qwen35")}


@pytest.fixture(scope="session")
def model_of(random_model, tmp_path_factory):
    """model_of("llama.F16"): the path of that one of MODELS."""

    def get(name: str) -> Path:
        if name == SHIPPED.stem:
            return SHIPPED
        if name != SMALL:
            return random_model(name)
        path = tmp_path_factory.getbasetemp() / f"{name}.gguf"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(small, "FF", 172)
            patch.setattr(small, "VOCAB", 128)
            return path if path.exists() else small.write_model(path, kind="F32")

    return get


CASES = [(name, given) for name in NAMED if not PARTS[name].group for given in PARTS[name].tokens]


@pytest.mark.parametrize(("name", "given"), CASES)
@pytest.mark.parametrize("model_name", [SHIPPED.stem, *NAMES])
def test_every_node_is_judged_and_right(name, given, model_name, usage, model_of, tmp_path):
    path = model_of(model_name)
    model = without_its_tokenizer(path, tmp_path) if PARTS[name].older else path
    done = asked(usage(name), "backend", model, "--tokens", tokens(given), "-o", "json:-", "--keep", tmp_path / "kept")
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    wrong = note(name, given, model_name, report)
    assert wrong == REALLY_WRONG.get((name, model_name), []), report["headline"]
    assert {tap["verdict"] for tap in report["taps"]} <= {"match", "wrong"}
    if not wrong:
        return
    saved = sorted((tmp_path / "kept").glob("*.safetensors"))
    options = usage(name).options
    device = next((at for at, word in enumerate(options) if str(word).startswith("device=")), None)
    right = Usage(options[: device - 1]) if device is not None else Usage()
    assert len(saved) == len(wrong)
    assert asked(usage(name), "replay", *saved).returncode == 1
    assert asked(right, "replay", *saved).returncode == 0


@pytest.mark.parametrize("name", [name for name in NAMED if name == "openblas"])
@pytest.mark.parametrize(
    "words", [("compare", "--n-predict", 3), ("variants", "--only", "batch=32", "--only", "ubatch=32")]
)
@pytest.mark.parametrize("model_name", MODELS)
def test_taps_are_right_where_some_batches_are_multiplied_by_blas(name, words, model_name, usage, model_of):
    """Of 32 tokens and more: the arithmetic changes within a run, and within a tap."""
    verb, *more = words
    done = asked(usage(name), verb, model_of(model_name), "--tokens", tokens(70), *more)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name in NAMED if PARTS[name].group in ("arm", "others")])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", ["backend", "compare"])
@pytest.mark.parametrize("model_name", MODELS)
def test_another_cpu_is_right(name, way, verb, model_name, usage, model_of):
    """A prompt of ten tokens and eight decode steps. On vectors of 512 bits K-quants are really wrong (found.md)."""
    words = (verb, model_of(model_name), "--tokens", tokens(10), "--n-predict", 8, *WAYS[way], "-o", "json:-")
    done = asked(usage(name), *words)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    wrong = note(name, 10, model_name, report, f"{verb}, {way}")
    really = name == "sve512" and way != "repacked" and "_K" in model_name
    assert set(wrong) == ({"MUL_MAT"} if really else set()), report["headline"]
    assert {tap["verdict"] for tap in report["taps"]} <= {"match", "wrong"}


def test_a_right_device_is_a_right_variant(usage):
    """Vulkan against the CPU of the same build."""
    on_vulkan = usage("vulkan")
    folder, name = on_vulkan.options[1], on_vulkan.options[3]
    words = ["variants", SHIPPED, "--tokens", tokens(64), "--only", name, "-o", "json:-"]
    done = asked(Usage(("--llama-cpp", folder), on_vulkan.environment), *words)
    assert done.returncode == 0, done.stderr
    device = json.loads(done.stdout)["variants"][1]
    assert (device["verdict"], device["wrong"], device["top1_agree"]) == ("match", [], True)
    assert device["judged"] > 50
    assert 0 < device["kl"] < 1e-3


def test_a_device_is_judged_by_its_nodes_and_by_its_logits_where_nobody_looks(usage):
    """Where somebody does, no kernel of several nodes runs."""
    done = asked(usage("vulkan"), "variants", SHIPPED, "--tokens", tokens(16), "--only", "callback=off", "-o", "json:-")
    assert done.returncode == 0, done.stderr
    default, unseen = json.loads(done.stdout)["variants"]
    assert (default["verdict"], unseen["verdict"], unseen["top1_agree"]) == ("match", "match", True)
    assert default["judged"] > 50 > unseen["judged"]


@pytest.mark.parametrize("model_name", MODELS)
def test_kernels_of_several_nodes_are_right(model_name, usage, model_of):
    done = asked(usage("vulkan"), "fused", model_of(model_name), "--tokens", tokens(6), "-o", "json:-")
    report = json.loads(done.stdout)
    wrong = note("vulkan", 6, model_name, report, way="kernels of several nodes")
    assert {*wrong} == {*REALLY_WRONG.get(("vulkan", model_name), [])}  # alone already, of fewer tokens in fewer nodes
    if "moe" in model_name:
        assert any(tap["op"].startswith("SOFT_MAX + ") for tap in report["taps"])
