"""llama.h's structures in the releases that are known, for a library that comes without headers.

``structures.json`` has a row for each layout: the releases that have it, and each structure's fields in their order,
with their types. tests/tools/structures.py makes a row from headers. A library is held to its row before it is used.
"""

from __future__ import annotations

import ctypes
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from pkgutil import get_data
from typing import Any

from llamadiff.llamacpp.layout import Address, declare
from llamadiff.llamacpp.library import INSTALL
from llamadiff.system.errors import UserError

_PLAIN: Mapping[str, Any] = {
    "bool": ctypes.c_bool, "int8": ctypes.c_int8, "int32": ctypes.c_int32, "uint32": ctypes.c_uint32,
    "size_t": ctypes.c_size_t, "float": ctypes.c_float, "pointer": Address,
}  # fmt: skip
MODEL, CONTEXT, BATCH = "llama_model_params", "llama_context_params", "llama_batch"
STRUCTURES = (MODEL, CONTEXT, BATCH)
# What every release in the table puts there by itself; a field that stands elsewhere has another value.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    MODEL: {
        "devices": None, "n_gpu_layers": -1, "split_mode": 1, "main_gpu": 0, "tensor_split": None, "kv_overrides": None,
        "vocab_only": False, "check_tensors": False, "use_extra_bufts": True, "no_host": False,
    },
    CONTEXT: {
        "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_threads": 4, "n_threads_batch": 4,
        "rope_scaling_type": -1, "pooling_type": -1, "flash_attn_type": -1, "rope_freq_base": 0.0,
        "rope_freq_scale": 0.0, "yarn_ext_factor": -1.0, "defrag_thold": -1.0, "cb_eval": None, "type_k": 1,
        "type_v": 1, "abort_callback": None, "embeddings": False, "offload_kqv": True, "no_perf": True,
        "op_offload": True, "swa_full": True, "kv_unified": False, "samplers": None,
    },
}  # fmt: skip
_MADE = {"token", "pos", "n_seq_id", "seq_id", "logits"}  # what a batch of tokens has memory for
_POINTERS = (*_MADE, "embd")
_TOKENS = 5
_SPARE = 256  # bytes behind a structure: where it is larger than its row says, nothing else is written over
_HIDDEN_POINTER = ("x86_64", "AMD64")  # machines where what returns a structure takes a pointer to it first
_PATTERNS = (0xA5, 0x5A)  # of memory that a function writes to

Layout = Mapping[str, Mapping[str, str]]  # structure -> field -> type


def layout_of(releases: Iterable[str]) -> Layout | None:
    """The structures of a library that is known by one of these names; None: it is of no release in the table."""
    data = get_data("llamadiff.ext.builds", "structures.json")
    assert data is not None
    names = set(releases)
    return next((row["structures"] for row in json.loads(data) if names & set(row["releases"])), None)


def declare_by_layout(lib: Any, layout: Layout, name: str) -> None:
    """Give the functions that take or return structures their types.

    Raises UserError for a library whose structures are not laid out so; ``name`` says whose it is.
    """
    kinds = {structure: structure_of(structure, layout[structure]) for structure in STRUCTURES}
    declare(lib, {
        "llama_model_default_params": (kinds[MODEL],),
        "llama_model_load_from_file": (Address, ctypes.c_char_p, kinds[MODEL]),
        "llama_context_default_params": (kinds[CONTEXT],),
        "llama_init_from_model": (Address, Address, kinds[CONTEXT]),
        "llama_batch_init": (kinds[BATCH], ctypes.c_int32, ctypes.c_int32, ctypes.c_int32),
        "llama_batch_get_one": (kinds[BATCH], Address, ctypes.c_int32),
        "llama_decode": (ctypes.c_int32, Address, kinds[BATCH]),
        "llama_batch_free": (None, kinds[BATCH]),
    }, "llama.cpp")  # fmt: skip
    for wrong in misplaced(lib, kinds):
        raise UserError(f"{name}: {wrong}: it is not laid out as its release's llama.h says; pip install {INSTALL}")


def structure_of(name: str, fields: Mapping[str, str]) -> type[ctypes.Structure]:
    """A structure of llama.h, as C lays out these fields."""
    named = [(field, _kind(of)) for field, of in fields.items()]
    return type(name, (ctypes.Structure,), {"_fields_": [*named, ("_spare", ctypes.c_char * _SPARE)]})


def _kind(name: str) -> Any:
    if not name.endswith("*"):
        return _PLAIN[name]
    return ctypes.POINTER(_kind(name[:-1]))


def misplaced(lib: Any, kinds: Mapping[str, type[ctypes.Structure]]) -> Iterator[str]:
    """What a library does otherwise than structures laid out so would have it, in words."""
    for name, defaults in DEFAULTS.items():
        function = name.replace("_params", "_default_params")
        made = getattr(lib, function)()
        for field, expected in defaults.items():
            found = getattr(made, field, expected)
            if found != expected:
                yield f"{function} gives {field} {found}, not {expected}"
        yield from _beside(lib, function, kinds[name])
    yield from _beside(lib, "llama_batch_init", kinds[BATCH], 1, 0, 1)
    batch, other = lib.llama_batch_init(1, 0, 1), lib.llama_batch_get_one(None, _TOKENS)
    if other.n_tokens == _TOKENS and {each for each in _POINTERS if getattr(batch, each)} == _MADE:
        lib.llama_batch_free(batch)
    else:
        yield "llama_batch_init gives no batch of tokens"


def writes_are_seen() -> bool:
    """Whether this machine lets it be seen what a function writes that returns a structure."""
    return platform.machine() in _HIDDEN_POINTER


def written(lib: Any, function: str, *arguments: int) -> frozenset[int]:
    """The bytes of a structure, by their places, that a function writes where it returns one."""
    images = []
    for pattern in _PATTERNS:
        memory = (ctypes.c_uint8 * (4 * _SPARE))()
        ctypes.memset(memory, pattern, len(memory))
        call = ctypes.CFUNCTYPE(Address, Address, *[ctypes.c_int32] * len(arguments))((function, lib))
        call(ctypes.addressof(memory), *arguments)
        images.append(bytes(memory))
    return frozenset(place for place, found in enumerate(zip(*images, strict=True)) if found != _PATTERNS)


def _beside(lib: Any, function: str, kind: type[ctypes.Structure], *arguments: int) -> Iterator[str]:
    """Fields of which not all is written, and what is written behind the last; where this machine lets that be seen."""
    if not writes_are_seen():
        return
    places, end = written(lib, function, *arguments), 0
    for field, of in kind._fields_[:-1]:  # type: ignore[misc]
        begin = getattr(kind, field).offset
        end = begin + ctypes.sizeof(of)
        if not places.issuperset(range(begin, end)):
            yield f"{function} does not write all of {field}"
    if max(places) >= end:
        yield f"{function} writes {max(places) + 1} bytes, not {end}"
