"""The model's own chat template, rendered.

A template is code from a stranger, and may be hostile: it runs in jinja2's sandbox, in a child process that has a limit
of time and memory.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NoReturn

from llamadiff.system import python_child
from llamadiff.system.errors import UserError

if TYPE_CHECKING:
    from llamadiff.engines.model_file import ModelFile

MAX_TEMPLATE = 1 << 18  # characters
MAX_RENDERED = 1 << 20
SECONDS = 10  # that rendering may take
CPU_SECONDS = 2  # of which so many at work: a busy machine makes the first longer, not the second
MEMORY = 1 << 30  # bytes


def render(model: ModelFile, prompt: str) -> str:
    """One user turn and the opening of the answer, as the model's template writes them.

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
    bos, eos = model.special_token("bos"), model.special_token("eos")
    answer = _ask({"template": template, "prompt": prompt, "bos": bos, "eos": eos})
    if "error" in answer:
        raise UserError(f"{model.path}: the chat template {answer['error']}; leave out --chat")
    return answer["text"]


def _ask(request: dict[str, str]) -> dict[str, str]:
    """The child's answer, or what became of it."""
    child = python_child.command("llamadiff.engines.chat_template")
    try:
        code, said = python_child.within(child, json.dumps(request).encode(), SECONDS, CPU_SECONDS, MEMORY)
    except python_child.TakesTooMuchError as error:
        return {"error": f"takes more than {error}"}
    if code != 0:
        return {"error": f"ends the process that renders it (code {code})"}
    answer: dict[str, str] = json.loads(said)
    return answer


def main() -> None:
    """The child: a request on standard input, an answer on standard output, both JSON."""
    python_child.leave_no_core()
    python_child.take_no_more(MEMORY)
    python_child.die_with_parent()
    json.dump(_rendered(**json.load(sys.stdin)), sys.stdout)


def _rendered(template: str, prompt: str, bos: str, eos: str) -> dict[str, str]:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    try:
        text = environment.from_string(template).render(
            messages=[{"role": "user", "content": prompt}], add_generation_prompt=True, bos_token=bos, eos_token=eos
        )
    except MemoryError:
        return {"error": f"takes more than {MEMORY >> 20} MiB of memory"}
    except Exception as error:  # a stranger's code raises what it likes
        return {"error": f"fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    if len(text) > MAX_RENDERED:
        return {"error": f"wrote {len(text)} characters for one short turn"}
    return {"text": text}


def _refuse(message: Any) -> NoReturn:
    """What templates call to reject a conversation."""
    raise ValueError(str(message))


def _now(form: str) -> str:
    """What templates call for today's date."""
    return datetime.now(timezone.utc).strftime(form)
