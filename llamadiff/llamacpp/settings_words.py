"""llama.cpp's settings in words, ``KEY=VALUE,...``: of ``--llama-cpp``, of a candidate ``llama.cpp:...``, a sweep's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamadiff.llamacpp.request import Settings
from llamadiff.numerics.types import CACHE_TYPES
from llamadiff.system.errors import UserError

OPTION = "--llama-cpp "
MOST_SCALE = 1e6  # of an adapter
_SCALED = re.compile(r"(.*):(-?[0-9]{1,15}(?:\.[0-9]{1,15})?(?:e[+-]?[0-9]{1,2})?)")
WORDS = {  # settings worth a word, and the value of each that is not
    "type_k": ("F32", "K cache {}"), "type_v": ("F32", "V cache {}"), "flash_attn": ("False", "flash attention"),
    "repack": ("False", "repacked weights"), "gpu_layers": ("0", "{} layers on the GPU"),
    "device": ("", "layers on {}"), "split": ("", "split by {}"), "tensor_split": ("", "in parts of {}"),
}  # fmt: skip
Changes = Mapping[str, Any]  # of fields of Settings; a slice has more


def settings_of(parts: Iterable[str], of: str = OPTION, before: Settings | None = None) -> Settings:
    """Settings from words of this grammar, or a build's directory, on top of those of ``before``.

    Raises UserError for what is no setting, or no value of one; it begins with ``of``.
    """
    changes: dict[str, Any] = {}
    for part in parts:
        if "=" not in part or {"/", "\\"} & set(part.partition("=")[0]):  # a directory's name may have one
            changes |= _folder(part)
            continue
        words = [part] if part.startswith("runner=") else part.split(",")  # a command may have commas
        changes |= changes_in(words, SETTINGS, of)
    return replace(before or Settings(), **changes)


def changes_in(words: Iterable[str], keys: Mapping[str, Callable[[str], Changes]], of: str) -> dict[str, Any]:
    """The fields that words change, each by the reader of its key. Raises UserError, which begins with ``of``."""
    found: dict[str, Any] = {}
    for word in filter(None, map(str.strip, words)):
        found |= _read_setting(word, keys, of)
    return found


def _read_setting(part: str, keys: Mapping[str, Callable[[str], Changes]], of: str) -> Changes:
    key, equals, value = (word.strip() for word in part.partition("="))
    reader = keys.get(key.lower().replace("-", "_"))
    if reader is None or not equals:
        raise UserError(f"{of}{part}: expected KEY=VALUE, with a key of {', '.join(keys)}")
    try:
        return reader(value)
    except ValueError as error:
        raise UserError(f"{of}{part}: expected {error}") from None


def _types_reader(*names: str) -> Callable[[str], Changes]:
    def read(value: str) -> Changes:
        if value.upper() not in CACHE_TYPES:
            raise ValueError("one of " + ", ".join(map(str.lower, CACHE_TYPES)))
        return dict.fromkeys(names, value.upper())

    return read


def flag_reader(name: str) -> Callable[[str], Changes]:
    """Reads on and off."""

    def read(value: str) -> Changes:
        if value.lower() not in ("on", "off"):
            raise ValueError("on or off")
        return {name: value.lower() == "on"}

    return read


def count_reader(name: str, least: int, most: int) -> Callable[[str], Changes]:
    """Reads whole numbers."""

    def read(value: str) -> Changes:
        if not value.isascii() or not value.isdecimal() or not least <= int(value[:12]) <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return {name: int(value)}

    return read


def _folder(value: str) -> Changes:
    return {"llama_cpp": str(Path(value).expanduser())}


def _adapter(value: str) -> Changes:
    """``FILE`` or ``FILE:SCALE``."""
    match = _SCALED.fullmatch(value)
    file, scale = (match[1], float(match[2])) if match else (value, 1.0)
    if not file or not abs(scale) <= MOST_SCALE:
        raise ValueError(f"FILE or FILE:SCALE, of a LoRA adapter and a number up to {MOST_SCALE:g}")
    return {"lora": str(Path(file).expanduser()), "lora_scale": scale}


SETTINGS: Mapping[str, Callable[[str], Changes]] = {
    "kv": _types_reader("type_k", "type_v"), "type_k": _types_reader("type_k"), "type_v": _types_reader("type_v"),
    "flash_attn": flag_reader("flash_attn"), "repack": flag_reader("repack"),
    "threads": count_reader("threads", 0, 512), "gpu_layers": count_reader("gpu_layers", 0, 9999),
    "device": lambda names: {"device": names}, "split": lambda way: {"split": way.lower()},
    "tensor_split": lambda parts: {"tensor_split": parts}, "dir": _folder,
    "lora": _adapter, "runner": lambda words: {"runner": words},
}  # fmt: skip
