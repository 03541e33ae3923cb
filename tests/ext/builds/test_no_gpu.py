"""A build is given the devices that were asked for, and how they share a model, and no others."""

from __future__ import annotations

import ctypes
import re

import pytest
from builds import HEADERS, INSTALLED, compiled
from optional import needs
from places import ROOT

from llamadiff.ext.builds import build_tree
from llamadiff.ext.builds.compiled import flags_of
from llamadiff.llamacpp.interface import MOST_PARTS

CHOOSES, LIST = 1, 2  # llama.cpp chooses among all devices; a list, of so many more than this


LAYER, TENSOR = 1, 3  # llama.h's split modes: its own default, and one that is asked for
# layers, devices and their parts -> devices, split mode, the sum of parts
WAYS = [
    ((0, (), ()), (LIST, LAYER, 0)), ((20, (), ()), (CHOOSES, LAYER, 0)), ((9999, (4096,), ()), (LIST + 1, TENSOR, 0)),
    ((9999, (4096, 8192), (3, 2)), (LIST + 2, TENSOR, 5)),
]  # fmt: skip


# llama.cpp's own loading stands aside, and what it was given is the model, in decimal digits.
ASIDE = """
#include "llama.h"
struct llama_model * llama_model_load_from_file(const char * path, struct llama_model_params params) {
    size_t count = 0;
    while (params.devices != NULL && params.devices[count] != NULL) count++;
    size_t parts = 0;
    for (size_t i = 0; params.tensor_split != NULL && i < llama_max_devices(); i++) parts += params.tensor_split[i];
    return (struct llama_model *) ((params.devices == NULL ? 1 : 2 + count) + 10 * params.split_mode + 100 * parts);
}
"""


@needs("cc")
@pytest.mark.parametrize(("given", "devices"), WAYS)
def test_a_build_is_given_the_devices_that_are_asked_for_and_no_gpu_besides(given, devices, tmp_path):
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
    model.restype = ctypes.c_size_t
    asked_for = [((4096, 8192, 1), (1, 1, 1)), given[1:]]  # what was given before does not stay
    for one, parts in asked_for:
        listed = (ctypes.c_void_p * (len(one) + 1))(*one)
        shares = (ctypes.c_float * MOST_PARTS)(*parts) if parts else None
        found = model(b"m.gguf", given[0], 0, 0, listed, TENSOR, shares)
    assert (found % 10, found // 10 % 10, found // 100) == devices
