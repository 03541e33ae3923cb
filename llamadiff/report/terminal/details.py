"""What a full report adds: how weights were decoded and multiplied, who is nearer to the engine, where time went."""

from __future__ import annotations

from rich.text import Text

from llamadiff.comparison.result import Comparison
from llamadiff.report.terminal.escape import tiny
from llamadiff.report.terminal.finding import labelled
from llamadiff.report.terminal.page import Page

_TIMES = {"total_s": "{:.1f} s in all", "capture_s": "capture {:.1f} s", "engine_s": "engine {:.1f} s",
          "peak_rss_mb": "peak memory {:.0f} MiB"}  # fmt: skip


def put_details(page: Page, comparison: Comparison) -> None:
    """Print them."""
    used = [f"{page.data(kind)} weights by {page.data(to)} activations" for kind, to in comparison.arithmetics.items()]
    if used:
        page.paragraph(labelled("products"), Text(", ".join(used)))
    if comparison.decoding.by_ggml:
        said = f"{comparison.decoding.by_ggml} tensors decoded by compiled code, bit for bit as gguf-py does"
        page.paragraph(labelled("decoding"), Text(said))
    _put_distances(page, comparison)
    facts = [words.format(comparison.timing[key]) for key, words in _TIMES.items() if key in comparison.timing]
    if facts:
        page.paragraph(labelled("cost"), Text(", ".join(facts)))


def _put_distances(page: Page, comparison: Comparison) -> None:
    """How far each side is from the engine's own run, where both are traces."""
    last = comparison.rows[-1] if comparison.rows else None
    if last is not None and len(last.distance) > 1:
        names = {"baseline": comparison.baseline.get("name"), "candidate": comparison.candidate.get("name")}
        facts = [f"{page.data(names[side] or side, 40)} {tiny(value)}" for side, value in last.distance.items()]
        page.paragraph(labelled("distance"), Text(f"{page.data(last.tap)} from exact arithmetic: {', '.join(facts)}"))


def put_absences(page: Page, comparison: Comparison, full: bool) -> None:
    """Print which taps were not recorded; in a full report also which weights only one side read."""
    missing, baseline = comparison.missing, page.data(comparison.baseline.get("name") or "the baseline", 40)
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
            page.paragraph(labelled(label), Text(words + page.names(names)))


def put_names(page: Page, comparison: Comparison) -> None:
    """Print the lines of a map that was found by values."""
    if comparison.found_map:
        page.paragraph(labelled("map"), Text("found by the values; to keep it, put these lines into a file for --map:"))
    for line in comparison.found_map:
        page.copied(line)
