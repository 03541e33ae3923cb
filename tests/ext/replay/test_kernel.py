"""A stranger's kernel on an op's inputs: what is wrong is found, what only adds in another order is right."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import run
from optional import needs
from places import ROOT

from llamadiff.ext.graph.op import Op, Operand
from llamadiff.ext.graph.readers import check_nodes
from llamadiff.ext.graph.repro import PARAMETERS, SavedInputs, decoded, load, load_inputs, save_inputs
from llamadiff.ext.replay import axes
from llamadiff.ext.replay.cases import cases_of
from llamadiff.ext.replay.common import common_trait
from llamadiff.ext.replay.kernel_result import CaseRun
from llamadiff.ext.replay.python_kernel import inputs_for, load_function
from llamadiff.ext.replay.run import run_ops
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.system.commands import quote

KERNELS = Path(__file__).with_name("kernels.py")
F, HALF = np.float32, np.float16
DICE = np.random.default_rng


def params(floats=(), ints=()):
    """op_params with some of its numbers set."""
    packed = bytearray(64)
    for form, numbers in (("f", floats), ("i", ints)):
        for place, value in dict(numbers).items():
            struct.pack_into(form, packed, 4 * place, value)
    return bytes(packed)


def random(*shape, seed=0, size=1.0):
    return (size * DICE([seed, *shape]).standard_normal(shape)).astype(F)


def q8_0(rows, columns):
    """Random blocks of Q8_0: scales of some thousandths."""
    blocks = np.zeros((rows, columns // 32, 34), np.uint8)
    blocks[..., :2] = DICE(1).uniform(2e-4, 4e-4, (rows, columns // 32, 1)).astype(HALF).view(np.uint8)
    blocks[..., 2:] = DICE(2).integers(-127, 128, (rows, columns // 32, 32)).astype(np.int8).view(np.uint8)
    return blocks.reshape(rows, -1)


def q4_k(rows, columns):
    """Random blocks of Q4_K."""
    blocks = DICE(3).integers(0, 256, (rows, columns // 256, 144)).astype(np.uint8)
    for at, scale in ((0, 1e-4), (2, 5e-5)):
        blocks[..., at : at + 2] = np.full((rows, columns // 256, 1), scale, HALF).view(np.uint8)
    return blocks.reshape(rows, -1)


def mask(tokens, keys):
    seen = np.arange(keys)[None, :] <= np.arange(tokens)[:, None] + keys - tokens
    return np.where(seen, 0, -np.inf).astype(F)[None, None]


ROPE = params({5: 10000.0, 6: 1.0, 8: 1.0, 9: 32.0, 10: 1.0}, {1: 64, 4: 4096})
SCALED = params({0: 0.125})
OPS = {
    "norm": ("RMS_NORM", [(random(1, 1, 64, 128), "f32")], params({0: 1e-5}), (1, 1, 64, 128)),
    "f32": ("MUL_MAT", [(random(1, 1, 64, 96, size=0.1), "f32"), (random(1, 1, 64, 96, seed=1), "f32")], params(),
            (1, 1, 64, 64)),
    "f16": ("MUL_MAT", [(random(64, 96, size=0.02).astype(HALF), "f16"), (random(1, 1, 64, 96), "f32")], params(),
            (1, 1, 64, 64)),
    "q8_0": ("MUL_MAT", [(q8_0(64, 256), "q8_0"), (random(1, 1, 32, 256, size=0.5), "f32")], params(), (1, 1, 32, 64)),
    "q4_k": ("MUL_MAT", [(q4_k(64, 512), "q4_k"), (random(1, 1, 32, 512, size=0.5), "f32")], params(), (1, 1, 32, 64)),
    "softmax": ("SOFT_MAX", [(random(1, 4, 16, 64), "f32"), (mask(16, 64), "f32")], SCALED, (1, 4, 16, 64)),
    "attention": (
        "FLASH_ATTN_EXT",
        [(random(1, 4, 16, 32, size=0.5), "f32"), (random(1, 2, 192, 32, seed=1, size=0.5), "f32"),
         (random(1, 2, 192, 32, seed=2, size=0.3), "f32"), (mask(16, 192), "f16")], SCALED, (1, 16, 4, 32),
    ),
    "rope": ("ROPE", [(random(1, 5, 4, 64), "f32"), (np.arange(5, dtype=np.int32).reshape(1, 1, 1, 5), "i32")], ROPE,
             (1, 5, 4, 64)),
    "gelu": ("GELU", [(random(1, 1, 8, 64), "f32")], params(), (1, 1, 8, 64)),
    "swiglu": ("SWIGLU", [(random(1, 1, 8, 64), "f32"), (random(1, 1, 8, 64, seed=1), "f32")], params(ints={0: 2}),
               (1, 1, 8, 64)),
    "rows": ("GET_ROWS", [(random(1, 1, 90, 64), "f32"), (np.arange(6, dtype=np.int32).reshape(1, 1, 1, 6), "i32")],
             params(), (1, 1, 6, 64)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch):
    """Sizes that tell as much of the kernels here as all."""
    monkeypatch.setattr(axes, "FEW", (1, 2))
    monkeypatch.setattr(axes, "EDGES", (16, 31, 32, 33, 1025))
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which load_function adds
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def op_file(folder, kind):
    """An op as backend --keep saves it, but for results."""
    name, sources, packed, shape = OPS[kind]
    op = Op(name, shape, "f32", packed, tuple(Operand(values, of, "") for values, of in sources))
    path = folder / f"{kind}.safetensors"
    save_inputs(path, SavedInputs(op, f"{kind}-0"))
    return path


def tried(path, function, *more):
    """The report of a kernel on an op, and what was printed beside it."""
    done = run("replay", path, "--candidate", f"python:{KERNELS}:{function}", "-o", "json:-", *more)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == {"match": 0, "noise": 0, "wrong": 1, "unchecked": 2}[report["verdict"]]
    return report


def given(path, function):
    """What a kernel gives on an op as it was saved."""
    return load_function(KERNELS, function)(inputs_for(load_inputs(path).op))


RIGHT = [
    ("f32", "matmul_blocked"), ("f32", "matmul_reversed"), ("f32", "matmul_pairwise"), ("f32", "matmul_fused"),
    ("f16", "matmul_blocked"), ("q8_0", "matmul_blocked"), ("q8_0", "matmul_of_eight_bits"), ("q4_k", "matmul_blocked"),
    ("q4_k", "matmul_of_superblocks"), ("norm", "rms_norm"), ("softmax", "softmax"),
    ("softmax", "softmax_by_powers_of_two"), ("attention", "attention"), ("rope", "rope"), ("gelu", "gelu"),
    ("swiglu", "swiglu"), ("rows", "get_rows"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "function"), RIGHT)
def test_another_order_of_sums_is_right(kind, function, tmp_path):
    report = tried(op_file(tmp_path, kind), function)
    op = report["ops"][0]
    assert report["verdict"] in ("match", "noise"), op["summary"]
    assert len(op["cases"]) >= 20
    assert op["common"] is None
    in_eight = {"matmul_of_eight_bits": "Q8_0", "matmul_of_superblocks": "Q8_K"}.get(function)
    assert in_eight is None or any(in_eight in (case["arithmetic"] or "") for case in op["cases"])


BY_VALUES = "only with large values, one large value in each row, or a mask with biases of -150"
BY_BLOCKS = "only with 64 channels and more (with 32 it is right), but not with zeros"
WRONG = [
    ("norm", "rms_norm_eps_outside", "rms_norm", ""),
    ("softmax", "softmax_without_maximum", "softmax", BY_VALUES),
    ("softmax", "softmax_unscaled_beyond_one_block", "softmax", "only with 1025 keys and more (with 68 it is right)"),
    ("f32", "matmul_partial_tile_lost", "matmul_blocked", "where the number of rows is not a multiple of 32"),
    ("f16", "matmul_sums_in_half", "matmul_blocked", ""),
    ("q8_0", "matmul_last_scale_of_the_block_before", "matmul_blocked", BY_BLOCKS),
    ("q4_k", "matmul_last_minimum_lost", "matmul_blocked", ""),
    ("attention", "attention_without_the_last_key", "attention", ""),
    ("rope", "rope_positions_wrap", "rope", "with positions from 4000 on"),
    ("rope", "rope_base_off", "rope", "with more than 1 token"),
    ("gelu", "gelu_by_erf", "gelu", ""),
    ("swiglu", "swiglu_of_an_approximate_exp", "swiglu", ""),
    ("rows", "get_rows_never_the_last", "get_rows", ""),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "function", "right", "common"), WRONG, ids=[each[1] for each in WRONG])
def test_what_a_fixed_tolerance_lets_pass_is_wrong(kind, function, right, common, tmp_path):
    path = op_file(tmp_path, kind)
    np.testing.assert_allclose(given(path, function), given(path, right), rtol=1e-2, atol=1e-2)
    report = tried(path, function)
    op = report["ops"][0]
    assert report["verdict"] == "wrong", op["summary"]
    assert common in (op["common"] or "")
    first = op["cases"][0] if op["smallest_wrong"] == 0 else next(
        case for case in op["cases"] if case["case"] == op["smallest_wrong"])  # fmt: skip
    at = first["wrong"]
    assert at["error"] is None or at["error"] > at["limit"]
    assert f"row {at['row']}, column {at['column']}" in op["summary"]


# -- what a kernel may do, and what is done to it ---------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    """An op's file of one case, which is tried alone."""
    path = op_file(tmp_path, "norm")
    save_inputs(path, replace(load_inputs(path), case="random values"))
    return path


def script(folder, text):
    """A kernel in Python that is a program: it has ``op`` and ``out``."""
    file = folder / "kernel.py"
    file.write_text(f"import os, sys\nimport numpy as np\nop, out = sys.argv[1:]\n{text}\n", "utf-8")
    return f"cmd: {quote(sys.executable)} {quote(str(file))} {{op}} {{out}}"


FAILS = {
    "os.abort()": "died of SIGABRT",
    "print('no such tile'); sys.exit(3)": "ended with exit code 3; its last words: no such tile; run it on that op",
    "pass": "wrote nothing; write 8192 values of float32 in C order, shape [1, 1, 64, 128], to {out}",
    "os.read(os.pipe()[0], 1)": "was still running after 1 s; --timeout SECONDS gives it more",
    "np.zeros(8192, np.float16).tofile(out)": "wrote 16384 bytes (2 for each value), where 32768 are right; write 8192",
    "np.save(open(out, 'wb'), np.zeros((1, 1, 64, 128)))": "wrote float64; write 8192 values of float32",
    "np.save(open(out, 'wb'), np.zeros((128, 64), np.float32))": "wrote the shape [128, 64]; write 8192 values",
    "np.save(open(out, 'wb'), np.array(['x' * 32768]))": "wrote ",
    "open(out, 'wb').write(b'\\x93NUMPY garbage')": "wrote no array (",
}


@pytest.mark.parametrize("text", FAILS)
def test_a_kernel_without_a_result_is_told_in_one_line(text, alone, tmp_path):
    least = ["--timeout", 1] if "still running" in FAILS[text] else []
    done = run("replay", alone, "--candidate", script(tmp_path, text), *least)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"llamadiff: {alone}: cmd: ")
    assert FAILS[text] in done.stderr
    assert done.stderr.count("\n") == 1


def test_nan_is_wrong_and_what_is_read_is_not_touched(alone, tmp_path):
    """Even where a kernel writes over the file that it is given."""
    before = alone.read_bytes()
    text = "open(op, 'wb').write(b''); np.full(8192, np.nan, np.float32).tofile(out)"
    done = run("replay", alone, "--candidate", script(tmp_path, text))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("WRONG  norm-0: RMS_NORM by ")
    assert (
        "goes wrong first at row 0, column 0, in 8192 of 8192 values; furthest at [0, 0, 0, 0]: nan where "
        in done.stdout
    )
    assert alone.read_bytes() == before


def test_nothing_is_left_beside_a_function(alone, tmp_path):
    """No compiled file either."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.py").write_bytes(KERNELS.read_bytes())
    assert run("replay", alone, "--candidate", f"python:{folder / 'mine.py'}:rms_norm").returncode == 0
    assert [path.name for path in folder.iterdir()] == ["mine.py"]


def test_a_kernel_that_fails_on_some_cases_is_wrong_or_not_judged(tmp_path):
    """Dying is wrong; saying so, by an exit code, is what nothing can be told of."""
    path = op_file(tmp_path, "norm")
    for function, verdict, words in (
        ("rms_norm_dies_of_many_rows", "wrong", "died of SIGABRT"),
        (
            "rms_norm_refuses_many_rows",
            "unchecked",
            "ended with exit code 1; its last words: NotImplementedError: 1025 rows (",
        ),
    ):
        report = tried(path, function)
        op = report["ops"][0]
        assert report["verdict"] == verdict
        failed = [case for case in op["cases"] if case["problem"]]
        assert failed == [case for case in op["cases"] if case["sizes"]["rows"] > 1024] != []
        assert words in op["summary"]
        if verdict == "wrong":
            assert op["common"] == "only with 1025 rows and more (with 67 it is right)"


REFUSED = {
    ("--candidate", "kernel.so"): "--candidate kernel.so: not a kernel; expected ",
    ("--candidate", "cmd: ./kernel {op}"): "has no {out}; expected ",
    ("--candidate", "cmd: /nowhere/kernel {op} {out}"): "/nowhere/kernel: cannot be run (No such file or directory); ",
    ("--candidate", "python:nowhere.py:f"): "nowhere.py: no such file; expected python:FILE.py:FUNCTION",
    ("--candidate", f"python:{KERNELS}"): "names no function; expected python:FILE.py:FUNCTION",
    ("--candidate", f"python:{KERNELS}:nothing"): "kernels.py: has no function nothing",
    (
        "--candidate",
        f"python:{KERNELS}:F",
        "--tolerance",
        "1e-2",
    ): "--tolerance 1e-2: limits come from",
    (
        "--candidate",
        f"python:{KERNELS}:F",
        "--llama-cpp",
        "device=CPU",
    ): "a kernel runs without llama.cpp",
    ("--seed", "1"): "--seed 1: is about a kernel; give --candidate with it",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_meant_is_refused(words, alone):
    done = run("replay", alone, *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert REFUSED[words] in done.stderr


def test_a_wrong_case_is_kept_and_replayed_alone(tmp_path):
    path, keep = op_file(tmp_path, "f32"), tmp_path / "kept"
    op = tried(path, "matmul_partial_tile_lost", "--keep", keep, "--seed", 5)["ops"][0]
    wrong = [case for case in op["cases"] if case["verdict"] == "wrong"]
    assert sorted(map(str, keep.iterdir())) == sorted(case["path"] for case in wrong)
    smallest = next(case for case in wrong if case["case"] == op["smallest_wrong"])
    assert op["next_steps"] == [f"llamadiff replay {smallest['path']} --candidate {op['candidate']}"]
    again = tried(smallest["path"], "matmul_partial_tile_lost")["ops"][0]
    assert [case["wrong"] for case in again["cases"]] == [smallest["wrong"]]
    assert tried(smallest["path"], "matmul_blocked")["verdict"] == "match"
    saved, expected, found, _ = load(Path(smallest["path"]))
    np.testing.assert_allclose(expected, (saved.x(1) @ saved.x().swapaxes(-1, -2)), rtol=1e-4, atol=1e-5)
    assert not found.any()


def test_cases_are_those_of_their_seed(tmp_path):
    path = op_file(tmp_path, "rows")
    first, again, other = ([case.inputs.op.sources for case in cases_of(load_inputs(path), seed)] for seed in (3, 3, 4))
    values = [[[source.values.tobytes() for source in each] for each in some] for some in (first, again, other)]
    assert values[0] == values[1] != values[2]
    done = run("replay", path, "--candidate", f"python:{KERNELS}:get_rows", "--seed", 3)
    assert "\n       seed 3; tried: as saved, " in done.stdout


def test_kept_files_do_not_replace_what_is_read(tmp_path):
    """A wrong case is not kept where an op lies that was given."""
    path = op_file(tmp_path, "rows")
    other = tmp_path / "rows-case01-seed0.safetensors"
    other.write_bytes(path.read_bytes())
    kernel = f"python:{KERNELS}:get_rows_never_the_last"
    done = run("replay", path, other, "--candidate", kernel, "--keep", tmp_path)
    assert (done.returncode, other.read_bytes()) == (2, path.read_bytes())
    assert done.stderr.endswith("which would be overwritten; give another name\n")


def test_a_report_for_an_issue(alone):
    done = run("replay", alone, "--candidate", f"python:{KERNELS}:rms_norm_eps_outside", "-o", "markdown:-")
    assert done.stdout.startswith("### WRONG: norm-0: `RMS_NORM` by `rms_norm_eps_outside` is wrong in 1 of 1 case")
    assert "| **WRONG** | 64 rows, 128 columns, random values | `f32[128,64,1,1]` |" in done.stdout


@needs("gcc")
def test_a_kernel_in_c(tmp_path):
    """It needs no library for an op's file: the header's length, the header, the values."""
    file, kernel = Path(__file__).with_name("kernel.c"), tmp_path / "kernel"
    subprocess.run(["gcc", "-O1", "-o", kernel, file, "-lm"], check=True)
    path = op_file(tmp_path, "norm")
    save_inputs(path, replace(load_inputs(path), case="random values"))
    done = run("replay", path, "--candidate", f"cmd: {kernel} {{op}} {{out}}")
    assert done.stdout.startswith("MATCH  norm-0: RMS_NORM by kernel is right in the 1 case\n")


def test_a_real_ops_inputs(small_model, tmp_path):
    """Of a run of llama.cpp: kernels are right, and so is ggml on the cases around it."""
    kernels = {"MUL_MAT": "matmul_blocked", "SOFT_MAX": "softmax"}
    folder = tmp_path / "ops"
    folder.mkdir()
    check_nodes(Request(str(small_model("llama", "Q8_0")), tokens=(1, 5, 9, 30, 17), output=str(folder / "o.json"),
                        nodes=True, keep=str(folder), keep_nodes=("*",)))  # fmt: skip
    paths = sorted(folder.glob("*.safetensors"))
    for op, kernel in kernels.items():
        path = next(path for path in paths if load(path)[0].name == op)
        report = tried(path, kernel)
        assert report["verdict"] in ("match", "noise"), report["summary"]
        cases = tmp_path / op
        tried(path, "nothing_but_zeros", "--keep", cases)
        runs = run_ops([*sorted(cases.iterdir())[:6]], Settings())
        assert [each.verdict for each in runs] == ["match"] * 6
        assert all(each.recorded > 0.9 for each in runs)


def test_the_page_names_the_parameters_that_a_file_has():
    page = (ROOT / "docs/kernels.md").read_text("utf-8")
    rows = re.findall(r"^\| (`[A-Z].*?) \| (`.*?) \|$", page, re.MULTILINE)
    said = {op: re.findall("`(.*?)`", names) for ops, names in rows for op in re.findall("`(.*?)`", ops)}
    assert said == {op: [name for name, *_ in named] for op, named in PARAMETERS.items()}


def test_axes_have_sizes_beside_tiles(monkeypatch, tmp_path):
    monkeypatch.undo()
    for kind, steps in (("f32", 1), ("q8_0", 32)):
        n = decoded(load_inputs(op_file(tmp_path, kind)).op)
        found = axes.axes_of(n)
        sizes = list(found.varied())
        assert {1, 2, 3, 15, 16, 17, 31, 32, 33, 127, 129, 255, 257, 1023, 1025} <= {each["rows"] for each in sizes}
        assert {each["channels"] % steps for each in sizes} == {0}
        assert {each["batches"] for each in sizes} == {1, 2, 3}
        for each in sizes:
            w, x, y = found.shapes(each)
            assert w[-1] == x[-1] == each["channels"]
            assert (x[-2], w[-2]) == (y[-2], y[-1]) == (each["rows"], each["outputs"])


def test_what_a_weight_serves_many_of_stays_so(tmp_path):
    """Two heads of K for four of Q; a mask's padding; what is added to each row."""
    n = decoded(load_inputs(op_file(tmp_path, "attention")).op)
    for sizes in axes.axes_of(n).varied():
        q, k, v, hides, y = axes.axes_of(n).shapes(sizes)
        assert (q[1], k[1], v[1], y[2]) == (4, 2, 2, 4)
        assert (q[2], k[2], hides) == (sizes["tokens"], sizes["keys"], (q[0], 1, sizes["tokens"], sizes["keys"]))
    bias = Op("ADD", (1, 1, 8, 64), "f32", params(), (Operand(random(1, 1, 8, 64)), Operand(random(1, 1, 1, 64))))
    found = axes.axes_of(bias)
    assert {found.shapes(sizes)[1][2] for sizes in found.varied()} == {1}


def case(number, verdict, values="random values", **sizes):
    return CaseRun(number, "", sizes, values, "", 1, verdict)


SIZES = (1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 127, 128, 129)
TRAITS = {
    "only where the number of rows is not a multiple of 16": lambda rows, values: rows % 16 != 0,
    "only with more than 32 rows": lambda rows, values: rows > 32,
    "only with 127 rows and more (with 64 it is right)": lambda rows, values: rows > 100,
    "only with 1 row": lambda rows, values: rows == 1,
    "only with more than 1 row, but not with zeros": lambda rows, values: rows > 1 and values != "zeros",
    "only with zeros": lambda rows, values: values == "zeros",
    "in all but zeros": lambda rows, values: values != "zeros",
    "in every case": lambda rows, values: True,
    "": lambda rows, values: rows in (3, 8, 31),
}


@pytest.mark.parametrize("words", TRAITS)
def test_what_is_said_of_the_wrong_cases_is_so(words):
    given = [*((rows, "random values") for rows in SIZES), *((rows, "zeros") for rows in (1, 64))]
    judged = [
        case(number, "wrong" if TRAITS[words](*each) else "match", each[1], rows=each[0])
        for number, each in enumerate(given)
    ]
    assert common_trait(judged) == words
    assert common_trait([replace(each, verdict="match") for each in judged]) == ""
