"""Command lines are cut and quoted as the system's own shells do it: Windows's way, asked for here."""

from __future__ import annotations

import pytest

from llamadiff.system import commands

# A line, and the words that a program is given: the table of Microsoft's "Parsing C command-line arguments"; and paths.
CUT = {
    r'"abc" d e': ["abc", "d", "e"],
    r'a\\b d"e f"g h': [r"a\\b", "de fg", "h"],
    r"a\\\"b c d": [r"a\"b", "c", "d"],
    r'a\\\\"b c" d e': [r"a\\b c", "d", "e"],
    r"C:\engine\engine.exe --dump {out}": [r"C:\engine\engine.exe", "--dump", "{out}"],
    r'"C:\Program Files\e.exe" --model=C:\new\m.gguf': [r"C:\Program Files\e.exe", r"--model=C:\new\m.gguf"],
    r'e.exe "C:\out\\"  x': ["e.exe", "C:\\out\\", "x"],
    "e.exe 'a b'": ["e.exe", "'a", "b'"],
    " \t ": [],
}


@pytest.fixture
def windows(monkeypatch):
    monkeypatch.setattr(commands, "as_windows", lambda: True)


@pytest.mark.parametrize("line", CUT)
def test_windows_cuts_a_line(line, windows):
    assert commands.split_line(line) == CUT[line]


def test_a_line_that_programs_read_in_two_ways_is_refused(windows):
    with pytest.raises(ValueError, match="ambiguous"):
        commands.split_line('"a""b c" d')


@pytest.mark.parametrize(
    "word", ["plain", r"C:\a b\c", "C:\\a b\\", 'say "hi"', "", r"C:\new", "a&b", "100%", "it's", "é"]
)
def test_what_is_quoted_for_windows_is_one_word(word, windows):
    """A shell takes its own signs away first; a program is given what is left."""
    import mslex

    assert mslex.split(commands.quote(word)) == [word]


@pytest.mark.parametrize(("word", "seen"), [("a\nb", r"a\x0ab"), ("\x1b[31m", r"\x1b[31m"), ("\u202e", r"\u202e")])
def test_what_cannot_be_seen_is_named(word, seen, windows):
    assert commands.quote(word) == seen


@pytest.mark.parametrize(
    ("line", "words"),
    [("'/opt/my engine/e' --dump {out}", ["/opt/my engine/e", "--dump", "{out}"]), (r"a\ b", ["a b"])],
)
def test_elsewhere_it_is_a_posix_shell(line, words):
    assert commands.split_line(line) == words
