"""Samples of a sound, edited as a mistake would: emphasized, cut off, moved; and windows of other shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def edited(mono: Array, how: Mapping[str, Any], chunk: int) -> Array:
    """Samples with whatever ``how`` names done to them; ``chunk``: how many an extractor takes at once."""
    mono = _leveled(_placed(mono, how, chunk), how)
    if "filter" in how:  # a weight for each sample, those before it
        mono = np.convolve(mono, how["filter"])[: len(mono)]
    return np.asarray(mono * how.get("scale", 1.0))


def _placed(mono: Array, how: Mapping[str, Any], chunk: int) -> Array:
    if how.get("reversed"):
        mono = mono[::-1]
    if "moved" in how:  # later, after silence; or earlier, without the first ones
        mono = np.concatenate([np.zeros(max(0, how["moved"])), mono[max(0, -how["moved"]) :]])
    if how.get("last") and len(mono) < chunk:
        mono = np.concatenate([np.zeros(chunk - len(mono)), mono])
    if how.get("repeated") and len(mono) < chunk:
        mono = np.resize(mono, chunk)
    if "kept" in how:
        mono = mono[: how["kept"]]
    if "faster" in how:
        place = np.arange(int(len(mono) / how["faster"])) * how["faster"]
        mono = np.interp(place, np.arange(len(mono)), mono)
    return mono


def _leveled(mono: Array, how: Mapping[str, Any]) -> Array:
    if "level" in how:
        mono = mono / np.abs(mono).max() * how["level"]
    if how.get("centred"):
        mono = mono - mono.mean()
    if "more" in how:
        mono = mono + how["more"]
    if "steps" in how:
        mono = np.rint(mono * how["steps"]) / how["steps"]
    if "cut" in how:
        mono = np.clip(mono, -how["cut"], how["cut"])
    if "companded" in how:
        mono = np.sign(mono) * np.log1p(how["companded"] * np.abs(mono)) / np.log1p(how["companded"])
    return mono


def of_cosines(
    length: int, *_: Any, cosines: Sequence[float], symmetric: bool = False, inner: int = 0, **__: Any
) -> Array:
    """A window as a sum of cosines; ``inner``: of so many samples in the middle of the window's."""
    count = inner or length
    at = 2 * np.pi * np.arange(count) / (count - 1 if symmetric else count)
    found = np.zeros(length)
    start = (length - count) // 2
    found[start : start + count] = sum(c * np.cos(n * at) for n, c in enumerate(cosines))
    return found


def framed(samples: Array, length: int, hop: int, center: bool, pad_mode: str) -> Array:
    """Frames [frame, sample] of samples."""
    padded = np.pad(np.asarray(samples, np.float64), length // 2, mode=pad_mode) if center else samples  # type: ignore[call-overload]
    return np.lib.stride_tricks.sliding_window_view(padded, length)[::hop]


KNOWN = {"frame_length", "hop_length", "fft_length", "power", "center", "pad_mode", "mel_filters", "mel_floor",
         "log_mel", "preemphasis", "remove_dc_offset", "dither", "sums"}  # fmt: skip


def spectrogram(waveform: Array, window: Array, more: Mapping[str, Any]) -> Array | None:
    """What transformers' spectrogram gives, of all frames at once; None for what this does not know."""
    length = more["frame_length"]
    if set(more) - KNOWN or more.get("dither") or len(window) != length or more.get("mel_filters") is None:
        return None
    frames = framed(waveform, length, more["hop_length"], more.get("center", True), more.get("pad_mode", "reflect"))
    if more.get("remove_dc_offset"):
        frames = frames - frames.mean(1, keepdims=True)
    if more.get("preemphasis"):
        by = more["preemphasis"]
        frames = np.concatenate([frames[:, :1] * (1 - by), frames[:, 1:] - by * frames[:, :-1]], 1)
    spectra = np.abs(np.fft.rfft(frames * window, more.get("fft_length") or length, axis=1)) ** more.get("power", 1.0)
    powers = more["mel_filters"].T @ spectra.T  # [band, bin] @ [bin, frame]
    powers = powers + more["sums"] if more.get("sums") else np.maximum(powers, more.get("mel_floor", 1e-10))
    logarithm = more.get("log_mel")
    if logarithm not in (None, "log", "log10"):
        return None
    found = powers if logarithm is None else np.log(powers) if logarithm == "log" else np.log10(powers)
    return np.asarray(found, np.float32)
