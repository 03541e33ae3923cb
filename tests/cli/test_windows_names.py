"""Paths with a drive's letter and backslashes, where words are told from paths. Here they are names of files."""

from __future__ import annotations

import ntpath
from pathlib import Path

import pytest
from command import run
from optional import needs_slices

from llamadiff import UserError
from llamadiff.candidates import command
from llamadiff.candidates.gguf_file import is_model_file
from llamadiff.cli import complaint, renamed, reports
from llamadiff.cli.complaint import complain
from llamadiff.cli.reports import Reports
from llamadiff.llamacpp.request import Settings
from llamadiff.llamacpp.settings_words import settings_of
from llamadiff.report.formats import formats
from llamadiff.system import commands

IDS = ("--tokens", "1,17,5")


@needs_slices("file", "page")
def test_the_commands_take_them(small_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, trace, report = r"C:\new\m.gguf", r"C:\dumps\t.safetensors", r"C:\out\r.json"
    (tmp_path / model).write_bytes(small_model().read_bytes())
    (tmp_path / r"C:\names.toml").write_text("", encoding="utf-8")
    (tmp_path / r"C:\ids.txt").write_text("1,17,5", encoding="utf-8")
    for words in (
        ("capture", model, "--tokens", r"@C:\ids.txt", "-o", trace),
        ("compare", model, trace, "-o", f"json:{report}", "-o", r"C:\out\r.md"),
        ("compare", model, *IDS, "--candidate", trace, "--map", r"C:\names.toml"),
        ("check", trace, "--model", model, "-o", r"junit:C:\out\r.xml"),
        ("weights", model, model),
    ):
        done = run(*words)
        assert done.returncode == 0, done.stderr
    written = {path.name for path in tmp_path.iterdir()}
    assert {trace, report, r"C:\out\r.md", r"C:\out\r.xml"} <= written


@pytest.mark.parametrize(
    ("spec", "is_model"),
    [(r"C:\models\other.gguf", True), ("C:/models/other.gguf", True), ("/data/a:b.gguf", True), ("other.gguf", True),
     ("cmd: ./engine m.gguf", False), ("transformers:other.gguf", False), ("llama.cpp:dir=m.gguf", False)],
)  # fmt: skip
def test_a_drive_is_no_kind_of_candidate(spec, is_model):
    assert is_model_file(spec) == is_model


@pytest.mark.parametrize("word", [r"C:\llama.cpp", r"dir=C:\llama.cpp", r"kv=f16,dir=C:\llama.cpp"])
def test_a_build_lies_on_a_drive(word):
    assert settings_of([word]).llama_cpp == r"C:\llama.cpp"


@pytest.mark.parametrize("folder", ["/opt/llama.cpp=b9", "./kv=f16", "builds/a,b=1"])
def test_a_builds_name_may_have_an_equals_sign(folder):
    assert settings_of([folder]) == Settings(llama_cpp=str(Path(folder)))


@pytest.mark.parametrize(("text", "folder"), [("C:\\kept\\", True), ("C:/kept/", True), (r"C:\kept\r.json", False)])
def test_a_directory_ends_in_either_separator(text, folder, monkeypatch):
    monkeypatch.setattr(reports, "basename", ntpath.basename)
    made = Reports.of([text], formats(), keeps=True)
    assert (made.folder is not None, [target for _, target in made.targets]) == (folder, [] if folder else [text])


@pytest.mark.parametrize(("given", "now"), [(r"C:\kept", "C:\\kept\\"), ("C:\\kept\\", "C:\\kept\\")])
def test_the_old_name_for_it_too(given, now, monkeypatch):
    monkeypatch.setattr(renamed, "join", ntpath.join)
    assert renamed.in_new_names(["compare", "m.gguf", "--save", given])[-2:] == ["-o", now]


def test_a_complaint_has_a_path_as_it_is_typed(monkeypatch, capsys):
    with monkeypatch.context() as windows:
        windows.setattr(complaint.os, "sep", "\\")
        complain("C:\\new\\m.gguf: no such file\n\x1b[31m")
    assert capsys.readouterr().err == "llamadiff: C:\\new\\m.gguf: no such file\\n\\x1b[31m\n"
    complain("a\\b: no such file")
    assert capsys.readouterr().err == "llamadiff: a\\\\b: no such file\n"


def test_a_command_is_cut_as_windows_cuts_it(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "as_windows", lambda: True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / r"C:\my engine\e.exe").touch()
    (tmp_path / r"C:\new\m.gguf").touch()
    spec = r'cmd: "C:\my engine\e.exe" --model=C:\new\m.gguf --dump {out}'
    assert [str(path) for path in command.files(spec)] == [r"C:\my engine\e.exe", r"C:\new\m.gguf"]
    with pytest.raises(UserError, match=r"--candidate cmd:  : no command"):
        command.open_source("cmd:  ")
    with pytest.raises(UserError, match=r"--candidate cmd: .*ambiguous"):
        command.open_source('cmd: "a""b c" d')
