"""The command line as one meets it: help, versions, searches, what is a prompt, exit codes, and formats."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import jsonschema
import pytest
from command import in_process_of_its_own, run
from optional import needs_slices
from places import REPORT_SCHEMA
from traces import TOKENS

import llamadiff
from llamadiff.cli import command as command_line
from llamadiff.cli.app import app
from llamadiff.cli.renamed import in_new_names
from llamadiff.llamacpp import doctor
from llamadiff.llamacpp.doctor import BAD, NOTE, OK, Examined
from llamadiff.llamacpp.request import Settings
from llamadiff.report import listing
from llamadiff.report.formats import About, formats
from llamadiff.system import exits
from llamadiff.system.errors import UserError

PANELS = ("Input", "Your engine", "What is recorded", "llama.cpp", "Judgement", "Report")
# help


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_compare_has_panels_and_examples(flag, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = run("compare", flag).stdout
    places = [text.find(f" {panel} ─") for panel in PANELS]
    assert -1 not in places
    assert places == sorted(places)
    assert "llamadiff compare model.gguf mine.safetensors" in text
    assert "kv=q8_0, flash_attn=on" in text
    assert "[wrong|noise|never]" in text
    assert not re.search(r"--(chat|partial|full)\s+<bool>", text)


def test_the_commands_fit_a_page():
    """Of 80 columns and 40 lines; a line of at most ten words a command."""
    lines = run("--help").stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    for command in app.registered_commands:
        name, words = command.callback.__name__, command.callback.__doc__.split("\n")[0]
        assert len(words.split()) <= 10, name
        assert [line.split(None, 1) for line in lines].count([name, words]) == 1


@needs_slices("explain")
def test_every_command_has_help_in_a_sentence_and_most_an_example():
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert {"compare", "taps", "explain", "doctor"} <= set(names)
    for command in app.registered_commands:
        assert command.callback.__doc__
        assert command.rich_help_panel in command_line.PANELS
    without = {"demo", "doctor"}
    assert all(bool(command.epilog) == (command.callback.__name__ not in without)
               for command in app.registered_commands)  # fmt: skip


def test_examples_name_options_that_exist():
    for command in app.registered_commands:
        known = run(command.callback.__name__, "--help").stdout
        assert all(option in known for option in re.findall(r"(?<= )--[a-z-]+(?= )", command.epilog or "")
                   if option not in ("--dump",))  # fmt: skip


def test_the_version_is_printed():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"llamadiff {llamadiff.__version__}\n")


@needs_slices("explain")
def test_a_shell_completes_commands(monkeypatch):
    monkeypatch.setenv("_LLAMADIFF_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "llamadiff di")
    monkeypatch.setenv("COMP_CWORD", "1")
    done = in_process_of_its_own()
    assert done.stdout.split() == ["diff"]


# lists


def test_taps_as_json(small_model):
    listed = json.loads(run("taps", small_model(), "--n-tokens", "5", "--json").stdout)
    by_name = {each["tap"]: each for each in listed}
    assert by_name["Qcur_rope-1"]["shape"][0] == 5
    assert by_name["Qcur_rope-1"]["layer"] == 1
    assert by_name["result_output"]["first"] is True


@needs_slices("graph")
def test_a_graph_shows_one_layer_with_the_names_of_taps(small_model):
    text = run("graph", small_model(), "--layer", "1").stdout
    assert "layer 1" in text
    assert "layer 0" not in text
    assert "tap Qcur_rope-1" in text
    done = run("graph", small_model(), "--layer", "7")
    assert done.stderr == "llamadiff: --layer 7: the graph has the layers 0 to 1\n"


def examined(monkeypatch, dies_repacked, dies=False):
    """The doctor's findings on a machine where llama.cpp dies so."""

    def capture(request):
        if (request.settings.repack and dies_repacked) or dies:
            raise UserError(f"{request.model}: llama.cpp died of SIGSEGV")

    monkeypatch.setattr(doctor, "capture", capture)
    return [doctor.decodes("plain", Settings()), doctor.decodes("repacked", Settings(repack=True))]


def test_the_doctor_is_content_with_a_healthy_default(monkeypatch, capsys):
    found = examined(monkeypatch, dies_repacked=True)
    assert [check.state for check in found] == [OK, NOTE]
    assert found[1].found == "llama.cpp died of SIGSEGV; this is off unless you ask for it: leave it so"
    assert listing.print_checks(found) is True
    assert "note" in capsys.readouterr().out


def test_the_doctor_says_what_is_bad(monkeypatch):
    found = examined(monkeypatch, dies_repacked=True, dies=True)
    assert [check.state for check in found] == [BAD, NOTE]
    assert listing.print_checks(found) is False
    assert listing.print_checks([Examined("x", OK, "")]) is True


@needs_slices("builds", "cpus", "watch")
def test_the_doctor_finds_every_op_of_the_installed_header():
    found = run("doctor").stdout
    line = next(line for line in found.splitlines() if "ops judged" in line)
    assert line.split()[0] == "ok"
    assert int(re.search(r"(\d+) of \d+ in its ggml.h", line)[1]) >= 112


def test_the_demos_words_break_between_words(monkeypatch, capsys):
    from llamadiff.report.terminal.report import say

    monkeypatch.setenv("COLUMNS", "40")
    say("The same again, with a bug in the engine: its RoPE rotates halves (i, i+32).")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["the", "(i,", "i+32)."]


# prompts and traces


def test_two_candidates_are_one_too_many(small_model, faulty):
    done = run("compare", small_model(), faulty, "--candidate", "x.npz")
    assert done.returncode == 2
    assert done.stderr == f"llamadiff: {faulty}: is a trace, and --candidate x.npz is another; give one of them\n"


def test_a_dash_for_the_prompt_is_standard_input(monkeypatch):
    read = []
    monkeypatch.setattr("llamadiff.cli.inputs._read_text", lambda *about: read.append(about[0]) or "Once\n")
    from llamadiff.cli.inputs import prompt_of

    assert prompt_of("-") == "Once"
    assert prompt_of("@p.txt") == "Once"
    assert prompt_of("Once") == "Once"
    assert prompt_of("@@all") == "@all"
    assert prompt_of("@") == "@"
    assert read == ["-", "p.txt"]


# what an option was called


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--kv-type q8_0 --flash-attn", "--llama-cpp kv=q8_0 --llama-cpp flash_attn=on"),
        ("--device=CUDA0 --threads 2", "--llama-cpp device=CUDA0 --llama-cpp threads=2"),
        ("--runner x", "--llama-cpp runner=x"),
        ("--explain-output", "--explain 600"),
        ("--taps l_out-* --layers 0-3 --save kept", "--only l_out-* --only 0-3 -o kept/"),
        ("--json - --html page", "-o json:- -o html:page"),
        ("--prompt-file p.txt --tokens-file t", "--tokens @t @p.txt"),
        ("--precision f64 --verbose", "--engine numpy:f64 --full"),
        ("--candidate cmd:x --full -- --json", "--candidate cmd:x --full -- --json"),
    ],
)
def test_an_old_name_goes_on_and_the_new_one_is_said(old, new, capsys):
    assert in_new_names(["compare", *old.split()]) == ["compare", *new.split()]
    said = capsys.readouterr().err
    assert said.count("is now") == sum(word.startswith("--") and word not in new for word in old.split())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("compare --budget 60 --explain-output", "compare --explain 60"),
        ("compare --explain-output --budget=60", "compare --explain 60"),
        ("compare --prompt-file p.txt m.gguf --full", "compare m.gguf --full @p.txt"),
        ("compare a.gguf Once --candidate b.gguf --spend 64M", "loss a.gguf b.gguf Once --spend 64M"),
        ("taps --json", "taps --json"),  # other commands keep their words
        ("demo --full", "demo --full"),
    ],
)
def test_an_old_line_may_stand_in_another_order(old, new):
    assert in_new_names(old.split()) == new.split()


def test_a_command_line_with_old_names_runs(small_model, faulty):
    done = run("compare", small_model(), faulty, "--json", "-", "--kv-type", "f32")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (1, "wrong")
    assert "--json - is now -o json:-; the old name goes with the next release" in done.stderr


# exit codes


FAULT = "a fault in llamadiff, please report it: ValueError: seven"


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ValueError("seven"), 70, FAULT), (UserError("x"), 2, "x"), (MemoryError(), 2, ""), (OSError(28, "Full"), 2, "")
    ],
)  # fmt: skip
def test_a_fault_of_our_own_has_a_code_of_its_own(error, code, says):
    said = []

    def command():
        raise error

    assert exits.run(command, said.append) == code
    assert said[0].startswith(says)
    assert (exits.OWN_FAULT, exits.COULD_NOT_TELL) == (70, 2)


STOP = "os.kill(os.getpid(), signal.SIGINT)"
MADE = f'type("Made", (), {{"field": type("Field", (), {{"__set_name__": lambda *_: {STOP}}})()}})'


@pytest.mark.parametrize("where", [STOP, MADE])
def test_a_shell_shows_130_after_ctrl_c_and_the_command_one_line(where):
    """Also where it finds Python making a class, as while modules are imported."""
    code = f"""
import os, signal
from llamadiff.system import exits
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a parent may have turned off
exits.run(lambda: {where}, print)
"""
    command = ["sh", "-c", '"$0" -c "$1"; echo $?', sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
    assert done.stdout.split() == ["stopped", "130"]


@pytest.fixture
def handlers():
    hook, before = sys.unraisablehook, {number: signal.getsignal(number) for number in exits.SIGNALS}
    yield
    sys.unraisablehook = hook
    for number, handler in before.items():
        signal.signal(number, handler)


# formats


@pytest.fixture(scope="module")
def result(small_model, faulty):
    return llamadiff.compare(small_model(), candidate=faulty)


@pytest.mark.parametrize("form", formats(), ids=lambda form: form.name)
def test_every_format_is_an_option_and_writes_a_report(form, result, small_model, faulty, tmp_path):
    text = form.text(result, About(("llamadiff", "compare")))
    assert "Qcur_rope-0" in text
    target = tmp_path / "made" / "of it" / "report"
    done = run("compare", small_model(), faulty, "-o", f"{form.name}:{target}")
    assert done.returncode == 1, done.stderr
    assert "Qcur_rope-0" in target.read_text("utf-8")
    refused = run("compare", small_model(), faulty, "-o", f"{form.name}:{faulty}").stderr
    assert f"-o: {faulty} is the candidate, which would be overwritten" in refused


@pytest.mark.parametrize("form", [form for form in formats() if form.of_several], ids=lambda form: form.name)
def test_formats_of_several_traces_are_options_of_check(form, small_model, faulty):
    done = run("check", faulty, "--model", small_model(), "-o", f"{form.name}:-")
    assert done.returncode == 1
    assert str(faulty) in done.stdout
    if form.name.startswith("json"):
        assert list(json.loads(done.stdout)) == [str(faulty)]


@needs_slices("explain")
def test_json_says_who_wrote_it_and_how(small_model, faulty, tmp_path):
    target = tmp_path / "report.json"
    run("compare", small_model(), faulty, "-o", f"json:{target}")
    report = json.loads(target.read_text("utf-8"))
    jsonschema.validate(report, REPORT_SCHEMA)
    assert report["llamadiff"]["version"] == llamadiff.__version__
    words = ["llamadiff", "compare", str(small_model()), str(faulty), "-o", f"json:{target}"]
    assert report["llamadiff"]["command"] == words
    assert report["headline"] == "RoPE, layers 0, 1: rotates (i, i+32); this model needs (2i, 2i+1)"
    assert report["summary"] == "; ".join([report["headline"], *report["proof"]])


def test_json_sums_up_lists_per_token_and_the_full_one_has_them(result):
    short, full = (json.loads(form.text(result, About())) for form in formats()[:2])
    jsonschema.validate(full, REPORT_SCHEMA)
    row, whole = (next(row for row in report["taps"] if row["tap"] == "Qcur_rope-0") for report in (short, full))
    assert "per_token" not in row["local"]
    errors = whole["local"]["per_token"]
    assert len(errors) == len(TOKENS)
    over = {"count": 4, "median": sum(sorted(errors)[1:3]) / 2, "largest": max(errors),
            "token": errors.index(max(errors))}  # fmt: skip
    assert row["local"]["over_tokens"] == whole["local"]["over_tokens"] == over
    assert row["drift"]["over_tokens"]["count"] == 4
    assert len(json.dumps(short)) < len(json.dumps(full))


@needs_slices("explain")
def test_a_comparison_is_one_line_and_a_piece_of_html_in_a_notebook(result):
    line = repr(result)
    assert line.startswith("<Comparison WRONG: RoPE, layers 0, 1: rotates")
    assert "\n" not in line
    page = result._repr_html_()
    assert "WRONG" in page
    assert "<td>Qcur_rope-0</td>" in page


def test_html_of_a_notebook_escapes_what_is_foreign(result):
    from dataclasses import replace

    hostile = replace(result, headline="<script>x</script>", rows=tuple(
        replace(row, tap="<b>") for row in result.rows))  # fmt: skip
    assert "<script>" not in hostile._repr_html_()
    assert "<td>&lt;b&gt;</td>" in hostile._repr_html_()


def test_only_what_is_public_is_listed():
    assert dir(llamadiff) == sorted([*llamadiff.__all__, "__version__", "torch"])
    assert all(getattr(llamadiff, name) is not None for name in llamadiff.__all__)
