"""The terminal renderer: what it shows, what it obeys, and where its lines end."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Literal

import pytest
from rich.cells import cell_len
from rich.console import Console

from llamadiff.judge.verdict import NOISE, SEVERITY
from llamadiff.report.terminal.escape import escape_line, number, quote, times, tiny
from llamadiff.report.terminal.finding import page_of
from llamadiff.report.terminal.report import make_console, render
from llamadiff.result.comparison import Comparison
from llamadiff.result.rows import Row
from report.made_up import (
    DENSE,
    HOSTILE,
    MATCH,
    SHAPES,
    WRONG,
    comparison,
    difference,
    explained,
    local,
    logits,
    row,
    rows,
    stats,
)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def printed(its: Comparison, width: int = 80, **options: bool) -> str:
    file = io.StringIO()
    render(its, make_console(file, width), **options)
    return file.getvalue()


def table(text: str) -> list[str]:
    """The lines of the tap table, from its titles to the next blank line."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("layer") and " tap" in line)
    return lines[start : [*lines, ""].index("", start)]


def titled(text: str, title: str) -> list[str]:
    """The cells under a title, a line each."""
    head, *lines = table(text)
    at = head.index(title)
    return [line[at - 4 : at + len(title) + 1].strip() for line in lines]


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
    if not its.rows:
        assert "x limit" not in printed(its)
        return
    head = table(printed(its))[0]
    assert "inherited" in head
    assert ("own error" in head) == any(row.local is not None for row in its.rows)
    assert "…" not in "".join(table(printed(its)))


@pytest.mark.parametrize("width", [1, 7, 20, 33, 40, 60, 79])
@pytest.mark.parametrize("name", SHAPES)
def test_narrow_consoles_fold_and_drop_but_do_not_crash(name: str, width: int) -> None:
    printed(SHAPES[name], width, full=True)
    text = printed(SHAPES[name], width)
    assert max(cell_len(line) for line in text.splitlines()) <= max(width, 2)


@pytest.mark.parametrize("name", ["match", "wrong", "eighty layers, rounded", "disagree"])
def test_at_40_cells_a_line_of_the_table_is_still_one_line(name: str) -> None:
    lines = table(printed(SHAPES[name], 40))
    assert lines[0].split()[:4] == ["layer", "tap", "own", "error"]
    assert all(len(line.split()) >= 3 for line in lines)
    assert all(" match" in line or "WRONG" in line for line in lines[1:])


def test_the_finding_comes_first_and_the_proof_under_it() -> None:
    lines = printed(WRONG).splitlines()
    assert lines[0] == "WRONG  RoPE, layer 1: wrong on the inputs it was given"
    assert lines[1].startswith("       Qcur_rope-1: own error 2.7e-01, limit 1e-10; every other op is right")


@pytest.mark.parametrize("verdict", SEVERITY)
def test_every_verdict_is_a_word_in_the_first_and_in_the_last_line(verdict: str) -> None:
    lines = printed(comparison([], verdict=verdict)).splitlines()
    assert lines[0].startswith(f"{verdict.upper()}  RoPE, layer 1")
    assert lines[-1].startswith(f"{verdict.upper()}  RoPE, layer 1")
    assert lines[-1].endswith("(0.5 s)")


def test_sections_come_in_reading_order() -> None:
    its = comparison(
        rows(2, wrong=("Qcur_rope-1",)), missing=("kq-0", "kq-1"), only_baseline_read=("rope_freqs.weight",),
        only_engine_read=("output.bias",), arithmetics={"Q4_K": "Q8_K"}, next_steps=("compare your rotation",),
    )  # fmt: skip
    text = printed(its, 100, full=True)
    words = [
        "WRONG", "Qcur_rope-1[0, 0] is 2; on its inputs 1 is right", "tiny.gguf", "llama.cpp (b9)", "my-engine (0.3)",
        '403:" Once"', "x limit", "result_output", "KL 2.4e-01 nats", "2 taps were not recorded: kq-0, kq-1",
        "only llama.cpp reads rope_freqs.weight", "only the reference engine reads output.bias",
        "compare your rotation", "Q4_K weights by Q8_K activations", "0.5 s in all",
    ]  # fmt: skip
    places = [text.find(word) for word in words]
    assert -1 not in places
    assert places == sorted(places)


def test_how_it_was_computed_is_for_those_who_ask() -> None:
    its = comparison(rows(2), arithmetics={"Q4_K": "Q8_K"})
    assert "Q8_K" not in printed(its)
    assert "Q4_K weights by Q8_K activations" in printed(its, full=True)
    assert "capture 0.4 s" in printed(its, full=True)


# the table


def test_what_is_right_is_folded_around_the_wrong_taps_of_the_first_wrong_layer() -> None:
    lines = [line.split()[:3] for line in table(printed(WRONG))[1:]]
    assert lines == [
        ["0,", "1", "9"], ["1", "Qcur_rope", "WRONG"], ["1", "Kcur_rope", "WRONG"], ["1", "4", "taps"],
        ["2", "Qcur_rope", "WRONG"], ["2", "taps", "match"],
    ]  # fmt: skip


@pytest.mark.quick
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


def test_layers_of_a_small_right_model_have_a_line_each_and_those_of_a_deep_one_are_folded() -> None:
    assert [line.split()[0] for line in table(printed(MATCH))[1:]] == ["embd", "0", "1", "2", "result_norm",
                                                                     "result_output"]  # fmt: skip
    assert len(table(printed(comparison(rows(80))))) == 2


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


def test_the_full_table_has_every_layer_and_every_tap_of_those_that_are_wrong() -> None:
    lines = [line.split()[:3] for line in table(printed(WRONG, 120, full=True))[1:]]
    assert [line[:2] for line in lines if line[0] == "1"] == [["1", word] for word in DENSE]
    assert ["0", "7", "taps"] in lines
    assert "limit" in table(printed(WRONG, 140, full=True))[0]


def test_one_bar_stands_out() -> None:
    """It is of the own error over its limit: what follows a mistake has none, however large its drift."""
    its = rows(3, wrong=("Qcur_rope-1",))
    its = [replace(one, drift=difference(0.5)) for one in its]
    bars = [line for line in printed(comparison(its), 120).splitlines() if "━" in line]
    assert len(bars) == 1
    assert "Qcur_rope" in bars[0]


def test_a_wrong_tap_has_own_error_and_what_it_is_of_its_limit_and_inherits_nothing() -> None:
    line = next(line for line in table(printed(WRONG)) if " Qcur_rope" in line)
    assert line.split()[:5] == ["1", "Qcur_rope", "WRONG", "2.7e-01", "3e9x"]
    assert "rounding" not in line
    folded = next(line for line in table(printed(WRONG)) if "match" in line)
    assert "1.0x rounding" in folded


def test_both_sides_rms_stand_under_their_names() -> None:
    lines = table(printed(WRONG, 100))
    assert lines[0].split()[-3:] == ["rms", "llama.cpp", "my-engine"]
    assert lines[1].split()[-2:] == ["0.0412", "-0.0413"]


def test_an_engine_without_a_name_is_yours_and_one_layer_is_no_plural() -> None:
    text = printed(comparison(rows(2), candidate={"name": "the candidate"}, model={"file": "m.gguf", "layers": 1}), 100)
    assert table(text)[0].endswith("yours")
    assert "m.gguf (1 layer)" in text


def test_what_no_line_has_is_no_column() -> None:
    text = printed(SHAPES["unchecked"])
    assert "unchecked" in text
    assert "own error" not in table(text)[0]
    bare = [replace(one, drift=None, ratio_to_noise=None, baseline=None, candidate=None) for one in rows(2)]
    assert table(printed(comparison(bare)))[0].split() == ["layer", "tap", "own", "error", "x", "limit"]


def test_the_worst_tap_is_the_one_nearest_its_limit() -> None:
    its = [
        row("kq-0", local(9e-11)),
        row("ffn_inp-0", local(9e-13, limit=1e-12)),
        row("l_out-0", local(9e-13, limit=1e-10)),
    ]
    assert table(printed(comparison(its)))[1].split()[4:6] == ["9.0e-13", "0.9x"]
    its.append(row("ffn_moe_topk-0", local(1e-30, limit=0.0)))
    assert "ffn_moe_topk  WRONG" in "".join(table(printed(comparison(its))))


def test_noise_is_set_against_the_limit_of_noise() -> None:
    """A right engine in 16 bits must not look like an alarm."""
    its = [replace(one, verdict=NOISE, local=replace(local(5e-10), verdict=NOISE))
           for one in rows(24)]  # fmt: skip
    text = printed(comparison(its))
    assert "0.5x" in text
    assert "━" not in text


def test_a_graphs_nodes_in_any_order_make_one_line_a_layer() -> None:
    its = [row(name) for name in ("embd", "a-0", "between", "b-1", "c-0", "d-1", "result_output")]
    its[2] = replace(its[2], layer=None, tap="between")
    layers = [line.split()[0] for line in table(printed(comparison(its)))[1:]]
    assert layers == ["embd", "0", "between", "1", "result_output"]


# the map


def test_a_deep_model_has_a_map_in_which_a_wrong_cell_is_seen() -> None:
    lines = printed(SHAPES["eighty layers, rounded"], 100).splitlines()
    cells = next(line for line in lines if line.startswith("Qcur_rope  "))
    assert cells.split()[1] == "·" * 47 + "✗" + "·" * 32
    assert "✗" not in printed(comparison(rows(16, wrong=("Qcur_rope-4",))))


def test_the_numbers_of_a_map_stand_above_their_layers() -> None:
    lines = printed(SHAPES["eighty layers, rounded"], 100).splitlines()
    axis, cells = next((one, two) for one, two in pairwise(lines) if two.startswith("Qcur_rope  "))
    first = cells.index("·")
    assert all(axis[first + layer :].startswith(str(layer)) for layer in range(0, 80, 5))


def test_where_layers_outnumber_cells_a_cell_has_the_worst_of_its_layers() -> None:
    lines = printed(comparison(rows(200, wrong=("Qcur_rope-150",))), 80).splitlines()
    cells = next(line for line in lines if line.startswith("Qcur_rope  ")).split()[1]
    assert (len(cells), cells.index("✗")) == (67, 50)


def test_the_full_map_has_every_tap() -> None:
    text = printed(SHAPES["eighty layers, rounded"], 100, full=True)
    assert all(f"\n{word} " in text for word in DENSE)


# values and notes


def test_values_that_are_not_finite_are_shown_and_told() -> None:
    bad = replace(row("l_out-0", local(math.inf), math.inf, math.inf), candidate=stats(0.0, 0.0, nan=12, inf=3))
    lost = row("kq-0", local(math.nan), math.nan, math.nan)
    its = comparison([lost, bad], logits=replace(logits(value=math.nan), kl=math.nan, margin=math.inf))
    text = printed(its, 100, full=True)
    own = {line.split()[1]: line.split()[3] for line in table(text)[1:] if line.startswith("0")}
    assert own["l_out"] == "inf"
    assert own["kq"] != "nan"  # no own error where nothing could be judged
    assert "l_out-0 of the candidate has 12 NaN and 3 infinite values" in " ".join(text.split())
    assert "KL nan nats" in text


def test_a_span_is_told_once_for_all_layers_alike() -> None:
    def spanning(layer: int) -> Row:
        return row(f"l_out-{layer}", local(span=tuple(f"{word}-{layer}" for word in DENSE[:-1])))

    text = " ".join(printed(comparison([spanning(0), spanning(1), spanning(2)])).split())
    assert (
        "l_out-0 answers for attn_norm-0 ... ffn_swiglu-0 (6 taps) too: not recorded (the same in layers 1, 2)" in text
    )
    assert text.count("answers for") == 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ((), "not recorded"),
        (["ffn_out-0"], "not recorded, or wrongly"),
        (["ffn_up-0", "ffn_out-0"], "recorded wrongly"),
    ],
)
def test_a_span_says_of_what_was_recorded_wrongly_that_it_was(wrong, why) -> None:
    rows = [replace(row(name), misrecorded=True) for name in wrong]
    text = printed(comparison([*rows, row("l_out-0", local(span=("ffn_up-0", "ffn_out-0")))]))
    assert f"l_out-0 answers for ffn_up-0, ffn_out-0 too: {why}\n" in text


def test_a_baseline_that_is_off_is_marked() -> None:
    its = [replace(one, baseline_local=local(0.5 if one.tap == "ffn_inp-1" else 0.0)) for one in rows(3)]
    text = printed(comparison(its))
    assert next(line.split()[:2] for line in table(text) if "BASELINE OFF" in line) == ["1", "ffn_inp"]
    note = "BASELINE OFF: llama.cpp itself is wrong at ffn_inp-1: own error 5.0e-01, limit 1.0e-10"
    assert note in " ".join(text.split())
    assert "BASELINE OFF" not in printed(MATCH)


def test_missing_facts_leave_no_trace() -> None:
    bare = comparison(
        [replace(row("l_out-0", drift=None, ratio=None), baseline=None, candidate=None)],
        model={"file": None, "architecture": None, "layers": 0, "weight_types": {}}, baseline={}, candidate={},
        logits=None, timing={}, next_steps=(), tokens=(),
    )  # fmt: skip
    text = printed(bare, full=True)
    assert "None" not in text
    assert "nats" not in text
    assert "next  " not in text


def test_known_causes_are_linked_to_their_threads_where_a_terminal_can() -> None:
    its = explained(rows(3, wrong=("Qcur_rope-1",)), {"Qcur_rope-1"})
    file = io.StringIO()
    render(its, Console(file=file, width=100, force_terminal=True, color_system="truecolor", legacy_windows=False))
    assert "https://github.com/ggml-org/llama.cpp/issues/22611" in file.getvalue()
    assert "github.com" not in printed(its)
    assert page_of("imp#503") is None  # nobody knows whose


def test_the_fix_has_the_bugs_name_and_the_place_both_values() -> None:
    text = " ".join(printed(explained(rows(3, wrong=("Qcur_rope-1",)), {"Qcur_rope-1"})).split())
    assert "fix rotate the other layout" in text
    assert "(rope-layout; known from TinyLlama#24" in text
    assert "place Qcur_rope-1[0, 0] is 2; on its inputs 1 is right" in text
    assert text.count("rotate the other layout") == 1
    assert text.count("is right compared") == 1


def test_only_unusual_settings_are_named() -> None:
    assert "cache" not in printed(MATCH)
    unusual = {"type_k": "Q8_0", "type_v": "f32", "flash_attn": True, "repack": True, "gpu_layers": 0}
    text = " ".join(printed(comparison(rows(1), baseline={"name": "llama.cpp", "settings": unusual})).split())
    assert "llama.cpp (K cache Q8_0, flash attention, repacked weights) and my-engine" in text


def test_few_tokens_are_all_shown_and_decoding_is_marked() -> None:
    text = printed(comparison([], n_prefill=2), full=True)
    assert '    0    1:"<s>"     403:" Once"  ▸407:" upon"' in text
    assert "3: the first 2 in one prefill" in text
    assert "▸" not in printed(MATCH, full=True)
    assert "2 tokens and 1 decode step" in " ".join(printed(comparison([], n_prefill=2)).split())


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


def test_logits_say_which_first_tokens_differ() -> None:
    assert "first token agrees, margin 2.11; 8/9 rows agree" in printed(MATCH)
    text = " ".join(printed(SHAPES["disagree"]).split())
    assert 'first token DIFFERS (llama.cpp " Once", my-engine " Once")' in text


def test_three_tokens_are_shown_where_both_sides_agree_and_ten_where_they_do_not() -> None:
    assert printed(MATCH).count('" Once" ') == 3
    assert '1→1 " Once" 12.5 / 12.2' in printed(MATCH)
    moved = " ".join(printed(SHAPES["disagree"]).split())
    assert [f"{rank}→{rank + 1}" in moved for rank in range(1, 11)] == [True] * 10


def test_nothing_from_a_file_is_obeyed() -> None:
    """Escape sequences, newlines, bidi overrides and markup, wherever a file's words can come through."""
    bad = replace(
        row("l_out-0", local(arithmetic=HOSTILE, span=(HOSTILE,))), tap=f"{HOSTILE}-0", op=HOSTILE, weight=HOSTILE
    )
    settings = {"type_k": HOSTILE}
    its = comparison(
        [replace(bad, verdict="wrong", baseline_local=local(0.5))], headline=HOSTILE, missing=(HOSTILE,),
        model={"file": HOSTILE, "architecture": [HOSTILE], "layers": HOSTILE, "weight_types": {HOSTILE: HOSTILE}},
        tokens=((1, HOSTILE),), baseline={"name": HOSTILE, "version": HOSTILE, "settings": settings},
        candidate={"name": {HOSTILE: 1}, "settings": HOSTILE}, logits=logits(False, HOSTILE),
        only_baseline_read=(HOSTILE,), only_engine_read=(HOSTILE,), next_steps=(HOSTILE,),
    )  # fmt: skip
    for width in (20, 80, 400):
        text = printed(its, width, full=True)
        assert not set(text) & set("\x1b\x07\r\u202e\u2066\x9b\ud800")
        text.encode("utf-8")
    assert r"\x1b[31mred\x1b[0m\x07\r\n[bold]x[/bold]\u202egnp.exe\u2066\x9b2J\ud800[/]" in text
    assert "\nred" not in text


def test_a_pipe_gets_plain_text_120_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = make_console(file)
    render(WRONG, console)
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
        render(WRONG, Console(file=file, width=80, force_terminal=True, color_system=colours, legacy_windows=False))
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


def test_an_ascii_console_escapes_what_it_cannot_show() -> None:
    assert r"\u65e5" in _in_ascii(SHAPES["wide texts"])


def test_an_ascii_console_has_borders_of_ascii() -> None:
    assert "Qcur_rope  WRONG" in _in_ascii(SHAPES["wrong"])
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
    expected = [
        "5.9e-14",
        "12.3",
        "0.0412",
        "-0.0412",
        "1234",
        "4.1e-4",
        "-2e-12",
        "100",
        "1.00e30",
        "0",
        "nan",
        "-inf",
    ]
    assert [number(value) for value in values] == expected
    assert [number(value, 6) for value in (-0.0412, -0.00412, 0.0412)] == ["-0.041", "-4e-3", "0.0412"]
    assert [tiny(value) for value in (0.27, 4.0, 0.0, 1e-123, math.inf)] == ["2.7e-01", "4.0e+00", "0", "1e-123", "inf"]
    ratios = (0.0, 0.01, 0.97, 12.34, 99.99, 4321.0, 2.6e11, math.inf)
    assert [times(ratio) for ratio in ratios] == ["0.0x", "<0.1x", "1.0x", "12.3x", "100x", "4321x", "3e11x", "inf"]
