"""What llama-server does to conversations is no mistake: it is told, and what is left is WRONG."""

from __future__ import annotations

import json
from runpy import run_path

import pytest
from ext.prompt.answering import answering
from models.tokenized import with_tokenizer
from places import ROOT
from waiting import HANG

from llamadiff.ext.prompt.templates.page import headline, notes
from llamadiff.ext.prompt.templates.run import template
from llamadiff.ext.prompt.templates.server_ways import WAYS, changed_by, taken

ENGINE = run_path(str(ROOT / "tests/ext/prompt/templates/engine.py"))
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "strict": True}}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "u"}}]


def as_parsed(said):
    """A message as the server has read it: written anew, as an engine's author would."""
    content = said.get("content")
    made = {"role": "system" if said["role"] == "developer" else said["role"]}
    made["content"] = "\n".join(each["text"] for each in content) if isinstance(content, list) else content or ""
    for key in ("reasoning_content", "name", "tool_call_id"):
        made |= {key: said[key]} if said.get(key) else {}
    calls = []
    for call in said.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append({"type": "function", "function": {"name": call["function"]["name"], "arguments": arguments}})
    return made | ({"tool_calls": calls} if calls else {})


def llama_server(*mistakes):
    """/apply-template of an engine by hand, with llama-server's ways, and more mistakes."""

    def answer(path, asked):
        contents = [each["content"] for each in asked["messages"] if isinstance(each.get("content"), list)]
        if any(part["type"] != "text" for content in contents for part in content):
            return 500, {"error": {"message": "image input is not supported"}}
        tools = [
            {"type": "function", "function": {
                "name": tool["function"]["name"], "description": tool["function"].get("description", ""),
                "parameters": tool["function"].get("parameters") or {"type": "object", "properties": {}}}}
            for tool in asked.get("tools") or ()
        ]  # fmt: skip
        messages = [as_parsed(each) for each in asked["messages"]]
        given = {**asked, "messages": messages, "tools": tools,
                 "bos_token": "", "eos_token": "</s>",
                 "add_generation_prompt": asked.get("add_generation_prompt")}  # fmt: skip
        return 200, {"prompt": ENGINE["render"](given, mistakes.__contains__)}

    return answering(answer)


@pytest.mark.parametrize("mistake", ["", "tool-calls-ignored", "trim-ignored", "tojson-ascii"])
def test_its_ways_are_told_and_what_is_left_is_wrong(mistake, tmp_path):
    path = with_tokenizer(tmp_path / "m.gguf", ENGINE["TEMPLATE"], adds_bos=True)
    with llama_server(mistake) as address:
        found = template(path, address, HANG)
    assert {"tools", "parts"} <= {each.way.slot for each in found.ways}
    assert all(each.count > 0 for each in found.ways)
    assert sum("no mistake of " in line for line in notes(found)) == len(found.ways)
    if not mistake:
        assert found.verdict == "match", headline(found)
        assert "in llama-server's own ways with messages" in headline(found)
        return
    assert found.verdict == "wrong"
    assert mistake in [cause.name for cause in found.places[0].causes]


@pytest.mark.parametrize(
    ("slot", "message", "more", "wanted"),
    [
        ("rebuilt", {"role": "assistant", "content": None, "tool_calls": [{**CALL, "x": 1}], "thinking": "t"}, {},
         {"role": "assistant", "content": "", "tool_calls": [CALL]}),
        ("parts", {"role": "user", "content": PARTS}, {}, {"role": "user", "content": "a\nb"}),
        ("developer", {"role": "developer", "content": ""}, {}, {"role": "system", "content": ""}),
        ("arguments", {"role": "assistant", "tool_calls": [CALL]}, {},
         {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}),
        ("trimmed", {"role": "user", "content": " a\n"}, {}, {"role": "user", "content": "a"}),
        ("images", {"role": "user", "content": IMAGE}, {}, None),
        ("none", {"role": "user"}, {}, None),
        ("images", {"role": "user", "content": PARTS}, {}, {"role": "user", "content": PARTS}),
        ("merged", {"role": "user", "content": "b"}, {"before": {"role": "system", "content": "a"}},
         {"role": "user", "content": "a\nb"}),
    ],
)  # fmt: skip
def test_each_way(slot, message, more, wanted):
    way = next(each for each in WAYS if each.slot == slot)
    made = changed_by([way], {"messages": [*more.values(), message]})
    assert (made["messages"][-1] if made is not None else None) == wanted


def test_tools_and_what_nobody_says():
    ways = [next(each for each in WAYS if each.slot == slot) for slot in ("tools", "thinking")]
    made = changed_by(ways, {"messages": [], "tools": [TOOL]})
    assert made["tools"] == [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    assert made["enable_thinking"] is True
    assert changed_by(ways, {"messages": [], "enable_thinking": False})["enable_thinking"] is False


@pytest.mark.parametrize("has", [(), ("parts",), ("parts", "developer")])
def test_those_that_bring_prompts_nearer_are_taken(has):
    """Of two conversations one for each way."""

    def asked(sets):
        for ways in sets:
            slots = {each.slot for each in ways}
            yield [name in slots or name not in has for name in ("parts", "developer")]

    found = taken(lambda sets: [*asked(sets)])
    assert not taken(
        lambda sets: [[len(ways) == 0, len(ways) > 0, len(ways) > 0] for ways in sets]
    )  # one is wrong by it
    assert [(each.way.slot, each.count) for each in found] == [(slot, 1) for slot in has]
