"""The child process in which a template is rendered, with what it did told, and changed as engines are known to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from time import process_time
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes

from llamadiff.ext.prompt.chat_template import answers, environment, rendered
from llamadiff.ext.prompt.templates.changes import FUNCTIONS, TOKENS, WHITE, Change
from llamadiff.ext.prompt.templates.conversation_changes import MESSAGES
from llamadiff.ext.prompt.templates.own_changes import KNOWN, own_changes
from llamadiff.ext.prompt.templates.several import Cases, several
from llamadiff.ext.prompt.templates.traced import Traced

Conversation = Mapping[str, Any]
NAMED = (*WHITE, *TOKENS, *FUNCTIONS, *MESSAGES)
NUMBERS = (0, 512, 1 << 20)  # to give to what is compared by size
PATIENCE = 20.0  # seconds of work for causes


def main() -> None:
    """A request's answer; ``wanted`` asks for causes, and ``parted`` for several of those that come first."""
    answers(_answered)


def _answered(
    template: str, conversations: Sequence[Conversation], wanted: Sequence[str | None] | None = None, parted: int = 0
) -> Mapping[str, Any]:
    try:
        if wanted is not None and parted:
            return _several(template, conversations, wanted, parted)
        if wanted is not None:
            return {"causes": list(_causes(template, conversations, wanted))}
        traced = Traced(environment(), template)
        told = [traced.told(each) for each in conversations]
        return {"told": told, "branches": traced.branches, **_words(environment().parse(template))}
    except (TemplateError, RecursionError, MemoryError, ValueError) as error:
        return {"error": f"fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def _words(tree: nodes.Template) -> dict[str, Any]:
    """What a template can be given: variables with the texts that they are compared with, roles, keys, texts."""
    stored = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}
    asked = {node.node.name for node in tree.find_all(nodes.Test) if isinstance(node.node, nodes.Name)}
    free = meta.find_undeclared_variables(tree) - (stored - asked) - {"raise_exception", "strftime_now", *KNOWN}
    compared: dict[str, list[str | int]] = {name: [] for name in sorted(free)}
    roles, sought = dict[str, None](), dict[str, None]()
    for node in tree.find_all(nodes.Compare):
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        texts = [each.value for side in sides for each in _constants(side) if isinstance(each.value, str)]
        if node.ops[0].op in ("in", "notin") and isinstance(node.expr, nodes.Const):
            sought.update(dict.fromkeys(texts))
        for side in sides:
            if isinstance(side, nodes.Name) and side.name in compared:
                is_number = any(operand.op in ("lt", "lteq", "gt", "gteq") for operand in node.ops)
                compared[side.name] += NUMBERS if is_number else texts
            if _key(side) == "role" or (isinstance(side, nodes.Name) and side.name == "role"):
                roles.update(dict.fromkeys(texts))
    many = [node.iter for node in tree.find_all(nodes.For)]
    many += [node.expr for node in tree.find_all(nodes.Operand) if node.op in ("in", "notin")]
    lists = {each.name for node in many for each in (node, *node.find_all(nodes.Name)) if isinstance(each, nodes.Name)}
    keys = {key for node in tree.find_all((nodes.Getattr, nodes.Getitem)) if (key := _key(node))}
    keys |= {each.value for each in _constants(tree) if isinstance(each.value, str)}
    return {
        "variables": compared,
        "roles": list(roles),
        "sought": list(sought),
        "lists": sorted(lists),
        "keys": sorted(keys),
    }


def _constants(node: nodes.Node) -> Iterator[nodes.Const]:
    if isinstance(node, nodes.Const):
        yield node
    yield from node.find_all(nodes.Const)


def _key(node: nodes.Node) -> str | None:
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
        return node.arg.value
    return None


def _causes(template: str, conversations: Sequence[Conversation], wanted: Sequence[str | None]) -> Iterator[list[str]]:
    """The changes under which each conversation gives the text that is wanted, or fails where that is None."""
    usual = environment()
    tree = usual.parse(template)
    made = usual.from_string(template)
    variables = tuple(_words(tree)["variables"])
    until = process_time() + PATIENCE
    for changes in (NAMED, own_changes(tree, template, variables)):
        found = False
        for change in takewhile(lambda _: process_time() < until, changes):
            if _fits(change, template, made, zip(conversations, wanted, strict=True)):
                yield [change.name, change.says, change.fix]
                found = True
        if found:
            return


def _several(
    template: str, conversations: Sequence[Conversation], wanted: Sequence[str | None], parted: int
) -> Mapping[str, Any]:
    """Several changes that together give the texts that are wanted, and how many of the first ones they leave."""
    tree, until, usual = environment().parse(template), process_time() + PATIENCE, environment().from_string(template)
    made = dict[str, Template | None]()

    def text(change: Change, conversation: Conversation) -> str | None:
        if change.name not in made:
            try:
                made[change.name] = change.template(template, usual)
            except (TemplateError, RecursionError, LookupError, AttributeError):  # one took what another changes
                made[change.name] = None
        found = made[change.name]
        return None if found is None else _text(change, found, conversation)

    cases = Cases(conversations, wanted, parted, text, lambda: process_time() >= until)
    changes, left = several(cases, [*NAMED, *own_changes(tree, template, tuple(_words(tree)["variables"]))])
    return {"causes": [[each.name, each.says, each.fix] for each in changes], "left": left}


def _fits(change: Change, source: str, usual: Template, cases: Iterator[tuple[Conversation, str | None]]) -> bool:
    try:
        template = change.template(source, usual)
    except (TemplateError, RecursionError):
        return False
    return all(_text(change, template, conversation) == text for conversation, text in cases)


def _text(change: Change, template: Template, conversation: Conversation) -> str | None:
    try:
        given = change.conversation(conversation) if change.conversation is not None else conversation
    except (KeyError, TypeError, ValueError):
        return None
    text = rendered(lambda: template, given).get("text")
    return change.text(text, conversation) if text is not None and change.text is not None else text
