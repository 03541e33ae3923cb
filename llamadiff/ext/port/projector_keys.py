"""The keys of a projector file against the config of its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.port.projector_graph import SENSES
from llamadiff.ext.port.projector_model import numbers_in
from llamadiff.ext.port.sides import shows_at
from llamadiff.ext.port.stand_in import STACKED
from llamadiff.result.oddity import Oddity

ACTIVATIONS = ("hidden_act", "activation_function")
ALIKE = 1e-5  # relative, of numbers that are one
# Key -> what configs call it, the first that is there.
NAMES: dict[str, tuple[str, ...]] = {
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_eps", "rms_norm_eps"),
    "attention.head_count": ("num_attention_heads", "num_heads", "encoder_attention_heads"),
    "feed_forward_length": ("intermediate_size", "encoder_ffn_dim"),
    "embedding_length": ("embed_dim", "d_model", "hidden_size"),
    "patch_size": ("patch_size",),
    "num_mel_bins": ("num_mel_bins",),
    "projector.scale_factor": ("scale_factor", "downsample_factor"),
    "spatial_merge_size": ("spatial_merge_size",),
    "window_size": ("window_size",),
}


def other_keys(file: ModelFile, config: Mapping[str, Any], sense: str) -> Iterator[Oddity]:
    """Each key that the file has, and the config has otherwise."""
    for key, names in NAMES.items():
        whole = f"clip.{SENSES[sense]}.{key}"
        value = file.weights.fields.get(whole)
        wanted = next(
            (x for part in numbers_in(config, sense) for name in names if _is_number(x := part.get(name))), None
        )
        if _is_number(value) and _is_number(wanted) and not np.isclose(value, wanted, rtol=ALIKE, atol=0):
            yield Oddity(whole, f"is {value:g}; config.json has {wanted:g}", "metadata")

    yield from _other_choices(file, config, sense)


def said_by_a_key(file: ModelFile, sense: str, place: str, says: str) -> str | None:
    """A key that has llama.cpp's number at a place, where the model's is in no config, as Whisper's epsilon is."""
    match = re.search(r"where llama\.cpp has ([-+.e0-9]+)", says)
    if match is None:
        return None
    for name in NAMES:
        key = f"clip.{SENSES[sense]}.{name}"
        value = file.weights.fields.get(key)
        if isinstance(value, float) and shows_at(key, place) and f"{value:g}" == match[1]:
            return f"{key}: is {value:g}"
    return None


def _other_choices(file: ModelFile, config: Mapping[str, Any], sense: str) -> Iterator[Oddity]:
    """What is no number on both sides: the activation, which layers see all, and of which rows are stacked."""
    fields, kind = file.weights.fields, f"clip.{SENSES[sense]}"
    parts = list(numbers_in(config, sense))
    act = next((x for part in parts for name in ACTIVATIONS if isinstance(x := part.get(name), str)), None)
    given = next((word for word in ("gelu", "silu") if fields.get(f"clip.use_{word}")), "quick_gelu")
    if act is not None and sense == "image" and (act if "quick" in act else act.partition("_")[0]) != given:
        key = f"clip.use_{given}" if given != "quick_gelu" else "clip.use_gelu"
        says = f"is true; config.json has {act}" if given != "quick_gelu" else f"is missing; config.json has {act}"
        if given != "quick_gelu" or act.partition("_")[0] in ("gelu", "silu"):
            yield Oddity(key, says, "metadata")
    full = next((x for part in parts if isinstance(x := part.get("fullatt_block_indexes"), list) and x), None)
    pattern = fields.get(f"{kind}.n_wa_pattern")
    if full is not None and _is_number(pattern) and pattern != full[0] + 1:
        yield Oddity(f"{kind}.n_wa_pattern", f"is {pattern}; config.json has full attention in {full}", "metadata")
    stacked = next((x for part in parts if isinstance(x := part.get("deepstack_visual_indexes"), list)), None)
    own = fields.get(f"{kind}.{STACKED}")
    if stacked is not None and isinstance(own, list) and [i for i, is_one in enumerate(own) if is_one] != stacked:
        yield Oddity(f"{kind}.{STACKED}", f"has others than config.json's {stacked}", "metadata")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
