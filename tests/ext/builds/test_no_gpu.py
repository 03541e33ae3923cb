"""A build is given no device that was not asked for."""

from __future__ import annotations

import ctypes
import re

import pytest
from builds import HEADERS, INSTALLED, compiled
from optional import needs
from places import ROOT

from llamadiff.ext.builds import build_tree
from llamadiff.ext.builds.compiled import flags_of

CHOOSES, LIST = 1, 2  # llama.cpp chooses among all devices; a list, of so many more than this


WAYS = [((0, None), LIST), ((20, None), CHOOSES), ((9999, 4096), LIST + 1)]  # layers and a device -> devices


# llama.cpp's own loading stands aside, and how many devices it was given is the model.
ASIDE = """
#include "llama.h"
struct llama_model * llama_model_load_from_file(const char * path, struct llama_model_params params) {
    size_t count = 0;
    while (params.devices != NULL && params.devices[count] != NULL) count++;
    return (struct llama_model *) (params.devices == NULL ? 1 : 2 + count);
}
"""


@needs("cc")
@pytest.mark.parametrize(("given", "devices"), WAYS)
def test_a_build_is_given_no_gpu(given, devices, tmp_path):
    libraries = [str(next((INSTALLED / "lib").glob(f"lib{name}.so"))) for name in ("llama", "ggml", "ggml-base")]
    words = re.findall(r"\w+", "".join((HEADERS / name).read_text("utf-8") for name in build_tree.HEADERS))
    shim = str(ROOT / "llamadiff/ext/builds/shim.c")
    compiled(
        tmp_path / "shim.so",
        ASIDE,
        shim,
        *flags_of(words, words),
        f"-I{HEADERS}",
        *libraries,
        f"-Wl,-rpath,{INSTALLED / 'lib'}",
    )
    model = ctypes.CDLL(str(tmp_path / "shim.so")).shim_model
    model.restype, model.argtypes = ctypes.c_size_t, [ctypes.c_char_p, *[ctypes.c_int32] * 3, ctypes.c_void_p]
    layers, device = given
    assert model(b"m.gguf", 20, 0, 0, 4096) == LIST + 1  # what was given before does not stay
    assert model(b"m.gguf", layers, 0, 0, device) == devices
