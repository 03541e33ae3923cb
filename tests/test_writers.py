"""The writers to paste into an engine: each is compiled and run, its file read back; and an engine in C is judged."""

from __future__ import annotations

import ctypes
import json
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file
from small import write_model

import llamadiff
from llamadiff import Trace, UserError, writers
from llamadiff.llamacpp.capture import capture
from llamadiff.llamacpp.request import Request
from llamadiff.pipeline import diff
from llamadiff.writers import trace_writer

PROGRAMS = Path(__file__).parent / "writers"
TOKENS = (1, 17, 5, 80, 42, 9, 33)
HEADER_BYTES = 1 << 20
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-O2"]

# How each driver is made, in a directory with the writer beside it, and run.
BUILDS = {
    "c": (["cc", "-std=c99", *STRICT, "driver.c", "-o", "driver"], ["{folder}/driver"]),
    "c++": (["g++", "-std=c++17", *STRICT, "-x", "c++", "driver.c", "-o", "driver"], ["{folder}/driver"]),
    "rust": (["rustc", "--edition", "2021", "-D", "warnings", "driver.rs"], ["{folder}/driver"]),
    "js": ([], ["node", "{folder}/driver.js"]),
    "python": ([], [sys.executable, "-W", "error", "{folder}/driver.py"]),
}


def tool_of(language: str) -> str:
    build, run = BUILDS[language]
    return (build or run)[0]


def if_installed(language: str):
    absent = shutil.which(tool_of(language)) is None
    return pytest.param(language, marks=pytest.mark.skipif(absent, reason=f"{tool_of(language)} is not installed"))


every_language = pytest.mark.parametrize("language", [if_installed(name) for name in BUILDS])
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not installed")
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """driver("rust"): the command that runs the driver of tests/writers in that language."""
    commands = {}

    def get(language):
        if language not in commands:
            folder = tmp_path_factory.mktemp("driver")
            build, command = BUILDS[language]
            name = "c" if language == "c++" else language
            (folder / writers.LANGUAGES[name]).write_text(writers.source(name))
            shutil.copy(PROGRAMS / f"driver{Path(writers.LANGUAGES[name]).suffix}", folder)
            if build:
                subprocess.run(build, cwd=folder, check=True, capture_output=True)
            commands[language] = [word.format(folder=folder) for word in command]
        return commands[language]

    return get


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """Any 32 bits as float32: NaNs with payloads, infinities, subnormal numbers."""
    bits = np.random.default_rng(3).integers(0, 1 << 32, 1 << 16, np.uint32)
    bits[:5] = [0x7FC12345, 0xFF800000, 0x80000000, 1, 0x7FA00001]
    path = tmp_path_factory.mktemp("values") / "values"
    bits.view("<f4").tofile(path)
    return path


def run(command, out, values, taps, *, tokens=TOKENS, last="end", file_size=None):
    """Run a driver; it can write files up to ``file_size`` and dumps no core."""

    def limit():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if file_size is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))

    words = [",".join(map(str, tokens)), str(values), last, *taps]
    return subprocess.run([*command, str(out), *words], capture_output=True, preexec_fn=limit, timeout=60, check=False)


def shapes(taps):
    return {name: [int(dim) for dim in dims.split("x")] for name, _, dims in (tap.rpartition(":") for tap in taps)}


def whole_file(taps, values):
    """The file a writer has to make, byte for byte."""
    info = json.dumps({"schema": "llamadiff.trace/1", "tokens": TOKENS}, separators=(",", ":"))
    header, end = {"__metadata__": {"llamadiff": info}}, 0
    for name, shape in shapes(taps).items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", HEADER_BYTES) + text.ljust(HEADER_BYTES) + values.read_bytes()[:end]


TAPS = ("embd:7x256", "Qcur_rope-12:7x4x64", "kq-0:4x7x7", "result_norm:9", r"odd \ name {x}:[1],:2x1x1x3", "l_out-0:1")


@every_language
def test_values_come_back_bit_by_bit(language, driver, values, tmp_path):
    path = tmp_path / "t.safetensors"
    done = run(driver(language), path, values, TAPS)
    assert (done.returncode, done.stderr) == (0, b"")
    assert path.read_bytes() == whole_file(TAPS, values)
    trace, loaded, rest = Trace.open(path), load_file(path), np.fromfile(values, np.uint32)
    assert trace.info.tokens == TOKENS
    assert list(trace) == list(shapes(TAPS))
    for name, shape in shapes(TAPS).items():
        expected, rest = rest[: np.prod(shape)].reshape(shape), rest[np.prod(shape) :]
        assert np.array_equal(np.ascontiguousarray(trace[name]).view(np.uint32), expected)
        assert np.array_equal(loaded[name].view(np.uint32), expected)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        (["embd:7x4", "l_out-0:7x4", "embd:7x4"], "^embd: added twice"),
        (["__metadata__:3"], "^__metadata__: added twice"),
        (['a"b:3'], "1 to 256 characters of printable ASCII"),
        (["a\nb:3"], "1 to 256 characters of printable ASCII"),
        (["embd\n:3"], "1 to 256 characters of printable ASCII"),
        (["größe:3"], "1 to 256 characters of printable ASCII"),
        (["x" * 257 + ":3"], "1 to 256 characters of printable ASCII|^\"x{200}"),
        ([":3"], "1 to 256 characters of printable ASCII"),
        (["x:0x3"], "^x: .*(dim|shape)"),
        (["x:-1x3"], "^x: .*(dim|shape)"),
        (["x:"], "^x: .*(dim|shape)"),
        (["x:" + "1x" * 8 + "1"], "^x: .*(dim|shape)"),
        (["x:4294967296x4294967296x4"], "^x: .*(dim|shape)"),
        ([f"{i:0256}:1" for i in range(4000)], r"^0+\d+: too many taps"),
    ],
    ids=["twice", "metadata", "quote", "newline", "newline at the end", "not ASCII", "long", "empty", "zero dim",
         "negative dim", "no dims", "nine dims", "overflow", "too many"],
)  # fmt: skip
@every_language
def test_what_cannot_be_written_is_refused(language, taps, message, driver, values, tmp_path):
    done = run(driver(language), tmp_path / "t.safetensors", values, taps)
    assert done.returncode == 1
    assert re.search(message, done.stderr.decode("utf-8", "replace"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("tokens", "message"), [((), "has no tokens"), ((1, -2), "token 1 is .*, no token id")])
@every_language
def test_a_run_has_tokens(language, tokens, message, driver, values, tmp_path):
    done = run(driver(language), tmp_path / "t.safetensors", values, ["embd:2x3"], tokens=tokens)
    assert done.returncode == 1
    assert re.search(message, done.stderr.decode())
    assert not list(tmp_path.iterdir())


@every_language
def test_a_name_of_256_characters_is_accepted(language, driver, values, tmp_path):
    taps = ["\\" * 256 + ":3", "\\" * 255 + ":3"]
    assert run(driver(language), tmp_path / "t.safetensors", values, taps).returncode == 0
    assert list(load_file(tmp_path / "t.safetensors")) == list(shapes(taps))


@every_language
def test_a_place_that_cannot_be_written_is_named(language, driver, values, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "no" / "t.safetensors", tmp_path / "file" / "t.safetensors"):
        done = run(driver(language), out, values, ["embd:2x3"])
        assert done.returncode == 1
        assert b"t.safetensors.part" in done.stderr
    (tmp_path / "directory").mkdir()
    done = run(driver(language), tmp_path / "directory", values, ["embd:2x3"])
    assert done.returncode == 1
    assert b"directory" in done.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["directory", "file"]


@pytest.mark.parametrize(
    ("taps", "file_size"), [([], 1000), (["embd:64x64"], HEADER_BYTES + 1000)], ids=["header", "values"]
)
@every_language
def test_a_full_disk_leaves_nothing(language, taps, file_size, driver, values, tmp_path):
    done = run(driver(language), tmp_path / "t.safetensors", values, taps, file_size=file_size)
    assert done.returncode == 1
    assert b"file too large" in done.stderr.lower()
    assert not list(tmp_path.iterdir())


@every_language
def test_a_crash_leaves_the_trace_of_before(language, driver, values, tmp_path):
    path = tmp_path / "t.safetensors"
    assert run(driver(language), path, values, ["embd:64x1000"], last="abort").returncode == -signal.SIGABRT
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.safetensors.part"]
    assert (tmp_path / "t.safetensors.part").stat().st_size > HEADER_BYTES + 64 * 1000  # streamed
    assert run(driver(language), path, values, TAPS).returncode == 0
    assert run(driver(language), path, values, ["embd:64x1000"], last="abort").returncode == -signal.SIGABRT
    assert path.read_bytes() == whole_file(TAPS, values)


@pytest.mark.parametrize("language", writers.LANGUAGES)
def test_a_source_says_that_it_may_be_pasted(language):
    source = writers.source(language)
    assert "SPDX-License-Identifier: MIT. Paste it anywhere." in source.splitlines()[0]
    assert max(map(len, source.splitlines())) <= 120
    assert source.isascii()


def test_an_unknown_language_is_answered_with_those_there_are():
    with pytest.raises(UserError, match='"go"; the languages are c, rust, js, python'):
        writers.source("go")


def ramp(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_python_takes_any_buffer_of_float32(tmp_path):
    given = {
        "numpy": ramp(2, 3),
        "strided": ramp(4, 6)[::2, ::-1],
        "transposed": ramp(2, 3, 4).transpose(2, 0, 1),
        "array": array("f", [1, 2, 3]),
        "ctypes": (ctypes.c_float * 3 * 2)((1, 2, 3), (4, 5, 6)),
    }
    writer = trace_writer.TraceWriter(tmp_path / "t.safetensors", np.array([5, 6]))
    for name, values in given.items():
        writer.add(name, values)
    writer.add("bytes", struct.pack("<4f", 1, 2, 3, 4), (2, 2))
    writer.add("reshaped", array("f", [1, 2, 3, 4]), np.array([2, 2]))
    writer.end()
    loaded = load_file(tmp_path / "t.safetensors")
    assert all(np.array_equal(loaded[name], np.asarray(values)) for name, values in given.items())
    assert loaded["bytes"].tolist() == loaded["reshaped"].tolist() == [[1, 2], [3, 4]]
    assert Trace.open(tmp_path / "t.safetensors").info.tokens == (5, 6)


@pytest.mark.parametrize(
    ("values", "shape", "error"),
    [
        (np.zeros(3), None, TypeError),
        (np.zeros(3, ">f4"), None, TypeError),
        (array("i", [1]), (1,), TypeError),
        ([1.0, 2.0], (2,), TypeError),
        (bytes(12), None, TypeError),
        (ramp(3), (2.0,), TypeError),
        (bytes(12), (4,), ValueError),
        (ramp(2, 3), (7,), ValueError),
        (np.float32(1), None, ValueError),
    ],
)
def test_python_refuses_what_is_no_float32(values, shape, error, tmp_path):
    writer = trace_writer.TraceWriter(tmp_path / "t.safetensors", [1])
    with pytest.raises(error):
        writer.add("embd", values, shape)
    for call in (writer.end, lambda: writer.add("embd", ramp(3))):
        with pytest.raises(ValueError, match="has ended"):
            call()
    assert not list(tmp_path.iterdir())


def test_python_needs_no_numpy():
    folder, code = Path(trace_writer.__file__).parent, "import sys, trace_writer; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "trace_writer" in modules
    assert "numpy" not in modules


def node(folder, name, text):
    (folder / name).write_text(text)
    return subprocess.run(["node", name], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


USE = """
const trace = begin("t.safetensors", BigInt64Array.of(5n, 6n));
add(trace, "embd", new Float32Array([9, 1, 2, 3, 4, 9]).subarray(1, 5), [2, 2]);
end(trace);
"""


@needs_node
@pytest.mark.parametrize("way", ["imported", "pasted"])
def test_javascript_serves_es_modules(way, tmp_path):
    (tmp_path / "trace_writer.cjs").write_text(writers.source("js"))
    text = writers.source("js") if way == "pasted" else 'import { begin, add, end } from "./trace_writer.cjs";\n'
    done = node(tmp_path, "engine.mjs", text + USE)
    assert (done.returncode, done.stderr) == (0, "")
    assert load_file(tmp_path / "t.safetensors")["embd"].tolist() == [[1, 2], [3, 4]]
    assert Trace.open(tmp_path / "t.safetensors").info.tokens == (5, 6)


@needs_node
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ('add(trace, "embd", [1, 2], [2])', "embd: the values are no Float32Array"),
        ('add(trace, "embd", new Float64Array(2), [2])', "embd: the values are no Float32Array"),
        ('add(trace, "embd", new Float32Array(2), [3])', r"embd: 2 values for shape \[3\]"),
        ('add(trace, "embd", new Float32Array(2), [1.5])', r"embd: shape \[1.5\]"),
        ("add(trace, 5, new Float32Array(2), [2])", "5: a name is"),
    ],
)
def test_javascript_refuses_what_is_no_tap(call, message, tmp_path):
    done = node(tmp_path, "engine.cjs", writers.source("js") + f'const trace = begin("t.safetensors", [1]);\n{call}')
    assert done.returncode == 1
    assert re.search(message, done.stderr)
    assert [entry.name for entry in tmp_path.iterdir()] == ["engine.cjs"]


@needs_node
@pytest.mark.parametrize("call", ["end(trace)", 'add(trace, "l_out-0", Float32Array.of(1), [1])'])
def test_javascript_ends_a_trace_once(call, tmp_path):
    done = node(tmp_path, "engine.cjs", writers.source("js") + USE + call)
    assert "t.safetensors: the trace has ended" in done.stderr
    assert (tmp_path / "t.safetensors").exists()


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    """A model of one layer, its weights as raw files, and llama.cpp's trace of it."""
    folder = tmp_path_factory.mktemp("engine")
    model = write_model(folder / "model.gguf", kind="F32", layers=1)
    for tensor in GGUFReader(model).tensors:
        tensor.data.tofile(folder / f"{tensor.name.removesuffix('.weight')}.f32")
    baseline = capture(Request(str(model), tokens=TOKENS, output=str(folder / "baseline.safetensors")))
    return folder, model, baseline


def engine_trace(folder, *flags):
    """What tests/writers/engine.c records."""
    program, out = folder / "engine", folder / "mine.safetensors"
    writer = Path(writers.__file__).parent
    command = ["cc", "-std=c99", *STRICT, *flags, f"-I{writer}", str(PROGRAMS / "engine.c"), "-o", str(program), "-lm"]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run([program, folder, out, *map(str, TOKENS)], check=True, timeout=60)
    return out


@needs_cc
def test_a_right_engine_in_c_matches(one_layer):
    folder, model, _ = one_layer
    result = llamadiff.compare(model, tokens=TOKENS, candidate=engine_trace(folder), partial=True)
    assert result.verdict == "match"
    assert result.missing == ("result_norm", "result_output")
    assert len(result.rows) == 18


@needs_cc
@pytest.mark.parametrize(
    ("flag", "wrong"),
    [
        ("-DBUG_ROPE", ["Qcur_rope-0", "Kcur_rope-0"]),
        ("-DBUG_MASK", ["kq_soft_max-0"]),
        ("-DBUG_EPS", ["attn_norm-0", "ffn_norm-0"]),
    ],
)
def test_a_bug_of_an_engine_in_c_is_named(flag, wrong, one_layer):
    folder, model, baseline = one_layer
    result = diff(baseline, engine_trace(folder, flag), model)
    assert result.verdict == "wrong"
    assert result.first_divergence.tap == wrong[0]
    assert [row.tap for row in result.wrong] == wrong
