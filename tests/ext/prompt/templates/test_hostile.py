"""Hostile chat templates are stopped."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from llamadiff.ext.prompt import chat_template
from llamadiff.system.errors import UserError


def rendered(template: str) -> str:
    model = SimpleNamespace(path="m.gguf", chat_template=template, special_token=lambda kind: f"<{kind}>")
    return chat_template.render(model, "hello")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(999999999) %}{% endfor %}", "OverflowError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 'a' * 10**10 }}", "more than 1024 MiB"),
        ("{{ 'a' * (2 * 10**6) }}", "wrote 2000000 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ " + "-" * 100_000 + "1 }}", "RecursionError"),
        ("{{ raise_exception('only\n tools') }}", "only tools"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("x" * 10_000_000, "10000000 characters"),
    ],
    ids=lambda text: text[:30],
)
def test_a_hostile_template_is_stopped(template: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        rendered(template)
    assert str(caught.value).startswith("m.gguf: the chat template ")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("limit", "other"), [("SECONDS", "CPU_SECONDS"), ("CPU_SECONDS", "SECONDS")])
def test_rendering_has_limits_of_time(limit: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, limit, 1)
    monkeypatch.setattr(chat_template, other, math.inf)
    with pytest.raises(UserError, match=r"takes more than 1 s;" if limit == "SECONDS" else "1 s of computation"):
        rendered("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")


def test_an_ordinary_template_is_rendered() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}[{{ m.role }}] "
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %} [assistant]{% endif %}{{ strftime_now('')}}"
    )
    assert rendered(template) == "<bos>[user] hello [assistant]"
