"""Command lines that are not understood: a line says what, where, the value, and what may be meant."""

from __future__ import annotations

import pytest

from llamadiff import UserError, plugins
from llamadiff.cli.app import app

WHOLE = "expected a whole number, 0 or more"
SAID = {
    "compare": 'compare: MODEL is missing: a .gguf file; such as llamadiff compare model.gguf "Once upon a time"',
    "compare m.gguf --candidat x": "--candidat: no such option of compare; did you mean --candidate?",
    "compare m.gguf --partal": "--partal: no such option of compare; did you mean --partial?",
    "compare m.gguf --verbose": "--verbose: no such option of compare; did you mean --full?",
    "compare m.gguf --zzz": "--zzz: no such option of compare",
    "compare -m m.gguf": "-m: no option of compare: the model comes first, llamadiff compare MODEL",
    "compare m.gguf --n-predict x": f"--n-predict x: {WHOLE}",
    "compare m.gguf --n-predict=1.5": f"--n-predict 1.5: {WHOLE}",
    "compare m.gguf --n-predict -1": f"--n-predict -1: {WHOLE}",
    "compare m.gguf --timeout fast": "--timeout fast: expected a number, 1 or more",
    "compare m.gguf --tokens": "--tokens: IDS is missing behind it: token ids instead of a prompt: 1,15043,29892",
    "compare m.gguf --chat=yes": "--chat: takes no value; give it alone",
    "compare m.gguf Once upon a time": 'compare: words that belong together stand in quotes: "Once upon a time"',
    "check --annotate": "check: PATHS is missing: recorded traces, or directories of them; such as llamadiff check",
    "check d --jobs 9999": f"--jobs 9999: {WHOLE}, 512 or less",
    "check d --max-mean-kl lots": "--max-mean-kl lots: expected a number, 0 or more",
    "capture m.gguf Once": "capture: -o OUTPUT is missing: the trace: FILE.safetensors; such as llamadiff capture",
    "capture m.gguf --candidate x": "--candidate: no option of capture, but of compare, heads, check",
    "diff a b c": "c: one argument too many; diff takes BASELINE CANDIDATE",
    "doctor x": "x: one argument too many; doctor takes no argument",
    "chekc d": "chekc: no such command; did you mean llamadiff check?",
    "verify d": "verify: no such command; did you mean llamadiff check?",
    "foo": "foo: no such command; all of them are in the help",
    "--versio": "--versio: no option before a command; did you mean --version?",
}


def said_of(line, monkeypatch):
    monkeypatch.setattr("sys.argv", ["llamadiff", *line.split()])
    with pytest.raises(UserError) as caught:
        app(line.split(), standalone_mode=False)
    return str(caught.value)


@pytest.mark.parametrize("line", SAID)
def test_what_is_not_understood_is_said_in_our_words(line, monkeypatch):
    name = line.split()[0]
    name = f"{name} " if name in ("compare", "check", "capture", "diff", "doctor") else ""
    said = said_of(line, monkeypatch)
    assert said.startswith(SAID[line])
    assert said.endswith(f" (llamadiff {name}--help)")
    assert "\n" not in said


def test_a_line_that_is_understood_is_let_by(monkeypatch, capsys):
    app(["--version"], standalone_mode=False)
    assert capsys.readouterr().out.startswith("llamadiff ")


def test_without_the_slice_the_parser_says_it(monkeypatch):
    monkeypatch.setattr(plugins, "slices", dict)
    with pytest.raises(Exception, match="No such option: --zzz") as caught:
        app(["compare", "m.gguf", "--zzz"], standalone_mode=False)
    assert not isinstance(caught.value, UserError)
