"""The block for a GitHub issue: what it says, how long it may be, and that GitHub reads nothing in foreign text.

It is rendered by GitHub's own parser (cmark-gfm) with the extensions that GitHub has on, then cleaned by a sanitizer.
What GitHub makes of text after that, outside of code, is looked for as it does: mentions, issues, commits.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path, PureWindowsPath

import pytest
from command import run
from faulty import BUGS
from optional import needs
from proof.injected.runs import record_faulty
from report.made_up import REPORTS, hostile
from report.snapshots import Markdown
from traces import TOKENS, save

import llamadiff
from llamadiff.engines.run_spec import How
from llamadiff.ext.page.markdown import checks_to_markdown, to_markdown
from llamadiff.report.formats import MOST as LONGEST
from llamadiff.report.formats import About, command_line
from llamadiff.report.github import MOST, block, code, prose, table, token
from llamadiff.result.logits import TopToken
from llamadiff.system import commands
from llamadiff.words.repairs import repairs_of

COMMAND = About(("llamadiff", "compare", "model.gguf", "it's `here`", "mine.safetensors"))
HOSTILE = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</details>", "<!-- gone", "@octocat", "#1", "GH-7",
    "a@example.org", "owner/name#12", "https://example.org/?a=b", "www.example.org", "[click](https://example.org)",
    "![see](//example.org/x.png)", "[click](javascript:alert(1))", "[x]: https://example.org", "<https://example.org>",
    "a | b", "a \\| b", "`", "``` x", "`<b>`", "a`@octocat`b", "*bold* _x_ ~~gone~~ **y**", "# title", "\n# a\n\n- x",
    "&lt;b&gt; &#64;octocat", "6dcb09b5b57875f334f61aebed695e2e4193db5e", "6dcb09b", ":tada:", "$\\sqrt{x}$", "\\",
    "\x1b[31m", "\u202egnp", "org/team@octocat,(@octocat)", "(https://example.org).", "xmpp:a@b.c/x", "mailto:a@b.c",
    "| --- |", "@octo_cat[1, 2]", "kq-0[#3]", "'@octocat'", "\ud800", "a b | c `d", "x`y``z", "1\u00a0@octocat",
)  # fmt: skip
TAGS = {
    "h3", "p", "ul", "li", "pre", "code", "table", "thead", "tbody", "tr", "th", "td", "strong", "em", "details",
    "summary", "hr",
}  # fmt: skip
# What GitHub links in text outside of code.
MENTIONED = re.compile(r"(?<![\w`])@[a-z0-9]|#[0-9]|\bGH-[0-9]|\b[0-9a-f]{7,40}\b|://|www\.|\w@\w|:\w+:", re.IGNORECASE)


class Text(HTMLParser):
    """The text of a page: within code, and without."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.depth, self.code, self.plain, self.whole, self.tags = 0, "", "", "", set[str]()
        self.feed(page)
        self.whole = self.whole.strip("\n")

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.depth += tag in ("code", "pre")

    def handle_endtag(self, tag):
        self.depth -= tag in ("code", "pre")
        self.code += "\n"
        self.plain += "\n"

    def handle_data(self, data):
        self.whole += data
        if self.depth:
            self.code += data
        else:
            self.plain += data


def rendered(text):
    """What GitHub shows of it; asserts that its sanitizer has nothing to take away, and that nothing is linked."""
    import cmarkgfm
    import nh3

    options = cmarkgfm.cmark.Options.CMARK_OPT_UNSAFE  # raw HTML is the sanitizer's
    text = text.encode("utf-8", "backslashreplace").decode()
    page = cmarkgfm.github_flavored_markdown_to_html(text, options)
    attributes = {"td": {"align"}, "th": {"align"}, "pre": {"lang"}}
    assert Text(nh3.clean(page, tags=TAGS, attributes=attributes)).tags == Text(page).tags
    assert Text(page).tags <= TAGS
    return Text(page)


# what it says


def test_the_block(snapshot, monkeypatch):
    monkeypatch.setattr("llamadiff.ext.page.markdown.__version__", "1")
    assert to_markdown(REPORTS["decode steps"], COMMAND) == snapshot(extension_class=Markdown)


def test_a_right_run_has_no_taps_around_anything():
    text = to_markdown(REPORTS["right"], About())
    assert text.startswith("### MATCH: ")
    assert not any(word in text for word in ("**Around", "**Causes", "```"))


def test_tokens_that_the_candidate_alone_ranks_first_are_told_once():
    from llamadiff.ext.page.data import told_tokens

    own = [TopToken(40 + n, 900 + n, f"own{n}", 1.0, 9.0, n + 1) for n in range(9)]
    plain = REPORTS["right"].logits
    logits = replace(plain, candidate_top=(plain.top[0], *own), expected=(own[0], own[8]))
    told = [each.id for each in told_tokens(logits)]
    assert told == [*(each.id for each in plain.top), 900, 901, 902, 903, 908]
    assert '| 43 | 903 | `"own3"` |' in to_markdown(replace(REPORTS["right"], logits=logits), About())


def test_a_graph_has_a_line_for_each_layer(small_model):
    text = to_markdown(llamadiff.compare(small_model(), TOKENS, how=How(engine="graph")), About())
    assert "drift" not in text  # a column that nothing fills
    assert "\n| 1 | `" in text


def test_causes_beyond_the_headline_are_told_whole():
    other = replace(REPORTS["wrong RoPE"], headline="something else")
    assert re.search(r"- `rope-layout` RoPE .*, layers 1, 2: rotates \(i, i\+32\)", to_markdown(other, About()))


def test_an_nmse_is_told_in_decibels_too():
    from llamadiff.ext.page.markdown import decibels

    assert decibels(1e-6) == pytest.approx(-60)
    assert decibels(0.0) == float("-inf")


# how long it may be


def test_no_report_is_longer_than_an_issue():
    result = REPORTS["decode steps"]
    long = "<@x> " * 20_000
    rows = tuple(replace(row, tap=f"{long}-{number}", layer=number // 9, verdict="wrong")
                 for number, row in enumerate(result.rows * 99))  # fmt: skip
    text = to_markdown(
        replace(
            result, rows=rows, diagnosis=(), headline=long, proof=(long,) * 9, next_steps=(long,) * 99, prompt=long
        ),
        COMMAND,
    )
    assert len(text) <= MOST
    assert text.startswith("### WRONG")


def test_what_does_not_fit_is_left_out_from_the_end():
    results = [(Path(f"{number:03}-{'x' * 150}.safetensors"), REPORTS["wrong RoPE"]) for number in range(400)]
    text = checks_to_markdown(results, About())
    assert len(text) <= MOST
    assert text.startswith("### WRONG: 0 of 400 runs are right")
    assert text.endswith("The JSON report has all of it.*\n")


def test_what_was_refused_is_a_line_with_its_reason():
    refused = ((Path("a|b.safetensors"), "is of <b>another</b> model"),)
    text = checks_to_markdown([], About(refused=refused))
    assert text.startswith("### UNCHECKED: 0 of 1 runs are right")
    page = rendered(text)
    assert "a|b.safetensors" in page.whole
    assert "is of <b>another</b> model" in page.whole
    assert "b" not in page.tags


CHECK = ("llamadiff", "check", "captures", "b.safetensors", "--model=m.gguf", "--partial", "--candidate",
         "cmd: e {out}", "-o", "all.md", "--output=all.xml")  # fmt: skip


@pytest.mark.parametrize("name", REPORTS)
def test_a_failure_is_told_in_ten_lines_with_what_to_run(name):
    """Of a trace among others: the finding, each fix, the evidence, the command for this trace alone."""
    result, path = REPORTS[name], Path("captures/a b.safetensors")
    _, *told = checks_to_markdown([(path, result)], About(CHECK)).split("**", 2)[-1].split("\n\n**", 1)
    lines = told[0].strip().splitlines() if told else []
    assert bool(lines) == (result.verdict in ("wrong", "unchecked"))
    assert len(lines) <= 10
    if lines:
        assert prose(result.headline, 600) in lines[0]
        run = next(line for line in lines if line.startswith("- run: "))
        assert run == ("- run: `llamadiff check 'captures/a b.safetensors' --model=m.gguf --partial --candidate "
                       "'cmd: e {out}' -o 'a b.html'`")  # fmt: skip
        fixes = [each.fix for each in repairs_of(result) if each.fix]
        assert sum(line.startswith("- fix: ") for line in lines) == min(3, len(fixes))
        assert result.leading is None or any(
            line.startswith("- evidence: ") and prose(result.leading.tap) in line for line in lines
        )


def test_a_command_too_long_to_show_is_left_out():
    assert command_line(("llamadiff", "compare", "--tokens", "1," * LONGEST)) is None
    assert command_line(()) is None


@pytest.mark.parametrize(
    "word", ["plain", "two words", "it's", "$HOME", "a\nb", "\x1b[31m", "'\\\n", "\udcff", "é\u202e"]
)
def test_a_shell_reads_the_command_back(word):
    given = word.encode("utf-8", "surrogateescape")
    line = command_line(("printf", "%s", os.fsdecode(given)))  # as this system's Python has it
    assert line.isprintable()
    command = ["/bin/bash", "-c", line]
    done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert done.stdout == given
    assert word != "plain" or line == shlex.join(("printf", "%s", word))


def test_a_path_has_slashes_on_every_system():
    refused = ((PureWindowsPath(r"C:\captures\new.safetensors"), "is of another model"),)
    assert "`C:/captures/new.safetensors`" in checks_to_markdown([], About(refused=refused))


def test_on_windows_a_command_is_as_its_shell_reads_it(monkeypatch):
    monkeypatch.setattr(commands, "as_windows", lambda: True)
    line = command_line(
        ("llamadiff", "check", r"C:\my captures\\", "--candidate", r'cmd: C:\e.exe "{out}"', "a&b", "\n")
    )
    assert line == r'llamadiff check "C:\my captures\\\\" --candidate "cmd: C:\e.exe "\^"{out}\^" a^&b \x0a'


# what GitHub makes of it


@needs("cmarkgfm", "nh3")
@pytest.mark.parametrize("text", HOSTILE)
def test_foreign_text_is_shown_as_it_is(text):
    from llamadiff.report.terminal.escape import escape_line

    seen = escape_line(text)
    in_table = table(("tap", "b"), [(code(text), prose(f"a {text} b")), ("`x`", token(text))])
    for made in (prose(f"the op {text} is wrong"), f"**{code(text)}**", token(text), f"- {prose(text)}", in_table):
        page = rendered(f"first\n\n{made}\n\nlast")
        assert not MENTIONED.search(page.plain), page.plain
        assert page.plain.startswith("first")
        assert page.plain.rstrip().endswith("last")
    whole = rendered(prose(f"the op {text} is wrong")).whole
    assert whole == f"the op {seen} is wrong"
    assert seen in rendered(f"x {code(text)}").code
    cells = rendered(in_table)
    assert cells.code.count(seen) >= 1


@needs("cmarkgfm", "nh3")
@pytest.mark.parametrize("text", HOSTILE)
def test_a_report_full_of_foreign_text_is_safe(text):
    page = rendered(to_markdown(hostile(text), About(("llamadiff", text))))
    assert not MENTIONED.search(page.plain), page.plain
    assert "judged by" in page.plain
    page = rendered(checks_to_markdown([(Path(text), hostile(text))], About(("llamadiff", text))))
    assert not MENTIONED.search(page.plain), page.plain


@needs("cmarkgfm", "nh3")
def test_a_place_is_one_word_and_names_are_code():
    page = rendered(prose("Qcur_rope-0[3, 0, 32] is -4.3; rotate (2i, 2i+1), not [i]"))
    assert "Qcur_rope-0[3, 0, 32]" in page.code
    assert "rotate (2i, 2i+1), not [i]" in page.plain


def test_code_ends_where_it_should():
    assert block("```\nx") == "````\n```\nx\n````"


# where it goes


def test_the_summary_of_a_job_gets_the_block_too(small_model, tmp_path, monkeypatch):
    faulty = save(record_faulty(BUGS[0], small_model(), TOKENS), tmp_path / "faulty.safetensors")
    summary, target = tmp_path / "summary.md", tmp_path / "report.md"
    summary.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    done = run("check", faulty, "--model", small_model(), "-o", f"markdown:{target}")
    assert done.returncode == 1, done.stderr
    assert summary.read_text("utf-8") == "before\n" + target.read_text("utf-8")
    assert "### WRONG: 0 of 1 runs are right" in target.read_text("utf-8")
    run("check", faulty, "--model", small_model(), "-o", f"markdown:{summary}")
    assert summary.read_text("utf-8").startswith("before\n")
    assert summary.read_text("utf-8").count("### WRONG: 0 of 1") == 2
    run("check", faulty, "--model", small_model(), "-o", f"json:{tmp_path / 'report.json'}")
    assert summary.read_text("utf-8").count("### WRONG: 0 of 1") == 2


def test_a_summary_that_is_full_is_left_as_it_is_and_said(small_model, tmp_path, monkeypatch):
    faulty = save(record_faulty(BUGS[0], small_model(), TOKENS), tmp_path / "faulty.safetensors")
    summary = tmp_path / "summary.md"
    summary.write_bytes(b"x" * (1 << 20))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    done = run("check", faulty, "--model", small_model(), "-o", "markdown:-")
    assert done.returncode == 1
    assert summary.stat().st_size == 1 << 20
    assert "GITHUB_STEP_SUMMARY: " in done.stderr
    assert "has no room" in done.stderr
    assert done.stdout.startswith("### WRONG")
