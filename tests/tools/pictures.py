"""The pictures of reports: README.md's, which moves, and that of docs/reading.md, with notes. ``make docs``."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html import escape
from pathlib import Path

from llamaref import Engine
from rich.console import Console

from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How, Run
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.report.terminal.page import BADGES
from llamadiff.report.terminal.report import render
from llamadiff.result.comparison import Comparison
from llamadiff.system.progress import silent
from llamadiff.verbs import demo
from llamadiff.verbs.verbs import compare

FOLDER = Path(__file__).parents[2] / ".github"
PICTURE, ANNOTATED = FOLDER / "report.svg", FOLDER / "reading.svg"
ASK = "llamadiff compare tiny.F16.gguf mine.safetensors"
# A line of the report, by what it begins with, and the note beside it.
NOTES = {
    "RoPE,": "verdict and finding",
    "Qcur_rope and": "what proves it",
    "fix": "what to do, and what the bug is called",
    "place": "where it is most off, with both values",
    "compared": "who with whom, on how many tokens",
    "layer": "own error decides; inherited does not",
    "0": "what is right is folded",
    "1, 2": "further layers that are wrong alike",
    "logits": "what it does to the next token",
}
MARGIN = 420
PROMPT = "$ "
TYPED, ANSWERED, PRINTED = 2.0, 0.8, 0.06  # seconds before a line that is typed, its answer, a line of that
PART = re.compile(r'<(rect) (?=[^>]*crispEdges)[^>]*? y="([0-9.]+)"|<(text) class="[^"]*-r[0-9]+"[^>]*? y="([0-9.]+)"')
OFFSET = {"text": 0.0, "rect": 18.5}  # from a line's background to its baseline
LINE = re.compile(r'<text class="[^"]*" x="[^"]*" y="([0-9.]+)"[^>]*>([^<]*)</text>')


def svg_of(title: str, *shown: Comparison | str) -> str:
    """Reports, and lines of their own, as an SVG; without the seconds that a report took, which differ every time."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for one in shown:
        if isinstance(one, str):
            console.print(one, highlight=False, style="bold")
        else:
            render(replace(one, timing={}), console)
    return console.export_svg(title=title)


def moving(svg: str) -> str:
    """The picture, whose lines appear one after the other, once: a report soon after the line that asks for it."""
    rows = {float(y): text for y, text in reversed(LINE.findall(svg))}  # the first of a row's
    delays, at = {}, -TYPED
    for y in sorted(rows):
        typed = rows[y].replace("&#160;", " ").startswith(PROMPT)
        at += TYPED if typed else PRINTED
        delays[y] = at + (0 if typed else ANSWERED)

    def appears(match: re.Match[str]) -> str:
        kind, place = filter(None, match.groups())
        y = min(delays, key=lambda row: abs(row - OFFSET[kind] - float(place)))
        return f'{match[0]} style="animation: appear 0s {delays[y]:.2f}s both"'

    still = "@media (prefers-reduced-motion: reduce) { * { animation: none !important } }"
    begun = svg.replace("<style>", f"<style>@keyframes appear {{ from {{ opacity: 0 }} }} {still}", 1)
    return PART.sub(appears, begun)


def annotated(svg: str) -> str:
    """The picture, wider, with the notes at the right of their lines."""
    size = re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', svg)
    top = re.search(r'<g transform="translate\(9, ([0-9.]+)\)', svg)
    assert size is not None
    assert top is not None
    width, height = float(size[1]), float(size[2])
    notes, left = [], dict(NOTES)
    for y, text in LINE.findall(svg):
        words = text.replace("&#160;", " ").strip()
        start = next((start for start in left if words.startswith(start)), None)
        if start is not None:
            at = float(y) + float(top[1])
            notes.append(_note(width, at, left.pop(start)))
    notes.insert(0, f'<rect x="{width}" y="0" width="{MARGIN}" height="{height}" fill="#ffffff"/>')
    wider = svg.replace(size[0], f'viewBox="0 0 {width + MARGIN} {height}"', 1)
    return wider.replace("</svg>", "".join(notes) + "</svg>")


def _note(x: float, y: float, words: str) -> str:
    line = f'<path d="M{x - 4} {y - 5}H{x + 24}" stroke="#c8102e" stroke-width="2"/>'
    font = "font-family:sans-serif;font-size:18px;fill:#c8102e"
    return f'{line}<text x="{x + 32}" y="{y}" style="{font}">{escape(words)}</text>'


def main() -> None:
    wrong = demo.run(silent)[1]
    mended = record(Engine(shipped_model()), [token for token, _ in wrong.tokens], "my-engine")
    right = compare(shipped_model(), Run(demo.PROMPT), mended, How())
    mend = "vi engine.c  # rotate (2i, 2i+1)"
    answer = f"[{BADGES[right.verdict]}] {right.verdict.upper()} [/]  {right.headline}"
    session = svg_of(
        "an engine with a bug", PROMPT + ASK, wrong, PROMPT + mend, f"{PROMPT}make && ./engine && {ASK}", answer
    )
    PICTURE.write_text(moving(session), encoding="utf-8")
    ANNOTATED.write_text(annotated(svg_of(ASK, wrong)), encoding="utf-8")


if __name__ == "__main__":
    main()
