"""What a sweep is of: a TOML file's models, prompts, candidates and settings, as cases with names that stay."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from llamadiff.candidates.gguf_file import is_model_file
from llamadiff.llamacpp.settings_words import settings_of
from llamadiff.system.errors import UserError
from llamadiff.trace.stated import brief, read_toml

MOST = 100_000  # cases
LISTS = ("models", "prompts", "candidates", "settings")
KV_TYPE, KV = "kv_type", "kv"  # what sweeps call the types of both caches, and --llama-cpp does
SINGLE: Mapping[str, tuple[type, ...]] = {"n_predict": (int,), "chat": (bool,), "timeout": (int, float)}


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


def read_plan(path: Path) -> tuple[SweepCase, ...]:
    """The cases of a TOML file. Raises UserError for a key that is unknown, and for a value of the wrong kind."""
    data = read_toml(path)
    for key, value in data.items():
        if key not in LISTS and key not in SINGLE:
            raise UserError(f"{path}: {key[:40]} is no key of a sweep; it may have {', '.join((*LISTS, *SINGLE))}")
        _check(path, key, value)
    for key in LISTS[:2]:
        if not data.get(key):
            raise UserError(f'{path}: has no {key}; give a list such as {key} = ["..."]')
    cases = tuple(_cases(path, data))
    if len(cases) > MOST:
        raise UserError(f"{path}: {len(cases)} cases; give no more than {MOST}")
    named = ((case.model, *([case.candidate] if is_model_file(case.candidate) else [])) for case in cases)
    missing = next((file for files in named for file in files if not Path(file).is_file()), None)
    if missing is not None:
        raise UserError(f"{path}: {missing}: no such model file")
    return tuple({case.key: case for case in cases}.values())


def _check(path: Path, key: str, value: Any) -> None:
    """Raise UserError for a value that is not what a key's should be."""
    if key in SINGLE:
        if not _is_a(value, SINGLE[key]):
            expected = "true or false" if key == "chat" else "a number, 0 or more"
            raise UserError(f"{path}: {key} = {brief(value)}: expected {expected}")
        return
    if not isinstance(value, list):
        raise UserError(f"{path}: {key} = {brief(value)}: expected a list")
    if key == "settings":
        for number, entry in enumerate(value, 1):
            _check_settings(f"{path}: settings {number}", entry)
    elif bad := [item for item in value if not isinstance(item, str)]:
        raise UserError(f"{path}: {key}: {brief(bad[0])}: expected text")


def _is_a(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a value is of one of these types; a number is not negative, and true is none."""
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) and not (isinstance(value, (int, float)) and value < 0)


def _check_settings(where: str, entry: Any) -> None:
    if not isinstance(entry, dict):
        raise UserError(f"{where}: {brief(entry)}: expected a table such as {{ flash_attn = true }}")
    for key, value in entry.items():
        if not isinstance(value, (str, bool, int)) or (key == "n_predict" and not _is_a(value, (int,))):
            raise UserError(f"{where}: {key[:40]} = {brief(value)}: expected text, a whole number, or true or false")
    settings_of(settings_in_words(entry), f"{where}: ")


def settings_in_words(entry: Mapping[str, Any]) -> list[str]:
    """A table of settings in the words of ``--llama-cpp``."""
    said = ((KV if key == KV_TYPE else key, value) for key, value in entry.items() if key != "n_predict")
    return [f"{key}={('off', 'on')[value] if isinstance(value, bool) else value}" for key, value in said]


def _cases(path: Path, data: Mapping[str, Any]) -> Iterator[SweepCase]:
    """Every model with every prompt, candidate and settings."""
    folder = path.resolve().parent
    models = [str(folder / model) for model in data["models"]]
    candidates: Sequence[str] = data.get("candidates") or [""]
    ways: Sequence[dict[str, Any]] = data.get("settings") or [{}]
    single = {key: data[key] for key in SINGLE if key in data}
    for model, prompt, candidate, way in product(models, data["prompts"], candidates, ways):
        own = {key: value for key, value in way.items() if key != "n_predict"}
        more = {**single, **({"n_predict": way["n_predict"]} if "n_predict" in way else {})}
        given = str(folder / candidate) if is_model_file(candidate) else candidate
        yield SweepCase(model, prompt, given, own, **more)
