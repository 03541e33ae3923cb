"""Conversations made for one template: of every kind that engines are asked for, until its branches are reached."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

Message = dict[str, Any]
Conversation = Mapping[str, Any]
Told = Mapping[str, Any]
MOST = 400  # conversations that a candidate is asked
ROUNDS, EACH = 4, 150  # of conversations made by chance, for branches that the others have not reached
SOUGHT = 8  # texts that a template looks for
LONGEST = 7  # messages of one that is made by chance

ARGUMENTS = {"city": "Zürich", "note": "<b>it's 3 & 4</b>", "days": 2, "exact": True, "of": ["a", {"b": None}]}
TOOLS = (
    {"type": "function", "function": {
        "name": "weather", "description": "The weather of a city: \"now\" & <soon>, in °C.",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "Its name."},
            "days": {"type": "integer", "description": "How many.", "default": 1},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "of": {"type": "array", "items": {"type": "string"}},
        }, "required": ["city"]},
    }},
    {"type": "function", "function": {
        "name": "time", "description": "The time.", "parameters": {"type": "object", "properties": {}},
    }},
)  # fmt: skip
# Schemas that not every template can read.
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "when": {"type": ["string", "null"], "format": "date", "title": "At", "default": None},
    "at": {"type": "string", "nullable": True, "minLength": 1, "default": "now", "examples": ["a", 1]},
    "where": {"type": "object", "description": "A place.", "properties": {"x": {"type": "number", "minimum": 0}},
              "required": ["x"], "additionalProperties": {"type": "string"}},
    "map": {"type": "object", "additionalProperties": True},
    "list": {"type": "array", "description": "Some.", "minItems": 1, "items": {
        "type": "object", "properties": {"y": {"type": "boolean", "default": True}}, "nullable": True}},
    "lists": {"type": "array", "nullable": True, "items": {"type": "array", "items": {"type": "integer"}}},
    "any": {"type": "array"}, "no": {"type": "null"}, "bare": {"description": "Anything."},
    "one": {"description": "Either.", "oneOf": [
        {"type": "string", "description": "A text.", "default": "a"},
        {"type": "object", "properties": {"z": {"type": "string"}}}, {"type": "object", "properties": {}}]},
    "sum": {"anyOf": [{"type": "number", "default": 1.5}, {"type": "null"}]},
    "both": {"allOf": [{"type": "string"}]}, "fixed": {"const": "a"}, "levels": {"type": "number", "enum": [1, 2.5]},
    "flag": {"type": "boolean", "default": False}, "numbers": {"type": "array", "items": {"type": "number"}},
    "flags": {"type": "array", "items": {"type": "boolean"}},
}  # fmt: skip


def _tool(*names: str) -> Mapping[str, Any]:
    """A tool whose arguments have these of the ``SCHEMAS``."""
    answer = {"type": "object", "description": "A booking.", "properties": {"id": {"type": "string"}}}
    parameters = {
        "type": "object", "properties": {name: SCHEMAS[name] for name in names}, "required": [*names[:1]], "$defs": {},
    }  # fmt: skip
    function = {"name": "book", "description": "Books.", "parameters": parameters, "return": answer, "response": answer}
    return {"type": "function", "function": function}


BARE: Mapping[str, Any] = {"type": "function", "function": {"name": "now"}}
DOCUMENTS = ({"title": "A", "text": "One.", "doc_id": 1}, {"title": "B", "text": "Two.", "doc_id": 2})
REASONING = ("reasoning_content", "reasoning", "thinking")
IMAGES: tuple[Mapping[str, Any], ...] = ({"type": "image"}, {"type": "image_url", "image_url": {"url": "a.png"}})


@dataclass(frozen=True)
class Words:
    """What a template reads: variables of its own with what they are compared with; roles; what it looks for in texts;
    variables that are ``lists``; all names and texts.
    """

    variables: Mapping[str, Sequence[Any]]
    roles: Sequence[str]
    sought: Sequence[str]
    lists: Sequence[str]
    keys: Sequence[str]

    @property
    def thoughts(self) -> tuple[str, ...]:
        """The keys under which it reads what an answer was reasoned by."""
        return tuple(key for key in REASONING if key in self.keys) or REASONING[:1]

    @property
    def settings(self) -> Mapping[str, tuple[Any, ...]]:
        """Values to try for each of its own variables."""
        return {name: self._values(name, compared) for name, compared in self.variables.items()}

    def _values(self, name: str, compared: Sequence[Any]) -> tuple[Any, ...]:
        if "builtin" in name:
            return (["weather", *compared], list(compared))
        if name.endswith("tools"):
            return (list(TOOLS),)
        if name in self.lists:
            return (list(DOCUMENTS),)
        numbers = [value for value in compared if not isinstance(value, str)]
        return tuple(dict.fromkeys(numbers or (True, False, *compared, "A text.")))


# -- messages ----------------------------------------------------------------------------------------------------------


def _says(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def _call(name: str, arguments: Any, number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


SYSTEM, USER, ANSWER = _says("system", "Be brief."), _says("user", "Hi & <you>"), _says("assistant", "Yes, I'm")
MORE, THOUGHT = _says("user", "And so?"), _says("assistant", "<think>\nhm\n</think>\n\nYes")
CALLS = _says("assistant", "", tool_calls=[_call("weather", ARGUMENTS)])
TWO_CALLS = _says("assistant", "", tool_calls=[_call("weather", {"city": "B"}), _call("time", {}, 2)])
RESULT = _says("tool", '{"t": "21 °C"}', tool_call_id="call00001", name="weather")
RESULT_2 = _says("tool", "12:00", tool_call_id="call00002", name="time")


def _messages(words: Words) -> list[Message]:
    """Every kind of message that this template may read."""
    reasoned = dict.fromkeys(words.thoughts, "hm")
    calls = [
        CALLS, TWO_CALLS, CALLS | {"content": "I'll look."}, CALLS | {"content": None}, CALLS | reasoned,
        {key: value for key, value in CALLS.items() if key != "content"},
        _says("assistant", "", tool_calls=[_call("weather", json.dumps(ARGUMENTS, ensure_ascii=False))]),
    ]  # fmt: skip
    plain = [
        SYSTEM, _says("system", ""), _says("system", "  Be brief.\n"), _says("system", _parts("Be brief.")),
        USER, MORE, _says("user", ""), _says("user", "  Hi\n\n"), _says("user", _parts("Hi")),
        _says("user", _parts("Hi", " you")), _says("user", "x</think>y"),
        ANSWER, _says("assistant", ""), _says("assistant", " Yes\n"), _says("assistant", _parts("Yes")), THOUGHT,
        ANSWER | reasoned, _says("assistant", "", **reasoned), _says("assistant", "<think>hm</think>"),
    ]  # fmt: skip
    results = [RESULT, RESULT_2, _says("tool", ""), _says("tool", _parts("21")), _says("tool", "x", name="weather")]
    others = [_says(role, "Text.") for role in words.roles if role not in ("system", "user", "assistant", "tool")]
    pictures = [_says("user", [*_parts("Look"), image]) for image in IMAGES if image["type"] in words.keys]
    for text in words.sought[:SOUGHT]:
        plain += [_says(role, f"a{text}b") for role in ("system", "user", "assistant")]
        plain.append(ANSWER | dict.fromkeys(words.thoughts, f"a{text}b"))
    if "tool_plan" in words.keys:
        calls.append(CALLS | {"tool_plan": "I'll look."})
    return [*plain, *calls, *results, *others, *pictures]


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


# -- conversations -----------------------------------------------------------------------------------------------------


def usual(words: Words) -> Iterator[Conversation]:
    """Those that engines are asked for: each kind of message where it may stand, each setting, tools or none."""
    yield {"messages": [USER], "add_generation_prompt": True}
    kinds = _messages(words)
    sequences = [[USER], [SYSTEM, USER], [USER, ANSWER, MORE], [SYSTEM, USER, ANSWER, MORE, ANSWER, MORE],
                 [USER, CALLS, RESULT], [SYSTEM, USER, CALLS, RESULT, ANSWER, MORE], [USER, ANSWER, USER, ANSWER],
                 [USER, TWO_CALLS, RESULT, RESULT_2], [USER, CALLS, RESULT, TWO_CALLS, RESULT, RESULT_2, ANSWER, MORE],
                 [USER, THOUGHT, MORE, THOUGHT, MORE]]  # fmt: skip
    for kind in kinds:
        before = [USER] if kind["role"] != "system" else []
        before += [CALLS] if kind["role"] == "tool" else []
        sequences += [[*before, kind], [*before, kind, *([RESULT] if "tool_calls" in kind else []), MORE]]
    for messages, opens, tools in product(sequences, (True, False), (None, TOOLS, TOOLS[1:])):
        if opens or len(messages) < 4:
            yield _of(messages, opens, tools)
    for tools in ([BARE], [*TOOLS, BARE], *([_tool(name)] for name in SCHEMAS)):
        yield _of([USER], True, tools)
    if words.settings:
        yield _of([USER], True, None, {name: values[-1] for name, values in words.settings.items()})
    for name, values in words.settings.items():
        for value, base in product(values, ([USER], [SYSTEM, USER, THOUGHT, MORE], [USER, CALLS, RESULT])):
            yield _of(base, True, TOOLS if len(base) == 3 else None, {name: value})
            yield _of(base, False, None, {name: value})


def by_chance(words: Words, random: Random) -> Conversation:
    """One of any messages, settings and tools."""
    kinds = _messages(words)
    messages = [random.choice(kinds) for _ in range(random.randint(1, LONGEST))]
    if random.random() < 0.7:
        messages[:0] = random.choice(([USER], [SYSTEM, USER]))
    given = {name: random.choice(values) for name, values in words.settings.items() if random.random() < 0.25}
    tools = random.choice((None, TOOLS, TOOLS[:1], [_tool(*random.sample(sorted(SCHEMAS), 3))]))
    return _of(messages, random.random() < 0.7, tools, given)


def _of(messages: Sequence[Message], opens: bool, tools: Any = None, more: Conversation | None = None) -> Conversation:
    made = {"messages": list(messages), "add_generation_prompt": opens, **(more or {})}
    return made | {"tools": list(tools)} if tools else made


# -- which of them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """Conversations that a template renders, with what it made of them; the first ``needed`` reach all that any does.

    ``reached``: numbers of branches, by refused conversations too, of which there were ``refused``.
    """

    conversations: Sequence[Conversation]
    told: Sequence[Told]
    needed: int
    reached: frozenset[int]
    refused: int


def choose(
    ask: Callable[[Sequence[Conversation]], Sequence[Told]], words: Words, branches: int,
    takes: Callable[[Conversation], bool] = bool,
) -> Chosen:  # fmt: skip
    """Conversations for a template, of those that a candidate ``takes``; ``ask`` has some rendered."""
    tried = _distinct(filter(takes, usual(words)))
    told = list(ask(tried))
    random = Random(1)  # noqa: S311 - the same ones each time
    for _ in range(ROUNDS):
        reached = {branch for each in told for branch in each["reached"]}
        if len(reached) == branches:
            break
        more = _distinct(filter(takes, (by_chance(words, random) for _ in range(EACH))))
        for conversation, each in zip(more, ask(more), strict=True):
            if set(each["reached"]) - reached:
                tried, told = [*tried, conversation], [*told, each]
    rendered = [number for number, each in enumerate(told) if "text" in each]
    cover = _cover([set(told[number]["reached"]) for number in rendered])
    first = [rendered[number] for number in cover]
    others = [number for number in rendered if number not in first]
    random.shuffle(others)
    kept = [*first, *_varied(others, told)][:MOST]
    reached = {branch for each in told for branch in each["reached"]}
    return Chosen(
        [tried[number] for number in kept], [told[number] for number in kept], len(first), frozenset(reached),
        len(told) - len(rendered),
    )  # fmt: skip


def _distinct(conversations: Iterator[Conversation]) -> list[Conversation]:
    return list({json.dumps(each, sort_keys=True): each for each in conversations}.values())


def _cover(sets: Sequence[set[int]]) -> list[int]:
    """A few of some sets that have all that any has: the largest first, and then without those that are not needed."""
    left, found = set[int]().union(*sets), list[int]()
    while left:
        best = max(range(len(sets)), key=lambda number: len(sets[number] & left))
        found.append(best)
        left -= sets[best]
    for number in list(found):
        others = [sets[each] for each in found if each != number]
        if sets[number] <= set[int]().union(*others):
            found.remove(number)
    return found


def _varied(numbers: Sequence[int], told: Sequence[Told]) -> list[int]:
    """Those of different branches first, then the rest: what a template writes alike, an engine may not."""
    ways = {tuple(told[number]["reached"]): number for number in reversed(numbers)}
    first = set(ways.values())
    return sorted(numbers, key=lambda number: number not in first)
