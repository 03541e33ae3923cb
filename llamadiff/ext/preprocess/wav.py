"""Sound of a .wav file, as samples; and at another rate."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.system.errors import UserError
from llamadiff.system.input import read_bytes

Array = NDArray[Any]
MAX_BYTES = 1 << 28  # of a sound: 45 minutes of 48,000 stereo samples
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
MEANT = "a .wav file (ffmpeg -i SOUND sound.wav)"


@dataclass(frozen=True)
class Sound:
    """``samples``: [sample, channel], in [-1, 1]; ``rate`` of a second."""

    samples: Array
    rate: int


def is_wav(path: Path) -> bool:
    """Whether a file begins as sound does."""
    try:
        with path.open("rb") as file:
            start = file.read(12)
    except OSError:
        return False
    return start[:4] == b"RIFF" and start[8:] == b"WAVE"


def read_wav(path: Path) -> Sound:
    """The samples of a file. Raises UserError for what is none, or is packed."""
    data = read_bytes(path, MAX_BYTES, MEANT)
    form, values, place = None, b"", 12
    while place + 8 <= len(data) and not values:
        name, size = struct.unpack_from("<4sI", data, place)
        part = data[place + 8 : place + 8 + size]
        if name == b"fmt " and len(part) >= 16:
            form = struct.unpack_from("<HHIIHH", part)
            if form[0] == EXTENSIBLE and len(part) >= 26:
                form = (struct.unpack_from("<H", part, 24)[0], *form[1:])
        elif name == b"data":
            values = part
        place += 8 + size + size % 2
    if form is None or not values:
        raise UserError(f"{path}: no sound in it; give {MEANT}")
    kind, channels, rate, _, _, bits = form
    if not channels or not 1000 <= rate <= 400_000:
        raise UserError(f"{path}: {channels} channels at a rate of {rate}; give {MEANT}")
    samples = _samples(values, kind, bits)
    if samples is None:
        raise UserError(f"{path}: samples of format {kind}, {bits} bits, are not read; give {MEANT}")
    if len(samples) < channels:
        raise UserError(f"{path}: holds no samples; give {MEANT}")
    return Sound(samples[: len(samples) // channels * channels].reshape(-1, channels), rate)


def _samples(data: bytes, kind: int, bits: int) -> Array | None:
    width = bits // 8
    whole = data[: len(data) // width * width] if width else b""
    if kind == FLOAT and bits in (32, 64):
        return np.frombuffer(whole, f"<f{width}").astype(np.float64)
    if kind != PCM or bits not in (8, 16, 24, 32):
        return None
    if bits == 8:
        return (np.frombuffer(whole, "u1").astype(np.float64) - 128) / 128
    raised = np.zeros((len(whole) // width, 4), np.uint8)
    raised[:, 4 - width :] = np.frombuffer(whole, "u1").reshape(-1, width)
    return np.asarray(raised.view("<i4")[:, 0] / float(1 << 31))


def resampled(samples: Array, rate: int, target: int, way: str) -> Array:
    """Samples at another rate: ``sinc`` (``sharp``, ``soft``: with other slopes), ``linear``, ``nearest``."""
    count = int(np.ceil(len(samples) * target / rate))
    place = np.arange(count) * (rate / target)
    if way == "nearest":
        return np.asarray(samples[np.minimum(place.astype(int), len(samples) - 1)])
    if way == "linear":
        return np.asarray(np.interp(place, np.arange(len(samples)), samples))
    zeros, edge = {"sinc": (64, 0.945), "sharp": (128, 0.97), "soft": (16, 0.9)}[way]
    band = min(1.0, target / rate) * edge
    reach = int(np.ceil(zeros / band))
    near = np.floor(place).astype(int)
    padded = np.pad(samples, reach + 1)
    found = np.empty(count)
    for start in range(0, count, 4096):
        some = slice(start, start + 4096)
        taken = near[some, None] + np.arange(-reach, reach + 1)[None]
        x = (taken - place[some, None]) * band
        weights = band * np.sinc(x) * np.where(np.abs(x) < zeros, np.cos(np.pi * x / (2 * zeros)) ** 2, 0.0)
        found[some] = (padded[taken + reach + 1] * weights).sum(1)
    return found
