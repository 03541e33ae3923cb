"""The lines that add a model's taps, in the words of each writer: to paste where an engine computes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from llamadiff.engines.model_file import Runnable
from llamadiff.trace.taps import Tap

_FIRST = "*"  # marks the taps to write first
_TOKENS = {"token": "n_tokens", "query": "n_tokens", "key": "n_keys"}


@dataclass(frozen=True)
class Language:
    """A language's way to say what the lines say. ``{name}``: a tap's, as an expression."""

    comment: str  # before a remark
    loop: str  # over the layers from {first} on, which end before {stop}
    close: str  # of a loop
    layered: str  # the name of a tap in layer i
    plain: str  # the name of one outside the layers
    add: str  # {name}, {values}, {shape}, {n_dims}
    add_as: str  # the same of another type than float32, {dtype}


LANGUAGES: Mapping[str, Language] = {
    "c": Language(
        "//", "for (int i = {first}; i < {stop}; i++) {{", "}", 'trace_name(&trace, "{word}", i)', '"{word}"',
        "trace_add(&trace, {name}, {values}, (int64_t[]){{{shape}}}, {n_dims});",
        'trace_add_as(&trace, {name}, "{dtype}", {values}, (int64_t[]){{{shape}}}, {n_dims});',
    ),
    "cpp": Language(
        "//", "for (int i = {first}; i < {stop}; i++) {{", "}", '"{word}-" + std::to_string(i)', '"{word}"',
        "trace.add({name}, {values}.data(), {{{shape}}});",
        'trace.add_as({name}, "{dtype}", {values}.data(), {{{shape}}});',
    ),
    "rust": Language(
        "//", "for i in {first}..{stop} {{", "}", '&format!("{word}-{{i}}")', '"{word}"',
        "trace.add({name}, &{values}, &[{shape}])?;", 'trace.add_as({name}, "{dtype}", &{values}, &[{shape}])?;',
    ),
    "js": Language(
        "//", "for (let i = {first}; i < {stop}; i++) {{", "}", "`{word}-${{i}}`", '"{word}"',
        "trace.add({name}, {values}, [{shape}]);", 'trace.addAs({name}, "{dtype}", {values}, [{shape}]);',
    ),
    "python": Language(
        "#", "for i in range({first}, {stop}):", "", 'f"{word}-{{i}}"', '"{word}"',
        "trace.add({name}, {values}, [{shape}])", 'trace.add_as({name}, "{dtype}", {values}, [{shape}])',
    ),
    "java": Language(
        "//", "for (int i = {first}; i < {stop}; i++) {{", "}", '"{word}-" + i', '"{word}"',
        "trace.add({name}, {values}, {shape});", 'trace.addAs({name}, "{dtype}", {values}, {shape});',
    ),
    "go": Language(
        "//", "for i := {first}; i < {stop}; i++ {{", "}", 'fmt.Sprintf("{word}-%d", i)', '"{word}"',
        "trace.Add({name}, {values}, {shape})", 'trace.AddAs({name}, "{dtype}", {values}, {shape})',
    ),
    "zig": Language(
        "//", "for ({first}..{stop}) |i| {{", "}", 'trace.name("{word}", i)', '"{word}"',
        "try trace.add({name}, {values}, &.{{ {shape} }});",
        'try trace.addAs({name}, "{dtype}", {values}, &.{{ {shape} }});',
    ),
}  # fmt: skip


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
    by_layer = [list(group) for _, group in groupby(wanted, key=lambda tap: tap.layer)]
    for _, alike in groupby(by_layer, key=lambda own: _line_set(words, model, own)):
        blocks = list(alike)
        lines = _line_set(words, model, blocks[0])
        first, last = blocks[0][0].layer, blocks[-1][0].layer
        if first is None or last is None:
            yield from lines
            continue
        yield words.loop.format(first=first, stop=last + 1)
        yield from (f"    {line}" for line in lines)
        yield from [words.close] if words.close else []


def _line_set(words: Language, model: Runnable, own: Sequence[Tap]) -> tuple[str, ...]:
    return tuple(_line(words, model, tap) for tap in own)


def _line(words: Language, model: Runnable, tap: Tap) -> str:
    values = re.sub(r"\W", "_", tap.kind.word)
    name = (words.plain if tap.layer is None else words.layered).format(word=tap.kind.word)
    shape = ", ".join(_dim(axis, model) for axis in tap.kind.axes)
    facts = {"name": name, "values": values, "shape": shape, "n_dims": len(tap.kind.axes), "dtype": "I32"}
    line = (words.add_as if tap.kind.op == "ARGSORT" else words.add).format(**facts)
    return f"{line} {words.comment} {_FIRST}" if tap.kind.key else line


def _dim(axis: str, model: Runnable) -> str:
    """An axis as an expression: the number of tokens or keys by its name, all else as a number."""
    if axis in _TOKENS:
        return _TOKENS[axis]
    product = 1
    for part in axis.split("*"):
        product *= model.sizes[part] if part in model.sizes else int(part)
    return str(product)
