"""What engines are known to do to a template: each mistake is one change to the renderer, which is then tried."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, Template, nodes
from jinja2.runtime import Undefined

from llamadiff.engines.chat_template import environment
from llamadiff.extras.templates.traced import compiled

Conversation = Mapping[str, Any]
Environments = Callable[[Environment], None]
KNOWN = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "continue_final_message")
THINK_END = "</think>"


@dataclass(frozen=True)
class Change:
    """One mistake: its name, what who makes it does, what to do, and what changes for it.

    The rest is left as it is. ``tree`` changes the parsed template; ``text`` what was rendered.
    """

    name: str
    says: str
    fix: str
    environment: Environments | None = None
    source: Callable[[str], str] | None = None
    tree: Callable[[nodes.Template], None] | None = None
    conversation: Callable[[Conversation], Conversation] | None = None
    text: Callable[[str, Conversation], str] | None = None

    def template(self, source: str, usual: Template) -> Template:
        """The template with this change. Raises what jinja2 raises for a bad one."""
        if (self.environment, self.source, self.tree) == (None, None, None):
            return usual
        made = environment()
        if self.environment is not None:
            self.environment(made)
        tree = made.parse(self.source(source) if self.source is not None else source)
        if self.tree is not None:
            self.tree(tree)
        return compiled(made, tree)


# -- white space -------------------------------------------------------------------------------------------------------


def _set(**options: Any) -> Environments:
    """Options of jinja2's environment."""

    def change(made: Environment) -> None:
        for name, value in options.items():
            setattr(made, name, value)

    return change


def _replaced(*pairs: tuple[str, str]) -> Callable[[str], str]:
    def change(source: str) -> str:
        for old, new in pairs:
            source = re.sub(old, new, source)
        return source

    return change


LEFT, RIGHT = (r"(\{[%{#])-", r"\1"), (r"-([%}#]\})", r"\1")
_TRIM = "set trim_blocks: the first newline after %} is no text"
_LSTRIP = "set lstrip_blocks: blanks before {% at a line's start are no text"
_DASH = "strip all white space, newlines too, on the side of the dash"
WHITE = (
    Change("trim-blocks", "keeps the newline after a block: trim_blocks is off", _TRIM, _set(trim_blocks=False)),
    Change("lstrip-blocks", "keeps the blanks before a block: lstrip_blocks is off", _LSTRIP,
           _set(lstrip_blocks=False)),
    Change("blocks", "keeps newlines after blocks and blanks before them: trim_blocks and lstrip_blocks are off",
           f"{_TRIM}; {_LSTRIP}", _set(trim_blocks=False, lstrip_blocks=False)),
    Change("dash-left", "does not strip what stands before {%- and {{-", _DASH, source=_replaced(LEFT)),
    Change("dash-right", "does not strip what stands after -%} and -}}", _DASH, source=_replaced(RIGHT)),
    Change("dashes", "strips nothing for the dashes of {%- and -%}", _DASH, source=_replaced(LEFT, RIGHT)),
    Change("dash-left-newline", "strips blanks before {%- and {{-, and keeps newlines", _DASH,
           source=_replaced((r"[ \t]*(\{[%#])-", r"\1+"), (r"[ \t]*\{\{-", "{{"))),
    Change("dash-right-newline", "strips blanks after -%} and -}}, and keeps newlines", _DASH,
           source=_replaced((r"-([%#]\})[ \t]*", r"+\1"), (r"-\}\}[ \t]*", "}}"))),
    Change("dash-right-one", "strips blanks after -%} and -}}, and no more newlines than trim_blocks does", _DASH,
           source=_replaced((r"-([%#]\})[ \t]*", r"\1"), (r"-\}\}[ \t]*", "}}"))),
    Change("dash-newlines", "strips blanks at the dashes of {%- and -%}, and keeps newlines", _DASH,
           source=_replaced((r"[ \t]*(\{[%#])-", r"\1+"), (r"[ \t]*\{\{-", "{{"), (r"-([%#]\})[ \t]*", r"+\1"),
                            (r"-\}\}[ \t]*", "}}"))),
    Change("final-newline", "keeps the newline at the template's end", "drop one newline at the end of the template",
           _set(keep_trailing_newline=True)),
    Change("text-stripped", "strips the whole prompt", "leave the rendered text as it is", text=lambda x, _: x.strip()),
    Change("text-rstripped", "strips the prompt's end", "leave the rendered text as it is",
           text=lambda x, _: x.rstrip()),
    Change("text-lstripped", "strips the prompt's start", "leave the rendered text as it is",
           text=lambda x, _: x.lstrip()),
    Change("newline-added", "adds a newline at the prompt's end", "leave the rendered text as it is",
           text=lambda x, _: x + "\n"),
)  # fmt: skip


# -- tokens and the opening of the answer ------------------------------------------------------------------------------


def _with(**values: Any) -> Callable[[Conversation], Conversation]:
    return lambda conversation: {**conversation, **values}


def _without(*keys: str) -> Callable[[Conversation], Conversation]:
    return lambda conversation: {key: value for key, value in conversation.items() if key not in keys}


_BOS = "write the BOS token once: as the template does, and then not again when tokenizing"
TOKENS = (
    Change("bos-twice", "writes the BOS token twice", _BOS,
           text=lambda x, c: c["bos_token"] + x if x.startswith(c["bos_token"]) else x),
    Change("bos-added", "writes a BOS token that the template does not", _BOS,
           text=lambda x, c: x if x.startswith(c["bos_token"]) else c["bos_token"] + x),
    Change("bos-removed", "leaves out the BOS token at the start (right, if it is added when tokenizing)",
           "say so with --bos added, or write bos_token where the template does",
           text=lambda x, c: x.removeprefix(c["bos_token"])),
    Change("bos-missing", "has no bos_token", "give the template bos_token", conversation=_with(bos_token="")),
    Change("eos-missing", "has no eos_token", "give the template eos_token", conversation=_with(eos_token="")),
    Change("eos-added", "writes an EOS token at the end", "leave the rendered text as it is",
           text=lambda x, c: x + c["eos_token"]),
    Change("generation-prompt-missing", "does not open the answer: add_generation_prompt is not passed on",
           "give the template add_generation_prompt", conversation=_without("add_generation_prompt")),
    Change("generation-prompt-always", "always opens the answer: add_generation_prompt is not passed on",
           "give the template add_generation_prompt as asked", conversation=_with(add_generation_prompt=True)),
)  # fmt: skip


# -- the conversation --------------------------------------------------------------------------------------------------


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
    Change("tools-ignored", "does not pass the tools on", "give the template tools", conversation=_with(tools=None)),
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


# -- functions and values ----------------------------------------------------------------------------------------------


def _json(**usual: Any) -> Environments:
    """tojson with other defaults."""

    def change(made: Environment) -> None:
        made.filters["tojson"] = lambda value, **given: json.dumps(value, **{"ensure_ascii": False, **usual, **given})

    return change


def _json_as(change: Callable[[Any, Callable[..., str], dict[str, Any]], str]) -> Environments:
    """tojson otherwise: of a value, the right function and what the template gives it."""

    def changed(made: Environment) -> None:
        right = made.filters["tojson"]
        made.filters["tojson"] = lambda value, **given: change(value, right, given)

    return changed


_HTML = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"}


def _html(text: str) -> str:
    return "".join(_HTML.get(character, character) for character in text)


def _no_date(made: Environment) -> None:
    del made.globals["strftime_now"]


def _filter(name: str, function: Callable[..., Any]) -> Environments:
    def change(made: Environment) -> None:
        made.filters[name] = function

    return change


def _method(name: str, instead: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Environments:
    """What a text's method gives, of the text and its arguments."""

    def change(made: Environment) -> None:
        right = made.call  # type: ignore[attr-defined]

        def call(context: Any, called: Any, *given: Any, **named: Any) -> Any:
            of = getattr(called, "__self__", None)
            if isinstance(of, str) and getattr(called, "__name__", "") == name and when(*given):
                return instead(of, *given)
            return right(context, called, *given, **named)

        made.call = call  # type: ignore[attr-defined]

    return change


def _written(change: Callable[[Any], Any]) -> Environments:
    """What is written of a value."""
    return _set(finalize=change)


def _as_json(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value


def _like_json(value: Any) -> Any:
    return json.dumps(value) if value is None or isinstance(value, bool) else value


_TOJSON = "make tojson Python's json.dumps(value, ensure_ascii=False), with the arguments that the template gives"
_WRITE = "write values as Python's str() does: True, None, {'a': 1}; an undefined one is empty"
FUNCTIONS = (
    Change("strftime-missing", "has no strftime_now", "give the template strftime_now(format)", _no_date),
    Change("strftime-empty", "has a strftime_now that gives nothing", "give today's date in the format",
           lambda made: made.globals.update(strftime_now=lambda form: "")),
    Change("tojson-ascii", "escapes in tojson what is not ASCII", _TOJSON, _json(ensure_ascii=True)),
    Change("tojson-sorted", "sorts keys in tojson", _TOJSON, _json(sort_keys=True)),
    Change("tojson-html", "escapes HTML in tojson", _TOJSON, _json_as(lambda v, right, g: _html(right(v, **g)))),
    Change("tojson-jinja", "has jinja2's own tojson: it escapes HTML and what is not ASCII, and sorts keys", _TOJSON,
           _json_as(lambda v, _, g: _html(json.dumps(v, sort_keys=True, indent=g.get("indent"))))),
    Change("tojson-jinja-html", "has jinja2's own tojson with sorted keys: it escapes HTML and sorts keys", _TOJSON,
           _json_as(lambda v, right, g: _html(right(v, **{**g, "sort_keys": True})))),
    Change("tojson-compact", "writes no blanks after , and : in tojson", _TOJSON, _json(separators=(",", ":"))),
    Change("tojson-indent", "ignores tojson's indent", _TOJSON, _json_as(lambda v, right, g: right(v))),
    Change("tojson-indented", "indents in tojson, unasked", _TOJSON, _json(indent=2)),
    Change("tojson-str", "writes in tojson what Python's str() does", _TOJSON, _json_as(lambda v, _r, _g: str(v))),
    Change("trim-ignored", "does not strip for the filter trim", "strip white space at both ends",
           _filter("trim", lambda value, *_: value)),
    Change("strip-ignored", "does not strip for the method strip", "strip white space at both ends",
           _method("strip", lambda text, *_: text)),
    Change("thoughts-kept", "leaves thoughts in earlier answers: what the template splits at </think> stays whole",
           "let split(text)[-1] give what follows the last such text",
           _method("split", lambda text, *_: [text], lambda *given: given[:1] == (THINK_END,))),
    Change("safe-plain", "takes the filter safe for nothing; jinja2 escapes HTML in what is joined to such a text",
           "nothing, where your prompt is the one that is wanted; jinja2's has &#34; for \"",
           _filter("safe", lambda value: value)),
    Change("join-plain", "joins without what the template puts between", "let join(text) put the text between",
           _filter("join", lambda values, *_: "".join(map(str, values)))),
    Change("json-values", "writes true, false and null for True, False and None", _WRITE, _written(_like_json)),
    Change("json-objects", "writes an object as JSON", _WRITE, _written(_as_json)),
    Change("none-empty", "writes nothing for None", _WRITE, _written(lambda value: "" if value is None else value)),
    Change("undefined-written", "writes undefined where a value is", _WRITE,
           _written(lambda value: "undefined" if isinstance(value, Undefined) else value)),
    Change("undefined-none", "writes None where a value is undefined", _WRITE,
           _written(lambda value: None if isinstance(value, Undefined) else value)),
)  # fmt: skip
NAMED = (*WHITE, *TOKENS, *FUNCTIONS, *MESSAGES)


# -- what this template alone has --------------------------------------------------------------------------------------


def own_changes(tree: nodes.Template, source: str, variables: tuple[str, ...]) -> Iterator[Change]:
    """Of one template: a variable that is not passed on, a branch that is always or never taken, an output left out."""
    lines = source.split("\n")
    for name in variables:
        if name not in KNOWN:
            yield Change(f"ignored:{name}", f"does not pass {name} on", f"give the template {name}",
                         conversation=_without(name))  # fmt: skip
    for number, test in enumerate(node.test for node in _chosen(tree)):
        text = lines[test.lineno - 1].strip()
        for value in (True, False):
            says = f"takes the condition of line {test.lineno} for {str(value).lower()} always: {text}"
            yield Change(f"condition:{number}:{value}", says, "look at what the condition reads and how it is computed",
                         tree=_decided(number, value))  # fmt: skip
    for number, pair in enumerate(_pairs(tree)):
        for side in ("left", "right"):
            says = f"ignores a part of line {pair.lineno}: {lines[pair.lineno - 1].strip()}"
            yield Change(f"part:{number}:{side}", says, "look at what each part of the condition gives",
                         tree=_ignored(number, side))  # fmt: skip
    for number, output in enumerate(_outputs(tree)):
        what = "no white space" if isinstance(output, nodes.TemplateData) and not output.data.strip() else "nothing"
        says = f"writes {what} at line {output.lineno}: {lines[output.lineno - 1].strip()}"
        yield Change(f"silent:{number}", says, "look at what this expression reads", tree=_silenced(number))


def _chosen(tree: nodes.Template) -> list[nodes.If | nodes.CondExpr]:
    return [*tree.find_all(nodes.If), *tree.find_all(nodes.CondExpr)]


def _pairs(tree: nodes.Template) -> list[nodes.And | nodes.Or]:
    return [*tree.find_all(nodes.And), *tree.find_all(nodes.Or)]


def _outputs(tree: nodes.Template) -> list[nodes.Expr]:
    return [child for node in tree.find_all(nodes.Output) for child in node.nodes]


def _decided(number: int, value: bool) -> Callable[[nodes.Template], None]:
    def change(tree: nodes.Template) -> None:
        node = _chosen(tree)[number]
        node.test = nodes.Const(value, lineno=node.test.lineno)

    return change


def _ignored(number: int, side: str) -> Callable[[nodes.Template], None]:
    """One side of an "and" is always true, one of an "or" always false."""

    def change(tree: nodes.Template) -> None:
        pair = _pairs(tree)[number]
        setattr(pair, side, nodes.Const(isinstance(pair, nodes.And), lineno=pair.lineno))

    return change


def _silenced(number: int) -> Callable[[nodes.Template], None]:
    def change(tree: nodes.Template) -> None:
        output = _outputs(tree)[number]
        for node in tree.find_all(nodes.Output):
            node.nodes = [child for child in node.nodes if child is not output]

    return change
