"""A key that one of two files lacks: what llama.cpp takes there, and whether that is what the other file has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from llamaref import ModelError
from llamaref.configure import read_config

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.decides import GATE_OF, GATES, POOLINGS, READ_ROUTING
from llamadiff.trace.stated import brief

DEFAULT_BASE = 10000.0
ASSUMED: Mapping[str, Any] = {  # by llama.cpp, where a file does not say it
    "rope.freq_base": DEFAULT_BASE, "rope.freq_base_swa": DEFAULT_BASE, "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0, "attention.sliding_window": 0, "use_parallel_residual": True,
    "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "expert_count": 0, "ssm.group_count": 1,
    "pooling_type": 0, "attention.causal": True,
}  # fmt: skip
ASSUMED_OF: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {
        "attention.sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
}  # fmt: skip
WORDS: Mapping[str, Mapping[int, str]] = {"pooling_type": POOLINGS, "expert_gating_func": GATES}
REFUSED, ANOTHER = "llama.cpp does not load it", "llama.cpp takes another"


@dataclass(frozen=True)
class Lacking:
    """What a file that lacks a key comes to in llama.cpp, in words, and whether it computes something else by that.

    ``decides`` is None where that is not known.
    """

    decides: bool | None
    takes: str = ""


def lacking(model: ModelFile, key: str, value: Any, refuses: Callable[[], bool]) -> Lacking:
    """A key of the architecture that ``model`` lacks and another file has with a ``value``.

    The configuration is read with it and without: of architectures that the reference engine knows, no table says what
    llama.cpp takes. ``refuses``: whether llama.cpp refuses the file, asked only where it matters.
    """
    own = key.removeprefix(f"{model.architecture}.")
    found = _by_config(model, key, value) if own != key and model.has_engine else Lacking(None)
    if found.decides is None:
        found = _by_table(model, own, value)
    return Lacking(True, REFUSED) if found.decides and refuses() else found


def assumed(model: ModelFile, key: str) -> Any:
    """What llama.cpp takes for a key that is not there; None if nothing is computed from it, it is not known, or it
    refuses the file.
    """
    arch = model.architecture
    heads, embd = (model.hyper_parameter(each) for each in ("attention.head_count", "embedding_length"))
    if key == "expert_gating_func" and arch in READ_ROUTING:
        return next((number for number, name in GATES.items() if name == GATE_OF.get(arch)), None)
    if key in ("expert_weights_norm", "expert_weights_scale") and arch in READ_ROUTING:
        return {"expert_weights_norm": False, "expert_weights_scale": 1.0}[key]
    if isinstance(heads, int) and isinstance(embd, int):
        size = embd // max(heads, 1)
        made = {
            "attention.head_count_kv": heads, "attention.key_length": size, "attention.value_length": size,
            "rope.dimension_count": model.hyper_parameter("attention.key_length") or size,
        }  # fmt: skip
        if key in made:
            return made[key]
    return {**ASSUMED, **ASSUMED_OF.get(arch, {})}.get(key)


def _by_table(model: ModelFile, key: str, value: Any) -> Lacking:
    taken = assumed(model, key)
    if taken is None:
        return Lacking(None)
    values = value if isinstance(value, list) else [value]
    return Lacking(not all(same(each, taken) for each in values), f"llama.cpp takes {told(key, taken)}")


def _by_config(model: ModelFile, key: str, value: Any) -> Lacking:
    """By what the reference engine reads of the metadata, which has llama.cpp's defaults."""
    without = _config(model.weights.fields)
    with_it = _config({**model.weights.fields, key: value})
    if with_it is None:
        return Lacking(None)
    if without is None:
        return Lacking(True, ANOTHER)
    if without == with_it:
        other = _config({**model.weights.fields, key: _another(value)})
        return Lacking(None if other == with_it else False)
    changed = _changes(without, with_it)
    taken = next((before for before, after in changed if same(after, value)), None)
    return Lacking(True, ANOTHER if taken is None else f"llama.cpp takes {told(key, taken)}")


def _config(metadata: Mapping[str, Any]) -> Any:
    """None where the engine refuses it."""
    try:
        return read_config(metadata)
    except ModelError:
        return None


def _another(value: Any) -> Any:
    """Another value, which shows whether the key is read at all."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):  # RoPE's scaling, the one word that is read
        return "none" if value == "yarn" else "yarn"
    return 2 * value + 1 if isinstance(value, (int, float)) else value


def _changes(before: Any, after: Any) -> Iterator[tuple[Any, Any]]:
    """The numbers and words of two configurations that are not the same."""
    if is_dataclass(before) and is_dataclass(after):
        for each in fields(before):
            yield from _changes(getattr(before, each.name), getattr(after, each.name))
    elif isinstance(before, tuple) and isinstance(after, tuple):
        for one, other in zip(before, after, strict=False):
            yield from _changes(one, other)
    elif before != after:
        yield before, after


def same(value: Any, wanted: Any) -> bool:
    """Whether two values of a key are one, of numbers as float32 has them."""
    if _is_number(value) and _is_number(wanted):
        return math.isclose(value, wanted, rel_tol=1e-6)
    return bool(value == wanted)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def told(key: str, value: Any) -> str:
    """A key's value in words."""
    words = WORDS.get(key.rpartition(".")[2], {})
    if isinstance(value, int) and value in words:
        return words[value]
    return f"{value:.7g}" if isinstance(value, float) else brief(value)
