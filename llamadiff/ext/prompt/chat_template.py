"""The model's own chat template, rendered as transformers does.

A template is code from a stranger, and may be hostile: it runs in jinja2's sandbox, in a child process that has a limit
of time and memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import TYPE_CHECKING, Any, NoReturn

from llamadiff.system import python_child
from llamadiff.system.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from llamadiff.engines.model_file import ModelFile

MAX_TEMPLATE = 1 << 18  # characters
MAX_RENDERED = 1 << 20
SECONDS = 10  # that rendering may take
CPU_SECONDS = 2  # of which so many at work: a busy machine makes the first longer, not the second
MEMORY = 1 << 30  # bytes
OFTEN = 0.02  # seconds between two looks at what it takes


def render(model: ModelFile, prompt: str, system: str | None = None) -> str:
    """One user turn and the opening of the answer, as the model's template writes them, after a ``system`` turn.

    It may begin with the beginning-of-text token, which is to be left out where tokenizing adds it. Raises UserError
    if the file has no template or it cannot be rendered.
    """
    template = model.chat_template
    if template is None:
        raise UserError(
            f"{model.path}: the file has no chat template; leave out --chat and write the turns in the prompt"
        )
    if len(template) > MAX_TEMPLATE:
        raise UserError(f"{model.path}: the chat template has {len(template)} characters; that is not taken for real")
    turns = [] if system is None else [{"role": "system", "content": system}]
    conversation = {"messages": [*turns, {"role": "user", "content": prompt}], "add_generation_prompt": True}
    tokens = {f"{kind}_token": model.special_token(kind) for kind in ("bos", "eos")}
    request = {"template": template, "conversation": conversation | tokens}
    answer = answer_of("llamadiff.ext.prompt.chat_template", request, SECONDS, CPU_SECONDS)
    if "error" in answer:
        raise UserError(f"{model.path}: the chat template {answer['error']}; leave out --chat")
    text: str = answer["text"]
    return text


def answer_of(module: str, request: Mapping[str, Any], seconds: float, at_work: float) -> dict[str, Any]:
    """What a module's ``main`` answers in a child process; or what became of it, as ``error``."""
    until = time.monotonic() + seconds
    with python_child.nameless_file() as file:
        file.write(json.dumps(request).encode())
        file.seek(0)
        process = Popen(python_child.command(module), stdin=file, stdout=PIPE, stderr=DEVNULL)  # noqa: S603
    with process:
        while True:
            try:
                said, _ = process.communicate(timeout=OFTEN)
                break
            except TimeoutExpired:
                pass
            memory, computed = python_child.taken_by(process.pid)
            if memory > MEMORY or computed > at_work or time.monotonic() > until:
                process.kill()
                words = f"{at_work:g} s of computation" if computed > at_work else f"{seconds:g} s"
                return {"error": f"takes more than {f'{MEMORY >> 20} MiB of memory' if memory > MEMORY else words}"}
    if process.returncode != 0:
        return {"error": f"ends the process that renders it (code {process.returncode})"}
    answer: dict[str, Any] = json.loads(said)
    return answer


def main() -> None:
    """The child that renders one conversation."""
    answers(lambda template, conversation: rendered(lambda: environment().from_string(template), conversation))


def answers(answer: Callable[..., Mapping[str, Any]]) -> None:
    """A child: a request on standard input, its answer on standard output, both JSON."""
    python_child.leave_no_core()
    python_child.take_no_more(MEMORY)
    python_child.die_with_parent()
    json.dump(answer(**json.load(sys.stdin)), sys.stdout)


def rendered(compiled: Callable[[], Template], conversation: Mapping[str, Any]) -> dict[str, str]:
    """The ``text`` of a conversation, or the ``error``. It has ``messages``, and what else a template may read."""
    try:
        text = compiled().render({"tools": None, "documents": None} | dict(conversation))
    except MemoryError:
        return {"error": f"takes more than {MEMORY >> 20} MiB of memory"}
    except Exception as error:  # a stranger's code raises what it likes
        return {"error": f"fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    if len(text) > MAX_RENDERED:
        return {"error": f"wrote {len(text)} characters for one short turn"}
    return {"text": text}


def environment() -> ImmutableSandboxedEnvironment:
    """jinja2 as transformers sets it up for templates (utils/chat_template_utils.py)."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, which marks for training what the model is to write."""

        tags = {"generation"}  # noqa: RUF012 - as the base class has it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    made.globals.update(raise_exception=_refuse, strftime_now=_now)
    made.filters["tojson"] = _to_json
    return made


def _refuse(message: Any) -> NoReturn:
    """What templates call to reject a conversation."""
    raise ValueError(str(message))


def _now(form: str) -> str:
    """What templates call for today's date, here."""
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own would escape HTML and sort keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
