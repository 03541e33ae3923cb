"""The model's own chat template, rendered. A template is code from a stranger: it runs in jinja2's sandbox."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from llamadiff.errors import UserError
from llamadiff.model import Model

MAX_TEMPLATE = 1 << 18  # characters
MAX_RENDERED = 1 << 20


def render(model: Model, prompt: str) -> str:
    """One user turn and the opening of the answer, as the model's template writes them.

    The beginning-of-text token is left out where the template writes it: tokenization adds it. Raises
    UserError if the file has no template or it cannot be rendered.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = model.chat_template
    if template is None:
        raise UserError(
            f"{model.path}: the file has no chat template; leave out --chat and write the turns in the prompt"
        )
    if len(template) > MAX_TEMPLATE:
        raise UserError(f"{model.path}: the chat template has {len(template)} characters; that is not taken for real")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    try:
        rendered = environment.from_string(template).render(
            messages=[{"role": "user", "content": prompt}], add_generation_prompt=True,
            bos_token=model.special_token("bos"), eos_token=model.special_token("eos"),
        )  # fmt: skip
    except (
        TemplateError,
        UserError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:
        raise UserError(f"{model.path}: the chat template fails: {' '.join(str(error).split())[:200]}") from None
    if len(rendered) > MAX_RENDERED:
        raise UserError(f"{model.path}: the chat template wrote {len(rendered)} characters for one short turn")
    bos = model.special_token("bos")
    return rendered.removeprefix(bos) if bos else rendered


def _refuse(message: Any) -> None:
    """What templates call to reject a conversation."""
    raise UserError(str(message))


def _now(form: str) -> str:
    """What templates call for today's date."""
    return datetime.now(timezone.utc).strftime(form)
