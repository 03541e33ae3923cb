"""llama.cpp's settings in words, ``KEY=VALUE,...``: of ``--llama-cpp``, of a candidate ``llama.cpp:...``, a sweep's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from llamadiff.llamacpp.request import Request, Settings, Way
from llamadiff.numerics.types import CACHE_TYPES
from llamadiff.system.errors import UserError

PREFIX = "llama.cpp:"
OPTION = "--llama-cpp "
WORDS = {  # settings worth a word, and the value of each that is not
    "type_k": ("F32", "K cache {}"), "type_v": ("F32", "V cache {}"), "flash_attn": ("False", "flash attention"),
    "repack": ("False", "repacked weights"), "gpu_layers": ("0", "{} layers on the GPU"),
    "device": ("", "layers on {}"),
}  # fmt: skip
LEAST, MOST = 1e-6, 1e12  # RoPE's bases and scales
_NUMBER = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?(e[+-]?[0-9]{1,2})?")
Changes = Mapping[str, Any]  # of fields of Settings and of Way


def settings_of(parts: Iterable[str], of: str = OPTION) -> Settings:
    """Settings from words of this grammar; a word without = is a build's directory.

    Raises UserError for what is no setting, or no value of one; it begins with ``of``.
    """
    changes: dict[str, Any] = {}
    for part in parts:
        if "=" not in part:
            changes |= _folder(part)
            continue
        words = [part] if part.startswith("runner=") else part.split(",")  # a command may have commas
        changes |= _changes(words, SETTINGS, of)
    return replace(Settings(), **changes)


def varied(request: Request, spec: str) -> Request:
    """A request of known tokens as ``spec`` has it. Raises UserError for what is no setting, or no value of one.

    All tokens are given: none is llama.cpp's own choice.
    """
    changes = _changes(spec.removeprefix(PREFIX).split(","), KEYS, PREFIX)
    settings, way = (
        {field.name: changes[field.name] for field in fields(kind) if field.name in changes} for kind in (Settings, Way)
    )
    _check_together(spec, Way(**way), changes)
    count, batch = len(request.tokens), changes.get("batch", 0)
    batches = () if not batch else tuple(min(batch, count - at) for at in range(0, count, batch))
    return replace(
        request, settings=replace(request.settings, **settings), way=Way(**way), batches=batches,
        n_prefill=batches[0] if batches else 0, n_predict=0,
    )  # fmt: skip


def _check_together(spec: str, way: Way, changes: Changes) -> None:
    if way.sequences > 1 and (way.ubatch or changes.get("batch")):
        raise UserError(f"{spec}: several sequences are run in one go; leave out batch and ubatch")


def _changes(words: Iterable[str], keys: Mapping[str, Callable[[str], Changes]], of: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in filter(None, map(str.strip, words)):
        found |= _read(word, keys, of)
    return found


def _read(part: str, keys: Mapping[str, Callable[[str], Changes]], of: str) -> Changes:
    key, equals, value = (word.strip() for word in part.partition("="))
    reader = keys.get(key.lower().replace("-", "_"))
    if reader is None or not equals:
        raise UserError(f"{of}{part}: expected KEY=VALUE, with a key of {', '.join(keys)}")
    try:
        return reader(value)
    except ValueError as error:
        raise UserError(f"{of}{part}: expected {error}") from None


def _types(*names: str) -> Callable[[str], Changes]:
    def read(value: str) -> Changes:
        if value.upper() not in CACHE_TYPES:
            raise ValueError("one of " + ", ".join(map(str.lower, CACHE_TYPES)))
        return dict.fromkeys(names, value.upper())

    return read


def _flag(name: str) -> Callable[[str], Changes]:
    def read(value: str) -> Changes:
        if value.lower() not in ("on", "off"):
            raise ValueError("on or off")
        return {name: value.lower() == "on"}

    return read


def _count(name: str, least: int, most: int) -> Callable[[str], Changes]:
    def read(value: str) -> Changes:
        if not value.isascii() or not value.isdecimal() or not least <= int(value[:12]) <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return {name: int(value)}

    return read


def _factor(name: str) -> Callable[[str], Changes]:
    def read(value: str) -> Changes:
        if not _NUMBER.fullmatch(value) or not LEAST <= float(value) <= MOST:
            raise ValueError(f"a number from {LEAST:g} to {MOST:g}")
        return {name: float(value)}

    return read


def _folder(value: str) -> Changes:
    return {"llama_cpp": str(Path(value).expanduser())}


SETTINGS: Mapping[str, Callable[[str], Changes]] = {
    "kv": _types("type_k", "type_v"), "type_k": _types("type_k"), "type_v": _types("type_v"),
    "flash_attn": _flag("flash_attn"), "repack": _flag("repack"), "threads": _count("threads", 0, 512),
    "gpu_layers": _count("gpu_layers", 0, 9999), "device": lambda name: {"device": name}, "dir": _folder,
    "runner": lambda words: {"runner": words},
}  # fmt: skip
KEYS: Mapping[str, Callable[[str], Changes]] = {
    **{key: reader for key, reader in SETTINGS.items() if key != "runner"},
    "batch": _count("batch", 1, 1 << 20), "ubatch": _count("ubatch", 1, 1 << 20),
    "sequences": _count("sequences", 1, 8),
    **{name: _flag(name) for name in ("used", "callback", "rotated")},
    **{name: _factor(name) for name in ("rope_base", "rope_scale")},
}  # fmt: skip
