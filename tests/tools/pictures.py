"""The pictures of a report in README.md and docs/reading.md, the second with notes beside its lines. ``make docs``."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html import escape
from pathlib import Path

from rich.console import Console

from llamadiff.report.terminal.report import render
from llamadiff.result.comparison import Comparison
from llamadiff.system.progress import silent
from llamadiff.verbs import demo

FOLDER = Path(__file__).parents[2] / ".github"
PICTURE, ANNOTATED = FOLDER / "report.svg", FOLDER / "reading.svg"
TITLE = "llamadiff compare tiny.F16.gguf mine.safetensors"
# A line of the report, by what it begins with, and the note beside it.
NOTES = {
    "RoPE,": "verdict and finding",
    "Qcur_rope and": "what proves it",
    "fix": "what to do, and who had it before",
    "place": "where it is most off, with both values",
    "compared": "who with whom, on how many tokens",
    "layer": "own error decides; inherited does not",
    "0": "what is right is folded",
    "1, 2": "further layers that are wrong alike",
    "logits": "what it does to the next token",
}
MARGIN = 420
LINE = re.compile(r'<text class="[^"]*" x="[^"]*" y="([0-9.]+)"[^>]*>([^<]*)</text>')


def svg_of(comparison: Comparison) -> str:
    """A report as an SVG; without the seconds that it took, which differ every time."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    render(replace(comparison, timing={}), console)
    return console.export_svg(title=TITLE)


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
    svg = svg_of(demo.run(silent)[1])
    PICTURE.write_text(svg, encoding="utf-8")
    ANNOTATED.write_text(annotated(svg), encoding="utf-8")


if __name__ == "__main__":
    main()
