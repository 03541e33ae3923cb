"""Programs as they are, which a stranger wrote: their values are found in their memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command import run
from optional import needs
from proof.strangers import programs
from proof.strangers.crossing import TOKENS, model_file, opened

from llamadiff import compare

KAHAN = next(each for each in programs.PROGRAMS if each.name == "kahan")
pytestmark = [KAHAN.mark, needs("frida", "elftools")]


def command_of(folder: Path, switch: str = "") -> tuple[Path, str]:
    """A model, and the words that run it with these tokens."""
    model, flat = model_file(folder, "llama", "F32"), folder / "model.flat"
    flat.write_bytes(b"".join(programs.flat(opened(model), TOKENS, raw=False)))
    return model, " ".join([*programs._command(KAHAN, folder, switch), str(flat), str(folder / "dump")])


@pytest.mark.parametrize(("switch", "word"), [("", None), ("BUG_LAST_ROW", "ffn_out"), ("BUG_RESCALE", "kqv_out")])
def test_a_program_is_judged_by_what_lies_in_its_memory(switch, word, tmp_path):
    model, command = command_of(tmp_path, switch)
    found = compare(model, TOKENS, candidate=f"record: {command}")
    assert found.verdict == ("match" if word is None else "wrong")
    assert {row.tap.partition("-")[0] for row in found.wrong} == ({word} if word else set())


@needs("gdb")
def test_a_program_that_is_linked_statically_is_recorded_by_gdb(tmp_path):
    model, command = command_of(tmp_path)
    words = command.split()[1:]
    source = next(Path(programs.__file__).parent.rglob("kahan.c"))
    static = tmp_path / "static"
    subprocess.run(["gcc", "-O1", "-g", "-static", "-pthread", str(source), "-o", str(static), "-lm"], check=True)
    found = compare(model, TOKENS, candidate=f"record: {static} {' '.join(words)}")
    assert found.verdict == "match"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("./nothere", "./nothere: cannot be run (no such program)"),
        ("./script", "./script: is no compiled program, nor python or node; name the engine itself; docs/engines.md"),
        ("python3 engine.py", "engine.py: ended with exit code 2"),
        ("python3", "python3: cannot be recorded (no program behind python: expected python engine.py"),
        (".", ".: cannot be run (a directory)"),
        ("nice ./script 1", "nice: starts another program; give that one: -- ./script 1"),
        ("false", "false: ended with exit code 1"),
        ("", "no command; expected record: ./engine"),
    ],
)
def test_a_program_that_cannot_be_recorded_is_one_line(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script").write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    Path("script").chmod(0o755)
    model, _ = command_of(tmp_path)
    done = run("compare", model, "--tokens", "1,2,3", "--candidate", f"record: {words}")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
