"""What a sweep is of: a TOML file's models, prompts, candidates and settings, as cases with names that stay."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from llamadiff.candidates.gguf_file import is_model_file
from llamadiff.cli.inputs import FILE, prompt_of
from llamadiff.llamacpp.settings_words import settings_of
from llamadiff.system.errors import UserError
from llamadiff.trace.stated import convert, read_toml

MOST = 100_000  # cases
KV_TYPE, KV = "kv_type", "kv"  # what sweeps call the types of both caches, and --llama-cpp does
REMEDY = "a sweep has models, prompts, and perhaps candidates, settings, n_predict, chat and timeout"
Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True)
class SweepCase:
    """One run to judge. ``candidate``: as ``--candidate`` takes it; empty: llama.cpp itself is judged."""

    model: str
    prompt: str
    candidate: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False
    n_predict: int = 0
    timeout: float = 600.0

    @property
    def key(self) -> str:
        """A name that the same case has in every run of the sweep."""
        said = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:24]

    @property
    def way(self) -> str:
        """Its settings, as tables show them."""
        return ",".join(f"{key}={str(value).lower()}" for key, value in self.settings.items())


class _Plan(Struct, forbid_unknown_fields=True):
    """The file. A time stays of its type: cases have their names of it."""

    models: Annotated[list[str], Meta(min_length=1)]
    prompts: Annotated[list[str], Meta(min_length=1)]
    candidates: list[str] = []
    settings: list[dict[str, str | bool | int]] = []
    n_predict: Count = 0
    chat: bool = False
    timeout: Count | Annotated[float, Meta(ge=0)] = 600.0


class _Way(Struct):
    n_predict: Count = 0


def read_plan(path: Path) -> tuple[SweepCase, ...]:
    """The cases of a TOML file, a prompt ``@FILE`` read from beside it.

    Raises UserError for a key that is unknown, for a value of the wrong kind, and for a file that is not there.
    """
    plan = convert(read_toml(path), _Plan, str(path), REMEDY)
    for number, way in enumerate(plan.settings, 1):
        convert(way, _Way, f"{path}: settings {number}")
        settings_of(settings_in_words(way), f"{path}: settings {number}: ")
    prompts = [_prompt(prompt, path, number) for number, prompt in enumerate(plan.prompts, 1)]
    cases = tuple(_cases(path.resolve().parent, plan, prompts))
    if len(cases) > MOST:
        raise UserError(f"{path}: {len(cases)} cases; give no more than {MOST}")
    named = ((case.model, *([case.candidate] if is_model_file(case.candidate) else [])) for case in cases)
    missing = next((file for files in named for file in files if not Path(file).is_file()), None)
    if missing is not None:
        raise UserError(f"{path}: {missing}: no such model file")
    return tuple({case.key: case for case in cases}.values())


def settings_in_words(entry: Mapping[str, Any]) -> list[str]:
    """A table of settings in the words of ``--llama-cpp``."""
    said = ((KV if key == KV_TYPE else key, value) for key, value in entry.items() if key != "n_predict")
    return [f"{key}={('off', 'on')[value] if isinstance(value, bool) else value}" for key, value in said]


def _prompt(given: str, plan: Path, number: int) -> str:
    """A prompt's text. Raises UserError for one without any, and for a file that cannot be read."""
    if not given:
        raise UserError(f'{plan}: prompts {number} is empty; expected a text ("Once upon a time"), or @FILE')
    is_file = given.startswith(FILE) and not given.startswith(2 * FILE)
    file = plan.resolve().parent / given.removeprefix(FILE)
    try:
        return given if given == "-" else prompt_of(f"{FILE}{file}" if is_file else given) or ""
    except UserError as error:
        raise UserError(f"{plan}: prompts {number}: {error}") from None


def _cases(folder: Path, plan: _Plan, prompts: list[str]) -> Iterator[SweepCase]:
    """Every model with every prompt, candidate and settings."""
    for model, prompt, candidate, way in product(plan.models, prompts, plan.candidates or [""], plan.settings or [{}]):
        own = {key: value for key, value in way.items() if key != "n_predict"}
        n_predict = int(way.get("n_predict", plan.n_predict))
        given = str(folder / candidate) if is_model_file(candidate) else candidate
        yield SweepCase(str(folder / model), prompt, given, own, plan.chat, n_predict, plan.timeout)
