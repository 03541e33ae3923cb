"""Output that goes to another code page, as on Windows where it is no console: all that is said can be written."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from faulty import BUGS
from optional import needs_slices
from proof.injected.runs import record_faulty
from traces import TOKENS, save

from llamadiff.report.status_line import progress

OURS = b"\\u"  # how a character is written that a stream cannot show: we use none


@needs_slices("explain", "state")
@pytest.mark.parametrize("page", ["cp437", "cp1252", "ascii"])
def test_reports_have_no_character_that_a_code_page_lacks(page, small_model, tmp_path):
    wrong = save(record_faulty(BUGS[0], small_model(), TOKENS), tmp_path / "wrong.safetensors")
    model = small_model()
    for words, code in (
        (("compare", model, wrong, "--full"), 1), (("compare", "--help"), 0), (("explain",), 0), (("taps", model), 0),
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "llamadiff", *map(str, words)],
            env={**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": page}, capture_output=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr, OURS in done.stdout) == (code, b"", False), done.stdout.decode(page)


def test_what_it_lacks_of_somebody_elses_is_named(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "llamadiff", "taps", "\u2192.gguf"],
        env={**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": "cp437"}, capture_output=True, check=False,
    )  # fmt: skip
    assert done.stderr == b"llamadiff: \\u2192.gguf: no such file\n"


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("page", "is_plain"), [("cp437", True), ("utf-8", False)])
def test_the_status_line_is_of_characters_that_it_has(page, is_plain, monkeypatch):
    stream = Terminal(io.BytesIO(), page, "backslashreplace", write_through=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with progress() as tell:
        tell("reading", 1, 2)
    written = stream.buffer.getvalue()
    assert b"reading" in written
    assert (OURS not in written, written.isascii()) == (True, is_plain)
