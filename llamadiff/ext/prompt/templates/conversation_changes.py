"""What engines do to a conversation before a template gets it: messages, their contents, tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llamadiff.ext.prompt.templates.changes import THINK_END, Change, Conversation, having


def _each(change: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> Callable[[Conversation], Conversation]:
    """What each message becomes; None: it is left out."""

    def changed(conversation: Conversation) -> Conversation:
        made = [change(dict(message)) for message in conversation["messages"]]
        return {**conversation, "messages": [message for message in made if message is not None]}

    return changed


def _content(change: Callable[[Any], Any]) -> Callable[[Conversation], Conversation]:
    return _each(lambda message: message | {"content": change(message["content"])} if "content" in message else message)


def _lacking(*keys: str) -> Callable[[Conversation], Conversation]:
    return _each(lambda message: {key: value for key, value in message.items() if key not in keys})


def _texts(content: Any, between: str, most: int | None = None) -> Any:
    """The texts of a content's parts, joined."""
    if not isinstance(content, list):
        return content
    return between.join([part["text"] for part in content if part.get("type") == "text"][:most])


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _stripped(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content


def _all_stripped(content: Any) -> Any:
    if isinstance(content, list):
        return [part | {"text": part["text"].strip()} if "text" in part else part for part in content]
    return _stripped(content)


def _thought(content: Any) -> Any:
    """Without a thought at its start."""
    if isinstance(content, str) and THINK_END in content:
        return content.partition(THINK_END)[2].lstrip("\n")
    return content


def _arguments(change: Callable[[Any], Any]) -> Callable[[Conversation], Conversation]:
    def changed(message: dict[str, Any]) -> Mapping[str, Any]:
        if not message.get("tool_calls"):
            return message
        calls = [
            call | {"function": call["function"] | {"arguments": change(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return message | {"tool_calls": calls}

    return _each(changed)


def _unwrapped(conversation: Conversation) -> Conversation:
    tools = conversation.get("tools")
    return {**conversation, "tools": [tool["function"] for tool in tools]} if tools else conversation


def _system_in_user(conversation: Conversation) -> Conversation:
    """The system message's text before the first user's."""
    messages = [dict(message) for message in conversation["messages"]]
    user = next((message for message in messages if message["role"] == "user"), None)
    if user is None or messages[0]["role"] != "system" or not isinstance(user["content"], str):
        return conversation
    user["content"] = f"{messages[0]['content']}\n\n{user['content']}"
    return {**conversation, "messages": messages[1:]}


def _merged(conversation: Conversation) -> Conversation:
    """Messages of one role after another as one."""
    made = list[dict[str, Any]]()
    for message in conversation["messages"]:
        texts = [each.get("content") for each in (message, *made[-1:])]
        if made and made[-1]["role"] == message["role"] and all(isinstance(text, str) for text in texts):
            made[-1]["content"] += "\n" + message["content"]
        else:
            made.append(dict(message))
    return {**conversation, "messages": made}


def _last(conversation: Conversation) -> Conversation:
    return {**conversation, "messages": conversation["messages"][-1:]}


def _system_and_last(conversation: Conversation) -> Conversation:
    first, *rest = conversation["messages"]
    return {**conversation, "messages": [first, *rest[-1:]] if first["role"] == "system" else [first, *rest][-1:]}


def _parsed(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _dumped(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


_PASS = "pass the messages on as they came"  # noqa: S105
MESSAGES = (
    Change("tools-ignored", "does not pass the tools on", "give the template tools", conversation=having(tools=None)),
    Change("tools-unwrapped", "passes tool.function on instead of the tool",
           "give the template each tool as it came, with type and function", conversation=_unwrapped),
    Change("tools-empty", "passes an empty list of tools on where there are none", "leave tools undefined or none",
           conversation=lambda c: {**c, "tools": c.get("tools") or []}),
    Change("tool-calls-ignored", "does not pass tool_calls on", _PASS, conversation=_lacking("tool_calls")),
    Change("tool-answers-ignored", "leaves out messages of tools", _PASS,
           conversation=_each(lambda m: None if m["role"] == "tool" else m)),
    Change("tool-names-ignored", "does not pass name and tool_call_id on", _PASS,
           conversation=_lacking("name", "tool_call_id")),
    Change("call-ids-ignored", "does not pass tool_call_id on", _PASS, conversation=_lacking("tool_call_id")),
    Change("arguments-as-text", "passes the arguments of a call on as JSON text", "parse them to an object first",
           conversation=_arguments(_dumped)),
    Change("arguments-parsed", "parses the arguments of a call that are JSON text", _PASS,
           conversation=_arguments(_parsed)),
    Change("system-ignored", "leaves out the system message", _PASS,
           conversation=_each(lambda m: None if m["role"] == "system" else m)),
    Change("system-in-user", "writes the system message into the first user message", _PASS,
           conversation=_system_in_user),
    Change("default-system-missing", "leaves out the default system prompt, as if the system message were empty",
           "render the template as it is where there is no system message",
           conversation=lambda c: c if c["messages"][:1] and c["messages"][0]["role"] == "system"
           else {**c, "messages": [{"role": "system", "content": ""}, *c["messages"]]}),
    Change("developer-as-system", "takes the role developer for system", _PASS,
           conversation=_each(lambda m: m | {"role": "system"} if m["role"] == "developer" else m)),
    Change("reasoning-ignored", "does not pass reasoning_content on", _PASS,
           conversation=_lacking("reasoning_content", "reasoning", "thinking")),
    Change("thoughts-removed", "takes the thought out of an answer's content, which the template does not", _PASS,
           conversation=_content(_thought)),
    Change("content-stripped", "strips the content of messages", _PASS, conversation=_content(_stripped)),
    Change("texts-stripped", "strips the content of messages and of its parts", _PASS,
           conversation=_content(_all_stripped)),
    Change("content-empty", "makes content that is null an empty text", _PASS,
           conversation=_content(lambda content: "" if content is None else content)),
    Change("content-null", "has the content null where a message has none",
           "leave out what a message does not have", conversation=_each(lambda m: {"content": None} | m)),
    Change("empty-messages-ignored", "leaves out messages without content", _PASS,
           conversation=_each(lambda m: m if m.get("content") or m.get("tool_calls") else None)),
    Change("parts-joined", "joins the parts of a content without anything between them", _PASS,
           conversation=_content(lambda content: _texts(content, ""))),
    Change("parts-lines", "joins the parts of a content with newlines", _PASS,
           conversation=_content(lambda content: _texts(content, "\n"))),
    Change("parts-first", "takes the first part of a content alone", _PASS,
           conversation=_content(lambda content: _texts(content, "", 1))),
    Change("parts-ignored", "takes a content that is a list for empty", _PASS,
           conversation=_content(lambda content: "" if isinstance(content, list) else content)),
    Change("parts-always", "makes each content a list of parts", _PASS, conversation=_content(_as_parts)),
    Change("merged", "makes one message of several of one role in a row", _PASS, conversation=_merged),
    Change("last-only", "passes the last message on alone", _PASS, conversation=_last),
    Change("turns-ignored", "passes the system message and the last message on alone", _PASS,
           conversation=_system_and_last),
    Change("first-left-out", "leaves out the first message", _PASS,
           conversation=lambda c: {**c, "messages": c["messages"][1:]}),
    Change("last-left-out", "leaves out the last message", _PASS,
           conversation=lambda c: {**c, "messages": c["messages"][:-1]}),
)  # fmt: skip
