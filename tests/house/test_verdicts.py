"""One module decides: nothing else gives anything a verdict, and what that module says can be traced to its reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from places import ROOT

HOME = ROOT / "llamadiff" / "judge" / "verdict.py"
VERDICTS = {"MATCH", "NOISE", "WRONG", "UNCHECKED"}
WORDS = {word.lower() for word in VERDICTS}


def assigned(source: str) -> Iterator[str]:
    """Where a source gives a verdict: everywhere that it names one, but to compare it, or to say what belongs to it."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        names = isinstance(node, ast.Name) and node.id in VERDICTS and isinstance(node.ctx, ast.Load)
        names |= isinstance(node, ast.Attribute) and node.attr in VERDICTS
        if (names and not is_asked(node, parents)) or is_word_of_a_verdict(node, parents):
            yield f"{ast.unparse(node)}, line {node.lineno}"


def is_asked(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether something is compared with it, or looked up by it."""
    parent = parents[node]
    if isinstance(parent, (ast.Tuple, ast.Set, ast.List)):
        return isinstance(parents[parent], ast.Compare)
    return isinstance(parent, ast.Compare) or (isinstance(parent, ast.Dict) and node in parent.keys)


def is_word_of_a_verdict(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a verdict is written out as the value of something that is called one."""
    if not (isinstance(node, ast.Constant) and node.value in WORDS):
        return False
    parent = parents[node]
    if isinstance(parent, ast.keyword):
        return parent.arg == "verdict"
    targets = parent.targets if isinstance(parent, ast.Assign) else [getattr(parent, "target", None)]
    return any(isinstance(target, ast.Name) and target.id == "verdict" for target in targets)


def test_one_module_gives_verdicts() -> None:
    files = [path for path in (ROOT / "llamadiff").rglob("*.py") if path != HOME]
    found = {str(path.relative_to(ROOT)): list(assigned(path.read_text("utf-8"))) for path in files}
    assert {name: places for name, places in found.items() if places} == {}


def test_the_rule_sees_what_it_is_for() -> None:
    for given in (
        "x = WRONG",
        "f(verdict=tolerances.MATCH)",
        "x = NOISE if y else 0",
        "verdict = 'wrong'",
        "f(verdict='match')",
        "x = [UNCHECKED]",
        "x = {1: WRONG}",
        "def f(): return (MATCH, NOISE)",
    ):
        assert list(assigned(given)), given
    for asked in (
        "x == WRONG",
        "x in (MATCH, NOISE)",
        "x = {WRONG: 'red'}",
        "x.verdict != verdict.WRONG",
        "y = 'match'",
    ):
        assert not list(assigned(asked)), asked
