"""The canary: what each command comes to, what is red, whose turn it is; packages made here, and nothing fetched."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from builds import HEADERS, INSTALLED
from optional import needs

from llamadiff.ext.builds import compiled, prebuilt
from tools import today
from tools.parts import MissingPartError
from tools.today import CRASH, LEFT, PREBUILT, REFUSED, Outcome, Release, Row

HAS_HEADERS = pytest.mark.skipif(not HEADERS.is_dir(), reason="this llama-cpp-python was installed without headers")


def report(verdict: str, **more: object) -> str:
    return json.dumps({"verdict": verdict, "headline": "attn_out-0 is wrong", **more})


DIED = [
    {"variant": "default", "failed": None}, {"variant": "kv=q8_0", "failed": "llama.cpp refused: K cache type q8_0"},
    {"variant": "repack=on", "failed": "llama.cpp died of SIGILL after 2 taps"},
]  # fmt: skip
OTHERS = "/x: has no type_k where its headers have it: they are of another version; give those that belong to it"


@pytest.mark.parametrize(("verb", "code", "out", "err", "kind", "bad", "sentence"), [
    ("compare", 0, report("match"), "", "MATCH", False, ""),
    ("compare", 0, report("noise"), "", "NOISE", False, ""),
    ("backend", 2, report("unchecked"), "", "UNCHECKED", False, "attn_out-0 is wrong"),
    ("backend", 1, report("wrong"), "", "WRONG", True, "attn_out-0 is wrong"),
    ("variants", 0, report("match", variants=DIED[:2]), "", "MATCH", False, ""),
    ("variants", 1, report("match", variants=DIED), "", CRASH, True, "repack=on: llama.cpp died of SIGILL"),
    ("watch", 0, json.dumps({"text": json.loads(report("match"))}), "", "MATCH", False, ""),
    ("watch", 1, json.dumps({"text": json.loads(report("match")), "vision": json.loads(report("wrong"))}), "",
     "WRONG", True, "attn_out-0 is wrong"),
    ("graph", 0, "layer 0\n", "", "printed", False, ""),
    ("graph", 0, "", "", REFUSED, True, "nothing was said"),
    ("compare", 2, "", f"llamadiff: {OTHERS}\n", REFUSED, False, OTHERS),
    ("compare", 2, "", "llamadiff: m.gguf: something that nobody has seen\n", REFUSED, True, "m.gguf: something that"),
    ("compare", 2, "", "llamadiff: m.gguf: llama.cpp died of SIGSEGV\n", CRASH, True, "exit code 2: m.gguf: llama"),
    ("variants", 2, "", "llamadiff: m.gguf: llama.cpp died of SIGABRT (iqk_flash_attn.cpp:188: Fatal error)\n", CRASH,
     False, "exit code 2: m.gguf: llama.cpp died of SIGABRT"),
    ("compare", 70, "", "llamadiff: a fault in llamadiff: 'x'\n", CRASH, True, "exit code 70: a fault in llama"),
    ("compare", -11, "", "", CRASH, True, "exit code -11: nothing was said"),
])  # fmt: skip
def test_what_a_command_comes_to(verb, code, out, err, kind, bad, sentence):
    found = today.outcome(verb, "tiny", code, out, err)
    assert (found.kind, found.is_bad) == (kind, bad)
    assert found.sentence.startswith(sentence)
    assert bool(found.sentence) == bool(sentence)


def test_reasons_are_what_llamadiff_says():
    """A line that is worded anew would be an unknown reason."""
    said = Path(compiled.__file__).read_text("utf-8")
    said += Path(prebuilt.__file__).read_text("utf-8")
    known = ["they are of another version", "structures are known neither by headers"]
    assert [part for part in today.REASONS if part in said] == known


@pytest.fixture
def main(monkeypatch, tmp_path, capsys):
    """main("--models", 1): the exit code and the table, with packages and commands of a test's own."""
    monkeypatch.setattr(today, "FOLDER", tmp_path)
    monkeypatch.setattr(today, "random_ones", lambda count: [Path(f"{name}.gguf") for name in today.NAMES[:count]])
    monkeypatch.setattr(today, "news", lambda folder: [])
    monkeypatch.setattr(today, "release", lambda name, headers: Release(name, "9", tmp_path, "ggml 9"))

    def run(*words: object) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["today.py", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            today.main()
        return end.value.code, capsys.readouterr().out

    return run


def answers(monkeypatch, answer) -> list[list[str]]:
    """Commands that end as ``answer`` (words -> code, standard output) says."""
    asked: list[list[str]] = []

    def run(command, **options):
        asked.append(command[3:])
        code, out = answer(command[3:])
        return subprocess.CompletedProcess(command, code, out, "")

    monkeypatch.setattr(today, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))
    return asked


def right(words):
    return 0, "a node" if words[0] == "graph" else report("match")


def test_a_package_that_is_right_is_a_row(main, monkeypatch):
    asked = answers(monkeypatch, right)
    code, printed = main("xllamacpp", "--models", 4)
    assert code == 0
    assert "| package | release | compare | backend | graph | variants | tokens | to note |" in printed
    assert "| xllamacpp | 9, ggml 9 | 6 MATCH | 6 MATCH | 6 printed | 1 MATCH | 2 MATCH |  |" in printed
    assert all(words[1] == "--llama-cpp" for words in asked)
    assert any("--n-predict" in words for words in asked)


def test_one_wrong_op_in_one_model_is_red_and_named(main, monkeypatch):
    def answer(words):
        wrong = words[0] == "backend" and "gpt-oss.Q8_0.gguf" in words
        return (1, report("wrong")) if wrong else right(words)

    answers(monkeypatch, answer)
    code, printed = main("xllamacpp", "--models", 4)
    assert code == 1
    assert "| 6 MATCH | 5 MATCH, 1 WRONG |" in printed
    assert "| WRONG, backend of gpt-oss.Q8_0: attn_out-0 is wrong |" in printed


def test_a_package_that_is_refused_is_asked_once(main, monkeypatch):
    asked = answers(monkeypatch, lambda words: (2, ""))
    code, printed = main("xllamacpp", "--models", 4)
    assert (code, len(asked)) == (1, 1)
    assert "| 1 refused | refused, compare of tiny.F16: nothing was said |" in printed


def test_a_command_that_hangs_is_a_crash(main, monkeypatch):
    def hang(words):
        raise subprocess.TimeoutExpired(words, 1)

    answers(monkeypatch, hang)
    code, printed = main("xllamacpp", "--models", 0)
    assert code == 1
    assert "crash, compare of tiny.F16: hangs: no end within 900 s" in printed


def test_what_cannot_be_fetched_is_said_and_fails_nothing(main, monkeypatch):
    def off(name, headers):
        raise MissingPartError("pip: no connection")

    monkeypatch.setattr(today, "release", off)
    code, printed = main("--models", 1)
    assert code == 0
    assert printed.count("not tried: pip: no connection") == len(PREBUILT)


def test_past_its_minutes_nothing_begins(main, monkeypatch):
    asked = answers(monkeypatch, right)
    code, printed = main("xllamacpp", "--models", 1, "--minutes", -1)
    assert (code, asked) == (0, [])
    assert f"| 3 {LEFT} | 3 {LEFT} |" in printed


def test_every_package_has_its_turn(main, monkeypatch):
    turns = [today.of_turn(turn, PREBUILT) for turn in range(4 * len(PREBUILT))]
    assert all(len(names) == (0 if number % 4 else 2) for number, names in enumerate(turns))
    assert {name for names in turns for name in names} == set(PREBUILT)
    answers(monkeypatch, right)
    assert main("--turn", 401) == (0, "not its turn\n")
    code, printed = main("--turn", 400)
    assert (code, printed.count("| 6 MATCH | 6 MATCH |")) == (0, 2)


# -- packages ----------------------------------------------------------------------------------------------------------


def fetched(folder: Path, monkeypatch) -> Path:
    """A package as pip leaves it: the installed llama.cpp's libraries under a release's name, no headers."""
    place = folder / "package"
    (place / "other-9.dist-info").mkdir(parents=True)
    (place / "other-9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 9\n", "utf-8")
    shutil.copytree(INSTALLED / "lib", place / "other/lib")
    (place / "other/lib/libllama.so").rename(place / "other/lib/libllama.v9.so")
    monkeypatch.setattr(today, "fetched", lambda name: place)
    monkeypatch.setattr(today, "FOLDER", folder)
    return place


@needs("cc")
@HAS_HEADERS
def test_a_package_is_laid_out_and_asked(monkeypatch, tmp_path):
    fetched(tmp_path, monkeypatch)
    found = today.release("other", None)
    assert (found.version, found.program) == ("9", None)
    assert "ggml 0." in found.about
    monkeypatch.setattr(today, "tasks", lambda of, models, own: [("graph", own[0], ["graph", own[0]])])
    row = today.examine(found, [], [today.shipped_model()], sys.maxsize)
    assert row.outcomes == [Outcome("graph", "tiny.F16", "printed")]
    assert row.about in {found.about, f"{found.about}; the installed headers"}
    assert row.news == []


@HAS_HEADERS
def test_headers_and_programs_of_its_own_are_taken(monkeypatch, tmp_path):
    place = fetched(tmp_path, monkeypatch)
    shutil.copytree(HEADERS, place / "include")
    (place / "other/lib").rename(place / "lib")
    (place / "lib/libllama.v9.so").rename(place / "lib/libllama.so")
    (place / "bin").mkdir()
    (place / "bin/llama-server").write_text("#!/bin/sh\n", "utf-8")
    (place / "bin/llama-server").chmod(0o755)
    found = today.release("other", None)
    assert (found.folder, found.program) == (place, place / "bin/llama-server")
    tasks = [*today.tasks(found, [], [today.shipped_model()])]
    assert [verb for verb, *_ in tasks] == ["tokens", "watch"]


def test_all_in_one_is_found_and_a_package_without_llama_cpp_said(tmp_path):
    (tmp_path / "m.abi3.so").write_bytes(b"\0llama_init_from_model\0")
    folder = today.laid_out(tmp_path, tmp_path / "out", HEADERS)
    assert (folder / "lib/libllama.so").resolve() == tmp_path / "m.abi3.so"
    (tmp_path / "m.abi3.so").write_bytes(b"\0")
    with pytest.raises(MissingPartError, match="there is no llama"):
        today.laid_out(tmp_path, tmp_path / "out", HEADERS)


def test_each_cpus_kernels_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(today, "FOLDER", tmp_path / "today")
    monkeypatch.setattr(today, "run", lambda *words: "0" if "amx" in words[-1].name else "64")
    (tmp_path / "npm/lib").mkdir(parents=True)
    for name in ("llama", "ggml-base", "ggml-cpu-haswell", "ggml-cpu-amx", "ggml-cpu-x64"):
        (tmp_path / f"npm/lib/lib{name}.so").touch()
    npm = Release(today.CPUS, "9", tmp_path / "npm")
    amx, *able = today.cpus(npm, HEADERS)
    assert amx == Row("kernels: amx", "9", missing="this machine lacks its instructions")
    assert [each.name for each in able] == ["kernels: haswell", "kernels: x64"]
    assert sorted(path.name for path in (able[0].folder / "lib").iterdir()) == [
        "libggml-base.so", "libggml-cpu-haswell.so", "libllama.so",
    ]  # fmt: skip
    assert set(able[0].verbs) == {"compare", "backend"}


def test_a_trained_model_is_put_together(monkeypatch, tmp_path):
    def run(*words):
        place, name = Path(words[-2]), words[-1]
        about = place / f"{name.partition('=')[0]}-1.dist-info"
        about.mkdir()
        needs = (
            "Requires-Dist: whole-part1==1\nRequires-Dist: whole-part2==1\nRequires-Dist: other\n"
            if name == "whole"
            else ""
        )
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{needs}", "utf-8")
        if name != "whole":
            number = name[len("whole-part")]  # the first is unpacked last
            (place / f"{9 - int(number)}").mkdir()
            (place / f"{9 - int(number)}" / f"m.gguf.part0{number}").write_bytes(number.encode())
        return ""

    monkeypatch.setattr(today, "run", run)
    monkeypatch.setattr(today, "FOLDER", tmp_path)
    monkeypatch.setattr(today, "TRAINED", ("whole",))
    assert [path.read_bytes() for path in today.trained()] == [b"12"]


# -- what is new -------------------------------------------------------------------------------------------------------


def test_a_library_tells_its_ops():
    found = today.look(INSTALLED / "lib/libllama.so")
    assert {"MUL_MAT", "GELU", "SWIGLU", "NONE"} <= {*found["op"]}
    assert found["ggml_version"][0].startswith("0.")


@HAS_HEADERS
def test_new_ops_architectures_and_flags_are_named(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "include").mkdir()
    names = b"\0".join([b"19llama_model_mystery", b"15llm_build_llama", b"25llama_model_quantize_implP"])
    installed = (INSTALLED / "lib/libllama.so").read_bytes()
    (tmp_path / "lib/libllama.so").write_bytes(installed + b"\0" + names + b"\0")
    (tmp_path / "include/ggml.h").write_text((HEADERS / "ggml.h").read_text("utf-8") + "GGML_TENSOR_FLAG_NEW", "utf-8")
    monkeypatch.setattr(today, "look", lambda library: {"op": ["NONE", "MUL_MAT", "FROBNICATE", "GLU", "CUSTOM"]})
    assert today.news(tmp_path) == [
        "new ops: FROBNICATE", "new architectures: mystery", "new flags: GGML_TENSOR_FLAG_NEW",
    ]  # fmt: skip
