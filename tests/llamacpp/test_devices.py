"""Which devices a run is on: a baseline opens no GPU, by either way in; and what doctor says of it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from command import run

from llamadiff import UserError
from llamadiff.llamacpp import interface, session
from llamadiff.llamacpp.doctor import baseline_on
from llamadiff.llamacpp.interface import Device
from llamadiff.llamacpp.request import CPU, GPU, HELPER, Request, Settings

CHOOSES, LIST = 1, 2  # llama.cpp chooses among all devices; a list, of so many more than this
WAYS = [((0, None), LIST), ((20, None), CHOOSES), ((9999, 4096), LIST + 1)]  # layers and a device -> devices

ASKED = """
import ctypes, sys
from llama_cpp import llama_cpp
from llamadiff.llamacpp.installed import Installed
from llamadiff.llamacpp.interface import Loading

def count(path, params):
    devices = ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p))
    return 2 + next(n for n in range(9) if not devices[n]) if devices else 1

llama_cpp.llama_model_load_from_file = count
c = llama_cpp._lib
print(Installed(c, "", llama_cpp).load(b"m.gguf", Loading({}, device={})))
"""


@pytest.mark.parametrize(("given", "devices"), WAYS)
def test_llama_cpp_python_is_given_no_gpu(given, devices):
    words = [sys.executable, "-c", ASKED.format(*given)]
    assert int(subprocess.run(words, capture_output=True, check=True).stdout) == devices


# a device's type, and whether its memory is the host's
KINDS = {"CPU": (0, True, CPU), "CUDA": (1, False, GPU), "Metal, once": (1, True, GPU), "BLAS, once": (2, True, HELPER),
         "integrated": (2, False, GPU), "BLAS": (3, True, HELPER), "meta": (4, False, GPU)}  # fmt: skip


@pytest.mark.parametrize(("number", "in_host", "kind"), KINDS.values(), ids=KINDS)
def test_a_device_is_known_by_its_type_in_each_version(number, in_host, kind):
    lib = SimpleNamespace(
        ggml_backend_dev_type=lambda device: number,
        ggml_backend_dev_buffer_type=lambda device: "buffers",
        ggml_backend_buft_is_host=lambda buffers: in_host,
    )
    assert interface.kind_of(lib, 1) == kind


MAC = (("MTL0", "Apple M1", GPU), ("BLAS", "Accelerate", HELPER), ("CPU", "Apple M1", CPU))


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (MAC, "the CPU, not MTL0 (Apple M1), which llama.cpp would take by itself; products of 32 tokens and more by "
              "BLAS (Accelerate), in float32"),
        (MAC[::2], "the CPU, not MTL0 (Apple M1), which llama.cpp would take by itself"),
        (MAC[1:], "the CPU; there is no GPU to take; products of 32 tokens and more by BLAS (Accelerate), in float32"),
        (MAC[2:], "the CPU; there is no GPU to take"),
    ],
)  # fmt: skip
def test_doctor_says_what_a_baseline_is_on(devices, said):
    assert baseline_on(devices).found == said


def test_doctor_asks_this_llama_cpp():
    assert any(line.split()[:4] == ["a", "baseline", "is", "on"] for line in run("doctor").stdout.splitlines())


def test_a_helper_takes_no_layers(monkeypatch):
    blas = Device("BLAS", "Accelerate", 1, HELPER)
    monkeypatch.setattr(session, "find_device", lambda library, name: blas)
    library = SimpleNamespace(lib=SimpleNamespace(llama_backend_init=lambda: None))
    with pytest.raises(UserError, match=r"device=BLAS: has no memory for layers; .* leave it out, or give device=CPU"):
        session.load(library, Request("m.gguf", settings=Settings(device="BLAS")))
