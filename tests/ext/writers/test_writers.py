"""The writers to paste into an engine: each is compiled and run, its file read back and judged."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
from array import array
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from llamaref import Engine
from models.small import write_model
from once import once
from optional import needs
from safetensors.numpy import load_file
from toolchains import STRICT, TOOLS, if_installed
from typer.testing import CliRunner
from waiting import HANG

import llamadiff
from llamadiff import Trace, UserError
from llamadiff.candidates.opening import resolve
from llamadiff.candidates.reference import record
from llamadiff.candidates.source import Context
from llamadiff.cli.app import app
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import How
from llamadiff.ext.writers import trace_writer, writers
from llamadiff.llamacpp.capture import capture
from llamadiff.llamacpp.request import Request
from llamadiff.numerics.halves import round_bf16
from llamadiff.trace import taps
from llamadiff.trace.metadata import Info
from llamadiff.verbs.verbs import diff

PROGRAMS = Path(__file__).parent
TOKENS = (1, 17, 5, 80, 42, 9, 33)
SIZES = {"F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}


every_language = pytest.mark.parametrize("language", [if_installed(name) for name in TOOLS])


@pytest.fixture(scope="module")
def driver(tmp_path_factory, small_model):
    """driver("rust"): the command that runs the driver here in that language, with a model's add lines."""

    def made(language, folder):
        tool = TOOLS[language]
        (folder / writers.LANGUAGES[language].file).write_text(writers.source(language), encoding="utf-8")
        text = (PROGRAMS / tool.driver).read_text("utf-8")
        marker = re.search(r"( *)(/\* LINES \*/|(//|#) LINES)", text)
        own = declared(language, Model(small_model("moe"))).splitlines()
        whole = "\n".join(marker[1] + line for line in own)
        (folder / tool.driver).write_text(text.replace(marker[0], whole), encoding="utf-8")
        if tool.build:
            environment = dict(os.environ)
            if not os.access(Path.home(), os.W_OK):
                environment |= {"GOCACHE": str(folder / "go"), "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig")}
            done = subprocess.run(
                tool.build, cwd=folder, env=environment, capture_output=True, text=True, check=False, encoding="utf-8"
            )
            assert done.returncode == 0, done.stderr

    def get(language):
        folder = once(tmp_path_factory, f"driver-{language}", partial(made, language))
        return [word.format(folder=folder) for word in TOOLS[language].run]

    return get


def declared(language, model):
    """The add lines of a model as code, after values for them."""
    comment = writers.LANGUAGES[language].comment
    code = [line.removeprefix(f"{comment} ") for line in writers.add_lines(language, model).splitlines()]
    first = next(i for i, line in enumerate(code) if "embd" in line)
    declare, seen = TOOLS[language].declare, {tap.kind.word: tap for tap in model.taps if not tap.kind.optional}
    if language == "zig":
        declare = declare.replace("[_]f32{{0}} ** {count}", "&@as([{count}]f32, @splat(0))")
    values = []
    for word, tap in seen.items():
        line = declare.format(word=word, count=int(np.prod(taps.shape_of(tap, 2, model.sizes))))
        is_whole = tap.kind.op == "ARGSORT" and language != "c"
        whole = {"f32": "i32", "f'": "i'", "float": "int", "Float32": "Int32"}
        for old, new in whole.items() if is_whole else ():
            line = line.replace(old, new)
        values.append(line)
    return "\n".join([*values, *code[first:]])


def run(command, folder, script, values=b"", *, tokens=TOKENS, out="t.safetensors", file_size=None):
    """Run a driver; it can write files up to ``file_size`` and dumps no core."""

    def limit():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if file_size is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))

    with_inputs = folder.parent / f"{folder.name}-inputs"
    with_inputs.mkdir(exist_ok=True)
    (with_inputs / "values").write_bytes(values)
    (with_inputs / "script").write_text("".join(f"{line}\n" for line in script), "utf-8")
    words = [folder / out, ",".join(map(str, tokens)), with_inputs / "values", with_inputs / "script"]
    return subprocess.run(
        [*command, *map(str, words)], capture_output=True, preexec_fn=limit, timeout=HANG, check=False
    )


STATED = [
    "text\tname\tmy \"own\" \\ engine \u00b5", "text\tversion\t1.0", "text\tprompt\tOnce \u00e9t\u00e9",
    "number\tn_prefill\t5",
    "list\tpositions\t0,1,2,3,4,5,7", "list\tbatches\t5,2", "text\tsettings.type_k\tQ8_0", "text\tsettings.type_v\tF16",
    "flag\tsettings.flash_attn\ttrue", "number\thyperparameters.rope.freq_base\t10000",
    "number\thyperparameters.attention.layer_norm_rms_epsilon\t1e-05", "text\tmodel.file\tm.gguf",
]  # fmt: skip
ADDED = {  # name -> type and shapes, one a call
    "embd": ("F32", "4x256", "1x256", "2x256"), "l_out-0": ("F64", "7x3"), "Qcur_rope-12": ("F16", "6x4x64", "1x4x64"),
    "ffn_out-1": ("BF16", "1x5", "1x5"), "ffn_moe_topk-0": ("I32", "2x2"),
    "odd \\ \" n\u00e4me {x}:[1],": ("F32", "2x1x1x3"),
    "kq-0": ("F32", "2x2x2", "2x1x3", "2x1x4"), "kqv-3": ("F16", "2x1x5", "2x2x5"), "result_output@-1": ("F32", "1x9"),
}  # fmt: skip


def whole_taps(values):
    """The taps of ADDED that random bytes make, and the calls that add them: their rows turn by turn."""
    script, parts, at = [], {name: [] for name in ADDED}, 0
    for turn in range(3):
        for name, (dtype, *shapes) in ADDED.items():
            if turn < len(shapes):
                shape, size = tuple(map(int, shapes[turn].split("x"))), SIZES[dtype]
                own = values[at : at + size * int(np.prod(shape))]
                parts[name].append(np.frombuffer(own, f"u{size}").reshape(shape))
                script.append(f"add\t{dtype}\t{shapes[turn]}\t{name}")
                at += len(own)
    wide = {name: [np.pad(x, [(0, 0)] * 2 + [(0, 4 - x.shape[2])]) for x in parts[name]] for name in ("kq-0",)}
    return script, {
        name: np.concatenate(wide.get(name, own), 1 if name.startswith("kq") else 0) for name, own in parts.items()
    }


@every_language
def test_values_and_all_that_is_stated_come_back(language, driver, tmp_path):
    values = np.random.default_rng(3).integers(0, 256, 1 << 16, np.uint8).tobytes()  # NaNs and infinities among them
    script, expected = whole_taps(values)
    done = run(driver(language), tmp_path, [*STATED, *script, "end"], values)
    assert (done.returncode, done.stderr) == (0, b"")
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.safetensors"]
    trace = Trace.open(tmp_path / "t.safetensors")
    assert trace.info == Info(
        TOKENS, (0, 1, 2, 3, 4, 5, 7), 5, "Once \u00e9t\u00e9",
        {"writer": language, "name": "my \"own\" \\ engine \u00b5", "version": "1.0",
         "settings": {"type_k": "Q8_0", "type_v": "F16", "flash_attn": True},
         "hyperparameters": {"rope.freq_base": 10000, "attention.layer_norm_rms_epsilon": 1e-5}},
        {"file": "m.gguf"}, (5, 2),
    )  # fmt: skip
    assert set(trace) == set(expected)
    for name, bits in expected.items():
        assert trace.dtypes[name] == ADDED[name][0]
        assert np.array_equal(np.ascontiguousarray(trace.stored(name)).view(bits.dtype), bits), name


def by_tokens(trace, n_prefill, dtypes):
    """A run's taps as an engine has them: the prompt's rows, then a token's at a time; of the logits the last alone."""
    script, values = [], b""
    for first, stop in [(0, n_prefill), *((i, i + 1) for i in range(n_prefill, len(TOKENS)))]:
        script += [f"tokens\t{TOKENS[first]}"] if first else []
        for name in trace:
            x, axis = trace[name], taps.parse(name).row_axis
            rows = x[:, first:stop, :stop] if axis else x[first:stop]
            label, dtype = name, dtypes.get(taps.parse(name).kind.word, dtypes.get("", "F32"))
            if name == "result_output":
                label, rows = "result_output@-1", x[-1:]
                if stop < len(TOKENS):
                    continue
            script.append(f"add\t{dtype}\t{'x'.join(map(str, rows.shape))}\t{label}")
            if dtype == "BF16":
                bits = round_bf16(rows.astype(np.float32)).view(np.uint32) >> 16
                values += bits.astype("<u2").tobytes()
            else:
                values += rows.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).tobytes()
    return script, values


@pytest.fixture(scope="module")
def recorded(small_model, tmp_path_factory):
    """A model, llama.cpp's trace of it and the engine's."""
    model = small_model("llama")
    output = str(tmp_path_factory.mktemp("baseline") / "b.safetensors")
    baseline = capture(Request(str(model), tokens=TOKENS, output=output))
    own = record(Engine(model), TOKENS, "mine")
    return model, baseline, {name: own[name] for name in own}


def judged(command, folder, own, dtypes, recorded):
    """What is said of a trace that a driver writes: the prompt's four rows, then row by row."""
    model, baseline, _ = recorded
    rows, values = by_tokens(own, 4, dtypes)
    stated = ["text\tname\tmine", "text\tsettings.type_k\tF32", "number\thyperparameters.block_count\t2"]
    done = run(command, folder, [*stated, *rows, "end"], values, tokens=TOKENS[:4])
    assert (done.returncode, done.stderr) == (0, b"")
    trace = resolve(str(folder / "t.safetensors"), Context(Model(model), TOKENS, len(TOKENS)))
    assert (trace.info.n_prefill, trace.info.tokens) == (4, TOKENS)
    return diff(baseline, trace, model)


@every_language
def test_a_run_token_by_token_is_judged(language, recorded, driver, tmp_path):
    dtypes = {"": "BF16", "l_out": "F64", "ffn_gate": "F16", "result_output": "F32"}
    result = judged(driver(language), tmp_path, recorded[2], dtypes, recorded)
    assert result.verdict == "noise", result.summary  # of what is kept in 16 bits
    assert not result.missing
    assert [(check.name, check.verdict) for check in result.preflight][1:] == [("hyper-parameters", "match")]


def test_a_bug_is_named_token_by_token(recorded, driver, tmp_path):
    own = {**recorded[2], "Kcur_rope-1": recorded[2]["Kcur_rope-1"][::-1]}
    result = judged(driver("python"), tmp_path, own, {"l_out": "F64"}, recorded)
    assert result.first_divergence.tap == "Kcur_rope-1"


@every_language
def test_the_add_lines_of_a_model_make_its_taps(language, small_model, driver, tmp_path):
    done = run(driver(language), tmp_path, ["lines", "end"], tokens=(1, 2))
    assert (done.returncode, done.stderr) == (0, b"")
    model, trace = Model(small_model("moe")), Trace.open(tmp_path / "t.safetensors")
    wanted = [tap for tap in model.taps if not tap.kind.optional]
    assert {name: trace.shape(name) for name in trace} == {
        tap.name: taps.shape_of(tap, 2, model.sizes) for tap in wanted
    }
    assert "ffn_moe_topk-1" in trace


ADD = "add\tF32\t"
REFUSED = {
    "rows of another type": ([f"{ADD}2x4\tembd", "add\tF16\t2x4\tembd"], "^embd: rows of another type or shape"),
    "rows of another shape": ([f"{ADD}2x4\tembd", f"{ADD}2x5\tembd"], "^embd: rows of another type or shape"),
    "rows of other axes": ([f"{ADD}2x4\tembd", f"{ADD}2x2x2\tembd"], "^embd: rows of another type or shape"),
    "scores of other heads": ([f"{ADD}2x1x1\tkq-0", f"{ADD}3x1x2\tkq-0"], "^kq-0: rows of another type or shape"),
    "metadata": ([f"{ADD}3\t__metadata__"], "is no name of a tap"),
    "no name": ([f"{ADD}3\t"], "is no name of a tap"),
    "no type": (["add\tF8\t3\tx"], "^x: type F8; "),
    "zero dim": ([f"{ADD}0x3\tx"], "^x: "),
    "negative dim": ([f"{ADD}-1x3\tx"], "^x: "),
    "no dims": ([f"{ADD}\tx"], "^x: .*(dim|shape)"),
    "nine dims": ([ADD + "1x" * 8 + "1\tx"], "^x: .*(dim|shape)"),
    "overflow": ([f"{ADD}4294967296x4294967296x4\tx"], "^x: "),
    "stated twice": (["text\tname\ta", "text\tname\tb"], "^name: stated twice"),
    "no such fact": (["text\tnprefill\t3"], "^nprefill: nothing is stated by that name"),
    "no such group": (["text\tsetting.type_k\tF16"], "^setting.type_k: nothing is stated by that name"),
    "a wrong id": (["tokens\t-3"], "token 7 is .*, no token id"),
    "ended": (["end", f"{ADD}3\tx"], "the trace has ended"),
    "ended twice": (["end", "end"], "the trace has ended"),
}


@pytest.mark.parametrize("case", [case for case in REFUSED if not case.startswith("ended")])
@every_language
def test_what_cannot_be_written_is_refused(language, case, driver, tmp_path):
    script, message = REFUSED[case]
    done = run(driver(language), tmp_path, script, bytes(1000))
    assert done.returncode == 1, done.stderr
    assert re.search(message, done.stderr.decode("utf-8", "replace"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", ["ended", "ended twice"])
@pytest.mark.parametrize("language", [if_installed(name) for name in TOOLS if name != "rust"])
def test_a_trace_ends_once(language, case, driver, tmp_path):
    """In Rust that does not compile: the end takes the trace."""
    script, message = REFUSED[case]
    done = run(driver(language), tmp_path, script, bytes(1000))
    assert done.returncode == 1
    assert re.search(message, done.stderr.decode())
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.parametrize(("tokens", "message"), [((), "has no tokens"), ((1, -2), "token 1 is .*, no token id")])
@every_language
def test_a_run_has_tokens(language, tokens, message, driver, tmp_path):
    done = run(driver(language), tmp_path, [f"{ADD}2x3\tembd", "end"], bytes(24), tokens=tokens)
    assert done.returncode == 1
    assert re.search(message, done.stderr.decode())
    assert not list(tmp_path.iterdir())


@every_language
def test_a_place_that_cannot_be_written_is_named(language, driver, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    for out in ("no/t.safetensors", "file/t.safetensors", "directory"):
        done = run(driver(language), tmp_path, [f"{ADD}2x3\tembd", "end"], bytes(24), out=out)
        assert done.returncode == 1
        assert out.encode() in done.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["directory", "file"]


@pytest.mark.parametrize(("last", "file_size"), [("end", 10000), ("abort", None)], ids=["a full disk", "a crash"])
@every_language
def test_what_ends_early_leaves_the_trace_of_before(language, last, file_size, driver, tmp_path):
    assert run(driver(language), tmp_path, [f"{ADD}2x3\tembd", "end"], bytes(24)).returncode == 0
    before = (tmp_path / "t.safetensors").read_bytes()
    done = run(driver(language), tmp_path, [f"{ADD}64x64\tembd", last], bytes(1 << 14), file_size=file_size)
    assert done.returncode == 1 if file_size else done.returncode != 0
    assert not file_size or re.search(b"(?i)file too large|FBIG", done.stderr)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.safetensors"]
    assert (tmp_path / "t.safetensors").read_bytes() == before


@pytest.mark.parametrize("language", writers.LANGUAGES)
def test_a_source_says_that_it_may_be_pasted(language):
    source = writers.source(language)
    assert "SPDX-License-Identifier: MIT. Paste it anywhere" in source.splitlines()[0]
    assert max(map(len, source.splitlines())) <= 120
    assert source.isascii()


@pytest.mark.parametrize("language", writers.LANGUAGES)
def test_a_source_knows_the_taps_whose_rows_are_not_first(language):
    source = writers.source(language)
    by_head = {kind.word for kind in taps.KINDS if taps.Tap(kind, 0).row_axis}
    assert all(re.search(rf"\b{word}\b", source) for word in by_head)
    assert not any(re.search(rf'"{kind.word}-"', source) for kind in taps.KINDS if kind.word not in by_head)


def test_the_command_prints_the_lines_after_the_writer(small_model):
    done = CliRunner().invoke(app, ["writer", "rust", "--model", str(small_model())])
    assert done.exit_code == 0
    assert done.stdout.startswith(writers.source("rust"))
    after = done.stdout.removeprefix(writers.source("rust")).splitlines()
    assert all(line.startswith("//") for line in after if line)
    assert '//     trace.add(&format!("Qcur_rope-{i}"), &Qcur_rope, &[n_tokens, 4, 64])?; // *' in after
    assert "// for i in 0..2 {" in after


def test_layers_that_differ_are_loops_of_their_own(small_model):
    printed = writers.add_lines("python", Model(small_model("smollm3")))
    assert re.findall(r"range\((\d+), (\d+)\)", printed) == [("0", "3"), ("3", "4"), ("4", "5")]


def test_an_unknown_language_is_answered_with_those_there_are():
    with pytest.raises(UserError, match='"ada"; the languages are c, cpp, rust, js, python, java, go, zig'):
        writers.source("ada")


def ramp(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_python_takes_any_buffer_of_floats(tmp_path):
    given = {
        "numpy": ramp(2, 3),
        "float64": ramp(2, 3).astype(np.float64),
        "float16": ramp(2, 3).astype(np.float16),
        "strided": ramp(4, 6)[::2, ::-1],
        "transposed": ramp(2, 3, 4).transpose(2, 0, 1),
        "array": array("f", [1, 2, 3]),
        "ctypes": (ctypes.c_float * 3 * 2)((1, 2, 3), (4, 5, 6)),
    }
    writer = trace_writer.TraceWriter(tmp_path / "t.safetensors", np.array([5, 6]))
    for name, values in given.items():
        writer.add(name, values)
    writer.add_as("bytes", "F32", np.array([1, 2, 3, 4], "<f4").tobytes(), (2, 2))
    writer.add("reshaped", array("f", [1, 2, 3, 4]), np.array([2, 2]))
    writer.end()
    loaded = load_file(tmp_path / "t.safetensors")
    assert all(np.array_equal(loaded[name], np.asarray(values)) for name, values in given.items())
    assert loaded["float64"].dtype == np.float64
    assert loaded["bytes"].tolist() == loaded["reshaped"].tolist() == [[1, 2], [3, 4]]
    assert Trace.open(tmp_path / "t.safetensors").info.tokens == (5, 6)


@pytest.mark.parametrize(
    ("values", "shape", "error"),
    [
        (np.zeros(3, ">f4"), None, TypeError),
        (np.zeros(3, np.int64), None, TypeError),
        (array("i", [1]), (1,), TypeError),
        ([1.0, 2.0], (2,), TypeError),
        (bytes(12), None, TypeError),
        (ramp(3), (2.0,), TypeError),
        (ramp(2, 3), (7,), ValueError),
        (np.float32(1), None, ValueError),
    ],
)
def test_python_refuses_what_is_no_float(values, shape, error, tmp_path):
    writer = trace_writer.TraceWriter(tmp_path / "t.safetensors", [1])
    with pytest.raises(error):
        writer.add("embd", values, shape)
    writer.add("embd", ramp(1, 3))  # what was refused left nothing
    writer.end()
    assert list(Trace.open(tmp_path / "t.safetensors")) == ["embd"]


def test_python_needs_no_numpy():
    folder, code = Path(trace_writer.__file__).parent, "import sys, trace_writer; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=True)
    assert {b"trace_writer", b"numpy"} & {*done.stdout.split()} == {b"trace_writer"}


def node(folder, name, text):
    (folder / name).write_text(text, encoding="utf-8")
    return subprocess.run(
        ["node", name], cwd=folder, capture_output=True, text=True, timeout=HANG, check=False, encoding="utf-8"
    )


USE = """
const trace = new TraceWriter("t.safetensors", BigInt64Array.of(5n, 6n));
trace.add("embd", new Float32Array([9, 1, 2, 3, 4, 9]).subarray(1, 5), [2, 2]);
trace.end();
"""


@needs("node")
@pytest.mark.parametrize("way", ["imported", "pasted"])
def test_javascript_serves_es_modules(way, tmp_path):
    (tmp_path / "trace_writer.cjs").write_text(writers.source("js"), encoding="utf-8")
    text = writers.source("js") if way == "pasted" else 'import { TraceWriter } from "./trace_writer.cjs";\n'
    done = node(tmp_path, "engine.mjs", text + USE)
    assert (done.returncode, done.stderr) == (0, "")
    assert load_file(tmp_path / "t.safetensors")["embd"].tolist() == [[1, 2], [3, 4]]
    assert Trace.open(tmp_path / "t.safetensors").info.tokens == (5, 6)


@needs("node")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ('add("embd", [1, 2], [2])', "embd: the values are no Float32Array"),
        ('add("embd", new Int32Array(2), [2])', "embd: the values are no Float32Array"),
        ('add("embd", new Float32Array(2), [3])', r"embd: 2 values of 32 bits for F32 \[3\]"),
        ('add("embd", new Float32Array(2), [1.5])', r"embd: shape \[1.5\]"),
        ('addAs("embd", "BF16", new Float32Array(2), [2])', r"embd: 2 values of 32 bits for BF16 \[2\]"),
        ("add(5, new Float32Array(2), [2])", "5: is no name"),
        ('state("n_prefill", NaN)', "n_prefill: NaN cannot be stated"),
    ],
)
def test_javascript_refuses_what_is_no_tap(call, message, tmp_path):
    text = writers.source("js") + f'const trace = new TraceWriter("t.safetensors", [1]);\ntrace.{call}'
    done = node(tmp_path, "engine.cjs", text)
    assert done.returncode == 1
    assert re.search(message, done.stderr)
    assert [entry.name for entry in tmp_path.iterdir()] == ["engine.cjs"]


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
    """What tests/ext/writers/engine.c records."""
    program, out = folder / "engine", folder / "mine.safetensors"
    writer = Path(writers.__file__).parent
    command = ["cc", "-std=c99", *STRICT, *flags, f"-I{writer}", str(PROGRAMS / "engine.c"), "-o", str(program), "-lm"]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run([program, folder, out, *map(str, TOKENS)], check=True, timeout=HANG)
    return out


@needs("cc")
def test_a_right_engine_in_c_matches(one_layer):
    folder, model, _ = one_layer
    result = llamadiff.compare(model, TOKENS, candidate=engine_trace(folder), how=How(partial=True))
    assert result.verdict == "match"
    assert result.missing == ("result_norm", "result_output")
    assert len(result.rows) == 18


@needs("cc")
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


@pytest.mark.parametrize(("asked", "language"), [("c++", "cpp"), ("Py", "python"), ("rust", "rust")])
def test_a_language_has_the_names_that_people_give_it(asked, language):
    assert writers.find_language(asked) == language
