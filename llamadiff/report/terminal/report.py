"""Comparison -> a terminal: the finding first, its evidence under it. Computes nothing; it lays out."""

from __future__ import annotations

import os
import sys
from typing import IO

from rich.console import Console
from rich.text import Text

from llamadiff.judge.verdict import is_right
from llamadiff.report.tables import tables_of
from llamadiff.report.terminal.escape import tiny
from llamadiff.report.terminal.finding import put_causes, put_fixes, put_headline, put_last_line, put_next_steps
from llamadiff.report.terminal.footnotes import put_notes
from llamadiff.report.terminal.logits import put_logits
from llamadiff.report.terminal.page import Page
from llamadiff.report.terminal.subject import put_preflight, put_subject
from llamadiff.report.terminal.tap_columns import put_taps
from llamadiff.report.terminal.tap_map import put_map
from llamadiff.result.comparison import Comparison

PIPED_WIDTH = 120
_TIMES = {"total_s": "{:.1f} s in all", "capture_s": "capture {:.1f} s", "engine_s": "engine {:.1f} s",
          "peak_rss_mb": "peak memory {:.0f} MiB"}  # fmt: skip


def make_console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console that obeys no markup; where it is no terminal, 120 cells wide unless COLUMNS says otherwise."""
    file = file if file is not None else sys.stdout
    console = Console(file=file, width=width, markup=False, emoji=False, highlight=False)
    if width is None and not console.is_terminal:
        columns = os.environ.get("COLUMNS", "")
        console.width = int(columns) if columns.isdecimal() and int(columns) > 0 else PIPED_WIDTH
    return console


def say(words: str) -> None:
    """Print words of our own, broken between words."""
    make_console().print(Text(words))


def render(comparison: Comparison, console: Console, full: bool = False) -> None:
    """Print a comparison. ``full``: every layer, token and cause, and how it was computed."""
    page = Page(console)
    put_headline(page, comparison, full)
    page.blank()
    put_fixes(page, comparison, full)
    put_subject(page, comparison, full)
    put_preflight(page, comparison, full)
    put_tables(page, comparison, full)
    if comparison.rows:
        page.blank()
        put_map(page, comparison, full)
        put_taps(page, comparison, full)
        put_notes(page, comparison, full)
    if full:
        put_causes(page, comparison)
    if comparison.logits is not None:
        page.blank()
        put_logits(page, comparison, full)
    put_absences(page, comparison, full)
    put_names(page, comparison)
    put_next_steps(page, comparison)
    if full:
        put_details(page, comparison)
    put_last_line(page, comparison)


def put_tables(page: Page, comparison: Comparison, full: bool) -> None:
    """Print what slices found besides."""
    tables = tables_of(comparison, full)
    if tables:
        page.blank()
    for _, titles, cells in tables:
        page.table(titles, cells)
        page.blank()


def put_details(page: Page, comparison: Comparison) -> None:
    """Print them."""
    used = [f"{page.data(kind)} weights by {page.data(to)} activations" for kind, to in comparison.arithmetics.items()]
    if used:
        page.print_labelled("products", ", ".join(used))
    if comparison.decoding.by_ggml:
        said = f"{comparison.decoding.by_ggml} tensors decoded by compiled code, bit for bit as gguf-py does"
        page.print_labelled("decoding", said)
    _put_distances(page, comparison)
    facts = [words.format(comparison.timing[key]) for key, words in _TIMES.items() if key in comparison.timing]
    if facts:
        page.print_labelled("cost", ", ".join(facts))


def _put_distances(page: Page, comparison: Comparison) -> None:
    """How far each side is from the engine's own run, where both are traces."""
    last = comparison.rows[-1] if comparison.rows else None
    if last is not None and len(last.distance) > 1:
        names = {"baseline": comparison.baseline.get("name"), "candidate": comparison.candidate.get("name")}
        facts = [f"{page.data(names[side] or side, 40)} {tiny(value)}" for side, value in last.distance.items()]
        page.print_labelled("distance", f"{page.data(last.tap)} from exact arithmetic: {', '.join(facts)}")


def put_absences(page: Page, comparison: Comparison, full: bool) -> None:
    """Print which taps were not recorded, unless all is right; in a full report, and which weights one side read."""
    missing = comparison.missing if full or not is_right(comparison.verdict) else ()
    baseline = page.data(comparison.baseline.get("name") or "the baseline", 40)
    facts = [
        ("missing", f"{len(missing)} taps were not recorded: " if missing[1:] else "not recorded: ", missing),
        ("decoding", "ggml and gguf-py decode differently ", comparison.decoding.refused),
    ]
    if full:
        facts += [
            ("weights", f"only {baseline} reads ", comparison.only_baseline_read),
            ("weights", "only the reference engine reads ", comparison.only_engine_read),
            ("ignored", "no tap of this model: ", comparison.extra),
        ]
    for label, words, names in facts:
        if names:
            page.print_labelled(label, words + page.names(names))


def put_names(page: Page, comparison: Comparison) -> None:
    """Print the lines of a map that was found by values."""
    if comparison.found_map:
        page.print_labelled("map", "found by the values; to keep it, put these lines into a file for --map:")
    for line in comparison.found_map:
        page.print_unbroken(line)
