"""What is typed, as values: prompts and token ids, from files too, layers, limits, settings."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llamadiff.system.collisions import Named
from llamadiff.system.errors import UserError
from llamadiff.system.input import read_text

if TYPE_CHECKING:
    from llamadiff.engines.run_spec import Costing
    from llamadiff.llamacpp.request import Settings
    from llamadiff.numerics.tolerances import Rule

MAX_TOKENS_FILE = 1 << 24  # bytes
MAX_PROMPT_FILE = 1 << 24
MAX_TEXT_FILE = 1 << 26
STANDARD_INPUT = "-"
LIST = "list"  # a device that is none
TRACES = (".safetensors", ".npz")  # what a name ends in that is no prompt
LONGEST_NAME, ALIKE = (
    255,
    0.85,
)  # characters of a file's name; of two names, from which on one may be the other misspelt
_WHOLE_NUMBER = re.compile("[0-9]{1,10}")
_BYTES = re.compile("([0-9]{1,15})([KMGkmg]?)")
_LAYERS = re.compile("([0-9]{1,4})(?:-([0-9]{1,4}))?")


def settings_files(tolerance: Path | None, tokens_file: Path | None, prompt_file: str | None = None) -> list[Named]:
    """The files that say how to run and to judge."""
    asked = None if prompt_file == STANDARD_INPUT else prompt_file
    return [("the tolerance file", tolerance), ("the tokens file", tokens_file), ("the prompt file", asked)]


def two_traces(baseline: Path, candidate: Path, model: Path | None, tolerance: Path | None) -> list[Named]:
    """The files that are read where two traces are compared."""
    traces = [("the baseline", baseline), ("the candidate", candidate), ("the model", model)]
    return [*traces, *settings_files(tolerance, None)]


def settings_of(
    kv_type: str, flash_attn: bool, gpu_layers: int, repack: bool, threads: int, place: Settings,
    device: str | None = None,
) -> Settings:  # fmt: skip
    """llama.cpp's settings, for the one at a place (``place_of``)."""
    if device == LIST:
        _list_devices(place)
    kv = kv_type.upper()
    return replace(
        place, type_k=kv, type_v=kv, flash_attn=flash_attn, gpu_layers=gpu_layers, repack=repack, threads=threads,
        device=device or "",
    )  # fmt: skip


def _list_devices(place: Settings) -> None:
    """Print what ``--device`` takes, and end the command."""
    from llamadiff.llamacpp.capture import probe

    for name, words in probe(place).devices:
        typer.echo(f"{name}  {words}")
    raise typer.Exit


def place_of(llama_cpp: Path | None, runner: str | None) -> Settings:
    """Which llama.cpp is asked for, and what starts the Python that it runs in."""
    from llamadiff.llamacpp.request import Settings

    build = "" if llama_cpp is None else str(llama_cpp)
    return Settings(llama_cpp=build) if runner is None else Settings(llama_cpp=build, runner=runner)


def rules_of(tolerance: Path | None) -> tuple[Rule, ...]:
    """The limits, those of a file first."""
    from llamadiff.numerics import tolerances

    return tolerances.RULES if tolerance is None else tolerances.load_rules(tolerance)


def prompt_or_trace(prompt: str | None, candidate: str | None) -> tuple[str | None, str | None]:
    """The prompt and the candidate, where a trace was given in the prompt's place: ``compare MODEL TRACE``."""
    if prompt is None or not prompt.endswith(TRACES):
        if prompt is not None and candidate is None and (meant := _meant_by(prompt)):
            raise UserError(f"{prompt}: no such trace; {meant} is there (a prompt of these words: --prompt-file FILE)")
        return prompt, candidate
    if candidate is not None:
        raise UserError(f"{prompt}: is a trace, and --candidate {candidate} is another; give one of them")
    return None, prompt


def _meant_by(prompt: str) -> str | None:
    """The trace whose name a prompt of one word nearly is; an engine that was not looked at would pass as right."""
    from difflib import get_close_matches

    path = Path(prompt)
    if len(prompt.split()) != 1 or len(prompt) > LONGEST_NAME or "." not in path.name or not path.parent.is_dir():
        return None
    try:
        traces = [each.name for each in path.parent.iterdir() if each.suffix in TRACES]
    except OSError:
        return None  # what cannot be listed says nothing
    return next(iter(get_close_matches(path.name, traces, 1, ALIKE)), None)


def token_ids(text: str | None, file: Path | None, option: str = "--tokens") -> tuple[int, ...]:
    """Ids separated by commas or white space."""
    if text is not None and file is not None:
        raise UserError("give --tokens or --tokens-file, not both")
    if file is not None:
        text = _read_text(file, MAX_TOKENS_FILE, "a text file of token ids such as 1,15043,29892")
    if text is None:
        return ()
    where = option if file is None else str(file)
    words = text.replace(",", " ").split()
    for word in words:
        if not _WHOLE_NUMBER.fullmatch(word):
            raise UserError(f'{where}: "{word[:40]}" is not a token id; expected whole numbers such as 1,15043,29892')
    if not words:
        raise UserError(f"{where}: no token ids given; expected whole numbers such as 1,15043,29892")
    return tuple(int(word) for word in words)


def prompt_of(prompt: str | None, file: str | None) -> str | None:
    """The prompt as given, or that of a file without its last line break, which editors add; - is standard input.

    Where the locale cannot read its bytes they are taken for UTF-8.
    """
    if file is None and prompt != STANDARD_INPUT:
        if prompt is None or not any("\ud800" <= character <= "\udfff" for character in prompt):
            return prompt
        return os.fsencode(prompt).decode("utf-8", "surrogateescape")
    if file is not None and prompt is not None:
        raise UserError("give a prompt or --prompt-file, not both")
    source = STANDARD_INPUT if file is None else file
    text = _read_text(source, MAX_PROMPT_FILE, "a prompt as UTF-8 text")
    if not text.removesuffix("\n"):
        raise UserError(f"--prompt-file {source}: is empty; it must hold the prompt")
    return text.removesuffix("\n").removesuffix("\r")


def costing_of(candidate: str | None, text: Path | None, spend: str | None) -> Costing:
    """What is asked of a candidate that is another file of the model. Raises UserError where it is none."""
    from llamadiff.candidates.gguf_file import is_model_file
    from llamadiff.engines.run_spec import Costing

    asked = [name for name, value in (("--text", text), ("--spend", spend)) if value is not None]
    if asked and not is_model_file(candidate):
        raise UserError(f"{asked[0]}: is about two files of one model; give --candidate OTHER.gguf")
    read = read_text(text, MAX_TEXT_FILE, "a text as UTF-8") if text is not None else None
    if read is not None and not read.strip():
        raise UserError(f"{text}: is empty; give a text")
    return Costing(read, text.name if text is not None else None, bytes_of(spend) if spend is not None else 0)


def bytes_of(text: str) -> int:
    """``64M`` as bytes."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise UserError(f"--spend {text[:40]}: expected bytes such as 500000, 64M or 1G")
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


def layer_range(text: str | None) -> range | None:
    """``3`` or ``0-3`` as a range."""
    if text is None:
        return None
    match = _LAYERS.fullmatch(text)
    layers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
    if not layers:
        raise UserError(f"--layers {text}: expected a layer such as 3 or a range such as 0-3")
    return layers
