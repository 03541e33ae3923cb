"""Plain lists: the taps of a model, and the findings of the doctor."""

from __future__ import annotations

from collections.abc import Iterable

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from llamadiff.diagnose.registry import Bug, known_bugs
from llamadiff.engines.model_file import Runnable
from llamadiff.llamacpp.doctor import Examined
from llamadiff.report.terminal.escape import shown
from llamadiff.report.terminal.report import make_console
from llamadiff.trace import taps

NAME_WIDTH = 26


def print_taps(model: Runnable, n_tokens: int) -> None:
    """Every tap of a layer once, with its shape; * marks those to write first."""
    console = make_console()
    name = Text(shown(model.path.name), style="bold")
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
            table.add_row("*" if tap.kind.key else "", label, str(list(shape)), ", ".join(tap.kind.axes), what)
    console.print(table)
    console.print(
        Text("* write these first; the others narrow a fault down to one op (the file: docs/trace-format.md)")
    )


def print_bugs() -> None:
    """Every known bug: its name, what it is, where it shows, what to do."""
    console = make_console()
    known = known_bugs().values()
    for bug in known:
        label = Text.assemble((bug.name, "bold"), ("  no mistake: noise" if bug.harmless else "", "dim"))
        console.print(label)
        for line in (
            bug.about,
            f"shows at {shows_at(bug)}" if bug.words != bug.ops else "",
            bug.ops and f"in a graph of llama.cpp at {', '.join(bug.ops)}",
            f"do: {bug.fix}",
            bug.source and f"known from {bug.source}",
        ):
            if line:
                console.print(Padding(Text(line), (0, 0, 0, 4)))
    count = sum(not bug.harmless for bug in known)
    console.print(Text(f"{count} known bugs, and {len(known) - count} ways of computing that are none"))


def shows_at(bug: Bug) -> str:
    """The taps where a bug shows, in words."""
    return ", ".join(bug.words) if len(bug.words) <= 6 else f"{', '.join(bug.words[:5])} and {len(bug.words) - 5} more"


def print_checks(checks: Iterable[Examined]) -> bool:
    """One line a check, as each is done; returns whether all are good."""
    console, good = make_console(), True
    ascii_only = console.options.ascii_only
    for check in checks:
        mark, style = {True: ("ok", "green"), False: ("BAD", "bold red"), None: ("", "")}[check.good]
        good = good and check.good is not False
        line = Table.grid(padding=(0, 2))
        line.add_column(width=3, justify="right")
        line.add_column(width=NAME_WIDTH)
        line.add_column(ratio=1)
        found = Text(shown(check.found, 1000, ascii_only=ascii_only))
        line.add_row(Text(mark, style), Text(check.name, "bold"), found)
        console.print(line)
    return good
