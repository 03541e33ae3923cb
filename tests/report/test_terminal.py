"""The terminal renderer: what it shows, what it obeys, and where its lines end."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, takewhile
from pathlib import Path
from typing import Literal

import pytest
from rich.cells import cell_len
from rich.console import Console

from llamadiff.report.check_lines import put_check
from llamadiff.report.terminal.escape import escape_line, number, quote, times, tiny
from llamadiff.report.terminal.finding import page_of
from llamadiff.report.terminal.page import Page
from llamadiff.report.terminal.report import make_console, render
from llamadiff.result.comparison import Comparison
from llamadiff.words.repairs import repairs_of
from report.made_up import DENSE, HOSTILE, REPORTS, SHAPES, comparison, explained, hostile, local, row, rows
from report.snapshots import printed


def table(text: str) -> list[str]:
    """The lines of the tap table: its titles, and what begins with a layer or with none."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if re.match(r"(layer +)?tap ", line))
    return [lines[start], *takewhile(re.compile(r" {4}|\d").match, lines[start + 1 :])]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", SHAPES)
def test_no_line_is_wider_than_the_console(name: str, width: int, full: bool) -> None:
    text = printed(SHAPES[name], width, full=full)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("name", SHAPES)
def test_at_80_cells_own_error_and_what_was_inherited_are_there(name: str) -> None:
    its = SHAPES[name]
    head, *lines = table(printed(its)) if its.rows else [""]
    inherits = [row for row in its.rows if row.drift is not None and row.verdict != "wrong"]
    assert ("inherited" in head) == bool(inherits)
    assert ("own error" in head) == any(row.local is not None for row in its.rows)
    assert "…" not in "".join([head, *lines]) or "hostile" in name


@pytest.mark.parametrize("width", [1, 7, 20, 33, 40, 60, 79])
@pytest.mark.parametrize("name", SHAPES)
def test_narrow_consoles_fold_and_drop_but_do_not_crash(name: str, width: int) -> None:
    printed(SHAPES[name], width, full=True)
    text = printed(SHAPES[name], width)
    assert max(cell_len(line) for line in text.splitlines()) <= max(width, 2)


@pytest.mark.parametrize("name", ["right", "wrong RoPE", "eighty layers, rounded", "decode steps"])
def test_at_40_cells_a_line_of_the_table_is_still_one_line(name: str) -> None:
    lines = table(printed(SHAPES[name], 40))
    assert lines[0].split()[:4] == ["layer", "tap", "own", "error"]
    assert all(len(line.split()) >= 3 for line in lines)
    assert all(" match" in line or "WRONG" in line for line in lines[1:])


@pytest.mark.parametrize("name", SHAPES)
def test_the_verdict_is_a_word_in_the_first_and_in_the_last_line(name: str) -> None:
    lines = printed(SHAPES[name]).splitlines()
    assert all(line.startswith(f"{SHAPES[name].verdict.upper()}  ") for line in (lines[0], lines[-1]))
    assert lines[-1].endswith("(0.5 s)")


# the table


@pytest.mark.parametrize("layers", [3, 24, 80, 200])
@pytest.mark.parametrize("everywhere", [False, True])
def test_one_bug_takes_25_lines_however_deep_the_model_is(layers: int, everywhere: bool) -> None:
    wrong = {f"{word}-{i}" for word in ("Qcur_rope", "Kcur_rope")
             for i in (range(layers) if everywhere else [layers // 2])}  # fmt: skip
    its = explained(rows(layers, wrong=tuple(wrong)), wrong)
    lines = printed(its, 100).splitlines()
    assert len(lines) <= 25
    assert lines[0] == lines[-1].removesuffix("  (0.5 s)")
    assert sum("WRONG" in line for line in table(printed(its, 100))) == (3 if everywhere else 2)


def test_an_80_layer_report_keeps_headline_and_last_line_on_a_screen_of_40_rows() -> None:
    thirty = tuple(f"Qcur_rope-{i}" for i in range(0, 60, 2))
    for its in (SHAPES["eighty layers, rounded"], comparison(rows(80)), comparison(rows(80, wrong=thirty))):
        assert len(printed(its, 80).splitlines()) <= 40
    assert len(table(printed(comparison(rows(80))))) == 2  # all of them on a line


def test_wrong_layers_that_alternate_are_one_line() -> None:
    """As a bug in the layers without a window, or in a cache that every other layer shares."""
    wrong = {f"Qcur_rope-{i}" for i in range(0, 60, 2)}
    text = printed(explained(rows(80, wrong=tuple(wrong)), wrong), 100)
    assert [line.split()[:2] for line in table(text)[1:]] == [
        ["0..79", "359"], ["0", "Qcur_rope"], ["2..58", "Qcur_rope"]]  # fmt: skip
    assert "layers 0, 2, ..., 58: rotates" in text.splitlines()[0]
    assert len(text.splitlines()) <= 25


def test_wrong_layers_that_are_not_alike_are_cut_after_a_dozen_lines_and_counted() -> None:
    different = tuple(f"{word}-{i}" for i, pair in enumerate(combinations(DENSE, 2)) for word in pair)
    its = comparison(rows(60, wrong=different))
    lines = table(printed(its))
    assert len(lines) == 15
    assert lines[-1].endswith("lines: --full shows them")
    assert "--full" not in "".join(table(printed(its, full=True)))


def test_the_worst_tap_is_the_one_nearest_its_limit() -> None:
    its = [
        row("kq-0", local(9e-11)),
        row("ffn_inp-0", local(9e-13, limit=1e-12)),
        row("l_out-0", local(9e-13, limit=1e-10)),
    ]
    assert table(printed(comparison(its)))[1].split()[4:6] == ["9.0e-13", "0.9x"]
    its.append(row("ffn_moe_topk-0", local(1e-30, limit=0.0)))
    assert "ffn_moe_topk  WRONG" in "".join(table(printed(comparison(its))))


# the map


def test_where_layers_outnumber_cells_a_cell_has_the_worst_of_its_layers() -> None:
    lines = printed(comparison(rows(200, wrong=("Qcur_rope-150",))), 80).splitlines()
    cells = next(line for line in lines if line.startswith("Qcur_rope  ")).split()[1]
    assert (len(cells), cells.index("✗")) == (67, 50)


def test_the_full_map_has_every_tap_and_a_small_model_has_none() -> None:
    text = printed(SHAPES["eighty layers, rounded"], 100, full=True)
    assert all(f"\n{word} " in text for word in DENSE)
    assert "✗" not in printed(comparison(rows(16, wrong=("Qcur_rope-4",))))


# values and notes


def test_missing_facts_leave_no_trace() -> None:
    bare = comparison(
        [replace(row("l_out-0", drift=None, ratio=None), baseline=None, candidate=None)],
        model={"file": None, "architecture": None, "layers": 0, "weight_types": {}}, baseline={}, candidate={},
        logits=None, timing={}, next_steps=(), tokens=(),
    )  # fmt: skip
    text = printed(bare, full=True)
    assert not any(word in text for word in ("None", "nats", "next  "))
    assert table(printed(bare))[0].split() == ["layer", "tap", "own", "error", "x", "limit"]


def test_known_causes_are_linked_to_their_threads_where_a_terminal_can() -> None:
    its = explained(rows(3, wrong=("Qcur_rope-1",)), {"Qcur_rope-1"})
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system="truecolor", legacy_windows=False)
    render(its, console, full=True)
    assert "https://github.com/ggml-org/llama.cpp/issues/22611" in file.getvalue()
    assert "github.com" not in printed(its)
    assert page_of("imp#503") is None  # nobody knows whose


def test_of_many_tokens_the_middle_is_left_out() -> None:
    many = tuple((1000 + i, None) for i in range(100))
    text = printed(comparison([], tokens=many, n_prefill=100, logits=None), full=True)
    shown_ids = [int(word) for word in text.split() if word.isdigit() and int(word) >= 1000]
    assert shown_ids == [*range(1000, 1024), *range(1092, 1100)]
    assert "... 68 tokens left out ..." in text
    assert "left out" not in printed(comparison([], tokens=many[:40], logits=None), full=True)


def test_wide_characters_keep_columns_aligned() -> None:
    lines = printed(SHAPES["wide texts"], full=True).splitlines()
    start = next(number for number, line in enumerate(lines) if line.lstrip().startswith("rank"))
    assert len({cell_len(line) for line in lines[start : start + 11]}) == 1
    grid = [line for line in lines if ':"日' in line]
    places = [[cell_len(line[:at]) for at in range(len(line)) if line[at : at + 2] == ':"'] for line in grid]
    assert len(places) == 9
    assert all(place == places[0][: len(place)] for place in places)


def test_nothing_from_a_file_is_obeyed() -> None:
    """Escape sequences, newlines, bidi overrides and markup, wherever a file's words can come through."""
    for width in (20, 80, 400):
        text = printed(hostile(HOSTILE), width, full=True)
        assert not set(text) & set("\x1b\x07\r\u202e\u2066\x9b\ud800")
        text.encode("utf-8")
    assert r"\x1b[31mred\x1b[0m\x07\r\n[bold]x[/bold]\u202egnp.exe\u2066\x9b2J\ud800[/]" in text
    assert "\nred" not in text


def test_a_pipe_gets_plain_text_120_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = make_console(file)
    render(REPORTS["wrong RoPE"], console)
    assert console.width == 120
    assert "\x1b" not in file.getvalue()
    monkeypatch.setenv("COLUMNS", "93")
    assert make_console(io.StringIO()).width == 93
    monkeypatch.setenv("COLUMNS", "nonsense")
    assert make_console(io.StringIO()).width == 120
    assert make_console(io.StringIO(), 64).width == 64


def test_colour_on_a_terminal_and_none_of_it_under_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_terminal(colours: Literal["standard", "256"]) -> str:
        file = io.StringIO()
        render(
            REPORTS["wrong RoPE"],
            Console(file=file, width=80, force_terminal=True, color_system=colours, legacy_windows=False),
        )
        return file.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[1;7m WRONG " in on_terminal("standard")  # a theme's 16 colours may be any
    assert "\x1b[1;38;5;231;48;5;160m WRONG " in on_terminal("256")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = on_terminal("256")
    assert ";5;" not in plain
    assert "WRONG" in plain


@pytest.mark.parametrize("name", SHAPES)
def test_an_ascii_console_gets_ascii(name: str) -> None:
    assert max(map(len, _in_ascii(SHAPES[name]).splitlines())) <= 80


def _in_ascii(result: Comparison) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    render(result, make_console(file, 80))
    file.flush()
    assert isinstance(file.buffer, io.BytesIO)
    return file.buffer.getvalue().decode("ascii")


def test_an_ascii_console_escapes_what_it_cannot_show_and_has_borders_of_ascii() -> None:
    assert r"\u65e5" in _in_ascii(SHAPES["wide texts"])
    assert "Qcur_rope  WRONG" in _in_ascii(SHAPES["wrong RoPE"])
    assert ".x." in _in_ascii(SHAPES["eighty layers, rounded"])


def test_rendering_loads_no_pandas() -> None:
    code = "import sys, llamadiff.report.terminal; sys.exit('pandas' in sys.modules or 'llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b", "a b"), ("\n", r"\n"), (r"\n", r"\\n"), ("\t", r"\t"), ("\x00", r"\x00"), ("\x7f", r"\x7f"),
        ("\u200b", r"\u200b"), ("\u202e", r"\u202e"), ("\u2028", r"\u2028"), ("\xa0", r"\xa0"), ("\ud83d", r"\ud83d"),
        ("\U000e0041", r"\U000e0041"), ("\u0301", r"\u0301"), ("e\u0301", "e\u0301"),
        ("e\u0301\u0301\u0301", "e\u0301\u0301\\u0301"),
        ("\ufffd", "\ufffd"), ("é日🦙", "é日🦙"), ("❤\ufe0f", r"❤\ufe0f"),
        ("a\ufe0f", r"a\ufe0f"), ("\U0001f1e9", r"\U0001f1e9"), ("👍🏽", r"👍\U0001f3fd"), ("[red]", "[red]"), ("", ""),
    ],
)  # fmt: skip
def test_shown(text: str, expected: str) -> None:
    assert escape_line(text) == expected


def test_shown_cuts_between_characters_at_the_limit() -> None:
    assert escape_line("x" * 9, 8) == "xxxxxxx…"
    assert escape_line("日" * 9, 8) == "日日日…"
    assert escape_line("xxxxx\x1b\x1b", 8) == "xxxxx…"
    assert escape_line("x" * 8, 8) == "x" * 8
    assert escape_line("x" * 9, 8, ascii_only=True) == "xxxxx..."
    assert quote('a"b', 8) == r'"a\"b"'
    assert all(cell_len(escape_line(HOSTILE * 3 + "日" * 9, limit)) <= limit for limit in range(60))


def test_numbers_have_three_digits_and_fit() -> None:
    values = (5.9e-14, 12.3, 0.0412, -0.0412, 1234.0, 0.000412, -1.5e-12, 100.0, 1e30, 0.0, math.nan, -math.inf)
    expected = "5.9e-14 12.3 0.0412 -0.0412 1234 4.1e-4 -2e-12 100 1.00e30 0 nan -inf"
    assert [number(value) for value in values] == expected.split()
    assert [number(value, 6) for value in (-0.0412, -0.00412, 0.0412)] == ["-0.041", "-4e-3", "0.0412"]
    assert [tiny(value) for value in (0.27, 4.0, 0.0, 1e-123, math.inf)] == ["2.7e-01", "4.0e+00", "0", "1e-123", "inf"]
    ratios = (0.0, 0.01, 0.97, 12.34, 99.99, 4321.0, 2.6e11, math.inf)
    assert [times(ratio) for ratio in ratios] == ["0.0x", "<0.1x", "1.0x", "12.3x", "100x", "4321x", "3e11x", "inf"]


@pytest.mark.parametrize("name", ["right", "wrong RoPE", "unchecked"])
@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}], ids=str)
def test_a_check_is_coloured_where_colours_are_shown(
    name: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {"TERM": "xterm-256color", "COLUMNS": "60", **variables}.items():
        monkeypatch.setenv(variable, value)
    file, result = io.StringIO(), REPORTS[name]
    put_check(Page(make_console(file)), Path("captures/a.safetensors"), result)
    plain = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
    assert ("\x1b[" in file.getvalue()) == (variables == {"FORCE_COLOR": "1"})
    assert plain.startswith(f"{result.verdict.upper():6}  captures/a.safetensors: ")
    assert max(map(cell_len, plain.splitlines())) <= 60
    assert ("fix: " in plain) == any(each.fix for each in repairs_of(result))


@pytest.mark.parametrize("recorder", ["llama.cpp", "mine"])
def test_a_right_check_says_whose_capture_it_was(recorder: str) -> None:
    """A trace of the engine itself shows nothing beside it."""
    file, right = io.StringIO(), next(each for each in REPORTS.values() if each.verdict == "match")
    result = replace(right, baseline={**right.baseline, "name": recorder}, is_engine=False)
    put_check(Page(make_console(file, 80)), Path("a.safetensors"), result)
    assert ("recorded by mine" in file.getvalue()) == (recorder == "mine")
    file = io.StringIO()
    put_check(Page(make_console(file, 80)), Path("a.safetensors"), replace(result, is_engine=True))
    assert "recorded by" not in file.getvalue()


def test_each_fix_of_a_check_says_where_if_there_are_several() -> None:
    for name, more in (("several causes", True), ("wrong RoPE", False)):
        put_check(Page(make_console(file := io.StringIO(), 4000)), Path("a.safetensors"), REPORTS[name])
        for each in repairs_of(REPORTS[name]):
            assert not each.fix or (f"fix: {each.tap}: {each.fix}" in " ".join(file.getvalue().split())) == more


def test_no_path_of_a_check_is_broken() -> None:
    file, path = io.StringIO(), Path("long" * 40, "a.safetensors")
    put_check(Page(make_console(file, 80)), path, REPORTS["wrong RoPE"])
    first, second, *_ = file.getvalue().splitlines()
    assert first == f"WRONG   {path}:"
    assert second.startswith("        RoPE")
