"""What a report says of the model, of both sides and of the run, as plain text; each format escapes it as it must."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from llamadiff.llamacpp.settings_words import WORDS
from llamadiff.result.comparison import Comparison
from llamadiff.result.diagnosis import Diagnosis

_SIZES = (("embd", "embd {}"), ("heads", "{} heads"), ("kv_heads", "{} kv"))


def model_facts(model: Mapping[str, Any], full: bool) -> list[str]:
    """Architecture, layers, types of weights; in a full report the sizes, and how many weights of each type."""
    facts = [str(model["architecture"])] if model.get("architecture") else []
    if model.get("layers"):
        facts.append(f"{model['layers']} layer{'' if model['layers'] == 1 else 's'}")
    if full:
        facts += [words.format(model[key]) for key, words in _SIZES if model.get(key)]
    types = model.get("weight_types") or {}
    shown = {kind: count for kind, count in types.items() if full or kind != "F32" or len(types) == 1}
    return [*facts, *(f"{count} {kind}" if full else str(kind) for kind, count in shown.items())]


def side_facts(producer: Mapping[str, Any], full: bool) -> list[str]:
    """The settings of a side that are not the usual ones; in a full report its version."""
    facts = [str(producer["version"])] if producer.get("version") and full else []
    facts += [_machine(producer)] if producer.get("machine") else []
    settings = producer.get("settings")
    for key, (usual, words) in WORDS.items():
        value = settings.get(key) if isinstance(settings, Mapping) else None
        if value is not None and str(value).upper() != usual.upper():
            facts.append(words.format(value))
    return facts


def _machine(producer: Mapping[str, Any]) -> str:
    """Another kind of CPU than this machine's, and how long its vectors are, where it says so."""
    vectors = re.search(r"SVE_CNT = (\d{1,4})\b", str(producer.get("build", "")))
    return f"on {producer['machine']}" + (f" with SVE of {8 * int(vectors[1])} bits" if vectors else "")


def settings_of(producer: Mapping[str, Any]) -> list[str]:
    """All settings that a side states, those that are single values: ``flash_attn=False``."""
    settings = producer.get("settings")
    stated = settings if isinstance(settings, Mapping) else {}
    return [f"{key}={value}" for key, value in stated.items() if isinstance(value, (str, int, float)) and value != ""]


def run_fact(comparison: Comparison) -> str:
    """How many tokens there were; empty for a program that was watched, of which nobody knows."""
    if not comparison.tokens:
        return ""
    count, decoded = len(comparison.tokens), decode_steps(comparison)
    steps = f" and {decoded} decode step{'s' if decoded > 1 else ''}" if decoded else ""
    prefill, of = count - decoded, comparison.baseline.get("rows")
    if isinstance(of, Mapping) and isinstance(of.get("of"), int):
        return f"{count} of {of['of']:,} tokens"
    return f"{prefill} token{'s' if prefill != 1 else ''}{steps}"


def decode_steps(comparison: Comparison) -> int:
    """How many tokens came one by one, after the prefill."""
    count, n_prefill = len(comparison.tokens), comparison.n_prefill
    return count - n_prefill if 0 < n_prefill < count else 0


def mistakes(comparison: Comparison) -> list[Diagnosis]:
    """The known bugs that were found, the largest own error first, as the headline has them."""
    found = [d for d in comparison.diagnosis if d.known and not d.harmless]
    return sorted(found, key=lambda d: -max(math.inf if math.isnan(each) else each for each in d.right.values()))
