"""Applies an adapter to a context of llama.cpp, in its process."""

from __future__ import annotations

import ctypes
import os

from llamadiff.llamacpp.interface import Handle, Library
from llamadiff.llamacpp.layout import Address, declare
from llamadiff.llamacpp.request import Settings
from llamadiff.system.errors import UserError

LOAD = {"llama_adapter_lora_init": (Address, Address, ctypes.c_char_p)}
SET = "llama_set_adapters_lora"  # all of a context's at once; in earlier versions one after the other
_SET = {
    SET: (ctypes.c_int32, Address, ctypes.POINTER(Address), ctypes.c_size_t, ctypes.POINTER(ctypes.c_float)),
    "llama_set_adapter_lora": (ctypes.c_int32, Address, Address, ctypes.c_float),
}


def apply(library: Library, model: Handle, context: Handle, settings: Settings) -> None:
    """Have the context's passes add what the adapter of these settings adds. Raises UserError if llama.cpp refuses."""
    lib, word = library.lib, f"lora={settings.lora}"
    declare(lib, LOAD, "llama.cpp")
    adapter = lib.llama_adapter_lora_init(model, os.fsencode(settings.lora))
    if not adapter:
        raise UserError(f"{word}: llama.cpp refuses the adapter; llamadiff weights ADAPTER MODEL says why")
    all_at_once = hasattr(lib, SET)
    name = SET if all_at_once else "llama_set_adapter_lora"
    declare(lib, {name: _SET[name]}, "llama.cpp")
    if all_at_once:
        one, scales = (Address * 1)(adapter), (ctypes.c_float * 1)(settings.lora_scale)
        code = lib.llama_set_adapters_lora(context, one, 1, scales)
    else:
        code = lib.llama_set_adapter_lora(context, adapter, settings.lora_scale)
    if code != 0:
        raise UserError(f"{word}: llama.cpp cannot apply it to this context (code {code}); leave it out")
