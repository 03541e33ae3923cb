"""How a report is coloured: a verdict has a background of its own, and all else the terminal's own colours.

No single colour of text can be read on dark, light and Solarized backgrounds alike, and dim text on none of them for
sure. So nothing is dim, nothing is told by a colour alone, and a badge brings its own background with it.
"""

from __future__ import annotations

from rich.text import Text

from llamadiff.numerics import tolerances
from llamadiff.report.terminal.page import Page

STRONG = "bold"
# Colours of the cube of 256, which are the same under every theme; the first 16 are not.
BADGES = {
    tolerances.MATCH: "bold color(231) on color(28)",
    tolerances.NOISE: "bold color(231) on color(24)",
    tolerances.WRONG: "bold color(231) on color(160)",
    tolerances.UNCHECKED: "bold color(16) on color(220)",
}
FEW_COLOURS = "bold reverse"  # where there are only a theme's 16 colours, or two
MARKS = {tolerances.MATCH: "·", tolerances.NOISE: "~", tolerances.WRONG: "✗", tolerances.UNCHECKED: "?"}
STYLES = (*BADGES.values(), FEW_COLOURS, STRONG)


def style_of(page: Page, verdict: str) -> str:
    """A verdict's style on this console."""
    return BADGES[verdict] if page.console.color_system in ("256", "truecolor") else FEW_COLOURS


def badge(page: Page, verdict: str) -> Text:
    """A verdict as the first word of a line, with room after it."""
    word = verdict.upper()
    if page.console.color_system is None:
        return Text(f"{word}  ")
    return Text.assemble((f" {word} ", style_of(page, verdict)), "  ")


def emphasis(page: Page, verdict: str) -> str:
    """The style of a verdict within a table: what is right has none."""
    return style_of(page, verdict) if verdict in (tolerances.WRONG, tolerances.UNCHECKED) else ""
