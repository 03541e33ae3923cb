"""A tokenizer that a user names: a command, a server, a Python function, another .gguf, a tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llamadiff.ext.prompt.http import LacksError, Server, is_server
from llamadiff.ext.prompt.lines import talking
from llamadiff.ext.prompt.own_code import function_of, is_function
from llamadiff.ext.prompt.tokens.changes import Ids
from llamadiff.ext.prompt.tokens.of_checkpoint import original_of
from llamadiff.ext.prompt.tokens.sides import Side, llama_cpp
from llamadiff.llamacpp.request import Settings
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress
from llamadiff.trace.stated import reason

MOST_IDS = 1 << 22


@dataclass(frozen=True)
class Wanted:
    """What llama-server is asked for: the path, the fields of what it is sent and what it answers."""

    path: str
    sent: str
    told: str
    more: Mapping[str, bool]


TOKENIZE = Wanted("/tokenize", "content", "tokens", {"add_special": True, "parse_special": True})
DETOKENIZE = Wanted("/detokenize", "tokens", "content", {})

Answers = Callable[[Sequence[Any]], Iterator[Any]]  # of each value that is asked, what is said


@contextmanager
def candidate(spec: str, settings: Settings, progress: Progress, patience: float) -> Iterator[Side]:
    """What ``--candidate`` names. Raises UserError for what it cannot be, and where it fails."""
    path = Path(spec)
    is_file = path.is_file() or not any(map(str.isspace, spec))  # a command may end in the name of one
    if is_file and path.suffix == ".gguf":
        with llama_cpp(path, settings, progress) as vocabulary:
            yield Side(f"{path}", vocabulary.ids, takes_bytes=True)
    elif is_file and path.suffix == ".json":
        yield original_of(path)
    else:
        with answering(spec, patience, TOKENIZE, progress) as (name, answers):

            def ids(texts: Sequence[str]) -> list[Ids | None]:
                return [_ids(name, text, said) for text, said in zip(texts, answers(texts), strict=True)]

            yield Side(name, ids)


@contextmanager
def answering(spec: str, patience: float, wanted: Wanted, progress: Progress) -> Iterator[tuple[str, Answers]]:
    """The name of a command, a server or a function, and what asks it."""
    if is_server(spec):
        with Server(spec, patience, progress) as server:
            yield server.name, partial(_by_server, server, wanted, progress)
    elif is_function(spec):
        yield spec, partial(_by_function, function_of(spec), spec)
    else:
        with talking(spec, patience) as ask:
            yield ask.name, ask.all


def _by_server(server: Server, wanted: Wanted, progress: Progress, asked: Sequence[Any]) -> Iterator[Any]:
    for number, value in enumerate(asked):
        progress("asking the server", number, len(asked))
        try:
            said = server.ask(wanted.path, {wanted.sent: value, **wanted.more})
        except LacksError as error:
            raise UserError(f"{error}; give the address of a llama-server, or a command") from None
        yield said.get(wanted.told) if isinstance(said, dict) else said


def _by_function(function: Callable[..., Any], name: str, asked: Sequence[Any]) -> Iterator[Any]:
    for value in asked:
        try:
            said = function(value)
            yield list(said) if not isinstance(said, (str, Mapping)) else said
        except Exception as error:  # a stranger's code may raise anything
            raise UserError(f"{name}: failed on {value!r:.60} ({type(error).__name__}: {reason(error)})") from None


def _ids(name: str, text: str, ids: Any) -> Ids:
    """Ids from outside. Raises UserError for what is no list of them."""
    with suppress(TypeError):
        if isinstance(ids, list) and len(ids) <= MOST_IDS and all(_is_id(each) for each in ids):
            return tuple(map(int, ids))
    raise UserError(f"{name}: gives {ids!r:.60} for {text!r:.42}; expected a list of token ids, such as [1, 17, 5]")


def _is_id(value: object) -> bool:
    """Whether it is a whole number of 32 bits; NumPy's, too."""
    if isinstance(value, (bool, float, str)) or not hasattr(value, "__index__"):
        return False
    return -(1 << 31) <= int(value.__index__()) < 1 << 31
