"""A template that tells, while it is rendered, which of its lines wrote what, and which of its branches were taken.

Its syntax tree is given calls that return what they are given: what it writes stays what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, Template, nodes

from llamadiff.ext.prompt.chat_template import rendered

INNER = (
    nodes.Macro,
    nodes.CallBlock,
    nodes.FilterBlock,
    nodes.AssignBlock,
)  # what is written here goes elsewhere first
Branch = tuple[int, str]  # its line, and which way: "then", "otherwise", "loop", "empty"


class Traced:
    """A template that can be rendered, told ``branches`` and all. Raises what jinja2 raises for a bad one."""

    def __init__(self, environment: Environment, source: str) -> None:
        self.branches: list[Branch] = []
        self.pieces: list[tuple[int, str]] = []
        self.reached: set[int] = set()
        self._written = 0  # pieces that the output has for sure
        self._is_fit = True
        self.environment = environment.overlay()
        for called in (self.begin, self.begin_top, self.mark, self.mark_top, self.reach):
            setattr(self.environment, called.__name__, called)
        tree = self.environment.parse(source)
        self._statements(tree, True)
        self.template = compiled(self.environment, tree)

    def told(self, conversation: Mapping[str, Any]) -> dict[str, Any]:
        """The ``text`` or ``error``, the ``pieces`` of it as [line, text], the numbers of branches ``reached``."""
        self.pieces, self.reached, self._written, self._is_fit = [], set(), 0, True
        answer: dict[str, Any] = dict(rendered(lambda: self.template, conversation))
        if not self._is_fit:
            answer = {"error": "writes a list of objects as Python does: it is not made for such a conversation"}
        del self.pieces[self._written :]
        whole = "".join(text for _, text in self.pieces) == answer.get("text")
        return answer | {"pieces": self.pieces if whole else [], "reached": sorted(self.reached)}

    # -- what the template calls ---------------------------------------------------------------------------------------

    def begin(self) -> int:
        return len(self.pieces)

    def begin_top(self) -> int:
        """What a macro wrote was taken by a condition or a variable."""
        del self.pieces[self._written :]
        return self._written

    def mark(self, line: int, start: int, value: Any) -> Any:
        """A value was written; a macro's pieces, if it is theirs, say more of it than one would."""
        text = str(value)
        self._is_fit &= not (isinstance(value, list) and any(map(_is_no_tool, value)))
        if "".join(each for _, each in self.pieces[start:]) != text:
            self.pieces[start:] = [(line, text)]
        return value

    def mark_top(self, line: int, start: int, value: Any) -> Any:
        self.mark(line, start, value)
        self._written = len(self.pieces)
        return value

    def reach(self, branch: int, value: Any = None) -> Any:
        self.reached.add(branch)
        return value

    # -- how the tree is changed ---------------------------------------------------------------------------------------

    def _statements(self, node: nodes.Node, is_top: bool, is_elif: bool = False) -> None:
        below = is_top and not isinstance(node, INNER)
        others = node.elif_ if isinstance(node, nodes.If) else []
        for child in list(node.iter_child_nodes()):
            self._statements(child, below, any(child is each for each in others))
        if isinstance(node, nodes.Output):
            node.nodes = [self._written_by(part, is_top) for each in node.nodes for part in _by_line(each)]
        elif isinstance(node, nodes.If) and not is_elif:
            for each in (node, *others):
                each.body.insert(0, self._statement(each.test.lineno, "then"))
            node.else_.insert(0, self._statement(node.test.lineno, "otherwise"))
        elif isinstance(node, nodes.For):
            node.body.insert(0, self._statement(node.lineno, "loop"))
            if node.else_:
                node.else_.insert(0, self._statement(node.lineno, "empty"))
        elif isinstance(node, nodes.CondExpr):
            node.expr1 = self._reaching(node.lineno, "then", node.expr1)
            if node.expr2 is not None:
                node.expr2 = self._reaching(node.lineno, "otherwise", node.expr2)

    def _written_by(self, value: nodes.Expr, is_top: bool) -> nodes.Expr:
        begin, mark = ("begin_top", "mark_top") if is_top else ("begin", "mark")
        line = value.lineno
        given = [nodes.Const(line), self._call(begin, [], line), value]
        return self._call(mark, given, line)

    def _reaching(self, line: int, way: str, value: nodes.Expr | None = None) -> nodes.Call:
        self.branches.append((line, way))
        given: list[nodes.Expr] = [nodes.Const(len(self.branches) - 1)]
        return self._call("reach", [*given, value] if value is not None else given, line)

    def _statement(self, line: int, way: str) -> nodes.ExprStmt:
        return nodes.ExprStmt(self._reaching(line, way), lineno=line)

    def _call(self, name: str, given: list[nodes.Expr], line: int) -> nodes.Call:
        called = nodes.Call(nodes.EnvironmentAttribute(name), given, [], None, None)
        called.set_lineno(line).set_environment(self.environment)
        return called


def _by_line(written: nodes.Expr) -> list[nodes.Expr]:
    """A text of several lines as a text for each."""
    if not isinstance(written, nodes.TemplateData):
        return [written]
    lines = enumerate(written.data.splitlines(keepends=True), written.lineno)
    return [nodes.TemplateData(text, lineno=number) for number, text in lines]


def _is_no_tool(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") != "function"


def compiled(environment: Environment, tree: nodes.Template) -> Template:
    """A template of a tree that was changed."""
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None))
