"""What carries meaning can be read on dark, light and Solarized terminals: contrast, computed from the styles."""

from __future__ import annotations

import io
import re

import pytest
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from tools.themes import THEMES

from llamadiff.report.terminal.page import BADGES, STYLES
from llamadiff.report.terminal.report import render
from llamadiff.result import notebook
from report.made_up import SHAPES, explained, rows

LEAST = 4.5
Rgb = tuple[int, int, int]


def luminance(colour: Rgb) -> float:
    """Relative luminance (WCAG 2.1)."""
    parts = [value / 255 for value in colour]
    red, green, blue = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Rgb, other: Rgb) -> float:
    """The ratio that WCAG asks for: 4.5 for text."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def shown(style: Style, theme: TerminalTheme) -> tuple[Rgb, Rgb]:
    """What a style's text and what is behind it look like under a theme."""
    front = (style.color or Color.default()).get_truecolor(theme)
    back = (style.bgcolor or Color.default()).get_truecolor(theme, foreground=False)
    return (back, front) if style.reverse else (front, back)


def used(shape: str) -> set[Style]:
    """Every style that a report really uses."""
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system="truecolor", record=True)
    its = SHAPES[shape]
    render(its, console, full=True)
    render(its, console)
    return {segment.style for segment in console._record_buffer if segment.style}


def own_contrast(theme: TerminalTheme) -> float:
    """That of the theme's plain text: Solarized's is below 4.5 by design, and nothing that we print can change it."""
    return contrast(*shown(Style(), theme))


def test_contrast_is_what_wcag_says() -> None:
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("style", STYLES)
def test_every_style_can_be_read_on_every_theme(style: str, theme: str) -> None:
    parsed = Style.parse(style)
    assert not parsed.dim
    least = min(LEAST, own_contrast(THEMES[theme]))
    assert contrast(*shown(parsed, THEMES[theme])) >= least


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("verdict", BADGES)
def test_verdicts_do_not_depend_on_the_theme(verdict: str, theme: str) -> None:
    assert contrast(*shown(Style.parse(BADGES[verdict]), THEMES[theme])) >= LEAST


@pytest.mark.parametrize("shape", SHAPES)
def test_reports_use_no_other_style(shape: str) -> None:
    """No dim text, and no colour of the theme's 16: each is too faint on one of the four."""
    for style in used(shape):
        assert not style.dim
        assert style.color is None or style.bgcolor is not None
        colours = [colour.number for colour in (style.color, style.bgcolor) if colour is not None]
        assert all(number is not None and number >= 16 for number in colours)


def test_nothing_is_told_by_colour_alone() -> None:
    """Without colours the words are the same."""

    def words(colours: str | None) -> str:
        file = io.StringIO()
        its = explained(rows(24, wrong=("Qcur_rope-11",)), {"Qcur_rope-11"})
        render(its, Console(file=file, width=140, force_terminal=colours is not None, color_system=colours))
        plain = re.sub(r"\x1b\[[0-9;]*m|\x1b\]8;[^\x1b]*\x1b\\", "", file.getvalue())
        return " ".join(plain.split())

    assert words("truecolor") == words(None)


@pytest.mark.parametrize("style", notebook._BADGES.values())
def test_a_notebooks_verdicts_can_be_read(style: str) -> None:
    front, back = (tuple(bytes.fromhex(code)) for code in re.findall("#([0-9a-f]{6})", style))
    assert contrast(front, back) >= LEAST
