"""A command that is asked line by line: what it answers, and one line for each way in which it does not."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import psutil
import pytest
from command import processes_of

from llamadiff import UserError
from llamadiff.ext.prompt.lines import talking

ECHO = "for line in sys.stdin: print(json.dumps([json.loads(line)]), flush=True)"


def command(code: str) -> str:
    return f"{shlex.quote(sys.executable)} -c {shlex.quote('import json, os, sys, time; ' + code)}"


def scripted(folder: Path, code: str) -> str:
    script = folder / "engine.py"
    script.write_text(f"import json, os, sys, time\n{code}\n", encoding="utf-8")
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(script))}"


def test_each_value_is_answered(tmp_path: Path) -> None:
    values = ["", "a\nb", "\ud800", "é\u2028", {"k": [1]}, None, "x" * 100_000]
    with talking("cmd: " + scripted(tmp_path, ECHO)) as ask:
        assert [ask(value) for value in values] == [[value] for value in values]


def test_many_are_asked_before_the_first_is_answered(tmp_path: Path) -> None:
    with talking(scripted(tmp_path, ECHO)) as ask:
        assert list(ask.all(range(100_000))) == [[number] for number in range(100_000)]


def test_the_last_answer_needs_no_end_of_line() -> None:
    with talking(command("print(1, end='')")) as ask:
        assert ask("a") == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('x', file=sys.stderr); sys.exit(3)", "code 3 before it answered \"a\"; its last words: x"),
        ("print(1, end=''); sys.stdin.read()", "did not answer"),
        ("os.abort()", "died of SIGABRT before it answered"),
        ("time.sleep(60)", "did not answer \"a\" within 0.5 s"),
        ("print('hello', flush=True); time.sleep(60)", "answers \"a\" with hello, which is no JSON"),
        ("print('[' * 99999 + '1', flush=True); time.sleep(60)", "which is no JSON"),
        ("sys.stdout.write('9' * (5 << 20)); sys.stdout.flush(); time.sleep(60)", "more than 4 MiB on one line"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_one_line(code: str, said: str) -> None:
    patience = 0.5 if "did not answer" in said else 60.0  # seconds: where it never answers, any will do
    with talking(command(code), patience) as ask, pytest.raises(UserError) as caught:
        ask("a")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_command_that_is_not_there() -> None:
    with talking("./nowhere") as ask, pytest.raises(UserError, match="nowhere: cannot be run \\(No such file"):
        ask("a")


def sleepers() -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "617"]]


def test_it_ends_with_whoever_asks(tmp_path: Path) -> None:
    """With the processes that it has started, though it listens to nothing."""
    code = "import subprocess\nsubprocess.Popen(['sleep', '617'])\n" + ECHO.replace(": ", ":\n ") + "\ntime.sleep(600)"
    with talking(scripted(tmp_path, code)) as ask:
        ask(1)
        assert sleepers()
    started = time.monotonic()
    while sleepers():
        assert time.monotonic() - started < 30
    assert not processes_of(tmp_path)
