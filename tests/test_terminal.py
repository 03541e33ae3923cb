"""The terminal renderer: what it shows, what it obeys, and where its lines end."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from llamadiff.comparison.logits import Logits, TopToken
from llamadiff.comparison.result import Comparison
from llamadiff.comparison.rows import Row
from llamadiff.judge.finding import Local
from llamadiff.numerics import metrics, tolerances
from llamadiff.report.terminal.escape import number, quoted, shown, times, tiny
from llamadiff.report.terminal.report import make_console, render

HOSTILE = "\x1b[31mred\x1b[0m\x07\r\n[bold]x[/bold]\u202egnp.exe\u2066\x9b2J\ud800[/]"
DENSE = ("attn_norm", "Qcur_rope", "Kcur_rope", "kq_soft_max", "ffn_inp", "ffn_swiglu", "l_out")
EXPERTS = ("attn_norm", "ffn_moe_weights_norm", "ffn_moe_down", "l_out")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def local(nmse: float = 1e-14, limit: float = 1e-10, arithmetic: str = "F32", span: tuple[str, ...] = ()) -> Local:
    verdict = tolerances.verdict(nmse, limit, 10 * limit)
    return Local(nmse, arithmetic, limit, 10 * limit, verdict, 0, (0, 0), 1.0, 2.0, (nmse,), span)


def difference(nmse: float, cosine: float = 1.0) -> metrics.Difference:
    return metrics.Difference(nmse, cosine, 0.1, 0.0, metrics.Worst(0, (0, 0), 1.0, 2.0), (nmse,))


def stats(rms: float = 0.0412, mean: float = -0.0412, nan: int = 0, inf: int = 0) -> metrics.Stats:
    return metrics.Stats(rms, mean, -12.3, 123.4, nan, inf)


def row(tap: str, its: Local | None = None, drift: float | None = 1.1e-4, ratio: float | None = 1.0) -> Row:
    word, _, layer = tap.rpartition("-")
    own = its if its is not None else local()
    return Row(
        tap=tap, layer=int(layer) if word else None, op="ROPE" if "rope" in tap else "MUL_MAT_ID",
        weight="blk.0.attn_q.weight", weight_type="Q4_K", shape=(4, 8), verdict=own.verdict, local=own,
        baseline_local=None, drift=None if drift is None else difference(drift), expected_drift=1e-4,
        ratio_to_noise=ratio, baseline=stats(), candidate=stats(-0.0413),
    )  # fmt: skip


def rows(
    layers: int, words: tuple[str, ...] = DENSE, wrong: tuple[str, ...] = (), arithmetic: str = "F32"
) -> list[Row]:
    taps = ["embd", *(f"{word}-{i}" for i in range(layers) for word in words), "result_norm", "result_output"]
    return [row(tap, local(0.27 if tap in wrong else 1e-14, arithmetic=arithmetic)) for tap in taps]


def logits(agree: bool = True, text: str | None = " Once", value: float = 12.5) -> Logits:
    top = tuple(TopToken(i + 1, 400 + i, text, value - i, value - i - 0.25, i + 1 + (not agree)) for i in range(10))
    return Logits(2.4e-1, agree, 2.11, 8, 9, top, top[::-1])


def comparison(its: list[Row], **fields: object) -> Comparison:
    verdict = tolerances.worst_of([one.verdict for one in its])
    plain = Comparison(
        verdict=verdict, summary="Qcur_rope-1: my-engine's RoPE is wrong on the inputs it was given " * 2,
        rows=tuple(its), missing=(),
        model={"file": "tiny.gguf", "architecture": "llama", "layers": 2, "embd": 64, "heads": 8, "kv_heads": 4,
               "vocab": 512, "weight_types": {"F32": 7, "Q4_K": 12}},
        tokens=((1, "<s>"), (403, " Once"), (407, " upon")), n_prefill=3,
        baseline={"name": "llama.cpp", "version": "b9", "settings": {"type_k": "F32", "flash_attn": False}},
        candidate={"name": "my-engine", "version": "0.3"}, logits=logits(),
        timing={"capture_s": 0.41, "engine_s": 0.06, "total_s": 0.5, "peak_rss_mb": 48.4},
        next_steps=("compare your rotation with the model's: pairs (2i, 2i+1) or halves (i, i+n/2), base, scaling",),
    )  # fmt: skip
    return replace(plain, **fields)  # type: ignore[arg-type]


def printed(its: Comparison, width: int = 80) -> str:
    file = io.StringIO()
    render(its, make_console(file, width))
    return file.getvalue()


def table(text: str) -> list[str]:
    """The lines of the tap table, from its titles to the next blank line."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if "worst tap" in line)
    return lines[start : [*lines, ""].index("", start)]


def opened(text: str) -> list[str]:
    """The tap names of the opened layer's lines."""
    return [line.split()[2] for line in table(text) if line.lstrip().startswith("│")]


WRONG = comparison(rows(3, wrong=("Qcur_rope-1", "Kcur_rope-1", "Qcur_rope-2")))
MATCH = comparison(rows(3))
SHAPES = {
    "match": MATCH,
    "wrong": WRONG,
    "eighty layers, rounded": comparison(rows(80, wrong=("Qcur_rope-47",), arithmetic="Q8_K")),
    "experts, rounded": comparison(rows(31, EXPERTS, wrong=("ffn_moe_weights_norm-30",), arithmetic="Q8_K")),
    "experts match": comparison(rows(31, EXPERTS, arithmetic="Q8_0")),
    "huge": comparison([replace(one, baseline=stats(1.23e30, -1.2e-30), ratio_to_noise=3e112) for one in rows(31)]),
    "empty": comparison([]),
    "disagree": comparison(rows(2), logits=logits(False)),
    "wide texts": comparison(
        rows(2), tokens=((9, "日本語のテキスト"), (10, "🦙🦙"), (11, "é")) * 9, logits=logits(text="日本🦙")
    ),
    "long texts": comparison(rows(2), tokens=((9, "x" * 900), (10, "日" * 900)), logits=logits(text="日" * 900)),
    "hostile": comparison(rows(2), summary=HOSTILE * 9, tokens=((1, HOSTILE),), candidate={"name": HOSTILE * 9}),
    "unchecked": comparison([replace(one, verdict=tolerances.UNCHECKED, local=None) for one in rows(2)]),
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", SHAPES)
def test_no_line_is_wider_than_the_console(name: str, width: int) -> None:
    text = printed(SHAPES[name], width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("name", SHAPES)
def test_at_80_cells_every_layer_has_one_line_with_both_sides(name: str) -> None:
    """Nothing is folded and nothing dropped: titles and lines agree in what they hold."""
    its = SHAPES[name]
    if not its.rows:
        assert "worst tap" not in printed(its)
        return
    lines = table(printed(its))
    assert [word for word in lines[0].split() if word in ("drift", "noise", "rms", "mean")][-4:] == [
        "rms",
        "rms",
        "mean",
        "mean",
    ]
    layers = {str(one.layer) for one in its.rows if one.layer is not None}
    assert [line.split()[0] for line in lines if line.split()[0].isdigit()] == sorted(layers, key=int)
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("width", [1, 7, 20, 33, 40, 60, 79])
@pytest.mark.parametrize("name", SHAPES)
def test_narrow_consoles_fold_and_drop_but_do_not_crash(name: str, width: int) -> None:
    text = printed(SHAPES[name], width)
    assert max(cell_len(line) for line in text.splitlines()) <= max(width, 2)


def test_the_sentence_comes_first_with_a_hanging_indent() -> None:
    lines = printed(WRONG).splitlines()
    assert lines[0].startswith("WRONG  Qcur_rope-1: my-engine's RoPE")
    assert lines[1].startswith("       ")
    assert lines[1][7] != " "


@pytest.mark.parametrize("verdict", tolerances.SEVERITY)
def test_every_verdict_is_a_word(verdict: str) -> None:
    assert printed(comparison([], verdict=verdict)).startswith(f"{verdict.upper()}  Qcur_rope-1")


def test_sections_come_in_reading_order() -> None:
    text = printed(comparison(
        rows(2, wrong=("Qcur_rope-1",)), missing=("kq-0", "kq-1"), only_baseline_read=("rope_freqs.weight",),
        only_engine_read=("output.bias",),
    ))  # fmt: skip
    words = [
        "WRONG", "tiny.gguf", "llama.cpp", "my-engine", '403:" Once"', "worst tap", "result_output", "KL 2.4e-01 nats",
        "only llama.cpp reads rope_freqs.weight", "only the reference engine reads output.bias", "2 taps: kq-0, kq-1",
        "What to do next", "• compare your rotation", "0.5 s in all",
    ]  # fmt: skip
    places = [text.find(word) for word in words]
    assert -1 not in places
    assert text.index("my-engine  0.3") > text.index("llama.cpp  b9")
    assert places[4:] == sorted(places[4:])


def test_the_layer_of_the_first_divergence_is_opened_and_no_other() -> None:
    assert opened(printed(WRONG)) == [f"{word}-1" for word in DENSE]
    assert opened(printed(WRONG, 120)) == [f"{word}-1" for word in DENSE]
    assert opened(printed(MATCH)) == []


def test_a_divergence_outside_the_layers_opens_that_tap() -> None:
    assert opened(printed(comparison(rows(2, wrong=("result_norm",))))) == ["result_norm"]


def test_an_opened_tap_shows_op_limit_and_verdict_in_80_cells() -> None:
    line = next(line for line in table(printed(WRONG)) if line.startswith("│ WRONG Qcur_rope-1"))
    assert line.split()[1:] == ["WRONG", "Qcur_rope-1", "2.7e-01", "1.1e-04", "1.0x", "1.0e-10", "ROPE"]


def test_names_are_whole_where_they_are_longest() -> None:
    text = printed(SHAPES["experts, rounded"])
    assert "✗ ffn_moe_weights_norm-30 2.7e-01 Q8_K" in text
    assert "30 ✗ ffn_moe_weights_norm" in text
    assert "✗ wrong" in text  # marks are explained


def test_the_worst_tap_is_the_one_nearest_its_limit() -> None:
    its = [
        row("kq-0", local(9e-11)),
        row("ffn_inp-0", local(9e-13, limit=1e-12)),
        row("l_out-0", local(9e-13, limit=1e-10)),
    ]
    assert "ffn_inp-0" in table(printed(comparison(its)))[1]
    its.append(row("ffn_moe_topk-0", local(0.0, limit=0.0)))
    assert "ffn_inp-0" in table(printed(comparison(its)))[1]
    its.append(row("ffn_moe_topk-0", local(1e-30, limit=0.0)))
    assert "WRONG ffn_moe_topk-0" in table(printed(comparison(its)))[1]


def test_a_line_shows_the_residual_and_the_worst_taps_arithmetic() -> None:
    residual = replace(row("l_out-0", drift=3.3e-5, ratio=12.5), baseline=stats(7.5, 0.25), candidate=stats(8.5, -0.5))
    its = [row("ffn_out-0", local(5.9e-11, arithmetic="Q8_K"), drift=0.9), residual]
    cells = table(printed(comparison(its)))[1].split()
    assert cells == [
        "0",
        "match",
        "ffn_out-0",
        "5.9e-11",
        "Q8_K",
        "3.3e-05",
        "12.5x",
        "7.50",
        "8.50",
        "0.250",
        "-0.500",
    ]


def test_without_l_out_the_last_tap_stands_for_the_layer_and_the_title_says_so() -> None:
    text = printed(comparison([row("kq-0", drift=0.5), row("ffn_out-0", drift=0.25)]))
    assert "layer's last tap" in text
    assert "2.5e-01" in table(text)[1]
    assert "layer's output, l_out" in printed(MATCH)


def test_values_that_are_not_finite_are_shown_and_told() -> None:
    bad = replace(row("l_out-0", local(math.inf), math.inf, math.inf), candidate=stats(0.0, 0.0, nan=12, inf=3))
    lost = row("kq-0", local(math.nan), math.nan, math.nan)
    text = printed(comparison([lost, bad], logits=replace(logits(value=math.nan), kl=math.nan, margin=math.inf)))
    cells = [line.split() for line in table(text) if line.startswith("│")]
    assert [(line[2], line.count("nan"), line.count("inf")) for line in cells] == [("kq-0", 2, 0), ("l_out-0", 0, 3)]
    assert cells[0][3] == "-"  # no local error where nothing could be judged
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


def test_a_baseline_that_is_off_is_marked() -> None:
    its = [replace(one, baseline_local=local(0.5 if one.tap == "ffn_inp-1" else 0.0)) for one in rows(3)]
    text = printed(comparison(its))
    assert [line.split()[0] for line in table(text) if "b off " in line] == ["1"]
    assert "b off:" not in table(text)[0]
    note = "b off: llama.cpp itself is wrong at ffn_inp-1: local NMSE 5.0e-01, limit 1.0e-10"
    assert note in " ".join(text.split())
    assert "b off" not in printed(MATCH)


def test_traces_without_a_model_have_no_local_column() -> None:
    text = printed(SHAPES["unchecked"])
    assert "unchecked" in text
    assert "local" not in table(text)[0]


def test_missing_facts_leave_no_trace() -> None:
    bare = comparison(
        [replace(row("l_out-0", drift=None, ratio=None), baseline=None, candidate=None)],
        model={"file": None, "architecture": None, "layers": 0, "weight_types": {}}, baseline={}, candidate={},
        logits=None, timing={}, next_steps=(), tokens=(),
    )  # fmt: skip
    text = printed(bare)
    assert "None" not in text
    assert "nats" not in text
    assert "What to do next" not in text
    assert table(text)[1].split()[3:] == ["1.0e-14", "-", "-", "-", "-", "-"]  # local, drift, rms, mean


def test_only_unusual_settings_are_named() -> None:
    assert "cache" not in printed(MATCH)
    unusual = {"type_k": "Q8_0", "type_v": "f32", "flash_attn": True, "repack": True, "gpu_layers": 0}
    text = printed(comparison(rows(1), baseline={"name": "llama.cpp", "settings": unusual}))
    assert "llama.cpp  K cache Q8_0, flash attention, repacked weights\n" in text


def test_few_tokens_are_all_shown_and_decoding_is_marked() -> None:
    text = printed(comparison([], n_prefill=2))
    assert '    0    1:"<s>"     403:" Once"  ▸407:" upon"' in text
    assert "3: the first 2 in one prefill" in text
    assert "▸" not in printed(MATCH)


def test_of_many_tokens_the_middle_is_left_out() -> None:
    many = tuple((1000 + i, None) for i in range(100))
    text = printed(comparison([], tokens=many, n_prefill=100, logits=None))
    shown_ids = [int(word) for word in text.split() if word.isdigit() and int(word) >= 1000]
    assert shown_ids == [*range(1000, 1024), *range(1092, 1100)]
    assert "... 68 tokens left out ..." in text
    assert "left out" not in printed(comparison([], tokens=many[:40], logits=None))


def test_wide_characters_keep_columns_aligned() -> None:
    lines = printed(SHAPES["wide texts"]).splitlines()
    start = next(number for number, line in enumerate(lines) if line.lstrip().startswith("rank"))
    assert len({cell_len(line) for line in lines[start : start + 11]}) == 1
    grid = [line for line in lines if ':"日' in line]
    places = [[cell_len(line[:at]) for at in range(len(line)) if line[at : at + 2] == ':"'] for line in grid]
    assert len(places) == 9
    assert all(place == places[0][: len(place)] for place in places)


def test_logits_say_which_first_tokens_differ() -> None:
    assert "first token agrees, margin 2.11; 8/9 rows agree" in printed(MATCH)
    text = " ".join(printed(SHAPES["disagree"]).split())
    assert 'first token DIFFERS (b says 400 " Once", c says 409 " Once")' in text


def test_nothing_from_a_file_is_obeyed() -> None:
    """Escape sequences, newlines, bidi overrides and markup, wherever a file's words can come through."""
    bad = replace(
        row("l_out-0", local(arithmetic=HOSTILE, span=(HOSTILE,))), tap=f"{HOSTILE}-0", op=HOSTILE, weight=HOSTILE
    )
    settings = {"type_k": HOSTILE}
    its = comparison(
        [replace(bad, verdict=tolerances.WRONG, baseline_local=local(0.5))], summary=HOSTILE, missing=(HOSTILE,),
        model={"file": HOSTILE, "architecture": [HOSTILE], "layers": HOSTILE, "weight_types": {HOSTILE: HOSTILE}},
        tokens=((1, HOSTILE),), baseline={"name": HOSTILE, "version": HOSTILE, "settings": settings},
        candidate={"name": {HOSTILE: 1}, "settings": HOSTILE}, logits=logits(False, HOSTILE),
        only_baseline_read=(HOSTILE,), only_engine_read=(HOSTILE,), next_steps=(HOSTILE,),
    )  # fmt: skip
    for width in (20, 80, 400):
        text = printed(its, width)
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
    def on_terminal() -> str:
        file = io.StringIO()
        render(WRONG, Console(file=file, width=80, force_terminal=True, color_system="standard", legacy_windows=False))
        return file.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[1;31mWRONG" in on_terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = on_terminal()
    assert "31m" not in plain
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
    assert r"\u65e5\u672c" in _in_ascii(SHAPES["wide texts"])


def test_an_ascii_console_has_borders_of_ascii() -> None:
    assert "| WRONG Qcur_rope-1" in _in_ascii(SHAPES["wrong"])


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
    assert shown(text) == expected


def test_shown_cuts_between_characters_at_the_limit() -> None:
    assert shown("x" * 9, 8) == "xxxxxxx…"
    assert shown("日" * 9, 8) == "日日日…"
    assert shown("xxxxx\x1b\x1b", 8) == "xxxxx…"
    assert shown("x" * 8, 8) == "x" * 8
    assert shown("x" * 9, 8, ascii_only=True) == "xxxxx..."
    assert quoted('a"b', 8) == r'"a\"b"'
    assert all(cell_len(shown(HOSTILE * 3 + "日" * 9, limit)) <= limit for limit in range(60))


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
