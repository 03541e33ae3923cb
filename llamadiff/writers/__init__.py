"""Trace writers to paste into an engine: one self-contained source file a language, printed and never run here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from llamadiff.system.errors import UserError

LANGUAGES: Mapping[str, str] = {
    "c": "trace_writer.c", "cpp": "trace_writer.cpp", "rust": "trace_writer.rs", "js": "trace_writer.js",
    "python": "trace_writer.py", "java": "TraceWriter.java", "go": "trace_writer.go", "zig": "trace_writer.zig",
}  # fmt: skip


def check_language(language: str) -> None:
    """Raise UserError for a language that there is no writer in."""
    if language not in LANGUAGES:
        raise UserError(f'there is no writer in "{language}"; the languages are {", ".join(LANGUAGES)}')


def source(language: str) -> str:
    """The writer's source. Raises UserError for a language that there is none in."""
    check_language(language)
    return files(__name__).joinpath(LANGUAGES[language]).read_text("utf-8")
