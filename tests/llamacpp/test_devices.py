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
from llamadiff.llamacpp.interface import Loading
from llamadiff.llamacpp.request import CPU, GPU, HELPER, Request, Settings
from llamadiff.llamacpp.tensors import Ggml, Tensor

CHOOSES, LIST = 1, 2  # llama.cpp chooses among all devices; a list, of so many more than this
# layers, devices and their parts -> devices, how they share the layers, the first parts
WAYS = [
    ((0, (), ()), f"{LIST} 1 []"), ((20, (), ()), f"{CHOOSES} 1 []"), ((9999, (4096,), ()), f"{LIST + 1} 3 []"),
    ((9999, (4096, 8192), (3.0, 0.5)), f"{LIST + 2} 3 [3.0, 0.5, 0.0]"),
]  # fmt: skip

ASKED = """
import ctypes, sys
from llama_cpp import llama_cpp
from llamadiff.llamacpp.installed import Installed
from llamadiff.llamacpp.interface import Loading

def count(path, params):
    devices = ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p))
    count = 2 + next(n for n in range(9) if not devices[n]) if devices else 1
    return f"{{count}} {{params.split_mode}} {{params.tensor_split[:3] if params.tensor_split else []}}"

llama_cpp.llama_model_load_from_file = count
c = llama_cpp._lib
layers, devices, parts = {}
loading = Loading(layers, devices=devices, split=3 if devices else 1, parts=parts)
print(Installed(c, "", llama_cpp).load(b"m.gguf", loading))
"""


@pytest.mark.parametrize(("given", "devices"), WAYS)
def test_llama_cpp_python_is_given_the_devices_that_are_asked_for_and_no_gpu_besides(given, devices):
    words = [sys.executable, "-c", ASKED.format(given)]
    assert subprocess.run(words, capture_output=True, check=True, text=True).stdout.strip() == devices


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


def test_without_the_slice_that_places_layers_they_are_where_they_were():
    library = SimpleNamespace(
        lib=SimpleNamespace(llama_backend_init=lambda: None), load=lambda path, loading: (path, loading)
    )
    assert session.load(library, Request("m.gguf", settings=Settings(repack=True)))[1] == Loading(repack=True)
    for settings in (
        Settings(device="X0"),
        Settings(gpu_layers=2),
        Settings(split="row"),
        Settings(tensor_split="1/1"),
    ):
        with pytest.raises(UserError, match="the slice that says where layers are is missing; leave them out"):
            session.load(library, Request("m.gguf", settings=settings))


# a buffer's memory: is it the host's, its device, its type, the device's own type -> whose it is said to be
HOMES = {
    "no buffer": (None, "CPU"), "CPU of most versions": ((True, 0, "CPU", 0), "CPU"),
    "a GPU": ((False, 7, "CUDA0", 70), "device 7"), "the host's memory of a GPU": ((True, 7, "CUDA_Host", 70), "CPU"),
    "a GPU with the host's memory": ((True, 7, "Metal", 1), "device 7"),
    "shared": ((False, 7, "CUDA_Split", 70), "CUDA_Split"),
    "of nobody": ((False, 0, "old", 0), ""),
}  # fmt: skip


@pytest.mark.parametrize(("buffer", "home"), HOMES.values(), ids=HOMES)
def test_whose_memory_a_buffer_is(buffer, home):
    in_host, device, kind, own = buffer or (True, 0, "", 0)
    ggml = Ggml.__new__(Ggml)
    ggml.knows_owners = True
    ggml.lib = SimpleNamespace(
        ggml_backend_buffer_is_host=lambda buffer: in_host,
        ggml_backend_buffer_get_type=lambda buffer: 1,
        ggml_backend_buft_get_device=lambda kind: device or None,
        ggml_backend_buft_name=lambda buffer: kind.encode(),
        ggml_backend_dev_buffer_type=lambda device: own,
        ggml_backend_dev_name=lambda device: f"device {device}".encode(),
    )
    assert ggml.home(buffer) == home
    ggml.knows_owners = False
    assert ggml.home(buffer) == ("CPU" if in_host else "")


def test_a_node_is_of_a_split_tensor_if_it_reads_one():
    ggml = SimpleNamespace(home=lambda buffer: buffer)

    def node(home, *sources):
        tensor = SimpleNamespace(buffer=home, src=[], view_src=None)
        made = Tensor(ggml, tensor)
        made.__dict__["sources"], made.__dict__["op"] = sources, "MUL_MAT"
        return made

    assert node("CUDA0", node("CUDA_Split"), node("CUDA0")).device == "CUDA0_Split"
    assert node("CUDA0", node("CUDA0"), node("CUDA0")).device == "CUDA0"
