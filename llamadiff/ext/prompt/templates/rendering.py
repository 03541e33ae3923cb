"""The template of a file: conversations rendered, and changes tried, in a child process that has limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamaref import ModelError

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.prompt.chat_template import MAX_TEMPLATE, answer_of
from llamadiff.ext.prompt.templates.conversations import Conversation, Told, Words
from llamadiff.ext.prompt.tokenizer import rules_of
from llamadiff.system.errors import UserError
from llamadiff.system.input import read_text

SECONDS, AT_WORK = 240.0, 60.0  # that one batch of conversations may take; of which so many at work
CHILD = "llamadiff.ext.prompt.templates.child"
ENDINGS = (".jinja", ".jinja2", ".j2")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}  # of a template alone, which names none


@dataclass(frozen=True)
class Cause:
    """What an engine does, and what to do about it."""

    name: str
    says: str
    fix: str


@dataclass(frozen=True)
class Source:
    """A template with the tokens that it is given. Raises UserError where it cannot be rendered.

    ``adds_bos``: tokenizing puts the BOS token before each prompt.
    """

    path: Path
    template: str
    tokens: Mapping[str, str]
    adds_bos: bool = False

    @property
    def lines(self) -> Sequence[str]:
        return self.template.split("\n")

    def line(self, number: int) -> str:
        """A line's text; nothing for one that is not there."""
        return self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""

    def told(self, conversations: Sequence[Conversation]) -> Sequence[Told]:
        """What the template makes of each: ``text`` or ``error``, its ``pieces``, the branches ``reached``."""
        found: Sequence[Told] = self._asked(conversations)["told"]
        return found

    def words(self) -> tuple[Words, Sequence[tuple[int, str]]]:
        """What the template reads, and its branches."""
        found = self._asked([])
        words = Words(**{name: found[name] for name in ("variables", "roles", "sought", "lists", "keys")})
        return words, [(line, way) for line, way in found["branches"]]

    def causes(self, conversations: Sequence[Conversation], wanted: Sequence[str | None]) -> Sequence[Cause]:
        """What known mistake gives exactly these texts; None is a failure."""
        return [Cause(*each) for each in self._asked(conversations, wanted=wanted)["causes"]]

    def several(
        self, conversations: Sequence[Conversation], wanted: Sequence[str | None], parted: int
    ) -> tuple[Sequence[Cause], Sequence[int]]:
        """Known mistakes that together give the first ``parted`` of these texts, and the numbers of those left."""
        found = self._asked(conversations, wanted=wanted, parted=parted)
        return [Cause(*each) for each in found["causes"]], found["left"]

    def _asked(self, conversations: Sequence[Conversation], **more: Any) -> Mapping[str, Any]:
        given = [{**self.tokens, **conversation} for conversation in conversations]
        request = {"template": self.template, "conversations": given, **more}
        answer = answer_of(CHILD, request, SECONDS, AT_WORK)
        if "error" in answer:
            raise UserError(f"{self.path}: the chat template {answer['error']}")
        return answer


def _adds_bos(fields: Mapping[str, Any]) -> bool:
    """Whether tokenizing puts BOS before a prompt: as the file says, or its kind of tokenizer does by itself."""
    with suppress(ModelError):
        return rules_of(fields).add_bos
    return fields.get("tokenizer.ggml.add_bos_token") is True


def source_of(path: Path, tokens: Mapping[str, str] | None = None) -> Source:
    """The chat template of a .gguf, or of a file of its own, which is given ``tokens``. Raises UserError."""
    if path.suffix in ENDINGS:
        template = read_text(path, 4 * MAX_TEMPLATE, "a chat template")
        given, adds_bos = TOKENS if tokens is None else tokens, False
    else:
        model = ModelFile(path)
        if model.chat_template is None:
            raise UserError(f"{path}: the file has no chat template; give a file of the template alone, named *.jinja")
        template = model.chat_template
        given = {f"{kind}_token": model.special_token(kind) for kind in ("bos", "eos")}
        adds_bos = bool(given["bos_token"]) and _adds_bos(model.weights.fields)
    if len(template) > MAX_TEMPLATE:
        raise UserError(f"{path}: the chat template has {len(template)} characters; that is not taken for real")
    return Source(path, template, given, adds_bos)
