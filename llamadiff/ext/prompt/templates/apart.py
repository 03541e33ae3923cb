"""Chat templates as texts: those of a checkpoint, of a file, and the first place where two of them part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamadiff.ext.prompt.chat_template import MAX_TEMPLATE
from llamadiff.result.oddity import Oddity
from llamadiff.system.input import read_text
from llamadiff.trace.stated import read_json

KEY, ENDING = "tokenizer.chat_template", ".jinja"
DEFAULT = "default"
BEFORE, AFTER = 20, 30  # characters that are shown around a place
MOST = 64  # templates of a checkpoint
CHATML = "llama.cpp takes ChatML for chats"


@dataclass(frozen=True)
class TextParting:
    """The first character at which two templates part: its line, and what stands there in both."""

    line: int
    ours: str
    theirs: str

    def says(self, own: str, other: str) -> str:
        """The place in words; ``own`` and ``other`` are what both are called."""
        return f"parts at line {self.line}: `{self.ours}` in {own}, `{self.theirs}` in {other}"


def text_parting(ours: str, theirs: str) -> TextParting | None:
    """None where two templates are the same to Jinja, which drops one newline at the end."""
    ours, theirs = (text.replace("\r\n", "\n").removesuffix("\n") for text in (ours, theirs))
    if ours == theirs:
        return None
    shorter = min(len(ours), len(theirs))
    place = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    return TextParting(ours.count("\n", 0, place) + 1, _around(ours, place), _around(theirs, place))


def _around(text: str, place: int) -> str:
    """What stands at a place, no further than its line goes."""
    line = text.rfind("\n", 0, place) + 1
    start = max(line, place - BEFORE)
    end = text.find("\n", place + 1)
    shown = text[start : min(place + AFTER, len(text) if end < 0 else end)]
    return f"{'...' if start > line else ''}{shown}" or "the end"


def template_oddities(
    fields: Mapping[str, Any], own: str, wanted: Mapping[str, str], label: str, fix: str
) -> Iterator[Oddity]:
    """Where the templates of a file are not those of another side: ``own`` and ``label`` are what both are called."""
    found = templates_of(fields)
    for name, theirs in wanted.items():
        key = KEY if name == DEFAULT else f"{KEY}.{name}"
        if name not in found:
            takes = f": {CHATML}" if name == DEFAULT else ""
            yield Oddity(key, f"is not in {own}{takes}; {label} has one; {fix}", "chat-template", name == DEFAULT)
            continue
        part = text_parting(found[name], theirs)
        if part is not None:
            yield Oddity(key, f"{part.says(own, label)}; {fix}", "chat-template")


def templates_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """A file's templates by their names."""
    found = {key: value for key, value in fields.items() if isinstance(value, str) and key.startswith(KEY)}
    return {key.removeprefix(KEY).removeprefix(".") or DEFAULT: value for key, value in found.items()}


def templates_in(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """A checkpoint's templates by their names, as llama.cpp's converter finds them (gguf-py, vocab.py)."""
    stated = config.get("chat_template")
    if stated is None:
        stated = _in_files(folder)
    if isinstance(stated, str):
        return {DEFAULT: stated}
    listed = stated[:MOST] if isinstance(stated, list) else ()
    pairs = [(each.get("name"), each.get("template")) for each in listed if isinstance(each, dict)]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _in_files(folder: Path) -> Any:
    path, older = folder / f"chat_template{ENDING}", folder / "chat_template.json"
    if path.is_file():
        others = sorted((folder / "additional_chat_templates").glob(f"*{ENDING}"))[:MOST]
        named = [(DEFAULT, path), *((each.stem, each) for each in others)]
        return [{"name": name, "template": read_text(each, 4 * MAX_TEMPLATE, "a template")} for name, each in named]
    data = read_json(older, 4 * MAX_TEMPLATE, "a chat template as JSON") if older.is_file() else {}
    return data.get("chat_template") if isinstance(data, dict) else None
