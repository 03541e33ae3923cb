"""Plain lists: the taps of a model, the findings of the doctor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from rich.table import Table
from rich.text import Text

from llamadiff.engines.model_file import Runnable
from llamadiff.judge.verdict import of_check
from llamadiff.llamacpp.doctor import BAD, NOTE, OK, Examined
from llamadiff.report.terminal.escape import escape_line
from llamadiff.report.terminal.page import Page
from llamadiff.report.terminal.report import make_console
from llamadiff.trace import taps
from llamadiff.words.diagnosis_text import layers_of

NAME_WIDTH = 26
_NAMED = 5  # taps by which a kind of layer is known
_FIRST = frozenset(kind.word for kind in taps.KINDS if kind.key)


def print_taps(model: Runnable, n_tokens: int) -> None:
    """Every tap of each kind of layer once, with its shape; * marks those to write first."""
    console, kinds = make_console(), dict(_kinds_of_layers(model))
    head = f": {len(model.taps)} taps, layers 0 to {model.n_layer - 1}; shapes for {n_tokens} tokens, float32, C order"
    console.print(Text.assemble((escape_line(model.path.name), "bold"), head))
    titles = dict(kinds) if sum(map(len, kinds.values())) > 1 else {}
    table = Table(box=None, pad_edge=False)
    for column in ("", "tap", "shape", "axes", "what"):
        table.add_column(column, no_wrap=column in ("tap", "shape"))
    for tap in model.taps:
        for title in titles.pop(tap.layer, []):
            table.add_row("", *title, style="bold")
        if tap.layer in (None, *kinds) and not ("(" in tap.name and tap.kind.optional):
            shape = str(list(taps.shape_of(tap, n_tokens, model.sizes)))
            label = tap.kind.word + ("-i" if tap.kind.layered else "")
            axes, what = ", ".join(tap.kind.axes), tap.kind.what or tap.kind.op
            table.add_row("*" if is_first(tap) else "", label, shape, axes, what)
    console.print(table)
    foot = "* write these first; the others narrow a fault down to one op (the file: docs/trace-format.md)"
    console.print(Text(foot))


def _kinds_of_layers(model: Runnable) -> Iterator[tuple[int | None, list[tuple[str, ...]]]]:
    """The first layer of each kind of them, and titles in cells: which layers, what they see, taps that others lack."""
    kinds: dict[frozenset[taps.Kind], dict[int, list[int]]] = {}
    for layer, window in enumerate(model.engine.windows or (0,) * model.n_layer):
        own = frozenset(tap.kind for tap in model.taps if tap.layer == layer)
        kinds.setdefault(own, {}).setdefault(window, []).append(layer)
    for own, layers in kinds.items():
        first = min(min(some) for some in layers.values())
        words = [t.kind.word for t in model.taps if t.layer == first and t.kind in own - frozenset.intersection(*kinds)]
        of = ", ".join(words[:_NAMED]) + ", ..." * (len(words) > _NAMED)
        sees = {w: f"attention to {f'the last {w}' if w else 'all'} keys" * any(layers) for w in layers}
        yield first, [(layers_of(some), "", "", "; ".join(filter(None, (sees[w], of)))) for w, some in layers.items()]


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
