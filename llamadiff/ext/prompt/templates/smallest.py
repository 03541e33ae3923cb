"""The smallest conversation that is still rendered otherwise: whatever can be left out of it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llamadiff.ext.prompt.templates.conversations import Conversation

MOST = 600  # conversations that are tried
AT_ONCE = 24
KEPT = ("role", "type", "function", "name", "arguments", "parameters", "properties", "id", "text")  # keys
SAID = ("role", "type")  # whose texts stay
LETTERS = 24  # characters of a text of which each is left out


def smallest(conversation: Conversation, parts: Callable[[Sequence[Conversation]], Sequence[bool]]) -> Conversation:
    """A conversation of which nothing can be left out so that it still ``parts``, as far as so many tries tell."""
    left = MOST
    while left > 0:
        steps = _smaller(conversation)
        while left > 0 and (batch := [step for step, _ in zip(steps, range(AT_ONCE))]):  # noqa: B905
            left -= len(batch)
            found = next((step for step, still in zip(batch, parts(batch), strict=True) if still), None)
            if found is not None:
                conversation = found
                break
        else:
            break
    return conversation


def _smaller(conversation: Conversation) -> Iterator[Conversation]:
    """With one thing left out, large things first."""
    messages = conversation["messages"]
    for number in range(len(messages)):
        if len(messages) > 1:
            yield {**conversation, "messages": [*messages[:number], *messages[number + 1 :]]}
    for key in conversation:
        if key not in ("messages", "add_generation_prompt"):
            yield {each: value for each, value in conversation.items() if each != key}
    if conversation.get("add_generation_prompt"):
        yield {**conversation, "add_generation_prompt": False}
    for key in ("tools", "messages"):
        if key in conversation:
            yield from ({**conversation, key: value} for value in _less(conversation[key], key) if value)


def _less(value: Any, key: str) -> Iterator[Any]:
    """A value with one thing less in it."""
    if isinstance(value, Mapping):
        yield from _less_of_object(value)
    elif isinstance(value, list):
        if len(value) > 1 or key not in ("messages", "tools", "tool_calls", "content"):
            yield from (value[:number] + value[number + 1 :] for number in range(len(value)))
        for number, inner in enumerate(value):
            yield from ([*value[:number], less, *value[number + 1 :]] for less in _less(inner, ""))
    elif isinstance(value, str) and value and key not in SAID:
        yield from _shorter(value)


def _less_of_object(value: Mapping[str, Any]) -> Iterator[Any]:
    for key in value:
        other = {"content": "tool_calls", "tool_calls": "content"}.get(key)  # a message has one of the two
        is_needed = key in KEPT or (other is not None and "role" in value and value.get(other) in (None, []))
        if not is_needed or (key == "name" and "role" in value):
            yield {each: inner for each, inner in value.items() if each != key}
    for key, inner in value.items():
        yield from ({**value, key: less} for less in _less(inner, key))


def _shorter(text: str) -> Iterator[str]:
    yield ""
    half = len(text) // 2
    if half:
        yield text[:half]
        yield text[half:]
    for number in range(len(text) if 1 < len(text) <= LETTERS else 0):
        yield text[:number] + text[number + 1 :]
