"""Kernels of several nodes, of real builds: right ones are right, and a mistake in one is said of its nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from command import in_process_of_its_own, run
from models.options import OPTIONS
from models.small import write_model
from optional import needs, program

from llamadiff.engines.run_spec import Run
from llamadiff.ext.fused.compare import judge_kernels
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.system.errors import UserError

TOKENS = ("--tokens", "1,17,5,40")


@pytest.fixture(scope="module")
def wrong_kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that stands before ggml's."""
    if not sys.platform.startswith("linux"):
        pytest.skip("a library is put before ggml's on Linux alone")
    package, out = find_spec("llama_cpp"), tmp_path_factory.mktemp("wrong") / "kernel.so"
    assert package is not None
    assert package.origin is not None
    headers = Path(package.origin).parent.parent / "include"
    source = Path(__file__).with_name("wrong_kernel.c")
    words = ["-shared", "-fPIC", "-O1", "-D_GNU_SOURCE", f"-I{headers}", source, "-o", out, "-ldl"]
    subprocess.run([str(program("gcc")), *map(str, words)], check=True)
    return out


def said(command, *more, **environment):
    done = in_process_of_its_own(command, *more, "-o", "json:-", env={**os.environ, **environment})
    return done.returncode, json.loads(done.stdout)


@needs("gcc")
@pytest.mark.parametrize("mistake", ["value", "row", "eps", "weight"])
def test_a_mistake_in_a_kernel_of_two_nodes_is_found_with_its_nodes(wrong_kernel, mistake):
    environment = {"LD_PRELOAD": str(wrong_kernel), "WRONG_KERNEL": mistake}
    code, result = said("fused", shipped_model(), *TOKENS, **environment)
    assert (code, result["verdict"]) == (1, "wrong")
    assert result["headline"].startswith("attn_norm-0: llama.cpp's RMS_NORM + MUL is wrong as one kernel")
    assert "GGML_CPU_DISABLE_FUSION=1" in result["next_steps"][0]
    code, _ = said("backend", shipped_model(), *TOKENS, **environment)
    assert code == 0  # which looks at each node, so that none runs with another


@needs("gcc")
def test_a_kernel_without_the_mistake_is_right_there(wrong_kernel):
    code, result = said("fused", shipped_model(), *TOKENS, LD_PRELOAD=str(wrong_kernel))
    assert (code, result["verdict"]) == (0, "match")


@needs("gcc")
def test_nodes_that_run_apart_are_right(wrong_kernel):
    environment = {"LD_PRELOAD": str(wrong_kernel), "WRONG_KERNEL": "row", "GGML_CPU_DISABLE_FUSION": "1"}
    code, _ = said("fused", shipped_model(), *TOKENS, **environment)
    assert code == 0


@pytest.mark.parametrize("name", ["llama", "moe", "gemma3", "mamba2", "deepseek2", "gpt-oss"])
def test_right_models_are_right(tmp_path, name):
    code, result = said("fused", write_model(tmp_path / "m.gguf", **OPTIONS[name]), *TOKENS)
    assert (code, result["verdict"]) == (0, "match")


def test_decode_steps_are_refused():
    with pytest.raises(UserError, match="kernels are looked for in one batch"):
        judge_kernels(shipped_model(), Run(tokens=(1, 17, 5), n_predict=1))


def test_split_tensors_are_refused():
    done = run("fused", shipped_model(), *TOKENS, "--llama-cpp", "device=A/B,split=tensor,flash_attn=on")
    assert (done.returncode, done.stderr.startswith("llamadiff: split=tensor: kernels are found by nodes")) == (2, True)
