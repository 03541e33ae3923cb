"""What a case is made of, as one hash: its model, its candidate's files, who judges."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from llamadiff import __version__
from llamadiff.candidates.command import PREFIX as COMMAND
from llamadiff.candidates.command import words_of
from llamadiff.candidates.opening import files_of
from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.sweep.plan import SweepCase, settings_in_words
from llamadiff.llamacpp.library import find_package
from llamadiff.llamacpp.request import RUNNER
from llamadiff.llamacpp.settings_words import settings_of
from llamadiff.system.errors import UserError
from llamadiff.trace.hashing import file_sha256

LLAMA_CPP = "llama.cpp:"
CODE = frozenset((".py", ".so", ".dylib", ".dll", ".js", ".mjs", ".lua"))  # what programs load from beside them
SHELL = frozenset((".sh", ".bat", ".cmd", ".ps1"))


def contents_of(cases: Iterable[SweepCase]) -> dict[str, str]:
    """By each case's key, a hash of what its files hold now; "" where nothing can tell, as of a server."""
    of_model, behind, of_settings, judges = cache(_of_model), cache(_behind), cache(_of_settings), _judges()
    found = {}
    for case in cases:
        words, candidate = settings_in_words(case.settings), case.candidate
        if candidate.startswith(LLAMA_CPP):
            words, candidate = [*words, *candidate.removeprefix(LLAMA_CPP).split(",")], ""
        files = behind(candidate) if candidate else ("",)
        parts = "\n".join((*judges, of_model(case.model), *files, *of_settings(tuple(words))))
        elsewhere = RUNNER in os.environ or any(word.startswith("runner=") for word in words)
        found[case.key] = hashlib.sha256(parts.encode()).hexdigest()[:24] if files and not elsewhere else ""
    return found


def _judges() -> tuple[str, ...]:
    try:
        return __version__, find_package().release
    except UserError:
        return (__version__,)


def _of_model(model: str) -> str:
    try:
        return ModelFile(model).sha256
    except UserError:  # its cases say why
        return _hash(Path(model))


def _hash(file: Path) -> str:
    """A file's hash; "" where it cannot be read, which its cases say."""
    try:
        return file_sha256(file)
    except OSError:
        return ""


def _behind(candidate: str) -> tuple[str, ...]:
    """The hashes of what is read for a candidate; none where that does not tell what is run."""
    try:
        files = set(files_of(candidate))
        files = _of_command(words_of(candidate)[0], files) if candidate.startswith(COMMAND) else files
        return tuple(f"{file} {file_sha256(file)}" for file in sorted(files) if file.is_file())
    except (UserError, OSError):
        return ()


def _of_command(program: str, files: set[Path]) -> set[Path]:
    """A command's program, the files that it names, and the code beside them.

    None of ``python -m engine``, whose code is not named, and of a shell's script, which runs other programs.
    """
    own = {file for file in files if file == Path(program) or file.suffix in CODE}
    if not own or any(file.suffix in SHELL or _is_for_a_shell(file) for file in own):
        return set()
    beside = {each for folder in {file.parent for file in own} for each in folder.iterdir() if each.suffix in CODE}
    found = shutil.which(program)
    return files | beside | ({Path(found)} if found is not None else set())


def _is_for_a_shell(file: Path) -> bool:
    with file.open("rb") as opened:
        first = opened.readline(80)
    return first.startswith(b"#!") and b"sh" in first


def _of_settings(words: tuple[str, ...]) -> tuple[str, ...]:
    """An adapter's hash, and what tells the libraries of a build."""
    try:
        settings = settings_of([word for word in words if word.startswith(("lora=", "dir="))])
    except UserError:
        return ()
    adapter, build = Path(settings.lora), Path(settings.llama_cpp)
    found = [_hash(adapter)] if settings.lora and adapter.is_file() else []
    return (*found, *(_libraries(build) if settings.llama_cpp else ()))


def _libraries(build: Path) -> Iterator[str]:
    """Of each its size and when it was changed: builds are large."""
    for file in sorted(each for each in build.rglob("*") if each.suffix in CODE or ".so." in each.name):
        if file.is_file():
            yield f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}"
