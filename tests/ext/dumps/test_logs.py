"""A debug log as people have it, one text file, as the candidate: read line by line, judged as what it is."""

from __future__ import annotations

import json

import numpy as np
import pytest
from command import run
from llamaref import Engine
from places import ROOT

from llamadiff.candidates.reference import record
from llamadiff.ext.dumps.loglines import number_of, read_lines
from llamadiff.llamacpp.capture import capture
from llamadiff.llamacpp.request import Request
from llamadiff.numerics.halves import round_bf16
from llamadiff.trace import taps

MODEL = ROOT / "llamadiff" / "shipped" / "tiny.Q4_K_M.gguf"
TOKENS = (1, 501, 503, 261, 502)
WORDS = ("embd", "attn_norm", "Qcur_rope", "kqv_out", "ffn_inp", "l_out", "result_norm", "result_output")


class Louder(Engine):
    """Layer 1's norm is half as large again."""

    def norm(self, x, name):
        return super().norm(x, name) * (1.5 if name == "blk.1.attn_norm" else 1)


class Halves(Engine):
    """Every norm is rounded to bfloat16, as an engine in 16 bits does it."""

    def norm(self, x, name):
        return round_bf16(np.asarray(super().norm(x, name), np.float32))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same tokens through the engine, right and wrong, and through llama.cpp."""
    output = tmp_path_factory.mktemp("runs") / "b.safetensors"
    made = {name: record(kind(MODEL), TOKENS, "mine") for name, kind in
            (("right", Engine), ("wrong", Louder), ("rounded", Halves))}  # fmt: skip
    return {**made, "llama.cpp": capture(Request(str(MODEL), tokens=TOKENS, output=str(output)))}


def compared(folder, lines, *options, model=MODEL):
    """The command's report of such a log, and its exit code."""
    (folder / "engine.log").write_text("\n".join(lines), encoding="utf-8")
    words = ["compare", model, "--tokens", ",".join(map(str, TOKENS)), "--candidate", folder / "engine.log"]
    done = run(*words, "-o", "json:-", *options)
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.returncode


def refused(folder, text, *options):
    (folder / "engine.log").write_text(text, encoding="utf-8")
    done = run("compare", MODEL, "--candidate", folder / "engine.log", *options)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    return done.stderr


def firsts(trace, words=WORDS, row=-1, digits=5, form="{name}: [{values}, ...]", count=10):
    for name in trace:
        if name.rsplit("-", 1)[0] in words:
            values = [f"{x:.{digits}f}" for x in trace[name][row].reshape(-1)[:count]]
            yield form.format(name=name, values=", ".join(values), count=count)


def statistics(trace, words=("embd", "attn_out", "l_out"), rows=slice(None)):
    for name in trace:
        if name.rsplit("-", 1)[0] in words:
            v = trace[name][rows].astype(np.float64)
            rms, mean = np.sqrt(np.square(v).mean()), v.mean()
            yield f"{name} rms={rms:.6f} mean={mean:.2e} min={v.min():.4f} max={v.max():.4f}"


# -- values -------------------------------------------------------------------------------------------------------


FORMS = (
    "{name}: [{values}, ...]",
    "=== {name} ===\nFirst {count} values: [{values}]",
    "{name} = tensor([[{values}, ...]])",
    "[DEBUG] {name} (last token) {values}",
)


@pytest.mark.parametrize(("side", "form"), [*(("right", form) for form in FORMS), ("llama.cpp", FORMS[0])])
def test_a_right_engines_first_values_pass(side, form, runs, tmp_path):
    report, code = compared(tmp_path, firsts(runs[side], form=form))
    assert (report["verdict"], code) == ("noise", 0), report["summary"]
    assert len(report["taps"]) == 18
    assert "a log has no op's inputs whole" in report["summary"]


@pytest.mark.slow
def test_an_engine_in_sixteen_bits_is_not_accused(runs, tmp_path):
    report, _ = compared(tmp_path, firsts(runs["rounded"]))
    assert not report["wrong"]


@pytest.mark.parametrize("row", [0, -1])
@pytest.mark.slow
def test_the_row_of_values_that_name_none_is_found_and_said(row, runs, tmp_path):
    report, _ = compared(tmp_path, firsts(runs["right"], row=row))
    assert not report["wrong"]
    told = "first one's (the last one's" if row == 0 else "last one's (the first one's"
    assert f"values that name no token are taken as the {told} fit worse)" in report["summary"]


@pytest.mark.parametrize("form", ["{name} (token 2): [{values}]", "{name} pos=2 {values}", "{name}\nrow 2: [{values}]"])
@pytest.mark.slow
def test_a_row_that_is_named_is_that_row(form, runs, tmp_path):
    report, _ = compared(tmp_path, firsts(runs["right"], row=2, form=form))
    assert not report["wrong"]
    assert all(row["worst"]["token"] == 2 for row in report["taps"] if row["drift"]["max_abs"])
    assert "taken as" not in report["summary"]


def test_a_wrong_engine_is_named_at_the_first_tap_that_leaves(runs, tmp_path):
    report, code = compared(tmp_path, firsts(runs["wrong"]))
    assert (report["verdict"], code) == ("wrong", 1)
    assert report["wrong"] == ["attn_norm-1"]
    assert {row["verdict"] for row in report["taps"]} == {"wrong", "unchecked", "noise"}  # those after it follow
    assert report["next_steps"][0].startswith("write l_out-0 next")


@pytest.mark.slow
def test_a_small_error_is_a_finding_and_no_verdict(runs, tmp_path):
    """Rounding in what was not printed might leave as much."""

    class Slightly(Engine):
        def norm(self, x, name):
            return super().norm(x, name) * (1.05 if name == "blk.1.attn_norm" else 1)

    report, code = compared(tmp_path, firsts(record(Slightly(MODEL), TOKENS, "mine"), ("l_out",)))
    assert (report["verdict"], code, report["wrong"]) == ("unchecked", 2, [])
    assert "is off by an NMSE of" in report["summary"]


@pytest.mark.slow
def test_printed_digits_are_the_limit_of_what_is_accused(runs, tmp_path):
    off = {name: runs["right"][name] + 0.004 for name in runs["right"]}
    assert compared(tmp_path, firsts(off, ("embd",), digits=4))[0]["wrong"] == ["embd"]
    (coarse,) = compared(tmp_path, firsts(runs["right"], ("embd",), digits=2))[0]["taps"]
    assert coarse["verdict"] == "noise"
    (fine,) = compared(tmp_path, firsts(runs["right"], ("embd",)))[0]["taps"]
    assert coarse["local"]["hides"] > 1000 * fine["local"]["hides"]


def test_single_values_and_logits_are_read(runs, tmp_path):
    norm, logits = runs["right"]["result_norm"][-1], runs["right"]["result_output"][-1]
    lines = ["result_norm", *(f"[{i}] = {norm[i]:.5f}" for i in range(6))]
    lines += [f"token={i} logit={logits[i]:.4f}" for i in np.argsort(-logits)[:5]]
    report, code = compared(tmp_path, lines)
    assert (report["verdict"], code) == ("noise", 0)
    assert report["logits"]["top1_agree"] is True
    assert [token["candidate"] is not None for token in report["logits"]["top"][:4]] == [True] * 4
    wrong = [line.replace("logit=", "logit=-") if i == 7 else line for i, line in enumerate(lines)]
    assert compared(tmp_path, wrong)[0]["wrong"] == ["result_output"]


def test_logits_without_the_first_token_say_nothing_of_it(runs, tmp_path):
    report, _ = compared(tmp_path, [f"token=7 logit={runs['right']['result_output'][-1][7]:.4f}"], "--expect", "7")
    assert report["logits"]["top1_agree"] is None
    (token,) = report["logits"]["expected"]
    assert token["candidate"] == pytest.approx(float(runs["right"]["result_output"][-1][7]), abs=1e-4)


@pytest.mark.slow
def test_all_rows_of_a_tensor_as_llama_cpp_prints_them(runs, tmp_path):
    """Three rows at both ends, of each three values at both ends."""
    values = runs["llama.cpp"]["l_out-0"]
    row = "      [ {:10.4f}, {:10.4f}, {:10.4f}, ..., {:10.4f}, {:10.4f}, {:10.4f} ],"
    shown = [row.format(*values[i][:3], *values[i][-3:]) for i in range(5)]
    head = "cb_eval:  l_out-0 = (f32)  ADD(ffn_out-0{256, 5, 1, 1}, ffn_inp-0{256, 5, 1, 1}}) = {256, 5, 1, 1}"
    for rows in (shown, [*shown[:2], "      ...,", *shown[-2:]]):
        report, _ = compared(tmp_path, [head, "  [", "   [", *rows, "   ],", "  ]", "  sum = -13.5"])
        (tap,) = report["taps"]
        assert (tap["tap"], tap["verdict"]) == ("l_out-0", "noise")
        assert tap["drift"]["over_tokens"]["largest"] == 0
        assert "taken as" not in report["summary"]


@pytest.mark.slow
def test_values_in_one_list_over_several_rows(runs, tmp_path):
    values = ", ".join(f"{x:.6f}" for x in runs["right"]["embd"].reshape(-1)[:300])
    report, _ = compared(tmp_path, [f"embd: [{values}]"])
    assert not report["wrong"]
    assert "taken as" not in report["summary"]


def test_a_map_translates_the_names_of_a_log(runs, tmp_path):
    (tmp_path / "map.toml").write_text('[l_out]\nname = "layers.{i}.output"\n', encoding="utf-8")
    lines = [line.replace("l_out-", "layers.").replace(":", ".output:", 1)
             for line in firsts(runs["right"], ("l_out",))]  # fmt: skip
    report, _ = compared(tmp_path, [*lines, "my_tensor: [0.5, 0.25]"], "--map", str(tmp_path / "map.toml"))
    assert [row["tap"] for row in report["taps"]] == ["l_out-0", "l_out-1", "l_out-2"]
    assert report["extra"] == ["my_tensor"]


@pytest.mark.slow
def test_the_tokens_of_a_log_are_run(runs, tmp_path):
    (tmp_path / "e.log").write_text("\n".join([f"tokens: {list(TOKENS)}", *firsts(runs["right"])]), encoding="utf-8")
    done = run("compare", MODEL, "--candidate", tmp_path / "e.log", "-o", "json:-")
    assert [token["id"] for token in json.loads(done.stdout)["tokens"]] == list(TOKENS)


# -- statistics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "rows"), [("right", slice(None)), ("llama.cpp", slice(-1, None)), ("rounded", slice(0, 1))]
)
def test_statistics_of_a_right_engine_never_acquit(side, rows, runs, tmp_path):
    report, code = compared(tmp_path, statistics(runs[side], rows=rows), "--partial")
    assert (report["verdict"], code) == ("unchecked", 2)
    over = {0: "over the first token", -1: "over the last token", None: "over all tokens"}[rows.start]
    assert f"the statistics of 7 taps are near llama.cpp's ({over})" in report["summary"]


def test_statistics_that_leave_accuse_and_say_what_to_write(runs, tmp_path):
    report, code = compared(tmp_path, statistics(runs["wrong"]))
    assert (report["verdict"], code, report["wrong"]) == ("unchecked", 2, [])
    assert "leaves llama.cpp's in layer 1 (attn_out-1) by more than rounding explains" in report["summary"]
    assert "those of the 3 taps before it are near" in report["summary"]
    (step,) = report["next_steps"]
    assert "attn_norm-1" in step
    assert "l_out-0" not in step


@pytest.mark.slow
def test_a_norm_is_a_statistic_too(runs, tmp_path):
    norms = {
        name: float(np.sqrt(np.square(runs["right"][name].astype(np.float64)).sum())) for name in ("embd", "l_out-0")
    }
    assert "near llama.cpp's" in compared(tmp_path, [f"{n} norm: {v:.4f}" for n, v in norms.items()])[0]["summary"]
    report, _ = compared(tmp_path, [f"{n} norm: {1.5 * v:.4f}" for n, v in norms.items()])
    assert "the norm leaves llama.cpp's at embd by more than rounding explains" in report["summary"]


# -- reading ------------------------------------------------------------------------------------------------------


def read(text):
    return read_lines(text.splitlines(), lambda word: taps.parse(word) is not None)


@pytest.mark.slow
def test_what_was_not_understood_is_counted_and_shown(runs, tmp_path):
    lines = ["engine 0.3 starts", *firsts(runs["right"], ("l_out",)), "so much for \x1b[2J that"]
    summary = compared(tmp_path, lines)[0]["summary"]
    assert "3 of the log's 5 lines were understood; the first others are" in summary
    assert '"engine 0.3 starts"' in summary


def test_values_under_a_strangers_name_are_nobodys():
    log = read("l_out-0:\nmy_tensor:\n[0.1, 0.2]\nl_out-1: [1, 2]\nother_one: [3, 4]\n")
    assert [(block.name, len(block.lists)) for block in log.blocks] == [("l_out-0", 0), ("l_out-1", 1)]
    assert list(log.unknown) == ["other_one"]


def test_shapes_are_no_values():
    (block,) = read("l_out-0 shape=[5, 256] values=[0.1, 0.2]").blocks
    assert [number.value for number in block.lists[0].head] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("text", "value", "slack"),
    [("0.58", 0.58, 5e-3), ("-1.7e-4", -1.7e-4, 5e-6), ("3", 3, 0.5), ("1.50", 1.5, 5e-3), ("2e3", 2000, 500)],
)
def test_a_number_has_half_a_unit_of_its_last_digit(text, value, slack):
    number = number_of(text)
    assert number.value == value
    assert number.slack == pytest.approx(slack)


def test_a_number_of_more_digits_than_anybody_prints_is_none():
    assert number_of("1" * 41) is None
    assert not read("l_out-0: [0." + "1" * 60 + "]").blocks[0].lists


@pytest.mark.parametrize(
    "part", ["1", "[", "1.e", "shape[", "a=1e", "token ", "[1]", "- ", "...,", "nan", "first ", "1,"]
)
def test_reading_takes_time_in_proportion(part):
    """If all of a line were looked at again at each place, this would take half an hour."""
    line = "l_out-0: [" + part * (1_000_000 // len(part)) + "x"
    assert len(read(line).blocks) <= 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing here\n", ("no values of this model's taps", "'nothing here'", "l_out-0: [")),
        ("my_tensor: [0.1, 0.2]\n", ("no tap is called my_tensor", "--map")),
        ("l_out-0 (token 1): [" + "1, " * 300 + "]\n", ("300 values of a row; there are 256",)),
        ("l_out-0 (token 9): [0.1]\n", ("the log speaks of token 9", "5 were run")),
    ],
)
@pytest.mark.slow
def test_a_log_that_says_nothing_is_refused(text, words, tmp_path):
    said = refused(tmp_path, text, "--tokens", ",".join(map(str, TOKENS)))
    for word in words:
        assert word in said


def test_a_log_without_tokens_says_how_to_state_them(tmp_path):
    assert "the log states no token ids" in refused(tmp_path, "l_out-0: [0.1]\n")
