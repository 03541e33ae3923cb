"""What a run asks of llama.cpp, by llama-cpp-python (installed.py) or with a build (compiled.py).

Functions of plain numbers and pointers are the same in every version and are called as they are. What takes or gives a
structure is each way's own, since structures differ between versions.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llamadiff.llamacpp.layout import Address, declare
from llamadiff.llamacpp.probes import Rounding, rounding_of
from llamadiff.llamacpp.request import CPU
from llamadiff.llamacpp.tensors import Ggml, kind_of
from llamadiff.system.libraries import Loaded, file_at

Handle = Any  # the address of a model, or of a context
Ids = Sequence[int]
LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, Address)
OBSERVE = ctypes.CFUNCTYPE(ctypes.c_bool, Address, ctypes.c_bool, Address)  # ggml_backend_sched_eval_callback
ABORT = ctypes.CFUNCTYPE(ctypes.c_bool, Address)  # ggml_abort_callback
SPLIT_LAYER = 1  # LLAMA_SPLIT_MODE_LAYER
MOST_PARTS = 256  # numbers in a tensor_split: llama.cpp reads as many as it can have devices
Observe = Callable[[Any, bool, Any], bool]
_INT, _FLAG, _TEXT = ctypes.c_int32, ctypes.c_bool, ctypes.c_char_p

FUNCTIONS: Mapping[str, tuple[Any, ...]] = {  # name -> result, arguments; llama.h and ggml-backend.h
    "llama_backend_init": (None,),
    "llama_log_set": (None, LOG, Address),
    "llama_supports_gpu_offload": (_FLAG,),
    "llama_print_system_info": (_TEXT,),
    "llama_model_get_vocab": (Address, Address),
    "llama_model_n_ctx_train": (_INT, Address),
    "llama_model_n_layer": (_INT, Address),
    "llama_vocab_type": (ctypes.c_int, Address),
    "llama_vocab_n_tokens": (_INT, Address),
    "llama_vocab_bos": (_INT, Address),
    "llama_vocab_get_add_bos": (_FLAG, Address),
    "llama_tokenize": (_INT, Address, _TEXT, _INT, ctypes.POINTER(_INT), _INT, _FLAG, _FLAG),
    "llama_token_to_piece": (_INT, Address, _INT, Address, _INT, _INT, _FLAG),
    "llama_n_ctx": (ctypes.c_uint32, Address),
    "llama_get_memory": (Address, Address),
    "llama_memory_clear": (None, Address, _FLAG),
    "llama_memory_seq_rm": (_FLAG, Address, _INT, _INT, _INT),
    "llama_memory_seq_cp": (None, Address, _INT, _INT, _INT, _INT),
    "llama_memory_seq_add": (None, Address, _INT, _INT, _INT, _INT),
    "llama_memory_can_shift": (_FLAG, Address),
    "llama_state_seq_get_size": (ctypes.c_size_t, Address, _INT),
    "llama_state_seq_get_data": (ctypes.c_size_t, Address, Address, ctypes.c_size_t, _INT),
    "llama_state_seq_set_data": (ctypes.c_size_t, Address, Address, ctypes.c_size_t, _INT),
    "llama_state_seq_save_file": (ctypes.c_size_t, Address, _TEXT, _INT, Address, ctypes.c_size_t),
    "llama_state_seq_load_file": (ctypes.c_size_t, Address, _TEXT, _INT, Address, ctypes.c_size_t, Address),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), Address, _INT),
    "llama_free": (None, Address),
    "llama_model_free": (None, Address),
    "llama_set_abort_callback": (None, Address, ABORT, Address),
    "llama_synchronize": (None, Address),
    "ggml_backend_dev_count": (ctypes.c_size_t,),
    "ggml_backend_dev_get": (Address, ctypes.c_size_t),
    "ggml_backend_dev_name": (_TEXT, Address),
    "ggml_backend_dev_description": (_TEXT, Address),
    "ggml_backend_dev_type": (ctypes.c_int, Address),
    "ggml_backend_dev_buffer_type": (Address, Address),
    "ggml_backend_dev_backend_reg": (Address, Address),
    "ggml_backend_reg_get_proc_address": (Address, Address, _TEXT),
    "ggml_backend_buft_is_host": (_FLAG, Address),
}


@dataclass(frozen=True)
class Loading:
    """How a model is loaded. ``layers`` are put on a GPU.

    ``devices``: the addresses of those that take its layers; empty: where there are layers for a GPU llama.cpp chooses,
    and else no GPU is so much as opened. ``split``: llama.h's number of how they share it, each in what ``parts``.
    """

    layers: int = 0
    repack: bool = False
    vocab_only: bool = False
    devices: tuple[int, ...] = ()
    split: int = SPLIT_LAYER
    parts: tuple[float, ...] = ()


@dataclass(frozen=True)
class Room:
    """What a context is made with; types are ggml's numbers. ``offload``: layers of the CPU may compute elsewhere.
    ``pooled``: texts are embedded, and no logits computed. ``rope_base``, ``rope_scale``: 0 for the file's."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_seq: int
    type_k: int
    type_v: int
    flash_attn: bool
    threads: int
    offload: bool = False
    pooled: bool = False
    rope_base: float = 0.0
    rope_scale: float = 0.0


@dataclass(frozen=True)
class Device:
    """One of llama.cpp's devices, as it names and describes it; ``kind`` is CPU, GPU or HELPER."""

    name: str
    description: str
    address: int
    kind: str


class Library(ABC):
    """llama.cpp and its ggml. ``lib`` has the functions of both; ``name`` says whose they are.

    ``is_tried``: something is that it may refuse, and what it says of that is no error. ``named``: the user's words for
    devices, by llama.cpp's. ``is_unread``: whether a node of a pass, asked in its order, has no values for now;
    ``prepare``: what is done to a context before it is used, where nobody looks (``is_unseen``).
    """

    is_tried = is_unseen = False
    is_unread: Callable[[Any], bool] = staticmethod(lambda node: False)
    prepare: Callable[[Handle], None] = staticmethod(lambda context: None)

    def __init__(self, lib: Any, name: str) -> None:
        """Raises UserError for a library that lacks a function, which is named."""
        self.lib, self.name, self.named = lib, name, dict[str, str]()
        declare(lib, FUNCTIONS, "llama.cpp")

    @cached_property
    def ggml(self) -> Ggml:
        """Its ggml, and how it lays out tensors. Raises UserError if that cannot be told."""
        return Ggml(self.lib, self.structure())

    @abstractmethod
    def structure(self) -> type[ctypes.Structure]:
        """``struct ggml_tensor``."""

    @abstractmethod
    def load(self, path: bytes, loading: Loading) -> Handle:
        """A model of a file; nothing if llama.cpp refuses it."""

    @abstractmethod
    def context(self, model: Handle, room: Room, observe: Observe | None) -> Handle:
        """A context, whose graph ``observe`` sees as it runs; nothing if llama.cpp refuses it."""

    @abstractmethod
    def decode(self, context: Handle, tokens: Ids, positions: Ids, sequences: Ids, logits: Ids) -> int:
        """Run a batch: each token, its position, its sequence, and 1 if it has logits -> llama_decode's code."""

    def tokenizer(self, model: Handle) -> Handle:
        """What llama_tokenize and llama_token_to_piece take: a model's vocabulary."""
        return self.lib.llama_model_get_vocab(model)

    def devices(self) -> tuple[Device, ...]:
        """All that this build and this machine have."""
        found = (self.lib.ggml_backend_dev_get(number) for number in range(self.lib.ggml_backend_dev_count()))
        return tuple(map(self.device, found))

    def device(self, address: int) -> Device:
        """What llama.cpp says of a device."""
        name, words = self.lib.ggml_backend_dev_name(address), self.lib.ggml_backend_dev_description(address)
        return Device(_text(name), _text(words), address, kind_of(self.lib, address))

    def kernels(self) -> Any:
        """The library that computes on the CPU: ``lib``, or one that ggml loaded by itself (libggml-cpu-haswell.so)."""
        cpu = next((device for device in self.devices() if device.kind == CPU), None)
        if cpu is None:
            return self.lib
        backend = self.lib.ggml_backend_dev_backend_reg(cpu.address)
        function = self.lib.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_set_n_threads")
        path = file_at(Address(function)) if function else None
        return self.lib if path is None else Loaded(path)

    def rounding(self) -> Rounding:
        """How its CPU rounds (``rounding_of`` in probes.py)."""
        return rounding_of(self.kernels())

    def version(self) -> str:
        """Whose it is, and which ggml it was built with."""
        said = []
        for name in ("ggml_version", "ggml_commit"):
            if hasattr(self.lib, name):
                getattr(self.lib, name).restype = ctypes.c_char_p
                said.append(_text(getattr(self.lib, name)()))
        return self.name + (f", ggml {said[0]}" if said else "") + (f" ({said[1]})" if len(said) > 1 else "")

    def machine(self) -> dict[str, str]:
        """What it runs on: the CPU's kind, and the order of bytes in a number."""
        return {"machine": platform.machine(), "order": sys.byteorder}

    def flags(self) -> str:
        """llama.cpp's own line of compiled-in CPU features and backends."""
        return _text(self.lib.llama_print_system_info()).strip()


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
