"""The tables in docs/ that are made from the code: taps and known bugs. ``make docs`` writes them anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from llamadiff.ext.explain.registry import Bug, known_bugs
from llamadiff.trace.taps import KINDS, Kind

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- generated: make docs -->\n", "<!-- end -->\n"


def taps() -> Iterator[str]:
    """Every row of the vocabulary."""
    heads = ("tap", "what it is", "axes", "op of ggml", "weight", "computed from", "in layers with")
    return _table(heads, map(_tap_row, KINDS))


def bugs() -> Iterator[str]:
    """Every known bug, the likeliest first."""
    heads = ("bug", "what it is", "what to do", "shows at", "known from")
    return _table(heads, map(_bug_row, known_bugs().values()))


TABLES = {"taps.md": taps, "known-bugs.md": bugs}


def _tap_row(kind: Kind) -> tuple[str, ...]:
    name = f"`{kind.word}{'-i' if kind.layered else ''}`"
    name = f"**{name}**" if kind.key else f"{name} (*optional*)" if kind.optional else name
    reads = ", ".join(" or ".join(_codes(words.split("|"))) for words in kind.inputs.split())
    having, lacking = ", ".join(_codes(kind.needs.split())), " or ".join(_codes(kind.without.split()))
    where = f"{having}, not with {lacking}" if lacking else having
    return (
        name,
        kind.what,
        f"`[{', '.join(kind.axes)}]`",
        kind.op,
        f"`{kind.weight}`" if kind.weight else "",
        reads,
        where,
    )


def _bug_row(bug: Bug) -> tuple[str, ...]:
    name = f"`{bug.name}`" + (" (noise)" if bug.harmless else "")
    return name, bug.about, bug.fix, _few(bug.ops), bug.source


def _codes(words: Iterable[str]) -> list[str]:
    return [f"`{word}`" for word in words]


def _few(words: Sequence[str]) -> str:
    return ", ".join(words) if len(words) <= 3 else f"{', '.join(words[:2])} and {len(words) - 2} more"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(cells)} |\n"


def current(name: str) -> str:
    """A page of docs/ with its table as it should be."""
    head, rest = (DOCS / name).read_text("utf-8").split(BEGIN)
    return head + BEGIN + "".join(TABLES[name]()) + END + rest.split(END)[1]


def main() -> None:
    for name in TABLES:
        (DOCS / name).write_text(current(name), encoding="utf-8")


if __name__ == "__main__":
    main()
