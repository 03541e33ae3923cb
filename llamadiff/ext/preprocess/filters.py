"""Resizing of pictures: a matrix for each axis, by filter, by where it looks, and by how it rounds."""

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
    ``aligned`` corners, ``corner``, ``clip``), ``a`` of the cubic, ``round`` (``each`` axis, ``once``, ``down``,
    ``not``), ``clip``.
    """
    ways = {"antialias": True, "at": "centre", "a": -0.5, "round": "each", "clip": True, **how}
    over_rows = matrix(image.shape[1], height, kernel, ways)
    over_columns = matrix(image.shape[2], width, kernel, ways)
    wide = np.asarray(image, np.float64) @ over_columns.T  # [channel, row, column] @ [column, new column]
    if ways["round"] == "each":
        wide = np.clip(np.rint(wide), 0, 255)
    found = over_rows @ wide  # [new row, row] @ [channel, row, new column]
    if ways["clip"]:
        found = np.clip(found, 0, 255)
    if ways["round"] == "not":
        return np.asarray(found)
    return np.asarray(np.floor(found + 1e-6) if ways["round"] == "down" else np.floor(found + 0.5))


def matrix(size: int, target: int, kernel: str, how: Mapping[str, Any]) -> Array:
    """What each pixel of the target takes of each of the source: [target, source]."""
    scale, place = size / target, np.arange(target)
    if kernel == "nearest":
        chosen = place * scale if how["at"] == "corner" else (place + 0.5) * scale
        return np.asarray(np.eye(size)[np.minimum(np.floor(chosen + 1e-9).astype(int), size - 1)])
    centre = {
        "centre": (place + 0.5) * scale - 0.5,
        "aligned": place * (size - 1) / max(target - 1, 1),
        "corner": place * scale,
        "clip": place * (size - 1) / target,
    }[how["at"]]
    wider = max(scale, 1.0) if how["antialias"] else 1.0
    reach = int(np.ceil(SUPPORT[kernel] * wider)) + 1
    taken = np.floor(centre).astype(int)[:, None] + np.arange(-reach, reach + 1)[None]  # [target, tap]
    weights = _value(kernel, ((taken - (centre[:, None] + 0.5)) + 0.5) * (1 / wider), how["a"])
    if how["antialias"]:
        weights = np.where((taken >= 0) & (taken < size), weights, 0.0)  # the edge is cut, as Pillow does
    total = weights.sum(1, keepdims=True)
    found = np.zeros((target, size))
    np.add.at(found, (np.repeat(place, taken.shape[1]), np.clip(taken, 0, size - 1).ravel()), (weights / total).ravel())
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
