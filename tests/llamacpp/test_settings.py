"""A setting of llama.cpp that cannot be applied is refused, never judged as if it were on."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest
from optional import needs_slices

from llamadiff import UserError
from llamadiff.engines.run_spec import Run
from llamadiff.llamacpp.library import set_fields
from llamadiff.llamacpp.request import Settings
from llamadiff.verbs.verbs import compare, record

TOKENS = (1, 17, 5)


class Parameters(ctypes.Structure):
    _fields_ = (("n_ctx", ctypes.c_uint32),)


def backend(*args: object) -> object:
    return resolve_name("llamadiff.ext.graph.backend:judge_graph")(*args)


def has_gpu() -> bool:
    code = "from llama_cpp import llama_cpp as c; c.llama_backend_init(); print(c.llama_supports_gpu_offload())"
    return (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8"
        ).stdout
        == "True\n"
    )


@pytest.mark.parametrize("command", [compare, record, pytest.param(backend, marks=needs_slices("graph"))])
def test_layers_for_a_gpu_that_is_not_there(command, small_model, tmp_path):
    if has_gpu():
        pytest.skip("this llama.cpp has a GPU")
    more = {"output": tmp_path / "t.safetensors"} if command is record else {}
    with pytest.raises(UserError, match=r"gpu_layers=99: this llama\.cpp .* finds no GPU; leave it out, or"):
        command(small_model(), Run(tokens=TOKENS, settings=Settings(gpu_layers=99)), **more)
    assert not list(tmp_path.iterdir())


def test_a_field_that_the_structure_has_not_is_refused():
    parameters = Parameters()
    set_fields(parameters, n_ctx=7)
    assert parameters.n_ctx == 7
    with pytest.raises(UserError, match=r"has no flash_attn_type in its Parameters.*pip install"):
        set_fields(parameters, n_ctx=8, flash_attn_type=1)
    assert parameters.n_ctx == 7


@pytest.mark.parametrize("field", ["use_extra_bufts", "flash_attn_type", "cb_eval"])
def test_an_older_library_is_refused(field, small_model, tmp_path):
    """llama-cpp-python as it is, but for one setting that it does not know."""
    real, older = Path(find_spec("llama_cpp").origin).parent, tmp_path / "path" / "llama_cpp"
    older.mkdir(parents=True)
    own = {"llama_cpp.py", "__pycache__"}  # Python goes by size and time: it would take one older library for another
    for path in real.iterdir():
        if path.name not in own:
            (older / path.name).symlink_to(path)
    text = (real / "llama_cpp.py").read_text("utf-8")
    (older / "llama_cpp.py").write_text(text.replace(f'("{field}",', '("of_old",'), encoding="utf-8")
    path = os.pathsep.join([str(tmp_path / "path"), *sys.path])
    run = subprocess.run(
        [sys.executable, "-m", "llamadiff", "compare", str(small_model()), "--tokens", "1,17,5"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
     encoding="utf-8")  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1), run.stderr
    assert f"has no {field} in its llama_" in run.stderr
