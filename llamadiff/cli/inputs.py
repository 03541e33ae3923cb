"""What is typed, as values: prompts and token ids, from files too, layers, limits, settings."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llamadiff import plugins
from llamadiff.candidates import TRACES
from llamadiff.system.collisions import Named
from llamadiff.system.commands import quote
from llamadiff.system.errors import UserError
from llamadiff.system.input import read_text

if TYPE_CHECKING:
    from llamadiff.engines.run_spec import Rules, Run
    from llamadiff.llamacpp.request import Settings

MAX_TOKENS_FILE = 1 << 24  # bytes
MAX_PROMPT_FILE = 1 << 24
MAX_TEXT_FILE = 1 << 26
STANDARD_INPUT, FILE = "-", "@"  # a value that is read, and what begins the name of a file that is
LIST = "list"  # a device that is none
LLAMA_CPP = "LLAMADIFF_LLAMA_CPP"  # in the environment: stands for --llama-cpp, whose values win
LONGEST_NAME = 255  # characters of a file's name
# Endings of files' names, as engines and people give them.
FILES = (
    "bin", "csv", "dat", "dump", "gguf", "h5", "json", "jsonl", "log", "md", "npy", "npz", "onnx", "out", "pkl", "pt",
    "pth", "raw", "safetensors", "st", "toml", "txt",
)  # fmt: skip
SEPARATORS = "/\\"  # of folders, on all systems
_WHOLE_NUMBER = re.compile("[0-9]{1,10}")
_BYTES = re.compile("([0-9]{1,15})([KMGkmg]?)")
_LAYERS = re.compile("([0-9]{1,4})(?:-([0-9]{1,4}))?")


@dataclass(frozen=True)
class RunOptions:
    """What is run, in the words of the options that ask for it."""

    prompt: str | None = None
    tokens: str | None = None
    chat: bool = False
    n_predict: int = 0
    llama_cpp: Sequence[str] | None = None
    only: Sequence[str] | None = None
    takes_candidate: bool = False

    @cached_property
    def settings(self) -> Settings:
        """llama.cpp's; of ``device=list`` the devices are printed, and the command ends."""
        return settings_of(self.llama_cpp)

    @property
    def files(self) -> list[Named]:
        """What it is read from."""
        return [("the tokens file", _file_in(self.tokens)), ("the prompt file", _file_in(self.prompt))]

    def run(self) -> Run:
        """Raises UserError for what cannot be read."""
        from llamadiff.engines.run_spec import Run

        _refuse_a_path(self.prompt, self.takes_candidate)
        patterns, layers = _taps_and_layers(self.only or ())
        prompt, tokens = prompt_of(self.prompt), token_ids(self.tokens)
        return Run(prompt, tokens, self.chat, self.n_predict, patterns, layers, self.settings)


def settings_of(words: Sequence[str] | None, environment: bool = True) -> Settings:
    """llama.cpp's settings from the values of ``--llama-cpp``, and before these from what stands in its stead."""
    from llamadiff.llamacpp.capture import probe
    from llamadiff.llamacpp.settings_words import settings_of as read

    stands = from_environment() if environment else ""
    before = read([stands], f"{LLAMA_CPP}=") if stands else None
    settings = read(words or (), before=before)
    if before is not None and before.llama_cpp == settings.llama_cpp != "" and not settings.runner:
        _check_folder(before.llama_cpp)
    if settings.device != LIST:
        return settings
    for name, about, _ in probe(settings.place).devices:
        typer.echo(f"{name}  {about}")
    raise typer.Exit


def _check_folder(folder: str) -> None:
    """Raise UserError for one of the environment's that is not there: nobody has just typed it."""
    if not Path(folder).is_dir():
        raise UserError(
            f"{LLAMA_CPP}: {folder}: is not a directory; give a build or an install of llama.cpp, or unset it"
        )


def from_environment() -> str:
    """What stands for ``--llama-cpp``; empty if nothing does."""
    return os.environ.get(LLAMA_CPP, "").strip()


def rules_of(tolerance: Path | None) -> Rules:
    """The limits, those of a file first."""
    from llamadiff.verbs.tolerance_file import load_rules

    return load_rules(tolerance)


def prompt_or_trace(model: Path, prompt: str | None, candidate: str | None) -> tuple[str | None, str | None]:
    """The prompt and the candidate, where a trace was given in the prompt's place: ``compare MODEL TRACE``."""
    if prompt is not None and prompt.endswith(".gguf") and model.suffix != ".gguf" and Path(prompt).is_file():
        raise UserError(f"{prompt}: is a model, which comes first: llamadiff compare {prompt} {quote(str(model))}")
    if prompt is None or not prompt.endswith(TRACES):
        return prompt, candidate
    if candidate is not None:
        raise UserError(f"{prompt}: is a trace, and --candidate {candidate} is another; give one of them")
    return None, prompt


def _refuse_a_path(prompt: str | None, takes_candidate: bool) -> None:
    """Raise UserError for a prompt that is a file's name, or looks like one, and was not given as @FILE.

    An engine that was not looked at, since its dump is elsewhere, would pass as right.
    """
    if not prompt or prompt == STANDARD_INPUT or prompt.startswith(FILE) or len(prompt) > LONGEST_NAME:
        return
    path = Path(prompt)
    try:
        kind = "a directory" if path.is_dir() else "a file" if path.exists() else ""
    except (OSError, ValueError):  # what cannot be listed says nothing
        kind = ""
    as_prompt = f"to run its text: @{prompt}" if kind == "a file" else "as a prompt: @FILE, or - for standard input"
    as_prompt = "the model comes first, then the prompt" if prompt.endswith(".gguf") else as_prompt
    if kind and takes_candidate:
        raise UserError(f"{prompt}: is {kind} here; give --candidate {prompt} ({as_prompt})")
    if kind:
        raise UserError(f"{prompt}: is {kind} here; give a prompt ({as_prompt})")
    if takes_candidate and (said := plugins.ask_first(lambda each: each.mistake(prompt, "prompt"))):
        raise UserError(f"{said} ({as_prompt})")
    if not _looks_like_a_path(prompt):
        return
    wanted = "give a trace that is there, or --candidate" if takes_candidate else "give a prompt"
    raise UserError(f"{prompt}: looks like a path, and nothing is there; {wanted} ({as_prompt})")


def _looks_like_a_path(prompt: str) -> bool:
    """Whether it is one word with a separator or a file's ending, or begins as a path and has such an ending."""
    ending = prompt.rpartition(".")[2].lower()
    has_ending = "." in prompt and ending in FILES
    if len(prompt.split()) != 1:
        return has_ending and prompt.startswith(("/", "./", "../", "~/"))
    return has_ending or any(separator in prompt for separator in SEPARATORS)


def token_ids(text: str | None, option: str = "--tokens") -> tuple[int, ...]:
    """Ids separated by commas or white space; @FILE has them in a file."""
    if text is None:
        return ()
    file = _file_in(text)
    if file is not None:
        text = _read_text(file, MAX_TOKENS_FILE, "a text file of token ids such as 1,15043,29892")
    where = option if file is None else file
    words = text.replace(",", " ").split()
    for word in words:
        if not _WHOLE_NUMBER.fullmatch(word):
            raise UserError(f'{where}: "{word[:40]}" is not a token id; expected whole numbers such as 1,15043,29892')
    if not words:
        raise UserError(f"{where}: no token ids given; expected whole numbers such as 1,15043,29892")
    return tuple(int(word) for word in words)


def prompt_of(prompt: str | None) -> str | None:
    """The prompt as given; of @FILE and - what is in it, without the last line break, which editors add.

    Where the locale cannot read its bytes they are taken for UTF-8. @@ begins a prompt with @.
    """
    file = STANDARD_INPUT if prompt == STANDARD_INPUT else _file_in(prompt)
    if file is None:
        prompt = prompt.removeprefix(FILE) if prompt is not None and prompt.startswith(2 * FILE) else prompt
        if prompt is None or not any("\ud800" <= character <= "\udfff" for character in prompt):
            return prompt
        return os.fsencode(prompt).decode("utf-8", "surrogateescape")
    text = _read_text(file, MAX_PROMPT_FILE, "a prompt as UTF-8 text")
    if not text.removesuffix("\n"):
        raise UserError(f"{prompt}: is empty; it must hold the prompt")
    return text.removesuffix("\n").removesuffix("\r")


def _file_in(text: str | None) -> str | None:
    """The file of a value ``@FILE``."""
    return text[1:] if text is not None and text[:1] == FILE != text[1:2] and text[1:] else None


def bytes_of(text: str, option: str = "--spend") -> int:
    """``64M`` as bytes."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise UserError(f"{option} {text[:40]}: expected bytes such as 500000, 64M or 1G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def _read_text(file: str | Path, limit: int, expected: str) -> str:
    """A file of text, or standard input for -. Raises UserError, with what was ``expected``."""
    if file != STANDARD_INPUT:
        return read_text(Path(file), limit, expected)
    data = sys.stdin.buffer.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"standard input: more than {limit >> 20} MiB; expected {expected}")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UserError(f"standard input: is not text; expected {expected}") from None


def _taps_and_layers(only: Sequence[str]) -> tuple[list[str], range | None]:
    """Values of ``--only``: patterns of taps, and a layer or a range of them, ``3`` or ``0-3``."""
    layers = [match for text in only if (match := _LAYERS.fullmatch(text))]
    if len(layers) > 1:
        raise UserError(f"--only {layers[1][0]}: layers were given before; give one range such as 0-3")
    found = range(int(layers[0][1]), int(layers[0][2] or layers[0][1]) + 1) if layers else None
    if found is not None and not found:
        raise UserError(f"--only {layers[0][0]}: expected a layer such as 3 or a range such as 0-3")
    return [text for text in only if not _LAYERS.fullmatch(text)], found
