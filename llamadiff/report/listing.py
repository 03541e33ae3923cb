"""Plain lists: the taps of a model, its graph, the known bugs and the page of each, the findings of the doctor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from llamadiff.diagnose.mends.kinds import kind_of, right_code
from llamadiff.diagnose.registry import Bug, known_bugs
from llamadiff.engines.model_file import Runnable
from llamadiff.ggml.check import NodeCheck, layers_of
from llamadiff.judge.verdict import of_check
from llamadiff.llamacpp.doctor import BAD, NOTE, OK, Examined
from llamadiff.report.terminal.escape import shown
from llamadiff.report.terminal.page import Page
from llamadiff.report.terminal.report import make_console
from llamadiff.system.errors import UserError
from llamadiff.trace import taps

NAME_WIDTH = 26
_FIRST = frozenset(kind.word for kind in taps.KINDS if kind.key)


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


def bugs_like(word: str | None) -> list[Bug]:
    """The bug of this name, else those in whose name or text the word is; all without one.

    Raises UserError where there is none.
    """
    known = known_bugs()
    if word is None or word in known:
        return list(known.values()) if word is None else [known[word]]
    found = [bug for bug in known.values() if word.lower() in " ".join((bug.name, bug.about, bug.fix)).lower()]
    if not found:
        raise UserError(f"{word}: no known bug is called so or mentions it; llamadiff bugs lists them all")
    return found


def print_bugs(word: str | None = None) -> None:
    """Known bugs: each one's name, what it is, where it shows, what to do."""
    console = make_console()
    known = bugs_like(word)
    for bug in known:
        console.print(Text.assemble((bug.name, "bold"), "  no mistake: noise" if bug.harmless else ""))
        for line in (
            bug.about,
            f"shows at {', '.join(bug.ops)}",
            f"do: {bug.fix}",
            bug.source and f"known from {bug.source}",
        ):
            if line:
                console.print(Padding(Text(line), (0, 0, 0, 4)))
    if word is None:
        count = sum(not bug.harmless for bug in known)
        console.print(Text(f"{count} known bugs, and {len(known) - count} ways of computing that are none"))


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
        found = Text(shown(check.found, 1000, ascii_only=ascii_only))
        line.add_row(Text(mark, style), Text(check.name, "bold"), found)
        console.print(line)
    return good


def explanation(name: str) -> str:
    """The page of a bug; of several (``a + b``, as reports name them), one after the other.

    Raises UserError for a name that no bug has.
    """
    bugs = [_named(part.strip()) for part in name.split("+")]
    return "\n\n".join("\n".join(_lines(bug)) for bug in bugs)


def _named(name: str) -> Bug:
    bug = known_bugs().get(name)
    if bug is None:
        raise UserError(f"{name}: no known bug is called so; llamadiff bugs lists them, llamadiff bugs WORD "
                        "finds those that mention a word")  # fmt: skip
    return bug


def _lines(bug: Bug) -> Iterator[str]:
    """One page; code stands in blocks that Markdown shows too."""
    kind = kind_of(bug)
    yield f"# {bug.name}"
    yield ""
    yield bug.about
    if bug.harmless:
        yield "It is a way of computing and no mistake: a tap that it explains is NOISE."
    yield ""
    yield f"How it looks: {kind.looks}"
    yield f"Ops of ggml: {', '.join(bug.ops)}"
    yield ""
    yield f"What to do: {bug.fix}."
    if bug.source:
        yield f"Known from: {bug.source}."
    yield ""
    yield f"Below is {kind.op} as it should be, for all bugs of this kind; take sizes and constants from the file."
    for language, code in right_code(kind):
        yield f"\n## {language}\n\n```{language.lower()}\n{code}\n```"


def print_tree(nodes: Sequence[NodeCheck]) -> None:
    """Every node under its layer: op, name, shape, type, and what it reads."""
    console = make_console()
    tree, branches = Tree(Text(f"{len(nodes)} nodes")), dict[str, Tree]()
    for place, node in zip(_places(nodes), nodes, strict=True):
        if place not in branches:
            branches[place] = tree.add(Text(place, "bold"))
        branches[place].add(_line(node))
    console.print(tree)


def of_layer(nodes: Sequence[NodeCheck], layer: int | None) -> list[NodeCheck]:
    """The nodes of one layer; all where none is asked for. Raises UserError for a layer that is not there."""
    if layer is None:
        return list(nodes)
    found = [node for node, own in zip(nodes, layers_of(nodes), strict=True) if own == layer]
    if not found:
        last = max((own for own in layers_of(nodes) if own is not None), default=-1)
        raise UserError(f"--layer {layer}: the graph has the layers 0 to {last}")
    return found


def _places(nodes: Sequence[NodeCheck]) -> list[str]:
    return ["outside the layers" if layer is None else f"layer {layer}" for layer in layers_of(nodes)]


def _line(node: NodeCheck) -> Text:
    sources = ", ".join(shown(name, 40) for name in node.sources)
    tap = f"  tap {shown(node.tap, 60)}" if node.tap is not None and node.tap != node.name else ""
    name = (shown(node.name, 60), "bold" if node.tap is not None else "")
    return Text.assemble(f"{node.op} ", name, f"{tap}  {_sizes(node)} {node.kind}  <- {sources}")


def _sizes(node: NodeCheck) -> str:
    """The shape without ones at the outer end."""
    first = next((i for i, size in enumerate(node.shape) if size != 1), len(node.shape) - 1)
    return "x".join(map(str, node.shape[first:]))


def as_dot(nodes: Sequence[NodeCheck]) -> str:
    """Graphviz: nodes in boxes, weights in ellipses, an edge from each source."""
    lines = ["digraph model {", "  rankdir=TB; node [shape=box, fontname=monospace];"]
    known = {node.name for node in nodes}
    for node in nodes:
        label = "\n".join((node.op, node.name, f"{_sizes(node)} {node.kind}"))
        lines.append(f"  {json.dumps(node.name)} [label={json.dumps(label)}];")
        for source in node.sources:
            if source not in known:
                lines.append(f"  {json.dumps(source)} [shape=ellipse];")
            lines.append(f"  {json.dumps(source)} -> {json.dumps(node.name)};")
    return "\n".join([*dict.fromkeys(lines), "}"]) + "\n"
