"""Reports as pictures, to be looked at: every case in every width and theme.

``PYTHONPATH=tests python -m tools.gallery DIR [CASE ...]``, with chromium.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from optional import program
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from llamadiff.report.terminal.report import render
from llamadiff.result.comparison import Comparison
from tools.themes import THEMES

WIDTHS = (40, 80, 100, 140)
PAGE = (
    "<!DOCTYPE html><meta charset=utf-8><style>body{{margin:12px;background:{background};color:{foreground}}}"
    "pre{{font:14px/1.25 'DejaVu Sans Mono',monospace;margin:0}}</style><pre>{code}</pre>"
)


def page_of(comparison: Comparison, width: int, theme: TerminalTheme, **options: bool) -> str:
    """A report as an HTML page."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    render(comparison, console, **options)
    background, foreground = theme.background_color.hex, theme.foreground_color.hex
    code = console.export_html(theme=theme, inline_styles=True, code_format="{code}")
    return PAGE.format(background=background, foreground=foreground, code=code)


def picture(html: Path, width: int, lines: int) -> None:
    """A PNG beside a page, by a browser."""
    browser = program("chromium") or "chromium"
    size = f"--window-size={int(8.45 * width) + 28},{int(17.5 * lines) + 28}"
    to = f"--screenshot={html.with_suffix('.png')}"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size, to, html.as_uri()]
    subprocess.run(command, check=True, capture_output=True)


def main(cases: dict[str, Callable[[], Comparison]], folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or cases:
        comparison = cases[name]()
        for width in WIDTHS:
            for theme in THEMES if width == 100 else ("dark",):
                html = folder / f"{name}-{width}-{theme}.html"
                page = page_of(comparison, width, THEMES[theme])
                html.write_text(page, encoding="utf-8")
                picture(html, width, page.count("\n"))
                print(html.with_suffix(".png"), page.count("\n") - 1, "lines")


if __name__ == "__main__":
    from tools.gallery_cases import CASES

    main(CASES, Path(sys.argv[1]), sys.argv[2:])
