"""What is said of devices before a model is loaded: which there are, how they share it, and what cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llamadiff import UserError
from llamadiff.ext.devices import placing
from llamadiff.ext.devices.placing import ALL_LAYERS, TENSOR, parts_of, place
from llamadiff.llamacpp.interface import Device, Loading
from llamadiff.llamacpp.request import CPU, GPU, HELPER, Request, Way
from llamadiff.llamacpp.settings_words import settings_of

NAMES = ["G0", "G1"]


def library(rows=False, tensors=True, most=16):
    """A llama.cpp with a CPU, a helper and two GPUs, whose backend splits tensors by ``rows``, or as one device."""
    lib = SimpleNamespace(
        llama_max_devices=lambda: most,
        llama_supports_gpu_offload=lambda: True,
        ggml_backend_dev_backend_reg=lambda device: device,
        ggml_backend_reg_get_proc_address=lambda backend, name: int(rows),
    )
    if tensors:
        lib.ggml_backend_meta_device = None
    kinds = {"CPU": CPU, "BLAS": HELPER, "G0": GPU, "G1": GPU}
    devices = [Device(name, f"the {name}", 100 + at, kind) for at, (name, kind) in enumerate(kinds.items())]
    return SimpleNamespace(lib=lib, named={}, devices=lambda: devices)


def placed(words, of=None, **more):
    return place(of or library(), Request("m.gguf", settings=settings_of([words]), **more))


def test_layers_are_on_all_devices_that_are_named():
    asked = library()
    assert placed("device=g1/CPU/g0,tensor_split=3/0/1", asked) == Loading(
        ALL_LAYERS, devices=(103, 100, 102), parts=(3.0, 0.0, 1.0)
    )
    assert asked.named == {"G1": "g1", "CPU": "CPU", "G0": "g0"}


def test_one_device_is_one():
    assert placed("device=G1") == Loading(ALL_LAYERS, devices=(103,))
    assert placed("device=G1,gpu_layers=3,repack=on") == Loading(3, repack=True, devices=(103,))
    assert placed("device=CPU,gpu_layers=3") == Loading()
    assert placed("gpu_layers=3") == Loading(3)


@pytest.mark.parametrize(("split", "number"), [("layer", 1), ("row", 2), ("tensor", 3)])
def test_a_way_to_split_is_llama_cpp_s_number(split, number):
    of = library(rows=True)
    found = placed(f"device=G0/G1,split={split},gpu_layers=2,flash_attn=on", of)
    assert (found.split, found.layers) == (number, 2)
    assert ("Meta(G0,G1)" in of.named) == (split == TENSOR)


REFUSED = {
    "device=G0/G7": "device=G7: this llama.cpp has no such device; it has CPU (the CPU), BLAS (the BLAS), G0",
    "device=BLAS": "device=BLAS: has no memory for layers; llama.cpp asks it of itself for what runs on the CPU, so",
    "device=G0/BLAS": "device=BLAS: has no memory for layers",
    "device=G0/": "device=: this llama.cpp has no such device",
    "device=G0/g0": "device=G0/g0: g0 is named twice; name each device once",
    "split=row": "split=row: among which devices? Name them: device=A/B (device=list prints them)",
    "device=G0,tensor_split=1": "tensor_split=1: among which devices?",
    "device=G0/G1,split=rows": "split=rows: expected one of layer, row, tensor",
    "device=G0/G1,split=row": "split=row: G0 (the G0) has no tensors that are split by rows in this llama.cpp; give "
                              "split=layer or split=tensor",
    "device=G0/G1,split=tensor": "split=tensor: llama.cpp wants flash attention with it; add flash_attn=on",
    "device=G0/G1,tensor_split=1/2/3": "tensor_split=1/2/3: 3 parts for 2 devices (G0/G1); give one for each",
}  # fmt: skip


@pytest.mark.parametrize(("words", "said"), REFUSED.items())
def test_what_cannot_be_is_said_in_a_line(words, said):
    with pytest.raises(UserError) as error:
        placed(words)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_another_llama_cpp_has_less():
    with pytest.raises(UserError, match=r"split=tensor: this llama.cpp splits no tensors over devices"):
        placed("device=G0/G1,split=tensor,flash_attn=on", library(tensors=False))
    with pytest.raises(UserError, match=r"device=...: 2 devices are named, and this llama.cpp takes 1; name fewer"):
        placed("device=G0/G1", library(most=1))


@pytest.mark.parametrize("asked", [{"nodes": True}, {"graph": "graph"}, {"keep_graph": True}])
def test_nodes_of_split_tensors_are_not_looked_at(asked):
    with pytest.raises(UserError, match="no node can be looked at by itself; llamadiff compare judges the taps"):
        placed("device=G0/G1,split=tensor,flash_attn=on", **asked)


def test_logits_alone_are_not_asked_of_split_tensors():
    with pytest.raises(UserError, match="logits alone show nothing; leave out callback=off"):
        placed("device=G0/G1,split=tensor,flash_attn=on", way=Way(callback=False))


@pytest.mark.parametrize("parts", ["0/0", "-1/2", "nan/1", "inf/1", "1e30/1", "a/b", "/", "1//2", "3:1"])
def test_parts_are_numbers_of_which_one_is_not_zero(parts):
    with pytest.raises(UserError, match="expected numbers from 0 on with / between, not all of them 0, such as 3/1"):
        parts_of(parts, NAMES)


def test_parts_as_they_are():
    assert parts_of("", NAMES) == ()
    assert parts_of("0.5/ 2", NAMES) == (0.5, 2.0)


def test_no_device_is_asked_for_where_none_is_named(monkeypatch):
    monkeypatch.setattr(placing, "find_device", None)
    assert placed("gpu_layers=0") == Loading()


@pytest.mark.parametrize(
    ("server", "said"),
    [("nowhere", "expected rpc:HOST:PORT"), ("host:port", "expected rpc:"), ("127.0.0.1:1", "nothing answers there (")],
)
def test_a_server_that_is_not_there(server, said):
    """llama.cpp would abort."""
    with pytest.raises(UserError) as caught:
        placing._check_answers(server)
    assert said in str(caught.value)
