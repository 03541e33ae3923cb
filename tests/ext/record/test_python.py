"""Programs in Python as they are: the arrays that they bind are found, and they run as they do without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ext.record.mistakes import MISTAKES, write_engine, write_weights
from models.small import write_model
from optional import needs

from llamadiff import compare
from llamadiff.engines.reference_model import Model
from llamadiff.ext.record.align import Alignment, align
from llamadiff.ext.record.candidate import run_program
from llamadiff.ext.record.log import Log
from llamadiff.ext.record.python_program import AGENT, split_options
from llamadiff.ext.record.scripts import shebang_of, title_of
from llamadiff.ext.record.search import Memory, Search

MODULE = "llamadiff.ext.record.python_program"
TOKENS = (1, 17, 5, 80, 42, 9)
TORCH = pytest.param("with_torch", {"ffn_gate", "ffn_up", "ffn_swiglu"}, marks=needs("torch"))


def recorded(folder: Path, *words: str) -> Log:
    """What a program in this Python leaves in its log."""
    return run_program(MODULE, [sys.executable, *words], folder, 60)[0]


def aligned(folder: Path, engine: Path) -> Alignment:
    model = write_model(folder / "m.gguf", kind="F32")
    weights = write_weights(model, folder / "m.bin")
    log = recorded(folder, str(engine), str(weights), ",".join(map(str, TOKENS)))
    return align(Model(model), Search(Memory(log.without_matrices())), TOKENS)


@pytest.mark.parametrize(
    ("engine", "unbound"),
    [
        ("with_numpy", {"ffn_swiglu"}),
        ("with_numpy_batch", {"attn_out", "ffn_out"}),
        ("with_lists", set()),
        TORCH,
    ],
)
def test_all_that_an_engine_gives_a_name_is_found(engine, unbound, tmp_path):
    found = aligned(tmp_path, write_engine(tmp_path, engine))
    assert found.nowhere is None
    lacking = {name.partition("-")[0] for name, rows in found.rows.items() if len(rows.places) < len(TOKENS)}
    assert lacking == unbound
    assert max(each.nmse for rows in found.rows.values() for each in rows.places.values()) < 1e-11


def test_a_mistake_is_found_where_it_is(tmp_path):
    mistake = next(each for each in MISTAKES if each.name == "the other norm's weight")
    found = aligned(tmp_path, write_engine(tmp_path, mistake.engine, mistake))
    off = {name for name, rows in found.rows.items() if any(each.nmse > 1e-9 for each in rows.places.values())}
    assert off == {"ffn_norm-0", "ffn_norm-1"}


# What these change has no name in the engine, or is read in another order: its place alone is said.
LOST = {
    "GELU",
    "sums in float16",
    "RoPE in halves",
    "heads not joined",
    "ReLU",
    "RoPE's angle by the pair's place in the row",
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [pytest.param(each, id=f"{each.engine}-{each.name}") for each in MISTAKES])
def test_mistakes_are_named_and_nothing_else(mistake, tmp_path):
    if mistake.engine == "with_torch":
        pytest.importorskip("torch")
    model = write_model(tmp_path / "m.gguf", kind="F32")
    weights = write_weights(model, tmp_path / "m.bin")
    engine = write_engine(tmp_path, mistake.engine, mistake)
    command = f"{sys.executable} {engine} {weights} {','.join(map(str, TOKENS))}"
    found = compare(model, TOKENS, candidate=f"record: {command}")
    assert found.verdict == ("match" if not mistake.words else "unchecked" if mistake.name in LOST else "wrong")
    assert {row.tap.partition("-")[0] for row in found.wrong} <= {*mistake.words}


@pytest.mark.slow
def test_a_program_that_fails_is_judged_by_what_it_wrote_until_then(tmp_path):
    model = write_model(tmp_path / "m.gguf", kind="F32")
    engine = write_engine(tmp_path, "with_numpy")
    engine.write_text(engine.read_text("utf-8") + "\nraise SystemExit('no more')\n", "utf-8")
    words = f"{sys.executable} {engine} {write_weights(model, tmp_path / 'm.bin')} {','.join(map(str, TOKENS))}"
    found = compare(model, TOKENS, candidate=f"record: {words}")
    assert found.verdict == "match"
    assert any("with_numpy.py ended with exit code 1; its last words: " in note for note in found.notes)


SEEN = """
import array, ctypes, sys
from types import SimpleNamespace
import numpy as np

rows = np.random.default_rng(0).standard_normal((8, 8, 16)).astype(np.float32)
state = SimpleNamespace(x=np.zeros(16, np.float32), caches=[np.zeros((4, 16), np.float32)])

class Duck:  # as arrays of JAX are
    shape, dtype = (16,), np.dtype("float32")
    def __init__(self, raw):
        self.raw = raw
    def __array__(self, dtype=None, copy=None):
        return np.frombuffer(self.raw, np.float32)

def bind(row, number, n):
    if number == 0:
        kept = (row * n).astype(np.float16)
    elif number == 1:
        kept = array.array("f", row * n)
    elif number == 2:
        kept = (ctypes.c_float * 16)(*row * n)
    elif number == 3:
        kept = [float(value) for value in row * n]
    elif number == 4:
        kept = np.asfortranarray(np.stack([row * n, row * n + 1, row * n + 2])).T  # [channel, token]
    elif number == 5:
        kept = np.stack([row.reshape(4, 4) * n, row.reshape(4, 4) * n + 1], 1)  # [head, token, dim]
    elif number == 6:
        kept = row[0::2] * n + 1j * row[1::2] * n
    elif number == 7:
        kept = Duck((row * n).tobytes())
    return number

for number, row in enumerate(rows[:, 0]):
    bind(row, number, np.float32(3 + number))
for row in rows[:, 1]:
    state.x[:] = row
    state.x *= 3
    state.caches[0][1] = row * 4
print("seen")
"""


def test_arrays_of_all_kinds_are_found(tmp_path):
    (tmp_path / "program.py").write_text(SEEN, "utf-8")
    search = Search(Memory(recorded(tmp_path, str(tmp_path / "program.py"))))
    rows = np.random.default_rng(0).standard_normal((8, 8, 16)).astype(np.float32)
    of_kinds = [row * (3 + number) for number, row in enumerate(rows[:, 0])]
    found = [search.find(row.astype(np.float64)) for row in (*of_kinds, *rows[:, 1] * 3, *rows[:, 1] * 4)]
    assert [number for number, each in enumerate(found) if each is None or each.nmse > 1e-6] == []
    assert search.find(rows[0, 2].astype(np.float64) + 7) is None


PROGRAMS = {
    "code": "import sys; print(sys.argv); sys.exit(3)",
    "text": "import sys; sys.exit('no model')",
    "raises": "def f():\n    return 1 / 0\nf()",
    "stops": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()",
    "leaves": "import os\nprint('out', flush=True)\nos._exit(7)",
    "main": "import sys, pickle\nclass A: pass\nprint(pickle.dumps(A()), __name__, __file__, sys.path[0], __spec__)\n"
    "import atexit; atexit.register(lambda: print(A))",
    "thread": "import threading\nthreading.Thread(target=lambda: print('thread')).start()",
    "fork": "import os\nif not os.fork():\n    print('child', flush=True); os._exit(0)\nos.wait()",
    "syntax": "def",
    "own": "import sys\nsys.excepthook = lambda kind, *_: print(kind)\n[][1]",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_it_does_without(name, tmp_path):
    (tmp_path / f"{name}.py").write_text(PROGRAMS[name], "utf-8")
    assert_same([f"{name}.py", "a", "-b"], tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "package", "x"],
        ["-m", "package.lacking"],
        ["-c", "import sys; print(sys.argv, sys.path[0], __name__)", "x"],
        ["package", "x"],
        ["nothere.py"],
    ],
)
def test_so_do_modules_and_code(words, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("", "utf-8")
    text = "import sys\nprint(sys.argv, sys.path[0], __name__, __package__)\nraise KeyError(1)"
    (tmp_path / "package/__main__.py").write_text(text, "utf-8")
    assert_same(words, tmp_path)


def assert_same(words: list[str], folder: Path) -> None:
    """A program prints and returns what it does without the agent."""
    (folder / "log").mkdir()
    plain, seen = (
        subprocess.run([sys.executable, *each, *words], cwd=folder, capture_output=True, check=False, text=True)
        for each in ([], [str(AGENT), "log", "1000000", sys.executable])
    )
    assert (seen.returncode, seen.stdout) == (plain.returncode, plain.stdout)
    if "nothere" not in words[0]:
        assert seen.stderr == plain.stderr
    assert "agent" not in seen.stderr


def test_what_a_program_wrote_until_it_was_killed_is_read(tmp_path):
    (tmp_path / "killed.py").write_text(
        "import os\nfrom array import array\nx = array('f', range(1, 9))\ny = 1\nos.kill(os.getpid(), 9)", "utf-8"
    )
    code = subprocess.run(
        [sys.executable, str(AGENT), str(tmp_path), "999", "", str(tmp_path / "killed.py")], check=False
    )
    assert code.returncode == -signal.SIGKILL
    assert np.fromfile(tmp_path / "words", "<f4").tolist() == [*range(1, 9)]


@pytest.mark.parametrize(
    ("words", "options", "program"),
    [
        (["python", "e.py", "-m"], ["python"], ["e.py", "-m"]),
        (["python", "-u", "-X", "dev", "e.py"], ["python", "-u", "-X", "dev"], ["e.py"]),
        (["python", "-Wignore", "-um", "e", "x"], ["python", "-Wignore", "-u"], ["-m", "e", "x"]),
        (["python", "-cpass", "x"], ["python"], ["-c", "pass", "x"]),
        (["p", "--check-hash-based-pycs", "never", "e.py"], ["p", "--check-hash-based-pycs", "never"], ["e.py"]),
        (["python", "-V"], ["python", "-V"], []),
        (["python", "-m"], ["python"], []),
    ],
)  # fmt: skip
def test_pythons_own_options_are_not_the_programs(words, options, program):
    assert split_options(words) == (options, program)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("#!/usr/bin/python3 -u", ["/usr/bin/python3", "-u"]),
        ("#!/usr/bin/env nothere3", ["nothere3"]),
        ("#!/usr/bin/env -S A=1 nothere3 -u", ["nothere3", "-u"]),
        ("no", []),
        ("#!", []),
    ],
)
def test_the_interpreter_of_a_script(line, words, tmp_path):
    (tmp_path / "script").write_text(line + "\nx", "utf-8")
    assert shebang_of(tmp_path / "script") == words
    assert title_of(["/bin/python3", "-u", "a/engine.py", "x"]) == "engine.py"


@pytest.mark.skipif(os.name != "posix", reason="scripts are run by their first line")
def test_a_script_is_recorded_by_its_first_line(tmp_path):
    script = tmp_path / "script"
    script.write_text(f"#!{sys.executable}\nx = list(map(float, range(1, 9)))\nprint(x)\n", "utf-8")
    script.chmod(0o755)
    assert run_program(MODULE, [str(script)], tmp_path, 60)[0].words.size == 16
