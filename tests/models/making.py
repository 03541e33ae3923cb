"""llama.cpp makes a model of its metadata alone: it says which tensors there are, and is given their values.

It asks for the optional ones too (biases, scales, factors), saves the file as it saves any, and quantizes it. It may
abort on the way: whoever uses this does so in a process of its own.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import llama_cpp._ggml
import numpy as np
from llama_cpp import llama_cpp as lib

from llamadiff.system.libraries import HERE
from models.gguf_file import finish

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "BF16": 32}  # llama_ftype
_GGML = ctypes.CDLL(str(Path(llama_cpp._ggml.libggml_base_path) / HERE.name("ggml-base")))
_SAID: list[str] = []
_LISTEN = lib.llama_log_callback(lambda _level, text, _data: _SAID.append(text.decode("utf8", "replace")))


def start() -> None:
    """Get llama.cpp ready, and silent."""
    for name, result in {
        "ggml_get_name": ctypes.c_char_p, "gguf_init_from_file": ctypes.c_void_p,
        **dict.fromkeys(("ggml_nelements", "ggml_nrows"), ctypes.c_int64), "ggml_nbytes": ctypes.c_size_t,
    }.items():  # fmt: skip
        getattr(_GGML, name).restype = result
    lib.llama_log_set(_LISTEN, None)
    lib.llama_backend_init()


class _Asked(ctypes.Structure):
    """gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def make(path: Path, arch: str, keys: Mapping[str, Any], kind: str) -> str:
    """Write a model -> what llama.cpp said, where it refused. ``keys`` are without the architecture's prefix."""
    metadata = path.with_suffix(".metadata")
    _write_metadata(metadata, arch, keys)
    held = _GGML.gguf_init_from_file(bytes(metadata), _Asked(True, None))
    metadata.unlink()
    _SAID.clear()
    model = lib.llama_model_init_from_user(held, _SET, None, lib.llama_model_default_params())
    if not model:
        return "".join(_SAID)
    whole = path.with_suffix(".whole")
    lib.llama_model_save_to_file(model, bytes(whole))
    lib.llama_model_free(model)
    if kind == "F32":
        whole.rename(path)
        return ""
    wanted = lib.llama_model_quantize_default_params()
    wanted.ftype = TYPES[kind]
    failed = lib.llama_model_quantize(bytes(whole), bytes(path), ctypes.byref(wanted))
    whole.unlink()
    return "".join(_SAID) if failed else ""


def _write_metadata(path: Path, arch: str, keys: Mapping[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("no_vocab")
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array,
               str: writer.add_string}  # fmt: skip
        add[type(value)](key[1:] if key.startswith("/") else f"{arch}.{key}", value)
    finish(writer)


@lib.llama_model_set_tensor_data_t
def _SET(tensor: int, _data: object) -> None:  # noqa: N802
    """Fill a tensor that llama.cpp has made."""
    place = ctypes.c_void_p(tensor)
    count, rows, size = _GGML.ggml_nelements(place), _GGML.ggml_nrows(place), _GGML.ggml_nbytes(place)
    x = values(_GGML.ggml_get_name(place).decode(), rows, count // rows)
    x = x.astype(np.float32 if size == 4 * count else np.float16)
    _GGML.ggml_backend_tensor_set(place, ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(0), ctypes.c_size_t(size))


def values(name: str, rows: int, columns: int) -> np.ndarray:
    """Random values of a sane size, the same ones for the same name."""
    x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal((rows, columns))
    if name.endswith("ssm_a"):
        return -np.abs(x) - 0.2
    if name.startswith("rope_factors") or name.startswith("rope_freqs"):
        return 1 + np.abs(x)
    if ("norm" in name and name.endswith("weight")) or name.endswith("scale"):
        return 1 + 0.1 * x
    return x * (0.1 if rows == 1 else 0.7 / np.sqrt(columns))
