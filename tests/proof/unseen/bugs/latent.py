"""Latent attention goes wrong: how rows are split, which matrices heads have."""

from __future__ import annotations

from typing import Any

import numpy as np

from proof.unseen.bugs.bug import bug
from proof.unseen.engine import Engine


def _rotated_first(e: Engine, rows: Any) -> Any:
    """The part that is rotated is taken from the beginning of a row."""
    shared, latent = np.split(rows, [e.n_rot], axis=-1)
    return latent, shared


def _stored_otherwise(e: Engine, x: Any, stem: str) -> Any:
    w = e.weight(stem)
    return x @ w.reshape(len(w), w.shape[2], w.shape[1])


BUGS = (
    bug("latent: rotated part first in K", "qkv-split", latent_parts=_rotated_first),
    bug("latent: rotated part first in Q", "qkv-split", query_parts=_rotated_first),
    bug("latent: heads' matrices transposed", "weight-transposed", of_heads=_stored_otherwise),
    bug("latent: other layer's matrices", "weight-of-other-layer", of_heads=lambda e, x, stem:
        x @ e.file[f"blk.{1 - e.layer}.{stem}.weight"].swapaxes(-1, -2)),
    bug("latent: scale without YaRN's", "attention-scale attention-scale-other", scale=lambda e:
        1 / np.sqrt(e.dim) if e.has("attn_kv_a_mqa") else Engine.scale(e)),
    bug("latent: scale of the unrotated part", "attention-scale-other", scale=lambda e:
        1 / np.sqrt(e.dim - e.n_rot) if e.has("attn_kv_a_mqa") else Engine.scale(e)),
    bug("latent: scale of compressed rows", "attention-scale-other", scale=lambda e:
        1 / np.sqrt(160) if e.has("attn_kv_a_mqa") else Engine.scale(e)),
)  # fmt: skip
