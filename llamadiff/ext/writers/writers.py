"""Trace writers to paste into an engine, a source file a language, and the lines that add a model's taps in its words.

They are printed, and never run here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING

from llamadiff.system.errors import UserError
from llamadiff.trace.taps import Tap, size_of

if TYPE_CHECKING:
    from llamadiff.engines.model_file import Runnable

_FIRST = "*"  # marks the taps to write first
_TOKENS = {"token": "n_tokens", "query": "n_tokens", "key": "n_keys"}


@dataclass(frozen=True)
class Language:
    """A language's way to say what the lines say. ``{name}``: a tap's, as an expression."""

    file: str  # the writer
    comment: str  # before a remark
    loop: str  # over the layers from {first} on, which end before {stop}
    close: str  # of a loop
    layered: str  # the name of a tap in layer i
    plain: str  # the name of one outside the layers
    add: str  # {name}, {values}, {shape}, {n_dims}
    add_as: str  # the same of another type than float32, {dtype}


ALIKE = {  # other names
    "c++": "cpp", "cc": "cpp", "cxx": "cpp", "rs": "rust", "javascript": "js", "typescript": "js", "node": "js",
    "py": "python", "golang": "go",
}  # fmt: skip
LANGUAGES: Mapping[str, Language] = {
    "c": Language(
        "trace_writer.c", "//", "for (int i = {first}; i < {stop}; i++) {{", "}",
        'trace_name(&trace, "{word}", i)', '"{word}"',
        "trace_add(&trace, {name}, {values}, (int64_t[]){{{shape}}}, {n_dims});",
        'trace_add_as(&trace, {name}, "{dtype}", {values}, (int64_t[]){{{shape}}}, {n_dims});',
    ),
    "cpp": Language(
        "trace_writer.cpp", "//", "for (int i = {first}; i < {stop}; i++) {{", "}",
        '"{word}-" + std::to_string(i)', '"{word}"', "trace.add({name}, {values}.data(), {{{shape}}});",
        'trace.add_as({name}, "{dtype}", {values}.data(), {{{shape}}});',
    ),
    "rust": Language(
        "trace_writer.rs", "//", "for i in {first}..{stop} {{", "}", '&format!("{word}-{{i}}")', '"{word}"',
        "trace.add({name}, &{values}, &[{shape}])?;", 'trace.add_as({name}, "{dtype}", &{values}, &[{shape}])?;',
    ),
    "js": Language(
        "trace_writer.js", "//", "for (let i = {first}; i < {stop}; i++) {{", "}", "`{word}-${{i}}`", '"{word}"',
        "trace.add({name}, {values}, [{shape}]);", 'trace.addAs({name}, "{dtype}", {values}, [{shape}]);',
    ),
    "python": Language(
        "trace_writer.py", "#", "for i in range({first}, {stop}):", "", 'f"{word}-{{i}}"', '"{word}"',
        "trace.add({name}, {values}, [{shape}])", 'trace.add_as({name}, "{dtype}", {values}, [{shape}])',
    ),
    "java": Language(
        "TraceWriter.java", "//", "for (int i = {first}; i < {stop}; i++) {{", "}", '"{word}-" + i', '"{word}"',
        "trace.add({name}, {values}, {shape});", 'trace.addAs({name}, "{dtype}", {values}, {shape});',
    ),
    "go": Language(
        "trace_writer.go", "//", "for i := {first}; i < {stop}; i++ {{", "}", 'fmt.Sprintf("{word}-%d", i)', '"{word}"',
        "trace.Add({name}, {values}, {shape})", 'trace.AddAs({name}, "{dtype}", {values}, {shape})',
    ),
    "zig": Language(
        "trace_writer.zig", "//", "for ({first}..{stop}) |i| {{", "}", 'trace.name("{word}", i)', '"{word}"',
        "try trace.add({name}, {values}, &.{{ {shape} }});",
        'try trace.addAs({name}, "{dtype}", {values}, &.{{ {shape} }});',
    ),
}  # fmt: skip


def find_language(language: str) -> str:
    """A language by what people call it. Raises UserError for one that there is no writer in."""
    found = ALIKE.get(language.lower(), language.lower())
    if found not in LANGUAGES:
        raise UserError(f'there is no writer in "{language}"; the languages are {", ".join(LANGUAGES)}')
    return found


def source(language: str) -> str:
    """The writer's source. Raises UserError for a language that there is none in."""
    return files(__package__).joinpath(LANGUAGES[find_language(language)].file).read_text("utf-8")


def add_lines(language: str, model: Runnable) -> str:
    """The lines of a model's taps, in the order of its graph; layers that are alike and follow each other are a loop.

    They are a comment, so that the file with the writer before them still compiles.
    """
    words = LANGUAGES[language]
    wanted = [tap for tap in model.taps if not tap.kind.optional]
    head = (
        "The lines below add the taps of this model. Paste each where its values are: n_tokens is how many tokens",
        "this pass runs, n_keys how many keys they see. What is left out is computed through; * marks what to write",
        "first.",
        "Of the logits, the last token's row is enough: call it result_output@-1 then, with one row.",
        "",
    )
    return "".join(f"{words.comment} {line}".rstrip() + "\n" for line in (*head, *_body(words, model, wanted)))


def _body(words: Language, model: Runnable, wanted: Sequence[Tap]) -> Iterator[str]:
    by_layer = ((layer, [_line(words, model, tap) for tap in own]) for layer, own in groupby(wanted, lambda t: t.layer))
    for lines, alike in groupby(by_layer, key=lambda block: block[1]):
        layers = [layer for layer, _ in alike]
        first, last = layers[0], layers[-1]
        if first is None or last is None:
            yield from lines
            continue
        yield words.loop.format(first=first, stop=last + 1)
        yield from (f"    {line}" for line in lines)
        yield from [words.close] if words.close else []


def _line(words: Language, model: Runnable, tap: Tap) -> str:
    values = re.sub(r"\W", "_", tap.kind.word)
    name = (words.plain if tap.layer is None else words.layered).format(word=tap.kind.word)
    shape = ", ".join(_dim(axis, model) for axis in tap.kind.axes)
    facts = {"name": name, "values": values, "shape": shape, "n_dims": len(tap.kind.axes), "dtype": "I32"}
    line = (words.add_as if tap.kind.op == "ARGSORT" else words.add).format(**facts)
    return f"{line} {words.comment} {_FIRST}" if tap.kind.key else line


def _dim(axis: str, model: Runnable) -> str:
    """An axis as an expression: the number of tokens or keys by its name, all else as a number."""
    return _TOKENS.get(axis) or str(size_of(axis, model.sizes))
