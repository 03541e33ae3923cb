"""Mistakes that only one template can show: its variables, its branches, what it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jinja2 import nodes

from llamadiff.ext.prompt.templates.changes import Change, without

KNOWN = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "continue_final_message")


def own_changes(tree: nodes.Template, source: str, variables: tuple[str, ...]) -> Iterator[Change]:
    """Of one template: a variable that is not passed on, a branch that is always or never taken, an output left out."""
    lines = source.split("\n")
    for name in variables:
        if name not in KNOWN:
            yield Change(f"ignored:{name}", f"does not pass {name} on", f"give the template {name}",
                         conversation=without(name))  # fmt: skip
    for number, test in enumerate(node.test for node in _chosen(tree)):
        text = lines[test.lineno - 1].strip()
        for value in (True, False):
            says = f"takes the condition of line {test.lineno} for {str(value).lower()} always: {text}"
            yield Change(f"condition:{number}:{value}", says, "look at what the condition reads and how it is computed",
                         tree=_decided(number, value))  # fmt: skip
    for number, pair in enumerate(_pairs(tree)):
        for side in ("left", "right"):
            says = f"ignores a part of line {pair.lineno}: {lines[pair.lineno - 1].strip()}"
            yield Change(f"part:{number}:{side}", says, "look at what each part of the condition gives",
                         tree=_ignored(number, side))  # fmt: skip
    for number, output in enumerate(_outputs(tree)):
        what = "no white space" if isinstance(output, nodes.TemplateData) and not output.data.strip() else "nothing"
        says = f"writes {what} at line {output.lineno}: {lines[output.lineno - 1].strip()}"
        yield Change(f"silent:{number}", says, "look at what this expression reads", tree=_silenced(number))


def _chosen(tree: nodes.Template) -> list[nodes.If | nodes.CondExpr]:
    return [*tree.find_all(nodes.If), *tree.find_all(nodes.CondExpr)]


def _pairs(tree: nodes.Template) -> list[nodes.And | nodes.Or]:
    return [*tree.find_all(nodes.And), *tree.find_all(nodes.Or)]


def _outputs(tree: nodes.Template) -> list[nodes.Expr]:
    return [child for node in tree.find_all(nodes.Output) for child in node.nodes]


def _decided(number: int, value: bool) -> Callable[[nodes.Template], None]:
    def change(tree: nodes.Template) -> None:
        node = _chosen(tree)[number]
        node.test = nodes.Const(value, lineno=node.test.lineno)

    return change


def _ignored(number: int, side: str) -> Callable[[nodes.Template], None]:
    """One side of an "and" is always true, one of an "or" always false."""

    def change(tree: nodes.Template) -> None:
        pair = _pairs(tree)[number]
        setattr(pair, side, nodes.Const(isinstance(pair, nodes.And), lineno=pair.lineno))

    return change


def _silenced(number: int) -> Callable[[nodes.Template], None]:
    def change(tree: nodes.Template) -> None:
        output = _outputs(tree)[number]
        for node in tree.find_all(nodes.Output):
            node.nodes = [child for child in node.nodes if child is not output]

    return change
