"""Latent attention goes wrong: how rows are split, which matrices heads have."""

from __future__ import annotations

import numpy as np

from proof.injected.attention import OTHER_SCALE
from proof.injected.base import elsewhere
from proof.strangers.engine import Array, Edit, Engine


def rotated_first(e: Engine, right: Edit, rows: Array) -> tuple[Array, Array]:
    """The part that is rotated is taken from the beginning of a row."""
    shared, latent = np.split(rows, [e.h.n_rot], axis=-1)
    return latent, shared


def stored_otherwise(e: Engine, right: Edit, x: Array, stem: str) -> Array:
    w = e.matrix(stem)
    return x @ w.reshape(len(w), w.shape[2], w.shape[1])


def of_other_layer(e: Engine, right: Edit, x: Array, stem: str) -> Array:
    return x @ e.file[f"blk.{1 - e.layer}.{stem}.weight"].swapaxes(-1, -2)


def scale_of(size: int) -> dict[str, Edit]:
    """1 / sqrt(size of the unrotated part of a head, or this one); 0: of a head."""
    return {"softmax_scale": lambda e, right: (size or e.h.dim) ** -0.5 if e.latent else right()}


INJECTIONS = (
    elsewhere("latent: rotated part first in K", "qkv-split", {"latent_parts": rotated_first}),
    elsewhere("latent: rotated part first in Q", "qkv-split", {"query_parts": rotated_first}),
    elsewhere("latent: heads' matrices transposed", "weight-transposed", {"of_heads": stored_otherwise}),
    elsewhere("latent: other layer's matrices", "weight-of-other-layer", {"of_heads": of_other_layer}),
    elsewhere("latent: scale without YaRN's", OTHER_SCALE, scale_of(0)),
    elsewhere("latent: scale of the unrotated part", "attention-scale-other", scale_of(64)),
    elsewhere("latent: scale of compressed rows", "attention-scale-other", scale_of(160)),
)  # fmt: skip
