"""A model that two rpc-servers share: right ones are right, and a mistake in one is said of that one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from command import run
from models.options import OPTIONS
from models.small import write_model
from optional import needs, program
from tools.backends import made
from tools.rpc_server import serving

pytestmark = [pytest.mark.backends, pytest.mark.slow]
NOT_FINITE = "llama-large"  # even the right op gives Inf there
TOKENS = ("--tokens", "1,17,5,40,9,33", "--n-predict", "2")
LAYERS = [f"l_out-{layer}" for layer in range(6)]


@pytest.fixture(scope="module")
def part() -> Path:
    folder = made().get("rpc", " not made yet: make backends PARTS=rpc")
    if folder[0] == " ":
        pytest.skip(folder.strip())
    return Path(folder)


@pytest.fixture(scope="module")
def server(part: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """server("a"): a device behind a server of that name; server("glu"), ("glu 2"): whose kernel of it is wrong."""
    with ExitStack() as running:
        known: dict[str, str] = {}

        def get(name: str) -> str:
            if name not in known:
                wrong = {} if len(name) == 1 else {"LD_PRELOAD": kernels(), "WRONG_KERNEL": name.partition(" ")[0]}
                listens = serving(next(part.glob("lib/*rpc-server")), **wrong)
                known[name] = f"rpc:{running.enter_context(listens)}"
            return known[name]

        def kernels() -> str:
            out = tmp_path_factory.getbasetemp() / "wrong_kernels.so"
            source = Path(__file__).with_name("wrong_kernels.c")
            words = ["-shared", "-fPIC", "-O1", f"-I{part / 'include'}", source, "-o", out, "-ldl"]
            subprocess.run([str(program("gcc")), *map(str, words)], check=True)
            return str(out)

        yield get


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.getbasetemp() / "deep.gguf", **OPTIONS["llama-deep"])


@pytest.fixture
def ask(part: Path):
    def words(verb: str, model: Path, settings: str, *more: str):
        done = run(verb, model, *TOKENS, "--llama-cpp", part, "--llama-cpp", settings, "-o", "json:-", *more)
        return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr

    return words


@pytest.mark.parametrize("verb", ["backend", "compare"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_right_model_is_right_on_two_devices(verb, name, ask, server, tmp_path):
    a, b = server("a"), server("b")
    code, found = ask(verb, write_model(tmp_path / "m.gguf", **OPTIONS[name]), f"device={a}/{b},tensor_split=1/2")
    assert code == (2 if name == NOT_FINITE else 0), found
    devices = {part["device"]: part["layers"] for part in found["devices"]}
    assert min(devices[a]) == 0
    assert max(devices[b]) > max(devices[a])


def test_each_device_has_the_part_that_llama_cpp_gave_it(ask, server, deep):
    a, b = server("a"), server("b")
    _, found = ask("compare", deep, f"device={a}/{b},tensor_split=1/1")
    parts = {part["device"]: part for part in found["devices"]}
    assert [parts[name]["layers"] for name in (a, b)] == [[0, 1, 2, 3], [4, 5]]  # of seven: the output is one, too
    assert {*LAYERS[:4]} <= {*parts[a]["taps"]}
    assert {*LAYERS[4:], "result_output"} <= {*parts[b]["taps"]}
    assert parts["CPU"]["taps"] == ["embd"]
    _, found = ask("compare", deep, f"device={b}/{a},tensor_split=1/6")
    assert {part["device"]: part["layers"] for part in found["devices"]} == {"CPU": [], b: [0], a: [1, 2, 3, 4, 5]}


WRONG = {"glu": "SWIGLU", "rope": "ROPE", "rms_norm": "RMS_NORM", "mul_mat": "MUL_MAT", "add": "ADD"}


@needs("gcc")
@pytest.mark.parametrize("verb", ["backend", "compare"])
@pytest.mark.parametrize(("kernel", "op"), WRONG.items())
def test_a_kernel_that_is_wrong_on_one_device_is_said_of_that_one(verb, kernel, op, ask, server, deep):
    a, wrong = server("a"), server(kernel)
    code, found = ask(verb, deep, f"device={a}/{wrong},tensor_split=1/1")
    assert code == 1
    assert found["headline"].endswith(f", only on {wrong}")
    assert found["proof"][0].startswith(f"wrong only on {wrong}, layers 4, 5: {op}")
    assert f" right on {a}, layers 0-3" in found["proof"][0]
    assert {part["device"] for part in found["devices"] if part["wrong"]} == {wrong}


@needs("gcc")
def test_a_kernel_that_is_wrong_on_both_is_said_of_both(ask, server, deep):
    one, other = server("glu"), server("glu 2")
    _, found = ask("backend", deep, f"device={one}/{other},tensor_split=1/1")
    assert "only on" not in found["headline"]
    counts = f"4 of 140 on {one}, layers 0-3; 2 of 75 on {other}, layers 4, 5"
    assert found["proof"][0] == f"wrong on more than one device: {counts}"


SPLIT = "split=tensor,flash_attn=on"
BIASED = ("gpt2", "gpt-oss")


@pytest.mark.parametrize("name", ["llama", "moe", "qwen3", "gemma2", "gpt2", "gpt-oss", "phi3", "llama-fused"])
def test_a_right_model_is_right_where_its_tensors_are_split(name, ask, server, tmp_path):
    model = write_model(tmp_path / "m.gguf", **OPTIONS[name])
    both = f"{server('a')}/{server('b')}"
    code, found = ask("compare", model, f"device={both},{SPLIT}")
    assert code == 0, found
    assert {part["split"] for part in found["devices"] if part["device"] == both} == {True, False}
    spans = [row["span"] for row in found["taps"]]
    assert any("attn_out-1" in span for span in spans) != (name in BIASED)  # whose sum is told of


@needs("gcc")
@pytest.mark.parametrize(("kernel", "first"), [("glu", "ffn_swiglu-0"), ("mul_mat", "Qcur_proj-0")])
def test_what_is_wrong_on_one_of_those_that_share_a_tensor_is_where_it_is_split(kernel, first, ask, server, deep):
    code, found = ask("compare", deep, f"device={server('a')}/{server(kernel)},{SPLIT}")
    assert (code, found["wrong"][0]) == (1, first)
    assert "where a tensor is split" in found["proof"][0]
    half = next(row for row in found["taps"] if row["tap"] == first)
    assert half["local"]["index"][-1] >= half["shape"][-1] // 2  # in the second device's half


def test_what_llama_cpp_cannot_do_is_refused(ask, server, deep):
    both = f"device={server('a')}/{server('b')}"
    assert "is named twice" in ask("backend", deep, f"device={server('a')}/{server('a')}")[1]
    assert "has no tensors that are split by rows" in ask("backend", deep, f"{both},split=row")[1]
    assert "no node can be looked at by itself" in ask("backend", deep, f"{both},{SPLIT}")[1]
    code, said = ask("compare", deep, f"{both},tensor_split=1")
    assert "1 parts for 2 devices" in said
    assert (code, said.count("\n")) == (2, 1)


@pytest.mark.parametrize("devices", ["Vulkan0/CPU", "CPU/Vulkan0"])
def test_what_comes_from_another_device_is_there_before_it_is_read(devices, deep, monkeypatch):
    """Where all devices may compute at once, a copy may be on its way when the node that reads it is asked about."""
    folder = made().get("vulkan", " not made yet: make backends PARTS=vulkan")
    if folder[0] == " ":
        pytest.skip(folder.strip())
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    words = ("--llama-cpp", folder, "--llama-cpp", f"device={devices},tensor_split=1/1", "-o", "json:-")
    done = run("backend", deep, *TOKENS, *words)
    assert done.returncode == 0, done.stdout
    parts = {part["device"]: part["layers"] for part in json.loads(done.stdout)["devices"]}
    assert parts == dict(zip(devices.split("/"), ([0, 1, 2, 3], [4, 5]), strict=True))


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("more", ["tensor_split=1/1", SPLIT])
def test_two_devices_are_a_right_variant(on_device, more, server, deep, part):
    before = ("--llama-cpp", f"device={server('a')}") if on_device else ()
    words = ("--llama-cpp", part, *before, "--only", f"device={server('a')}/{server('b')},{more}")
    done = run("variants", deep, "--tokens", "1,17,5,40", *words, "-o", "json:-")
    _, found = json.loads(done.stdout)["variants"]
    assert (found["verdict"], found["wrong"], found["top1_agree"]) == ("match", [], True)
    assert found["judged"] > 50
