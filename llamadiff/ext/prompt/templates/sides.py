"""Whoever renders conversations besides the model's own template: a command, a server, a template, a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from llamadiff.ext.prompt.chat_template import MAX_RENDERED
from llamadiff.ext.prompt.http import LacksError, RefusedError, Server, is_server
from llamadiff.ext.prompt.lines import talking
from llamadiff.ext.prompt.own_code import function_of, is_function
from llamadiff.ext.prompt.templates.conversations import Conversation
from llamadiff.ext.prompt.templates.rendering import ENDINGS, Source, source_of
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress, silent
from llamadiff.trace.stated import reason

Answer = Mapping[str, Any]  # its "text", or the "error" that it gives instead
Ask = Callable[[Sequence[Conversation]], Sequence[Answer]]
SENT = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
RENDERS = "/apply-template"  # of llama-server
FAULTS = (400, 422, 500)  # codes of a server that cannot render one conversation


@contextmanager
def candidate_of(spec: str, source: Source, patience: float, progress: Progress = silent) -> Iterator[Ask]:
    """What a ``--candidate`` names, open until the end of this. Raises UserError."""
    other = template_of(spec, source)
    if is_server(spec):
        with Server(spec, patience, progress) as server:
            yield partial(_by_server, server, progress)
    elif is_function(spec):
        yield partial(_by_function, spec, function_of(spec))
    elif other is not None:
        yield other.told
    else:
        with talking(spec, patience) as talker:
            yield lambda asked: [
                _answer(talker.name, each) for each in talker.all([as_sent(each, source.tokens) for each in asked])
            ]


def template_of(spec: str, source: Source) -> Source | None:
    """The template that a candidate is, where it is one: another file's, or a text. Raises UserError."""
    path = Path(spec)
    if is_server(spec) or is_function(spec) or path.suffix not in (".gguf", *ENDINGS):
        return None
    is_file = path.is_file() or not any(map(str.isspace, spec))  # a command may end in the name of one
    return source_of(path, source.tokens) if is_file else None


def is_asked(spec: str, conversation: Conversation) -> bool:
    """Whether a candidate takes such a conversation: llama-server goes on with an answer that stands last, and has
    ``enable_thinking`` true or false alone.
    """
    last, thinks = conversation["messages"][-1], conversation.get("enable_thinking", True)
    return not is_server(spec) or (last["role"] != "assistant" and isinstance(thinks, bool))


def as_sent(conversation: Conversation, tokens: Mapping[str, str]) -> dict[str, Any]:
    """A conversation as a command reads it: as a request to an OpenAI-like server, with the tokens."""
    whole = {"add_generation_prompt": False, **tokens, **conversation}
    more = {key: value for key, value in whole.items() if key not in SENT}
    sent = {key: whole[key] for key in SENT if key in whole}
    return sent | {"chat_template_kwargs": more} if more else sent


def _answer(name: str, answer: Any) -> Answer:
    """A command's answer: the text, or an object that has it as ``prompt``, or an ``error``."""
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        return {"error": answer["error"][:1000]}
    text = answer.get("prompt") if isinstance(answer, dict) else answer
    if not isinstance(text, str):
        raise UserError(
            f"{name}: answers a conversation with {str(answer)[:60]!r}; expected the prompt as a JSON string, or "
            '{"error": "..."}'
        )
    if len(text) > MAX_RENDERED:
        raise UserError(f"{name}: answers a short conversation with {len(text)} characters")
    return {"text": text}


def _by_server(server: Server, progress: Progress, asked: Sequence[Conversation]) -> Sequence[Answer]:
    found = list[Answer]()
    for conversation in asked:
        progress("asking the server", len(found), len(asked))
        try:
            found.append(_answer(server.name, server.ask(RENDERS, as_sent(conversation, {}))))
        except LacksError as error:
            raise UserError(f"{error}; only llama-server renders prompts, give its address, or a command") from None
        except RefusedError as error:
            if error.code not in FAULTS:
                raise
            found.append({"error": error.says or f"code {error.code}"})
    return found


def _by_function(name: str, function: Callable[..., Any], asked: Sequence[Conversation]) -> Sequence[Answer]:
    """function(messages, tools=..., add_generation_prompt=..., **more) of each."""
    found = list[Answer]()
    for conversation in asked:
        given = dict(conversation)
        try:
            answer = function(given.pop("messages"), **given)
        except Exception as error:  # a stranger's code may raise anything
            answer = {"error": f"{type(error).__name__}: {reason(error)}"}
        found.append(_answer(name, answer))
    return found
