"""The device that a user names: one of those that llama.cpp has, or one behind a server of its RPC backend."""

from __future__ import annotations

import ctypes
import socket

from llamadiff.llamacpp.interface import Device, Library
from llamadiff.llamacpp.layout import Address, declare
from llamadiff.system.errors import UserError

RPC = "rpc:"
PATIENCE = 10.0  # seconds to wait for a server
_OF_BACKENDS = {  # name -> result, arguments
    "ggml_backend_reg_by_name": (Address, ctypes.c_char_p),
    "ggml_backend_reg_dev_count": (ctypes.c_size_t, Address),
    "ggml_backend_reg_dev_get": (Address, Address, ctypes.c_size_t),
}


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
