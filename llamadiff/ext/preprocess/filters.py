"""Resizing of pictures: sums along each axis, by filter, by where it looks, and by how it rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

OF_PILLOW = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # Image.Resampling
SUPPORT = {"box": 0.5, "bilinear": 1.0, "hamming": 1.0, "bicubic": 2.0, "lanczos": 3.0}


def resized(image: Array, height: int, width: int, kernel: str, how: Mapping[str, Any]) -> Array:
    """A picture [channel, row, column] of levels, resized in float64.

    ``how``: ``antialias`` (a filter that widens as a picture shrinks), ``at`` (where a target's pixel lies: ``centre``,
    ``aligned`` corners, ``corner``, ``clip``), ``moved`` by pixels of the source, ``wider`` by a factor, ``a`` of the
    cubic, ``round`` (``each`` axis, ``once``, ``down``, ``not``), ``clip`` (``wraps``: as a byte does).
    """
    ways = {"antialias": True, "at": "centre", "a": -0.5, "round": "each", "clip": True, **how}
    wide = weighted(np.asarray(image, np.float64), taps(image.shape[2], width, kernel, ways))
    if ways["round"] == "each":
        wide = np.clip(np.rint(wide), 0, 255)
    found = weighted(wide.swapaxes(1, 2), taps(image.shape[1], height, kernel, ways)).swapaxes(1, 2)
    if ways["clip"] == "wraps":
        return np.asarray(np.rint(found) % 256)
    if ways["clip"]:
        found = np.clip(found, 0, 255)
    if ways["round"] == "not":
        return np.asarray(found)
    return np.asarray(np.floor(found + 1e-6) if ways["round"] == "down" else np.floor(found + 0.5))


def taps(size: int, target: int, kernel: str, how: Mapping[str, Any]) -> tuple[Array, Array]:
    """Which pixels of the source each of the target takes, and how much of each: [target, tap], twice."""
    ways = {"antialias": True, "at": "centre", "a": -0.5, "moved": 0.0, "wider": 1.0, **how}
    scale, place = size / target, np.arange(target)
    if kernel == "nearest":
        chosen = place * scale if ways["at"] == "corner" else (place + 0.5) * scale
        chosen = np.clip(np.floor(chosen + ways["moved"] + 1e-9).astype(int), 0, size - 1)
        return chosen[:, None], np.ones((target, 1))
    centre = (
        ways["moved"]
        + {
            "centre": (place + 0.5) * scale - 0.5,
            "aligned": place * (size - 1) / max(target - 1, 1),
            "corner": place * scale,
            "clip": place * (size - 1) / target,
        }[ways["at"]]
    )
    ways["wider"] *= max(scale, 1.0) if ways["antialias"] else 1.0
    return taps_at(centre, size, kernel, ways)


def taps_at(centre: Array, size: int, kernel: str, ways: Mapping[str, Any]) -> tuple[Array, Array]:
    """Which pixels are taken around each place of a source, by a filter that is so much ``wider``."""
    wider = ways["wider"]
    reach = int(np.ceil(SUPPORT[kernel] * wider)) + 1
    taken = np.floor(centre).astype(int)[:, None] + np.arange(-reach, reach + 1)[None]
    weights = _value(kernel, ((taken - (centre[:, None] + 0.5)) + 0.5) * (1 / wider), ways["a"])
    if ways["antialias"]:
        weights = np.where((taken >= 0) & (taken < size), weights, 0.0)  # the edge is cut, as Pillow does
    total = weights.sum(1, keepdims=True)
    return np.clip(taken, 0, size - 1), weights / np.where(np.abs(total) > 1e-9, total, 1.0)


def weighted(values: Array, taps: tuple[Array, Array]) -> Array:
    """Sums over the last axis: [..., source] becomes [..., target]."""
    found = np.zeros((*values.shape[:-1], len(taps[0])))
    for taken, weights in zip(taps[0].T, taps[1].T, strict=True):
        found += values[..., taken] * weights
    return found


def _value(kernel: str, x: Array, a: float) -> Array:
    """A filter's weight at a distance of x pixels."""
    far = np.abs(x)
    if kernel == "box":
        return np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0)
    if kernel == "bilinear":
        return np.maximum(1.0 - far, 0.0)
    if kernel == "hamming":
        return np.where(far < 1, np.sinc(x) * (0.54 + 0.46 * np.cos(np.pi * x)), 0.0)
    if kernel == "lanczos":
        return np.where(far < 3, np.sinc(x) * np.sinc(x / 3), 0.0)
    near = (a + 2) * far**3 - (a + 3) * far**2 + 1
    return np.where(far < 1, near, np.where(far < 2, a * (far**3 - 5 * far**2 + 8 * far - 4), 0.0))
