"""The keys of a projector file against the config of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.port.projector_graph import SENSES
from llamadiff.ext.port.projector_model import numbers_in
from llamadiff.result.oddity import Oddity

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
        wanted = next((x for part in numbers_in(config, sense) for name in names if _is_number(x := part.get(name))), None)
        if _is_number(value) and wanted is not None and not np.isclose(value, wanted, rtol=ALIKE, atol=0):
            yield Oddity(whole, f"is {value:g}; config.json has {wanted:g}", "metadata")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
