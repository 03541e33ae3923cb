"""What engines are known to do to a template: each mistake is one change to the renderer, which is then tried."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from jinja2 import Environment, Template, nodes
from jinja2.runtime import Undefined

from llamadiff.ext.prompt.chat_template import environment
from llamadiff.ext.prompt.templates.traced import compiled

Conversation = Mapping[str, Any]
Environments = Callable[[Environment], None]
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


def together(*changes: Change) -> Change:
    """Several mistakes as one change, made one after another."""

    def chain(functions: Iterable[Callable[..., Any] | None]) -> Callable[..., Any] | None:
        made = [function for function in functions if function is not None]

        def call(value: Any, *more: Any) -> Any:
            return reduce(lambda x, function: function(x, *more), made, value)

        return call if made else None

    def every(functions: Iterable[Callable[[Any], None] | None]) -> Callable[[Any], None] | None:
        made = [function for function in functions if function is not None]

        def call(value: Any) -> None:
            for function in made:
                function(value)

        return call if made else None

    return Change(
        " + ".join(each.name for each in changes), " and ".join(each.says for each in changes),
        "; ".join(each.fix for each in changes), every(each.environment for each in changes),
        chain(each.source for each in changes), every(each.tree for each in changes),
        chain(each.conversation for each in changes), chain(each.text for each in changes),
    )  # fmt: skip


def having(**values: Any) -> Callable[[Conversation], Conversation]:
    """With these values, whatever was asked."""
    return lambda conversation: {**conversation, **values}


def without(*keys: str) -> Callable[[Conversation], Conversation]:
    """As if nobody had said these."""
    return lambda conversation: {key: value for key, value in conversation.items() if key not in keys}


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
LEFT_BLANKS = (r"[ \t]*(\{[%#])-", r"\1+"), (r"[ \t]*\{\{-", "{{")
RIGHT_BLANKS = (r"-([%#]\})[ \t]*", r"+\1"), (r"-\}\}[ \t]*", "}}")
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
           source=_replaced(*LEFT_BLANKS)),
    Change("dash-right-newline", "strips blanks after -%} and -}}, and keeps newlines", _DASH,
           source=_replaced(*RIGHT_BLANKS)),
    Change("dash-right-one", "strips blanks after -%} and -}}, and no more newlines than trim_blocks does", _DASH,
           source=_replaced((r"-([%#]\})[ \t]*", r"\1"), (r"-\}\}[ \t]*", "}}"))),
    Change("dash-newlines", "strips blanks at the dashes of {%- and -%}, and keeps newlines", _DASH,
           source=_replaced(*LEFT_BLANKS, *RIGHT_BLANKS)),
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


_BOS = "write the BOS token once: as the template does, and then not again when tokenizing"
TOKENS = (
    Change("bos-twice", "writes the BOS token twice", _BOS,
           text=lambda x, c: c["bos_token"] + x if x.startswith(c["bos_token"]) else x),
    Change("bos-added", "writes a BOS token that the template does not", _BOS,
           text=lambda x, c: x if x.startswith(c["bos_token"]) else c["bos_token"] + x),
    Change("bos-removed", "leaves out the BOS token at the start (right, if it is added when tokenizing)",
           "write bos_token where the template does; a .gguf says whether tokenizing adds it, a .jinja does not",
           text=lambda x, c: x.removeprefix(c["bos_token"])),
    Change("bos-missing", "has no bos_token", "give the template bos_token", conversation=having(bos_token="")),
    Change("eos-missing", "has no eos_token", "give the template eos_token", conversation=having(eos_token="")),
    Change("eos-added", "writes an EOS token at the end", "leave the rendered text as it is",
           text=lambda x, c: x + c["eos_token"]),
    Change("generation-prompt-missing", "does not open the answer: add_generation_prompt is not passed on",
           "give the template add_generation_prompt", conversation=without("add_generation_prompt")),
    Change("generation-prompt-always", "always opens the answer: add_generation_prompt is not passed on",
           "give the template add_generation_prompt as asked", conversation=having(add_generation_prompt=True)),
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
