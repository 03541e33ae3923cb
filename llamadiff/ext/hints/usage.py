"""What is said of a command line that was not understood: what, where, the value, what may be meant.

The parser's errors are told by the names of their classes: of which library they are differs between its releases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

from llamadiff.ext.hints import file_kinds as kinds
from llamadiff.system.commands import quote

SHORT = 120  # characters of a help that is said beside what is missing
ALIKE = 0.6  # of two names, from which on one may be the other misspelt
MEANT = {  # what other programs call it
    "run": "compare", "test": "check", "verify": "check", "validate": "check", "dump": "capture",
    "trace": "capture", "list": "taps", "help": "--help", "version": "--version", "-v": "--version",
    "--verbose": "--full", "-m": "--model", "--gguf": "--model",
    "--out": "-o", "--dump": "-o", "--engine-command": "--candidate",
}  # fmt: skip
TOP, NEAR = ("--version", "--help"), 0.8  # options that need no command, and how near to one another name is
TRACES = (kinds.TRACE, kinds.TENSORS, kinds.ARCHIVE, kinds.ARRAYS)  # what a candidate may be
MODEL = {"-m", "--model", "--gguf"}


def mistaken_usage(error: Any, commands: Mapping[str, Any], words: Sequence[str]) -> str:
    """One line about an error of the parser's; ``commands`` by their names, ``words`` of the command line."""
    context = getattr(error, "ctx", None)
    name = str(getattr(context, "info_name", "")) if context is not None else next(iter(words), "")
    command = commands.get(name)
    name = name if command is not None else ""
    kind, message = type(error).__name__, error.format_message().rstrip(".")
    if kind == "NoSuchOption":
        said = _no_such_option(error.option_name, name, commands)
    elif kind == "BadOptionUsage":
        said = _lone_option(error.option_name, message, command)
    elif kind == "MissingParameter":
        said = _missing(error.param, name, command)
    elif kind == "BadParameter" and getattr(error, "param", None) is not None:
        said = _bad_value(error, message, words)
    elif "extra argument" in message and command is not None:
        said = _too_many(message, name, command, getattr(context, "params", {}))
    elif message.startswith("No such command"):
        said = _no_such_command(commands, words)
    else:
        said = message
    return f"{said} (llamadiff {f'{name} ' if name else ''}--help)"


def _options(command: Any) -> Iterator[str]:
    """The names of a command's options."""
    for each in command.params:
        yield from each.opts if each.param_type_name == "option" else ()


def _no_such_option(option: str, name: str, commands: Mapping[str, Any]) -> str:
    if not name:
        near = next(iter(get_close_matches(option, TOP, 1, NEAR)), MEANT.get(option))
        return f"{option}: no option before a command{f'; did you mean {near}?' if near in TOP else ''}"
    own = [*_options(commands[name]), "--help", "-h"]
    first = next((each for each in commands[name].params if each.param_type_name == "argument"), None)
    if option in MODEL and first is not None and first.name == "model":
        return f"{option}: no option of {name}: the model comes first, llamadiff {name} MODEL"
    near = MEANT.get(option) if MEANT.get(option) in own else None
    near = near or next(iter(get_close_matches(option, own, 1, ALIKE)), None)
    having = [other for other, command in commands.items() if option in _options(command)]
    if having:
        return f"{option}: no option of {name}, but of {', '.join(having[:4])}"
    return f"{option}: no such option of {name}{f'; did you mean {near}?' if near else ''}"


def _lone_option(option: str, message: str, command: Any) -> str:
    if "not take" in message:
        return f"{option}: takes no value; give it alone"
    each = next((each for each in getattr(command, "params", ()) if option in each.opts), None)
    return f"{option}: {_metavar(each) if each is not None else 'a value'} is missing behind it{_help(each)}"


def _missing(each: Any, name: str, command: Any) -> str:
    """What has to be given, with the command's first example."""
    label = f"{min(each.opts, key=len)} {_metavar(each)}" if each.param_type_name == "option" else _metavar(each)
    examples = str(getattr(command, "epilog", None)).split("\n\n")[1:2]
    such = f"; such as {examples[0].partition('   ')[0]}" if examples else ""
    return f"{name}: {label} is missing{_help(each)}{such}"


def _bad_value(error: Any, message: str, words: Sequence[str]) -> str:
    each = error.param
    label = each.opts[0] if each.param_type_name == "option" else _metavar(each)
    errors: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    behind = (word for before, word in pairwise(words) if before in each.opts)
    joined = (word.partition("=")[2] for word in words if word.partition("=")[0] in each.opts and "=" in word)
    value = errors[0]["input"] if errors and "input" in errors[0] else next(iter((*behind, *joined)), "")
    absent = re.search(r"'([^']*)' does not exist", message)
    if absent is not None:
        return f"{absent[1]}: no such directory or file; {label}{_help(each)}"
    low, high = (_bound(each, side) for side in ("min", "max"))
    if not errors and low is None and high is None and not re.search("integer|number|float|range", message):
        return f"{label}: {message}"
    whole = isinstance(each.default, int) or "integer" in message
    number = "a whole number" if whole else "a number"
    limits = [f"{low} or more"] * (low is not None) + [f"{high} or less"] * (high is not None)
    return f"{label} {value}: expected {', '.join([number, *limits])}"


def _bound(each: Any, side: str) -> Any:
    return getattr(each, side, None) if hasattr(each, side) else getattr(getattr(each, "type", None), side, None)


def _too_many(message: str, name: str, command: Any, given: Mapping[str, Any]) -> str:
    """Words that no argument takes: of a prompt without quotes, the whole of it."""
    extra = message.partition("(s) (")[2].removesuffix(")") or message.partition("(")[2].removesuffix(")")
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    prompt, kind = given.get("prompt"), kinds.kind_of(Path(extra))
    if kind in TRACES and any(each.name == "candidate" for each in command.params):
        return f"{name}: {extra} is {kind}; beside a prompt it is given as --candidate {extra}"
    if any(each.name == "prompt" for each in arguments) and isinstance(prompt, str):
        return f'{name}: words that belong together stand in quotes: "{prompt} {extra}"'
    takes = " ".join(map(_metavar, arguments)) or "no argument"
    return f"{extra}: one argument too many; {name} takes {takes}"


def _no_such_command(commands: Mapping[str, Any], words: Sequence[str]) -> str:
    word = next((each for each in words if not each.startswith("-")), "")
    if word.endswith(".gguf"):
        return f"{word}: is no command; llamadiff compare {' '.join(map(quote, words[:2]))}"
    near = MEANT.get(word) or next(iter(get_close_matches(word, commands, 1, ALIKE)), None)
    return f"{word}: no such command; {f'did you mean llamadiff {near}?' if near else 'all of them are in the help'}"


def _metavar(each: Any) -> str:
    return str(each.metavar or each.name.upper())


def _help(each: Any) -> str:
    """What it is, in its help's first clause, if that is short."""
    text = str(getattr(each, "help", None) or "").partition(". ")[0].partition("; ")[0].rstrip(".")
    return f": {text[:1].lower()}{text[1:]}" if 0 < len(text) <= SHORT else ""
