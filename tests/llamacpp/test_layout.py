"""The fields of ggml's tensors are found in libraries that lay them out otherwise, or it is said which are not."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
from optional import needs

from llamadiff.llamacpp.layout import InitParams, tensor_structure
from llamadiff.llamacpp.library import load
from llamadiff.system.errors import UserError

SOURCE = Path(__file__).parent / "layout/other_ggml.c"
F16 = 1


def library(folder: Path, *flags: str) -> Any:
    target = folder / f"other{len(flags)}.so"
    subprocess.run(["cc", "-shared", "-fPIC", *flags, str(SOURCE), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def at(structure: Any) -> dict[str, tuple[int, int]]:
    """Field -> its offset and size."""
    names = [field[0] for field in structure._fields_ if not field[0].startswith("_")]
    return {name: (getattr(structure, name).offset, getattr(structure, name).size) for name in names}


@needs("cc")
def test_fields_are_found_wherever_they_are(tmp_path: Path):
    assert at(tensor_structure(library(tmp_path))) == {
        "name": (0, 64), "view_src": (96, 8), "ne": (104, 32), "data": (136, 8), "op_params": (144, 96),
        "op": (240, 4), "type": (244, 4), "nb": (248, 32), "view_offs": (280, 8), "src": (288, 96), "flags": (384, 4),
        "buffer": (392, 8),
    }  # fmt: skip


@needs("cc")
def test_a_field_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"^ggml_tensor.nb: not found in this ggml's tensors; use another version"):
        tensor_structure(library(tmp_path, "-DLACKS_STRIDES"))


@needs("cc")
def test_a_function_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"^this ggml has no ggml_scale, so its tensors cannot be read"):
        tensor_structure(library(tmp_path, "-Dggml_scale=scaled"))


def test_the_installed_one_is_read_as_its_functions_made_it():
    lib = load("ggml-base")
    structure = tensor_structure(lib)
    context = lib.ggml_init(InitParams(1 << 20, None, False))
    try:
        made = [lib.ggml_new_tensor_4d(context, F16, 2, 9, 4, 6) for _ in range(2)]
        lib.ggml_set_name(made[0], b"blk.0.weight")
        total = structure.from_address(lib.ggml_add(context, *made))
        view = structure.from_address(lib.ggml_view_1d(context, made[0], 3, 10))
        first = structure.from_address(made[0])
        assert (bytes(first.name), list(first.ne), list(first.nb)) == (
            b"blk.0.weight", [2, 9, 4, 6], [2, 4, 36, 144],
        )  # fmt: skip
        assert (first.type, first.op, lib.ggml_op_name(total.op)) == (F16, 0, b"ADD")
        assert [ctypes.cast(source, ctypes.c_void_p).value for source in total.src[:3]] == [*made, None]
        assert (ctypes.addressof(view.view_src.contents), view.view_offs) == (made[0], 10)
        assert view.data == first.data + 10
    finally:
        lib.ggml_free(context)
