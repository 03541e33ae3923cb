"""What a candidate ``llama.cpp:KEY=VALUE,...`` changes of a run: its settings, its batches, its way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from llamadiff import plugins
from llamadiff.ext.state.ways import ALONE, SIZED, Plan, used
from llamadiff.llamacpp.request import Request, Settings, Way
from llamadiff.llamacpp.settings_words import SETTINGS, Changes, changes_in, count_reader, flag_reader
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress

if TYPE_CHECKING:
    from llamadiff.engines.model_file import ModelFile
    from llamadiff.ext.state.result import Variant

PREFIX = "llama.cpp:"
LEAST, MOST = 1e-6, 1e12  # RoPE's bases and scales
_NUMBER = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?(e[+-]?[0-9]{1,2})?")
SCHEDULE, SEED = "schedule", "seed"
FLOATS = {"F32", "F16", "BF16"}
STEPPER = "llamadiff.ext.state.stepper:Stepper"  # carries steps out


@dataclass(frozen=True)
class OwnWay:
    """A way of another slice's, which it runs by itself: ``key=N``, with settings. ``check`` raises UserError for a
    model that has not what it takes; ``run`` is given the variant's name, N, a request with the settings, and seconds.
    """

    key: str
    reader: Callable[[str], Changes]
    check: Callable[[ModelFile], None]
    run: Callable[[str, int, Request, Progress, float], Variant]


def own_ways() -> Iterable[OwnWay]:
    """Those of all slices."""
    return map(resolve_name, plugins.ask_all(lambda each: each.variant))


def own_way(spec: str) -> tuple[OwnWay, int] | None:
    """The one that is asked for, and its N. Raises UserError for what does not go together."""
    changes = _changes_of(spec)
    found = next((way for way in own_ways() if way.key in changes), None)
    if found is None:
        return None
    for other in (*ALONE, *SIZED, "used", "batch", "ubatch", SCHEDULE):
        if changes.get(other):
            raise UserError(f"{spec}: {found.key} and {other} are two ways; give one")
    return found, changes[found.key]


def varied(request: Request, spec: str) -> Request:
    """A request of known tokens as ``spec`` has it. Raises UserError for what is no setting, or no value of one.

    All tokens are given: none is llama.cpp's own choice. What has no batches or steps of its own runs in the request's.
    """
    changes = _changes_of(spec)
    settings, way = (
        {field.name: changes[field.name] for field in fields(kind) if field.name in changes} for kind in (Settings, Way)
    )
    count, batch = len(request.tokens), changes.get("batch", 0)
    batches = () if not batch else tuple(min(batch, count - at) for at in range(0, count, batch))
    plan = _planned(spec, request.tokens, changes, batches)
    if plan is not None:
        way |= {
            "steps": plan.finished(),
            "observer": STEPPER,
            "callback": way.get("callback", True) and not plan.is_moved,
        }
    return replace(
        request, settings=replace(request.settings, **settings), way=Way(**way), batches=batches,
        n_prefill=batches[0] if batches else 0 if plan is not None else request.n_prefill, n_predict=0,
    )  # fmt: skip


def _changes_of(spec: str) -> Changes:
    """What it changes. Raises UserError in its own words, which have the prefix of a candidate or have none."""
    keys = {**KEYS, **{way.key: way.reader for way in own_ways()}}
    return changes_in(spec.removeprefix(PREFIX).split(","), keys, PREFIX if spec.startswith(PREFIX) else "")


def schedule_of(spec: str) -> tuple[int, int] | None:
    """How many steps a random schedule is to have, and its seed; None where none is asked for. Raises UserError."""
    changes = _changes_of(spec)
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


def _factor_reader(name: str) -> Callable[[str], Changes]:
    def read(value: str) -> Changes:
        if not _NUMBER.fullmatch(value) or not LEAST <= float(value) <= MOST:
            raise ValueError(f"a number from {LEAST:g} to {MOST:g}")
        return {name: float(value)}

    return read


KEYS: Mapping[str, Callable[[str], Changes]] = {
    **{key: reader for key, reader in SETTINGS.items() if key not in ("runner", "lora")},
    "batch": count_reader("batch", 1, 1 << 20), "ubatch": count_reader("ubatch", 1, 1 << 20),
    "sequences": count_reader("sequences", 1, 8), "interleaved": count_reader("interleaved", 2, 8),
    "chunked": count_reader("chunked", 1, 1 << 20), "drafted": count_reader("drafted", 1, 64),
    **{name: flag_reader(name) for name in ("used", *ALONE, "reused", "callback", "rotated")},
    **{name: _factor_reader(name) for name in ("rope_base", "rope_scale")},
    SCHEDULE: count_reader(SCHEDULE, 1, 10_000), SEED: count_reader(SEED, 0, (1 << 31) - 1),
}  # fmt: skip
