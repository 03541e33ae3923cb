"""Plain lists: the taps of a model, the findings of the doctor."""

from __future__ import annotations

import json
from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from llamadiff.engines.model_file import Runnable
from llamadiff.judge.verdict import of_check
from llamadiff.llamacpp.doctor import BAD, NOTE, OK, Examined
from llamadiff.report.terminal.escape import escape_line
from llamadiff.report.terminal.page import Page
from llamadiff.report.terminal.report import make_console
from llamadiff.trace import taps

NAME_WIDTH = 26
_FIRST = frozenset(kind.word for kind in taps.KINDS if kind.key)


def print_taps(model: Runnable, n_tokens: int) -> None:
    """Every tap of a layer once, with its shape; * marks those to write first."""
    console = make_console()
    name = Text(escape_line(model.path.name), style="bold")
    head = Text.assemble(
        name,
        f": {len(model.taps)} taps, layers 0 to {model.n_layer - 1}; shapes for {n_tokens} tokens, float32, C order",
    )
    console.print(head)
    table = Table(box=None, pad_edge=False)
    for column in ("", "tap", "shape", "axes", "what"):
        table.add_column(column, no_wrap=column in ("tap", "shape"))
    for tap in model.taps:
        if tap.layer in (None, 0) and not ("(" in tap.name and tap.kind.optional):
            shape = taps.shape_of(tap, n_tokens, model.sizes)
            label = tap.kind.word + ("-i" if tap.kind.layered else "")
            what = tap.kind.what or tap.kind.op
            table.add_row("*" if is_first(tap) else "", label, str(list(shape)), ", ".join(tap.kind.axes), what)
    console.print(table)
    console.print(
        Text("* write these first; the others narrow a fault down to one op (the file: docs/trace-format.md)")
    )


def is_first(tap: taps.Tap) -> bool:
    """Whether a tap is one of those to write first: by its name, of what a graph has under a name of the vocabulary."""
    return tap.kind.key or tap.kind.word in _FIRST


def taps_as_json(model: Runnable, n_tokens: int) -> str:
    """Every tap in graph order, with its shape for so many tokens."""
    listed = [
        {
            "tap": tap.name, "layer": tap.layer, "op": tap.kind.op, "what": tap.kind.what or tap.kind.op,
            "shape": list(taps.shape_of(tap, n_tokens, model.sizes)), "axes": list(tap.kind.axes),
            "first": is_first(tap), "optional": tap.kind.optional,
        }
        for tap in model.taps
    ]  # fmt: skip
    return json.dumps(listed, indent=1, ensure_ascii=False)


def print_checks(checks: Iterable[Examined]) -> bool:
    """One line a check, as each is done; returns whether none is bad."""
    console, good = make_console(), True
    page = Page(console)
    ascii_only = console.options.ascii_only
    for check in checks:
        known = check.state in (OK, BAD, NOTE)
        verdict = of_check(check.state == BAD, is_known=check.state != NOTE) if known else ""
        mark, style = check.state, page.style_of(verdict) if verdict else ""
        good = good and check.state != BAD
        line = Table.grid(padding=(0, 2))
        line.add_column(width=4, justify="right")
        line.add_column(width=NAME_WIDTH)
        line.add_column(ratio=1)
        found = Text(escape_line(check.found, 1000, ascii_only=ascii_only))
        line.add_row(Text(mark, style), Text(check.name, "bold"), found)
        console.print(line)
    return good
