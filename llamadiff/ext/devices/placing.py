"""The devices that a user names, and what each takes of a model: in llama.cpp's process.

A device is one of those that llama.cpp has, or one behind a server of its RPC backend.
"""

from __future__ import annotations

import ctypes
import math
import socket
from collections.abc import Sequence
from functools import partial

from llamadiff.ext.devices.partial_sums import TOGETHER, PartialSums
from llamadiff.llamacpp.interface import SPLIT_LAYER, Device, Handle, Library, Loading
from llamadiff.llamacpp.layout import Address, declare
from llamadiff.llamacpp.request import CPU, HELPER, Request, Settings
from llamadiff.system.errors import UserError

RPC = "rpc:"
BETWEEN = "/"  # names of devices, and their parts
ALL_LAYERS = 9999  # more than any model has
PATIENCE = 10.0  # seconds to wait for a server
ROW, TENSOR = "row", "tensor"
SPLITS = {"layer": SPLIT_LAYER, ROW: 2, TENSOR: 3}  # LLAMA_SPLIT_MODE_x
MOST_DEVICES = 16  # where llama.cpp does not say
_OF_BACKENDS = {  # name -> result, arguments
    "ggml_backend_reg_by_name": (Address, ctypes.c_char_p),
    "ggml_backend_reg_dev_count": (ctypes.c_size_t, Address),
    "ggml_backend_reg_dev_get": (Address, Address, ctypes.c_size_t),
}
_OF_MODELS = {
    "llama_get_model": (Address, Address),
    "llama_model_meta_val_str": (ctypes.c_int32, Address, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t),
}


def place(library: Library, request: Request) -> Loading:
    """How the model of a request that says where its layers are is loaded. Raises UserError for what cannot be."""
    settings = request.settings
    names = settings.device.split(BETWEEN) if settings.device else []
    if len(names) < 2:
        return _on_one(library, settings)
    devices = _several(library, names)
    library.named = {device.name: name for device, name in zip(devices, names, strict=True)}
    if settings.split == TENSOR:
        _check_splits_tensors(request)
        library.named |= dict.fromkeys((f"{TOGETHER}{','.join(library.named)})", f"{TOGETHER})"), settings.device)
        library.is_unread = sums = PartialSums()
        library.prepare = partial(_prepare, library, sums)
    return Loading(
        settings.gpu_layers or ALL_LAYERS, settings.repack, devices=tuple(device.address for device in devices),
        split=_split_mode(library, settings.split, devices), parts=parts_of(settings.tensor_split, names),
    )  # fmt: skip


def _on_one(library: Library, settings: Settings) -> Loading:
    """Layers on one device, or on those that llama.cpp chooses."""
    for key, value in (("split", settings.split), ("tensor_split", settings.tensor_split)):
        if value:
            raise UserError(f"{key}={value}: among which devices? Name them: device=A/B (device=list prints them)")
    device = find_device(library, settings.device) if settings.device else None
    if device is not None:
        _check_takes_layers(device)
    if device is not None and device.kind == CPU:  # which is where it runs what is on no other device
        return Loading(repack=settings.repack)
    if settings.gpu_layers and not library.lib.llama_supports_gpu_offload():
        raise UserError(
            f"gpu_layers={settings.gpu_layers}: this llama.cpp was built without a GPU backend, or finds no GPU; "
            "leave it out, or build llama-cpp-python for your GPU (CMAKE_ARGS=-DGGML_CUDA=on)"
        )
    devices = () if device is None else (device.address,)
    return Loading(settings.gpu_layers or (ALL_LAYERS if devices else 0), settings.repack, devices=devices)


def _several(library: Library, names: Sequence[str]) -> list[Device]:
    """Devices that share a model. Raises UserError for one that is not there, or cannot, and for too many."""
    most = library.lib.llama_max_devices() if hasattr(library.lib, "llama_max_devices") else MOST_DEVICES
    if len(names) > most:
        raise UserError(f"device=...: {len(names)} devices are named, and this llama.cpp takes {most}; name fewer")
    devices = [find_device(library, name) for name in names]
    for number, device in enumerate(devices):
        _check_takes_layers(device)
        if any(device.address == other.address for other in devices[:number]):
            raise UserError(f"device={BETWEEN.join(names)}: {names[number]} is named twice; name each device once")
    return devices


def _check_splits_tensors(request: Request) -> None:
    """Raise UserError for a run that llama.cpp cannot do with tensors split over devices, or not be watched in."""
    if not request.settings.flash_attn:
        raise UserError(f"split={TENSOR}: llama.cpp wants flash attention with it; add flash_attn=on")
    if not request.way.callback:
        raise UserError(
            f"split={TENSOR}: sums are added in an order of their own, so that logits alone show nothing; leave out "
            "callback=off"
        )
    if request.nodes or request.graph is not None or request.keep_graph:
        raise UserError(
            f"split={TENSOR}: llama.cpp adds up the devices' parts of a product together with what comes next, so that "
            "no node can be looked at by itself; llamadiff compare judges the taps between"
        )


def _prepare(library: Library, sums: PartialSums, context: Handle) -> None:
    """A pass in one go, and forgotten: several devices that are one get room for graphs as large as the first ones."""
    sums.width = _gate_width(library, context)
    library.is_unseen = True
    library.decode(context, [0], [0], [0], [1])
    library.is_unseen = False
    library.lib.llama_memory_clear(library.lib.llama_get_memory(context), True)


def _gate_width(library: Library, context: Handle) -> int:
    """The rows of a gate of the feed-forward part, as the model's file states them; 0 where layers differ."""
    lib, said = library.lib, ctypes.create_string_buffer(128)
    declare(lib, _OF_MODELS, "llama.cpp")
    model = lib.llama_get_model(context)
    lib.llama_model_meta_val_str(model, b"general.architecture", said, len(said))
    count = lib.llama_model_meta_val_str(model, said.value + b".feed_forward_length", said, len(said))
    return int(said.value) if count > 0 and said.value.isdigit() else 0


def _check_takes_layers(device: Device) -> None:
    if device.kind == HELPER:
        raise UserError(
            f"device={device.name}: has no memory for layers; llama.cpp asks it of itself for what runs on the CPU, so "
            "leave it out, or give device=CPU"
        )


def _split_mode(library: Library, split: str, devices: Sequence[Device]) -> int:
    """llama.h's number of a way to split. Raises UserError for one that this llama.cpp, or a device, has not."""
    if split and split not in SPLITS:
        raise UserError(f"split={split}: expected one of {', '.join(SPLITS)}")
    lib = library.lib
    if split == TENSOR and not hasattr(lib, "ggml_backend_meta_device"):
        raise UserError(f"split={TENSOR}: this llama.cpp splits no tensors over devices; give split=layer")
    if split == ROW:
        for device in devices:
            backend = lib.ggml_backend_dev_backend_reg(device.address)
            if not lib.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_split_buffer_type"):
                raise UserError(
                    f"split={ROW}: {device.name} ({device.description}) has no tensors that are split by rows in this "
                    f"llama.cpp; give split=layer{f' or split={TENSOR}' * hasattr(lib, 'ggml_backend_meta_device')}"
                )
    return SPLITS[split or "layer"]


def parts_of(said: str, names: Sequence[str]) -> tuple[float, ...]:
    """What each device takes of a model, as ``tensor_split`` says; nothing where that is left to llama.cpp.

    Raises UserError for what is no part, or not one for each device.
    """
    if not said:
        return ()
    try:
        parts = tuple(map(float, said.split(BETWEEN)))
    except ValueError:
        parts = ()
    if not parts or any(not math.isfinite(part) or part < 0 for part in parts) or not 0 < sum(parts) < 1e6:
        raise UserError(
            f"tensor_split={said}: expected numbers from 0 on with / between, not all of them 0, such as 3/1"
        )
    if len(parts) != len(names):
        devices = f"{len(names)} devices ({BETWEEN.join(names)})"
        raise UserError(f"tensor_split={said}: {len(parts)} parts for {devices}; give one for each")
    return parts


def find_device(library: Library, name: str) -> Device:
    """The device of a name. Raises UserError, with those that are there, for one that is not."""
    if name.lower().startswith(RPC):
        return _behind(library, name[len(RPC) :])
    devices = library.devices()
    for device in devices:
        if device.name.lower() == name.lower():
            return device
    there = ", ".join(f"{device.name} ({device.description})" for device in devices) or "none"
    raise UserError(f"device={name}: this llama.cpp has no such device; it has {there}")


def _behind(library: Library, server: str) -> Device:
    """The first device of a server: HOST:PORT. Raises UserError where there is no such backend, or no such server."""
    lib = library.lib
    declare(lib, _OF_BACKENDS, "llama.cpp")
    backend = lib.ggml_backend_reg_by_name(b"RPC")
    add = lib.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_rpc_add_server") if backend else None
    if not add:
        raise UserError(f"device={RPC}{server}: this llama.cpp has no RPC backend; build it with -DGGML_RPC=ON")
    _check_answers(server)
    registry = ctypes.CFUNCTYPE(Address, ctypes.c_char_p)(add)(server.encode())
    if not registry or not lib.ggml_backend_reg_dev_count(registry):
        raise UserError(f"device={RPC}{server}: the server there has no device; start rpc-server of the same version")
    return library.device(lib.ggml_backend_reg_dev_get(registry, 0))


def _check_answers(server: str) -> None:
    """Raise UserError where nothing listens: llama.cpp would abort."""
    host, _, port = server.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
        raise UserError(f"device={RPC}{server}: expected {RPC}HOST:PORT, such as {RPC}127.0.0.1:50052")
    try:
        socket.create_connection((host, int(port)), PATIENCE).close()
    except OSError as error:
        raise UserError(
            f"device={RPC}{server}: nothing answers there ({error.strerror or error}); start rpc-server first"
        ) from None
