"""llama.cpp's settings in words, ``KEY=VALUE,...``: of ``--llama-cpp``, of a candidate ``llama.cpp:...``, a sweep's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from llamadiff.llamacpp.request import Request, Settings, Way
from llamadiff.llamacpp.ways import ALONE, SIZED, Plan, used
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
SCHEDULE, SEED = "schedule", "seed"
FLOATS = {"F32", "F16", "BF16"}
Changes = Mapping[str, Any]  # of fields of Settings and of Way, and by the names of ways


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
    count, batch = len(request.tokens), changes.get("batch", 0)
    batches = () if not batch else tuple(min(batch, count - at) for at in range(0, count, batch))
    plan = _planned(spec, request.tokens, changes, batches)
    if plan is not None:
        way |= {"steps": plan.finished(), "callback": way.get("callback", True) and not plan.is_moved}
    return replace(
        request, settings=replace(request.settings, **settings), way=Way(**way), batches=batches,
        n_prefill=batches[0] if batches else 0, n_predict=0,
    )  # fmt: skip


def schedule_of(spec: str) -> tuple[int, int] | None:
    """How many steps a random schedule is to have, and its seed; None where none is asked for. Raises UserError."""
    changes = _changes(spec.removeprefix(PREFIX).split(","), KEYS, PREFIX)
    if SCHEDULE not in changes:
        if SEED in changes:
            raise UserError(f"{spec}: a seed is a schedule's; give schedule=200 too")
        return None
    other = [name for name in (*ALONE, *SIZED, "used", "batch", "ubatch") if changes.get(name)]
    if other:
        raise UserError(f"{spec}: a random schedule does all of that; leave out {other[0]}")
    return changes[SCHEDULE], changes.get(SEED, 0)


def _planned(spec: str, tokens: Sequence[int], changes: Changes, batches: Sequence[int]) -> Plan | None:
    """What is done besides running the tokens, where a server's way is asked for. Raises UserError for two of them."""
    asked = [name for name in (*ALONE, *SIZED, "used") if changes.get(name)]
    if not asked:
        return None
    name, plan = asked[0], Plan(tokens, changes.get("ubatch", 0))
    if len(asked) > 1:
        raise UserError(f"{spec}: {asked[0]} and {asked[1]} are two ways; give one")
    if name == "used":
        used(plan, batches)
        return plan
    if changes.get("batch") or changes.get("ubatch"):
        raise UserError(f"{spec}: {name} has batches of its own; leave out batch and ubatch")
    if name in ALONE:
        ALONE[name](plan)
    else:
        SIZED[name](plan, changes[name])
    kinds = {changes.get(key, "F32") for key in ("type_k", "type_v")}
    if plan.is_moved and not kinds <= FLOATS:
        raise UserError(
            f"{spec}: rows of {', '.join(sorted(kinds - FLOATS))} that move are rounded once more, which no arithmetic "
            "has that is judged by; give a cache of f32, f16 or bf16"
        )
    return plan


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
    "sequences": _count("sequences", 1, 8), "interleaved": _count("interleaved", 2, 8),
    "chunked": _count("chunked", 1, 1 << 20), "drafted": _count("drafted", 1, 64),
    **{name: _flag(name) for name in ("used", *ALONE, "reused", "callback", "rotated")},
    **{name: _factor(name) for name in ("rope_base", "rope_scale")},
    SCHEDULE: _count(SCHEDULE, 1, 10_000), SEED: _count(SEED, 0, (1 << 31) - 1),
}  # fmt: skip
