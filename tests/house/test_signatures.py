"""Facts travel together: few parameters, one place that makes a Comparison, and no question which engine it is."""

from __future__ import annotations

import ast

import pytest
from places import ROOT

import llamadiff
from llamadiff.cli.commands import app
from llamadiff.engines.graph_model import GraphModel
from llamadiff.engines.model_file import Runnable
from llamadiff.engines.reference_model import Model

FILES = [*(ROOT / "llamadiff").rglob("*.py"), *(ROOT / "reference").rglob("*.py")]
MOST = 8  # parameters of a function, self and cls aside
COMMANDS = {command.callback.__name__ for command in app.registered_commands}
MAY_HAVE_MORE = {
    "llamadiff/cli/commands.py": COMMANDS,  # a parameter is an option
    "llamadiff/cli/variants.py": COMMANDS,
    "llamadiff/comparison/api.py": {name for name in llamadiff.__all__ if name.islower()},  # the public facade
}
ENGINES = {"Model", "ModelFile", "Runnable", "GraphModel", "Engine", "GraphEngine"}


def name(path):
    return str(path.relative_to(ROOT))


def parameters(function):
    """The names that a function takes, self and cls aside."""
    args = function.args
    every = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    return [arg.arg for arg in every if arg is not None and arg.arg not in ("self", "cls")]


def too_wide(tree):
    """The functions, methods and lambdas that take more than they may, by name, with how many they take."""
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    counts = [(getattr(node, "name", "lambda"), len(parameters(node))) for node in functions]
    return [(function, count) for function, count in counts if count > MOST]


def calls(tree, function):
    """The calls of a function by its name, be it imported or an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", None))
            if called == function:
                yield node


def engines_asked_for(tree):
    """The engines that an isinstance or an issubclass asks for."""
    asked = [
        argument for word in ("isinstance", "issubclass") for call in calls(tree, word) for argument in call.args[1:]
    ]
    names = {getattr(node, "id", getattr(node, "attr", None)) for argument in asked for node in ast.walk(argument)}
    return names & ENGINES


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_function_takes_more_than_eight_parameters(path):
    found, allowed = too_wide(ast.parse(path.read_text())), MAY_HAVE_MORE.get(name(path), ())
    assert [(function, count) for function, count in found if function not in allowed] == []


def test_commands_and_facade_are_where_they_may_have_more():
    wide = {where: dict(too_wide(ast.parse((ROOT / where).read_text()))).keys() for where in MAY_HAVE_MORE}
    assert wide == {
        "llamadiff/cli/commands.py": {"compare", "capture", "diagnose", "backend", "check"},
        "llamadiff/cli/variants.py": {"variants"},
        "llamadiff/comparison/api.py": {"compare", "diff"},
    }


def test_a_comparison_is_made_in_one_place():
    made = [name(path) for path in FILES for _ in calls(ast.parse(path.read_text()), "Comparison")]
    assert made == ["llamadiff/comparison/result.py"]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nobody_asks_which_engine_it_is(path):
    assert engines_asked_for(ast.parse(path.read_text())) == set()


@pytest.mark.parametrize("engine", [Model, GraphModel])
def test_both_engines_have_one_interface(engine):
    public = {attribute for attribute in dir(engine) if not attribute.startswith("_")}
    asked = {attribute for attribute in (*dir(Runnable), *Runnable.__annotations__) if not attribute.startswith("_")}
    assert asked >= public


@pytest.mark.parametrize(
    ("code", "found"),
    [("def f(self, a, b, c, d, e, f, g, *, h): ...", []), ("def f(a, b, c, d, e, f, g, *h, i, **k): ...", [("f", 10)]),
     ("class A:\n async def f(self, a, /, b, c, d, e, f, g, h, i): ...", [("f", 9)]),
     ("lambda a, b, c, d, e, f, g, h, i: 0", [("lambda", 9)])],
)  # fmt: skip
def test_parameters_are_counted(code, found):
    assert too_wide(ast.parse(code)) == found


@pytest.mark.parametrize(
    "code", ["isinstance(x, Model)", "isinstance(x, (int, llamaref.Engine))", "isinstance(x.y, A | GraphModel)",
             "issubclass(type(x), Runnable)"],
)  # fmt: skip
def test_questions_for_the_engine_are_seen(code):
    assert engines_asked_for(ast.parse(code))
