"""What llama-server does to a conversation before its template gets it, which is no mistake: ways that are told.

As its sources have it (common/chat.cpp, tools/server/server-common.cpp); which of them a server has depends on its
release and on what it found that the template can. So each is tried, and those are taken that bring its prompts nearer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from llamadiff.ext.prompt.templates.conversations import Conversation, Told

TEXT = "text"
OBJECT = {"type": "object", "properties": {}}
KEPT = ("role", "content", "reasoning_content", "name", "tool_call_id", "tool_calls")  # of a message, in this order
REFUSED: Told = {"error": "llama-server refuses such a conversation"}


class RefusalError(Exception):
    """The server takes no such conversation."""


@dataclass(frozen=True)
class Way:
    """One thing that the server does; ``says`` goes on after "it". Of one ``slot`` it does one alone."""

    slot: str
    says: str
    change: Callable[[Conversation], Conversation]


@dataclass(frozen=True)
class TakenWay:
    """One that a server has, and of how many conversations the prompt is another for it."""

    way: Way
    count: int


def changed_by(ways: Sequence[Way], conversation: Conversation) -> Conversation | None:
    """A conversation as the template gets it; None: the server refuses it."""
    try:
        for way in ways:
            conversation = way.change(conversation)
    except RefusalError:
        return None
    return conversation


def taken(asked: Callable[[Sequence[Sequence[Way]]], Sequence[Sequence[bool]]]) -> tuple[TakenWay, ...]:
    """The ways of a server. ``asked``: with each of some sets of ways, of which conversations its prompts are right.

    What a server does it does always: a way with which a prompt is wrong that was right is none of its ways.
    """
    ways: tuple[Way, ...] = ()
    (right,) = asked([ways])
    best = sum(right)
    while rest := [way for way in WAYS if way.slot not in {each.slot for each in ways}]:
        tried = [_in_order((*ways, way)) for way in rest]
        found = asked(tried)
        counts = [
            0 if any(old and not new for old, new in zip(right, each, strict=True)) else sum(each) for each in found
        ]
        if max(counts) <= best:
            break
        best = max(counts)
        ways, right = tried[counts.index(best)], found[counts.index(best)]
    without = asked([[each for each in ways if each is not way] for way in ways])
    return tuple(TakenWay(way, best - sum(each)) for way, each in zip(ways, without, strict=True))


def _in_order(ways: Sequence[Way]) -> tuple[Way, ...]:
    """As the server goes through them."""
    return tuple(sorted(ways, key=WAYS.index))


def _messages(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Conversation], Conversation]:
    return lambda conversation: {**conversation, "messages": [change(dict(m)) for m in conversation["messages"]]}


def _refuse_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list) and any(part.get("type") != TEXT for part in content):
        raise RefusalError
    return message


def _refuse_empty(message: dict[str, Any]) -> dict[str, Any]:
    if "content" not in message and "tool_calls" not in message:
        raise RefusalError
    return message


def _rebuilt(message: dict[str, Any]) -> dict[str, Any]:
    """Its known keys alone, in the server's order; no content is an empty one."""
    whole = {**message, "content": message.get("content") or ""}
    calls = [
        {"type": "function", "function": {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}}
        | ({"id": call["id"]} if call.get("id") else {})
        for call in message.get("tool_calls") or ()
    ]
    if calls:
        whole["tool_calls"] = calls
    return {key: whole[key] for key in KEPT if key == "content" or whole.get(key)}


def _arguments(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(message: dict[str, Any]) -> dict[str, Any]:
        calls = [
            call | {"function": call["function"] | {"arguments": change(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or ()
        ]
        return message | ({"tool_calls": calls} if calls else {})

    return changed


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise RefusalError from None


def _dumped(arguments: Any) -> Any:
    whole = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return arguments if isinstance(arguments, str) else whole


def _joined(between: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return message | {"content": between.join(part[TEXT] for part in content if part.get("type") == TEXT)}

    return changed


def _typed(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message | {"content": [{"type": TEXT, TEXT: content}]} if isinstance(content, str) else message


def _trimmed(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        return message | {"content": [part | {TEXT: part[TEXT].strip()} if TEXT in part else part for part in content]}
    return message | {"content": content.strip()} if isinstance(content, str) else message


def _system(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": "system"} if message["role"] == "developer" else message


def _merged(conversation: Conversation) -> Conversation:
    """The first system message's text before that of the message after it."""
    first, *rest = conversation["messages"]
    if first["role"] != "system":
        return conversation
    if rest:
        texts = [each.get("content") for each in (first, rest[0])]
        if not all(isinstance(text, str) for text in texts):
            raise RefusalError
        rest = [rest[0] | {"content": "\n".join(texts)}, *rest[1:]]
    return {**conversation, "messages": rest}


def _dated(conversation: Conversation) -> Conversation:
    today = date.today()
    return {"date_string": f"{today:%d %b %Y}", "datetime": f"{today:%b %d %Y}", **conversation}


def _filled(parameters: Mapping[str, Any]) -> Callable[[Conversation], Conversation]:
    def change(conversation: Conversation) -> Conversation:
        tools = conversation.get("tools")
        if not tools:
            return conversation
        made = []
        for tool in tools:
            function = tool["function"]
            inner = {"name": function["name"], "description": function.get("description", "")}
            inner["parameters"] = function.get("parameters") or parameters
            made.append({"type": "function", "function": inner})
        return {**conversation, "tools": made}

    return change


# In the order in which the server does them.
WAYS = (
    Way("images", "refuses parts of a content that are no texts (it has no projector)", _messages(_refuse_parts)),
    Way("none", "refuses messages without content and calls", _messages(_refuse_empty)),
    Way("trimmed", "strips the content of messages, for this template", _messages(_trimmed)),
    Way("rebuilt", "passes on role, content (empty where there is none), reasoning, name, ids and calls alone",
        _messages(_rebuilt)),
    Way("parts", "joins the parts of a content with newlines, for a template that takes texts alone",
        _messages(_joined("\n"))),
    Way("parts", "joins the parts of a content, for a template that takes texts alone", _messages(_joined(""))),
    Way("parts", "makes a part of each content, for a template that takes lists alone", _messages(_typed)),
    Way("developer", 'calls the role "developer" "system"', _messages(_system)),
    Way("merged", "puts the system message before the next message's text, for a template that has no such role",
        _merged),
    Way("arguments", "parses the arguments of calls that are JSON text", _messages(_arguments(_parsed))),
    Way("arguments", "writes the arguments of calls as JSON text", _messages(_arguments(_dumped))),
    Way("tools", "gives each tool a description and parameters, empty where there are none", _filled({})),
    Way("tools", "gives each tool a description and parameters, an empty object's where there are none",
        _filled(OBJECT)),
    Way("dates", "gives date_string and datetime, today's, to the template", _dated),
    Way("thinking", "turns thinking on where nobody says so", lambda c: {"enable_thinking": True, **c}),
)  # fmt: skip
