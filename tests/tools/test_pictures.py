"""README's picture moves: every line appears once, after the one above it, a command later than what is printed."""

from __future__ import annotations

import re
from itertools import pairwise

from tools import pictures


def delays(svg: str) -> list[tuple[float, str]]:
    """When each line appears, from above; a background with its words."""
    found = re.findall(
        r'<text class="[^"]*-r[0-9]+"[^>]* style="animation: appear 0s ([0-9.]+)s both"[^>]*>([^<]*)', svg
    )
    return [(float(delay), words.replace("&#160;", " ").strip()) for delay, words in found]


def test_lines_appear_in_their_order() -> None:
    svg = pictures.moving(pictures.svg_of("title", "$ first", "[on red] one [/] 1", "two", "$ second", "three"))
    shown = {words: delay for delay, words in delays(svg) if words}
    assert list(shown) == ["$ first", "one", "1", "two", "$ second", "three"]
    assert shown["one"] == shown["1"]
    assert all(first <= second for first, second in pairwise(shown.values()))
    assert shown["$ second"] - shown["two"] > 10 * (shown["two"] - shown["one"]) > 0
    assert re.findall(r'<rect [^>]*style="animation: appear 0s ([0-9.]+)s', svg) == [f"{shown['one']:.2f}"]
    assert "prefers-reduced-motion" in svg


def test_the_picture_of_the_readme_begins_and_ends_with_the_same_question() -> None:
    lines = [words for _, words in delays(pictures.PICTURE.read_text("utf-8")) if words]
    assert lines[0] == f"{pictures.PROMPT}{pictures.ASK}"
    assert lines[-3].endswith(pictures.ASK)
    assert lines[-2] == "MATCH"
