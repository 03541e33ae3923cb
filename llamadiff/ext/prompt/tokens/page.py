"""Tokenizers compared, as a page of 80 columns, and as JSON. Computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from llamadiff.ext.prompt.tokens.back import Back, Mistake
from llamadiff.ext.prompt.tokens.changes import Change
from llamadiff.ext.prompt.tokens.explain import Explanation
from llamadiff.ext.prompt.tokens.run import FILE, LLAMA_CPP, OWN, Example, Tokens
from llamadiff.ext.prompt.tokens.sides import THIRD
from llamadiff.judge.verdict import UNCHECKED, WRONG
from llamadiff.report.json import in_json
from llamadiff.report.terminal.page import Page

SCHEMA, SCHEMA_OF_BACK = "llamadiff.extras.tokens/1", "llamadiff.extras.tokens.back/1"
MOST_PIECES = 12  # tokens of a text that are shown
MOST_TEXT = 60
MOST_FAULTS = 3  # of a file that the first sentence names
CONVERT = "convert the file again, with the tables of {}"


def print_tokens(found: Tokens, console: Console) -> None:
    """The verdict, what to do, the smallest texts with both splits, and where llama.cpp goes its own way."""
    page = Page(console)
    page.paragraph(Text(f"{found.verdict.upper()}  ", page.style_of(found.verdict)), page.as_it_is(headline(found)))
    explanation = found.explanation
    page.blank()
    if explanation is not None and found.verdict == WRONG:
        for line in fixes(found, explanation):
            page.print_labelled("fix", page.as_it_is(line))
        for change in explanation.others:
            page.print_labelled("or", page.as_it_is(_or(found, change)))
    elif found.file_faults and found.parted:
        page.print_labelled("fix", page.as_it_is(CONVERT.format(found.candidate)))
    elif found.parted:
        more = ", and hardly any has the right ids: does the candidate have this file's vocabulary?"
        page.print_labelled("cause", f"no known mistake explains all of these texts{more if found.is_foreign else ''}")
    for example in found.examples:
        _put(page, example, found.candidate if found.wrong == FILE else "")
    if found.ways:
        own = "llama.cpp" if found.own else "it"
        page.print_labelled("note", f"where the model's own tokenizer and {own} part, and the file cannot tell:")
        for way, example in found.ways:
            page.print_labelled("", page.data(f"the model's own {way.says}", 1000))
            _put(page, example)
    for line in notes(found):
        page.print_labelled("", page.data(line, 1000))


def fixes(found: Tokens, explanation: Explanation) -> list[str]:
    """What to do: in the engine; where the file is wrong, with the file."""
    if found.wrong != FILE:
        return [change.fix for change in explanation.mistakes]
    stated = [change.stated for change in explanation.mistakes if change.stated]
    keys = [f"give the file {key} = {value!r}" for key, value in stated]
    return [*keys, *([CONVERT.format(found.candidate)] if len(keys) < len(explanation.mistakes) else [])]


def _or(found: Tokens, change: Change) -> str:
    """What would explain the same."""
    if found.wrong == FILE and change.stated is not None:
        return f"{change.stated[0]} = {change.stated[1]!r}, which gives the same ids for all of these texts"
    return f"{found.candidate} {change.says}"


def headline(found: Tokens) -> str:
    """The finding in a sentence."""
    every, name = found.texts, found.candidate
    if found.verdict == WRONG:
        count = len(found.explanation.mistakes) if found.explanation is not None and not found.file_faults else 1
        return f"{f'{count} mistakes: ' if count > 1 else ''}tokenizer: {_wrong(found)}"
    if found.verdict == UNCHECKED:
        return f"tokenizer: llama.cpp and {name} part for {found.doubted} of {every} texts: one of them is wrong"
    if _is_alone(found):
        return f"llama.cpp and {name} give the same ids for all {every} texts"
    if found.own:
        return (
            f"{name} is right for all {every} texts; llama.cpp is not for {found.own} of them, which no key of a file "
            "can mend: a port is as right as llama.cpp lets it be"
        )
    return f"{name} gives llama.cpp's ids for all {every} texts"


def _wrong(found: Tokens) -> str:
    """Who is wrong, and how."""
    name, share = found.candidate, f"for {found.parted} of {found.texts} texts"
    if found.wrong == LLAMA_CPP:
        return f"llama.cpp gives other ids than {name} and the independent tokenizer, for {found.doubted} texts"
    if found.wrong == FILE and found.file_faults:
        faults = "; ".join(f"{each.where} {each.says}" for each in found.file_faults[:MOST_FAULTS])
        return f"{found.model}: {faults}; other ids than {name}'s {share}{_left(found)}"
    if found.explanation is not None:
        says = "; ".join(change.says for change in found.explanation.mistakes)
        if found.wrong == FILE:
            return f"{found.model} is not {name}, which {says}; other ids {share}{_left(found)}"
        return f"{name} {says}; other ids than llama.cpp's {share}{_left(found)}"
    if found.wrong == FILE:
        return f"{found.model} makes other ids than {name} does, {share}, in llama.cpp and the independent tokenizer"
    right = "llama.cpp and the independent tokenizer" if found.wrong else "llama.cpp"
    return f"{name} gives other ids than {right} {share}"


def _left(found: Tokens) -> str:
    """How many texts what is named does not explain."""
    left = len(found.explanation.left) if found.explanation is not None else 0
    share = f"{left} ({left / found.parted:.1%})" if left else ""
    return f", {found.parted - left} of them by that; {share} part besides, for no known reason" if left else ""


def _is_alone(found: Tokens) -> bool:
    """Whether there is no candidate but llama.cpp itself."""
    return found.candidate == THIRD


def notes(found: Tokens) -> list[str]:
    """What else is to be known."""
    lines = [f"{found.model}: {found.texts} texts"]
    if _is_alone(found) and found.own:
        lines.append(
            f"for {found.own} of them llama.cpp's ids are not those of the tokenizer that the model was made with"
        )
    if found.file_faults and found.verdict != WRONG:
        faults = "; ".join(f"{each.where} {each.says}" for each in found.file_faults[:MOST_FAULTS])
        lines.append(f"what changes no ids, and is not {found.candidate}'s: {faults}")
    if found.file_faults:
        folder = Path(found.candidate).parent
        lines.append(f"all of the file against its checkpoint: llamadiff weights {found.model} {folder}")
    if found.no_third:
        lines.append(f"there is no third opinion: {found.no_third}")
    return lines


def print_back(found: Back, console: Console) -> None:
    """The verdict of texts made of ids, what to do, and the fewest ids that show it."""
    page = Page(console)
    page.paragraph(
        Text(f"{found.verdict.upper()}  ", page.style_of(found.verdict)), page.data(headline_of_back(found), 1000)
    )
    page.blank()
    for mistake in found.mistakes[:1]:
        page.print_labelled("fix", page.data(mistake.fix, 1000))
    for mistake in found.mistakes[1:]:
        page.print_labelled("or", page.data(f"{found.candidate} {mistake.says}", 1000))
    if found.parted and not found.mistakes:
        page.print_labelled("cause", "no known mistake explains all of these texts")
    for example in found.examples:
        pieces = " ".join(map(page.quote, example.pieces[:MOST_PIECES]))
        page.print_labelled("ids", f"{list(example.ids[:MOST_PIECES])}  {pieces}")
        page.print_labelled("", f"llama.cpp  {page.quote(example.right, MOST_TEXT)}")
        page.print_labelled("", f"yours      {page.quote(example.found, MOST_TEXT)}")
    page.print_labelled("", page.data(f"{found.model}: {found.lists} lists of token ids", 1000))


def headline_of_back(found: Back) -> str:
    """The finding about texts made of ids in a sentence."""
    if not found.parted:
        return f"{found.candidate} makes llama.cpp's text of all {found.lists} lists of token ids"
    share = f"for {found.parted} of {found.lists} lists of token ids"
    if found.mistakes:
        return f"detokenizer: {found.candidate} {found.mistakes[0].says}; other texts than llama.cpp's {share}"
    return f"detokenizer: {found.candidate} makes other texts than llama.cpp's {share}"


def _back(found: Back) -> str:
    about: dict[str, Any] = {
        "schema": SCHEMA_OF_BACK, "verdict": found.verdict, "headline": headline_of_back(found), "model": found.model,
        "candidate": found.candidate, "lists": found.lists, "parted": found.parted,
        "causes": [_change(each) for each in found.mistakes],
        "examples": [
            {"ids": each.ids, "pieces": each.pieces, "llama_cpp": each.right, "candidate": each.found}
            for each in found.examples
        ],
    }  # fmt: skip
    return in_json(about)


def _put(page: Page, example: Example, original: str = "") -> None:
    """A text with its ids; ``original``: the side that is the model's own tokenizer."""
    page.print_labelled("besides" if example.is_left else "text", page.quote(example.text, MOST_TEXT))
    called = {name: "original" if name == original else _called(name) for name in example.ids}
    width = max(map(len, called.values()))
    for name, ids in example.ids.items():
        pieces = example.pieces[name][:MOST_PIECES]
        more = " ..." if len(example.pieces[name]) > len(pieces) else ""
        said = "dies of it" if ids is None else f"{' '.join(map(page.quote, pieces))}{more}  {list(ids[:MOST_PIECES])}"
        page.print_labelled("", Text(f"{called[name].ljust(width)}  {said}"))


def _called(side: str) -> str:
    """A side in few characters."""
    return side if side in {LLAMA_CPP, THIRD, OWN} else "yours"


def as_json(found: Tokens | Back) -> str:
    """Everything, machine-readable."""
    return _back(found) if isinstance(found, Back) else _tokens(found)


def _tokens(found: Tokens) -> str:
    explanation = found.explanation
    about: dict[str, Any] = {
        "schema": SCHEMA, "verdict": found.verdict, "headline": headline(found), "model": found.model,
        "candidate": found.candidate, "texts": found.texts, "parted": found.parted, "own": found.own,
        "doubted": found.doubted, "wrong": found.wrong or None,
        "causes": [_change(each) for each in (explanation.mistakes if explanation is not None else ())],
        "left": len(explanation.left) if explanation is not None else 0,
        "file_faults": found.file_faults,
        "others": [_change(each) for each in (explanation.others if explanation is not None else ())],
        "examples": found.examples,
        "ways": [_change(way) | {"example": example} for way, example in found.ways],
        "no_third_opinion": found.no_third or None,
    }  # fmt: skip
    return in_json(about)


def _change(change: Change | Mistake) -> dict[str, Any]:
    return {"name": change.name, "says": change.says, "fix": change.fix}
