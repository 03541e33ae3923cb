"""A capture, as it was judged when it was recorded, and what changed when it was recorded anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llamadiff.report.check_lines import path_text
from llamadiff.report.terminal.escape import escape_line
from llamadiff.trace.metadata import CHECKED, Info


@dataclass(frozen=True)
class Changed:
    """What a capture was, what it is now, and the NMSE of each tap that is no longer the same."""

    path: Path
    before: Info
    after: Info
    taps: int
    apart: dict[str, float]
    gone: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """That of the engine on what was recorded now."""
        return str(self.after.producer[CHECKED]["verdict"])


def update_line(changed: Changed) -> str:
    """What recording a capture anew has changed, in numbers."""
    apart, what = changed.apart, [f"{changed.taps} taps"]
    if apart:
        name = max(apart, key=lambda tap: apart[tap])
        what.append(f"{len(apart)} changed, the most {escape_line(name)} by an NMSE of {apart[name]:.1e}")
        what.append(f"the first {escape_line(next(iter(apart)))}")
    else:
        what.append("none changed")
    what += [f"{len(changed.gone)} gone ({escape_line(changed.gone[0])})"] if changed.gone else []
    what += [f"{len(changed.new)} new ({escape_line(changed.new[0])})"] if changed.new else []
    sides = [_facts(info) for info in (changed.before, changed.after)]
    changes = ((name, was, sides[1][name]) for name, was in sides[0].items())
    what += [f"{name}: {escape_line(was, 300)} -> {escape_line(now, 300)}" for name, was, now in changes if was != now]
    return f"UPDATED  {path_text(changed.path)}: {'; '.join(what)}; checked: {changed.verdict.upper()}"


def _facts(info: Info) -> dict[str, str]:
    """What a capture says of its run: who, with what, of which model; of settings, those that say anything."""
    settings = info.producer.get("settings")
    if isinstance(settings, Mapping):
        settings = {key: value for key, value in settings.items() if value != ""}
    stated = {"tokens": info.tokens, "version": info.producer.get("version"), "settings": settings,
              "sha256": info.model.get("sha256")}  # fmt: skip
    return {name: str(value) for name, value in stated.items()}
