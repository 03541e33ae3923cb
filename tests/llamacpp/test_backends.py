"""Every node of the models on other builds and devices of llama.cpp: those that `make backends` has made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from models.random_models import NAMES
from tools.backends import FOUND, PARTS, Usage, made
from tools.rpc_server import serving

from llamadiff.shipped.place import shipped_model

pytestmark = [pytest.mark.backends, pytest.mark.slow]
TOKENS = ",".join(str(1 + 37 * number % 120) for number in range(64))  # within every vocabulary
SHIPPED = shipped_model(quantized=True)
CPU = Path("/proc/cpuinfo")

# Wrong, and really so. ggml-vulkan's tanh, 1 - 2 / (exp(2x) + 1), is off by 6e-8 near zero, where it is x. On CPUs that
# multiply in float16, older versions kept sums in it (simd-mappings.h, GGML_F16_DOT_STEP of later ones).
REALLY_WRONG = {("vulkan", "gemma2.F16"): ["TANH"] * 3}
if CPU.is_file() and "avx512_fp16" in CPU.read_text("utf-8"):
    REALLY_WRONG |= {("plain", f"{model}.F16"): ["MUL_MAT"] * 2 for model in ("mamba", "qwen35")}


@pytest.fixture(scope="session")
def usage() -> Iterator[Callable[[str], Usage]]:
    """usage("vulkan"): how that part is used; whoever asks for one that was not made is skipped."""
    with ExitStack() as open_ones:
        known: dict[str, Usage] = {}

        def of(name: str) -> Usage:
            folder = made().get(name, " not made yet: make backends")
            if folder[0] == " ":
                pytest.skip(folder.strip())
            if name not in known:
                known[name] = PARTS[name].use(Path(folder))
                if PARTS[name].served:
                    server = open_ones.enter_context(serving(next(Path(folder, "lib").glob("*rpc-server"))))
                    known[name] = Usage((*known[name].options, "--device", f"rpc:{server}"))
            return known[name]

        yield of


def asked(usage: Usage, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamadiff", *map(str, words), *usage.options]
    return subprocess.run(
        command, env={**os.environ, **usage.environment}, capture_output=True, text=True, check=False, encoding="utf-8"
    )


def without_its_tokenizer(path: Path, folder: Path) -> Path:
    """A copy of a model; where its tokenizer is that of llama.cpp's tests, which older versions lack, with none."""
    data, key = path.read_bytes(), b"tokenizer.ggml.model\x08\0\0\0\x04\0\0\0\0\0\0\0"
    copy = folder / path.name
    copy.write_bytes(data.replace(key + b"test", key + b"none", 1))
    return copy


CASES = [(name, tokens) for name, part in PARTS.items() for tokens in part.tokens]


@pytest.mark.parametrize(("name", "tokens"), CASES)
@pytest.mark.parametrize("model_name", [SHIPPED.stem, *NAMES])
def test_every_node_is_judged_and_right(name, tokens, model_name, usage, random_model, tmp_path):
    path = SHIPPED if model_name == SHIPPED.stem else random_model(model_name)
    given = ",".join(TOKENS.split(",")[:tokens])
    model = without_its_tokenizer(path, tmp_path) if PARTS[name].older else path
    done = asked(usage(name), "backend", model, "--tokens", given, "--json", "-", "--keep", tmp_path / "kept")
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    wrong = [tap["op"] for tap in report["taps"] if tap["verdict"] == "wrong"]
    row = {"part": name, "tokens": tokens, "model": model_name, "nodes": len(report["taps"]),
           "verdict": report["verdict"], "wrong": wrong}  # fmt: skip
    with FOUND.open("a", encoding="utf-8") as table:
        table.write(json.dumps(row) + "\n")
    assert wrong == REALLY_WRONG.get((name, model_name), []), report["headline"]
    assert {tap["verdict"] for tap in report["taps"]} <= {"match", "wrong"}
    if not wrong:
        return
    saved = sorted((tmp_path / "kept").glob("*.safetensors"))
    options = usage(name).options
    right = Usage(options[: options.index("--device")]) if "--device" in options else Usage()
    assert len(saved) == len(wrong)
    assert asked(usage(name), "replay", *saved).returncode == 1
    assert asked(right, "replay", *saved).returncode == 0


def test_a_right_device_is_a_right_variant(usage):
    """Vulkan against the CPU of the same build."""
    on_vulkan = usage("vulkan")
    folder, name = on_vulkan.options[1], on_vulkan.options[3]
    words = ["variants", SHIPPED, "--tokens", TOKENS, "--only", f"device={name}", "--json", "-"]
    done = asked(Usage(("--llama-cpp", folder), on_vulkan.environment), *words)
    assert done.returncode == 0, done.stderr
    device = json.loads(done.stdout)["variants"][1]
    assert (device["verdict"], device["wrong"], device["top1_agree"]) == ("match", [], True)
    assert device["judged"] > 50
    assert 0 < device["kl"] < 1e-3
