"""A command that is asked line by line: what it answers, and one line for each way in which it does not."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from command import processes_of
from waiting import BRIEF, HANG, eventually

from llamadiff import UserError
from llamadiff.ext.prompt.lines import talking

ECHO = "for line in sys.stdin: print(json.dumps([json.loads(line)]), flush=True)"


def command(code: str) -> str:
    return f"{shlex.quote(sys.executable)} -c {shlex.quote('import json, os, signal, sys; ' + code)}"


def scripted(folder: Path, code: str) -> str:
    script = folder / "engine.py"
    script.write_text(f"import json, os, signal, sys\n{code}\n", encoding="utf-8")
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
        ("signal.pause()", "did not answer \"a\" within 0.5 s"),
        ("print('hello', flush=True); signal.pause()", "answers \"a\" with hello, which is no JSON"),
        ("print('[' * 99999 + '1', flush=True); signal.pause()", "which is no JSON"),
        ("sys.stdout.write('9' * (5 << 20)); sys.stdout.flush(); signal.pause()", "more than 4 MiB on one line"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_one_line(code: str, said: str) -> None:
    patience = BRIEF if "did not answer" in said else HANG
    with talking(command(code), patience) as ask, pytest.raises(UserError) as caught:
        ask("a")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_command_that_is_not_there() -> None:
    with talking("./nowhere") as ask, pytest.raises(UserError, match="nowhere: cannot be run \\(No such file"):
        ask("a")


def test_it_ends_with_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the processes that it has started, though it listens to nothing."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = (
        "import subprocess\nsubprocess.Popen(['sleep', 'infinity'])\n" + ECHO.replace(": ", ":\n ") + "\nsignal.pause()"
    )
    with talking(scripted(tmp_path, code)) as ask:
        ask(1)
        assert processes_of(tmp_path, "sleep infinity")
        assert processes_of(tmp_path, "engine.py")
    eventually(lambda: not processes_of(tmp_path))


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("tokenizer.json", ".", "is a directory, no command; give {0}/tokenizer.json"),
        ("chat_template.jinja", ".", "is a directory, no command; give {0}/chat_template.jinja"),
        ("tokenizer.model", ".", "is a directory, no command; for a file against its checkpoint: llamadiff weights "
         "MODEL.gguf {0}"),
        ("tokenizer.model", "tokenizer.model", "is SentencePiece's model, no command; for a file against its "
         "checkpoint: llamadiff weights MODEL.gguf {0}"),
    ],
)  # fmt: skip
def test_a_checkpoint_is_no_command(tmp_path: Path, name: str, given: str, says: str) -> None:
    (tmp_path / name).write_text("{}", "utf-8")
    with pytest.raises(UserError) as caught, talking(str(tmp_path / given)):
        pass
    assert str(caught.value) == f"{tmp_path / given}: {says.format(tmp_path)}"
