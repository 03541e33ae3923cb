"""llama.cpp's process started by somebody's words: another Python, as in a container; what is said where it fails."""

from __future__ import annotations

import ast
import io
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from builds import HEADERS
from command import run
from optional import needs
from places import ROOT
from waiting import eventually

from llamadiff import UserError, plugins
from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import Run
from llamadiff.ext.builds.build_tree import find
from llamadiff.ext.cpus.remote_bootstrap import _BEGIN, LLAMA_CPP, MODULES, started_by
from llamadiff.ext.graph.backend import judge_graph
from llamadiff.ext.graph.readers import check_nodes
from llamadiff.ext.graph.repro import load
from llamadiff.llamacpp.request import RUNNER, Settings
from llamadiff.report.facts import side_facts
from llamadiff.report.terminal.report import make_console, render
from llamadiff.result.comparison import Comparison
from llamadiff.system import commands

BARE = f"{shlex.quote(sys.executable)} -I -S"  # nothing is installed for it
TOKENS = ["--tokens", "1,17,5,40,9,33,64,5,2,71"]
OF_THE_CALL = ("timing", "llamadiff")  # seconds, and the words of the command

pytestmark = [
    needs("cc"),
    pytest.mark.skipif(not HEADERS.is_dir(), reason="this llama-cpp-python was installed without llama.cpp's headers"),
]


# -- what is sent ------------------------------------------------------------------------------------------------------


def imported(name: str) -> Iterator[str]:
    """What a module imports when it runs, wherever in it; what type checkers alone import is not."""
    tree = ast.parse(ROOT.joinpath(*name.split(".")).with_suffix(".py").read_text("utf-8"))
    checked = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    only_types = {id(inner) for node in checked for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in inner if ROOT.joinpath(*name.split(".")).with_suffix(".py").is_file()]
            yield from modules or [node.module]


FILES = [name for names in plugins.ask_all(lambda each: each.remote_files) for name in names]
SENT = {*MODULES, *(name for names in plugins.ask_all(lambda each: each.remote) for name in names)}


def test_what_is_sent_is_all_that_the_process_imports():
    seen, left = set[str](), [LLAMA_CPP, *(SENT - set(MODULES))]
    while left:
        name = left.pop()
        if name.startswith("llamadiff.") and name not in seen:
            seen.add(name)
            left += imported(name)
    assert seen == SENT


WITHOUT = {"filelock", "mslex", "platformdirs", "psutil"}  # it does without them, where a BARE Python runs it


def test_it_needs_nothing_but_pythons_own():
    foreign = {name.partition(".")[0] for module in SENT for name in imported(module)}
    assert foreign - {"llamadiff", "llama_cpp"} - WITHOUT <= sys.stdlib_module_names
    assert all((ROOT / name).is_file() for name in FILES)


def test_words_for_a_shell_are_quoted():
    here, there = started_by("docker exec -i box python3", "")[0], started_by("ssh host python3", "")[0]
    assert here[:5] == ["docker", "exec", "-i", "box", "python3"]
    assert shlex.split(there[-1]) == [here[-1]]


@pytest.mark.parametrize("runner", ["", "'"])
def test_words_that_are_no_command(runner):
    with pytest.raises(UserError, match=r"runner="):
        started_by(runner, "")


# -- the same as in place ----------------------------------------------------------------------------------------------


def test_windows_cuts_a_runner_as_its_programs_do(monkeypatch):
    monkeypatch.setattr(commands, "as_windows", lambda: True)
    command, _ = started_by(r'"C:\Program Files\Python\python.exe" -I', "x")
    assert command[:3] == [r"C:\Program Files\Python\python.exe", "-I", "-c"]


@pytest.mark.parametrize("ssh", ["ssh", "/usr/bin/ssh", "ssh.exe"])
def test_a_shell_there_is_given_one_word(ssh):
    """Whatever the system here: the shell there is POSIX's."""
    command, _ = started_by(f"{ssh} mac python3", "x")
    assert len(shlex.split(command[-1])) == 1
    assert command[-1].startswith("'import os, json")


@pytest.mark.parametrize("separator", ["/", "\\"])
def test_a_file_that_is_sent_is_found_by_the_path_of_either_system(separator):
    """Python joins a package's folder and a file's name as its system does."""
    sent = {"modules": {}, "files": dict.fromkeys(FILES, "// the shim")}
    asked = "print(Sent().get_data('sent/llamadiff/ext/builds' + sys.argv[2] + 'shim.c').decode())"
    code = f"import json, sys; b = sys.argv[1]\n{_BEGIN.partition('sys.meta_path')[0]}\n{asked}"
    command = [sys.executable, "-c", code, json.dumps(sent), separator]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "// the shim\n"


def said(*words: object) -> dict[str, object]:
    done = run(*words, *TOKENS, "-o", "json:-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "machine" not in report["baseline"]  # it is of this kind
    return {key: value for key, value in report.items() if key not in OF_THE_CALL}


def alone(tmp_path: Path) -> str:
    """A runner whose process shares nothing with this one but its standard streams, as in a container."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import os, sys\nos.closerange(3, 256)\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, '-I', '-S', *sys.argv[1:]])\n",
        encoding="utf-8",
    )
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(script))}"


WAYS = (
    ["compare"], ["backend"], ["compare", "--engine", "graph"], ["backend", "--n-predict", 3],
    ["compare", "--n-predict", 3, "--llama-cpp", "kv=f16"],
)  # fmt: skip


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("words", WAYS)
def test_a_report_is_that_of_a_run_in_place(words, shares, small_model, build, tmp_path):
    asked = [words[0], small_model("llama", "Q8_0"), *words[1:], "--llama-cpp", build]
    assert said(*asked, "--llama-cpp", f"runner={BARE if shares else alone(tmp_path)}") == said(*asked)


@pytest.mark.parametrize("words", [["capture", "-o"], ["graph"], ["doctor"], ["variants", "--only", "threads=1"]])
def test_other_commands_take_it(words, small_model, build, tmp_path, monkeypatch):
    monkeypatch.setenv(RUNNER, alone(tmp_path))
    model = [] if words[0] == "doctor" else [small_model()]
    tokens = TOKENS if words[0] in ("capture", "variants") else []
    target = [tmp_path / "t.safetensors"] if words[0] == "capture" else []
    done = run(words[0], *model, *words[1:], *target, *tokens, "--llama-cpp", build)
    assert done.returncode == 0, done.stderr
    assert words[0] != "doctor" or "started by" in done.stdout


def test_a_saved_op_is_run_there(small_model, build, tmp_path):
    kept = tmp_path / "kept"
    model = small_model("llama", "Q8_0")
    kept.mkdir()
    request = text_request(ModelFile(model), Run(tokens=(1, 5, 9)), Path())
    check_nodes(replace(request, nodes=True, keep=str(kept), keep_nodes=("*",)))
    saved = [path for path in sorted(kept.glob("*.safetensors")) if load(path)[0].name not in LOOKS]
    done = run("replay", *saved, "--llama-cpp", build, "--llama-cpp", f"runner={alone(tmp_path)}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= len(saved) > 20


LOOKS = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")  # ops that compute nothing


# -- what fails --------------------------------------------------------------------------------------------------------


def fake(tmp_path: Path, code: str) -> str:
    script = tmp_path / "fake.py"
    script.write_text(code, encoding="utf-8")
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(script))}"


FAILURES = {
    "no such command": (None, "nobody-knows-this cannot be started (No such file or directory)"),
    "it ends at once": ("import sys; sys.exit('box: no such container')", "no Python answers (it said: box: no such "),
    "too old": (
        "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[2])", "is too old; give one of 3.10 or later",
    ),
    "an instruction": (
        "import os, signal; os.kill(os.getpid(), signal.SIGILL)", "the CPU there refuses an instruction",
    ),
    "it greets": (
        "import os, sys; print('welcome to box', flush=True); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
        "prints 'welcome to box' where answers are expected",
    ),
    "nothing installed": ("import os, sys; os.execv(sys.executable, [sys.executable, '-I', '-S', *sys.argv[1:]])",
                          "no llama.cpp is installed"),
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_what_fails_is_said_in_a_line(failure, small_model, tmp_path):
    code, expected = FAILURES[failure]
    runner = "nobody-knows-this -x" if code is None else fake(tmp_path, code)
    for words in (["backend", small_model(), *TOKENS], ["compare", small_model(), *TOKENS]):
        done = run(*words, "--llama-cpp", f"runner={runner}")
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert expected in done.stderr
    assert expected in " ".join(run("doctor", "--llama-cpp", f"runner={runner}").stdout.split())


def test_a_build_for_another_machine_is_told(small_model, build, tmp_path):
    library = find(build).library
    header = bytearray(library.read_bytes())
    header[18:20] = (0x28).to_bytes(2, "little") if header[18] != 0x28 else (0x3E).to_bytes(2, "little")  # e_machine
    copy = shutil.copytree(library.parent, tmp_path / "copy")
    (copy / library.name).write_bytes(header)
    shutil.copytree(build / "include", copy / "include")
    done = run("backend", small_model(), *TOKENS, "--llama-cpp", copy, "--llama-cpp", f"runner={BARE}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot be loaded on this machine" in done.stderr


def test_no_process_is_left_where_a_runner_starts_another(small_model, tmp_path):
    """It ends when its input does, however many processes are between."""
    mark = f"of-{os.getpid()}-{tmp_path.name}"
    script = fake(tmp_path, f"import subprocess, sys; subprocess.run([{sys.executable!r}, '-I', '-S', *sys.argv[1:]])")
    assert run("backend", small_model(), *TOKENS, "--llama-cpp", f"runner={script} -c pass").returncode == 2
    assert run("backend", small_model(), *TOKENS, "--llama-cpp", f"runner=env MARK={mark} {script}").returncode == 2
    eventually(lambda: not any(mark.encode() in read(path) for path in Path("/proc").glob("[0-9]*/environ")))


def read(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


def test_another_kind_of_machine_is_named(small_model, build, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    result = judge_graph(small_model(), Run(tokens=(1, 5), settings=Settings(llama_cpp=str(build), runner=BARE)))
    assert result.baseline["machine"] == os.uname().machine
    assert side_facts({**result.baseline, "build": "CPU : SVE = 1 | SVE_CNT = 32"}, full=False)[0] == (
        f"on {os.uname().machine} with SVE of 256 bits"
    )
    assert f"on {os.uname().machine}" in text_of(result)


def text_of(result: Comparison) -> str:
    console = make_console(io.StringIO())
    render(result, console)
    return str(console.file.getvalue())
