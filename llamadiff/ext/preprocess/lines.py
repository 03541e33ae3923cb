"""What one gain and one offset of each channel mean: another mean, another logarithm, a factor that is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.preprocess.fitting import Fit

Array = NDArray[Any]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def normalization_of(config: Mapping[str, Any], channels: int) -> tuple[Array, Array]:
    """The mean and the deviation by which levels of 0 to 1 become a processor's values, of each channel."""
    factor = config.get("rescale_factor") or 1 / 255 if config.get("do_rescale", True) else 1.0
    mean, deviation = np.zeros(channels), np.ones(channels)
    if config.get("do_normalize", True) and config.get("image_mean") is not None:
        mean = np.broadcast_to(np.asarray(config["image_mean"], np.float64), channels).copy()
        deviation = np.broadcast_to(np.asarray(config["image_std"], np.float64), channels).copy()
    scale = 1 / (255 * factor)  # of a level of 0 to 1
    return mean * scale, deviation * scale


def of_picture(found: Fit, config: Mapping[str, Any], line: float) -> tuple[str, str]:
    """The step that a picture's lines show, and what it did."""
    mean, deviation = normalization_of(config, len(found.gain))
    other = deviation / found.gain  # (level - mean) / deviation * gain + offset
    own = mean - found.offset * other
    for step, says, means, deviations in _known(mean, deviation):
        ends = np.stack([(x - means) / deviations - (x - own) / other for x in (0.0, 1.0)])
        if (np.abs(ends * other) * 255 <= max(2 * line, 0.01)).all():
            return step, says
    return "normalization", (
        f"normalized by the mean {_numbers(own)} and the deviation {_numbers(other)}; "
        f"the checkpoint has {_numbers(mean)} and {_numbers(deviation)}"
    )


def _numbers(x: Array) -> str:
    x = x[:1] if np.ptp(x) < 1e-6 * max(1.0, float(np.abs(x).max())) else x
    return ", ".join(f"{each:.4g}" for each in x)


def _known(mean: Array, deviation: Array) -> Iterator[tuple[str, str, Array, Array]]:
    zero, one = np.zeros_like(mean), np.ones_like(mean)
    yield "rescaling", "neither rescaled nor normalized: values are levels of 0 to 255", zero, one / 255
    yield "normalization", "not normalized: values are levels of 0 to 1", zero, one
    yield "rescaling", "not multiplied by rescale_factor before it is normalized", mean / 255, deviation / 255
    yield "rescaling", "multiplied by rescale_factor twice", mean * 255, deviation * 255
    yield "rescaling", "multiplied by 1/256, not by 1/255", mean * 256 / 255, deviation * 256 / 255
    yield "normalization", "the mean is not subtracted", zero, deviation
    yield "normalization", "not divided by the standard deviation", mean, one
    if len(mean) == 3:
        yield "normalization", "the means and deviations are in the order BGR", mean[::-1], deviation[::-1]
        yield "normalization", "the means are in the order BGR", mean[::-1], deviation
        yield "normalization", "the deviations are in the order BGR", mean, deviation[::-1]
        for name, (means, deviations) in (("ImageNet's", IMAGENET), ("CLIP's", CLIP), ("0.5 and 0.5", HALF)):
            m, d = np.array(means), np.array(deviations)
            has = f"; the checkpoint has {_numbers(mean)} and {_numbers(deviation)}"
            yield "normalization", f"the mean and the deviation are {name}{has}", m, d
            yield "normalization", f"the mean is {name}; the checkpoint has {_numbers(mean)}", m, deviation
            yield "normalization", f"the deviation is {name}; the checkpoint has {_numbers(deviation)}", mean, d
            yield "normalization", f"the mean and the deviation are {name}, in the order BGR{has}", m[::-1], d[::-1]
    yield "normalization", "divided by the variance, not by the standard deviation", mean, deviation**2
    yield "normalization", "multiplied by the standard deviation, not divided", mean, 1 / deviation
    yield "normalization", "normalized twice", mean + deviation * mean, deviation**2
    yield "normalization", "the mean is added, not subtracted", -mean, deviation
    yield "normalization", "divided by the deviation before the mean is subtracted", mean * deviation, deviation


LOGS = (("", 1.0), ("the natural logarithm is taken", log(10)), ("the logarithm to base 2 is taken", log2(10)),
        ("values are decibels, 10 times the logarithm", 10.0),
        ("values are 20 times the logarithm", 20.0))  # fmt: skip
ENDS = (("", 4.0, 4.0), ("(x + 4) / 4 is left out", 0.0, 1.0), ("4 is not added before the division by 4", 0.0, 4.0),
        ("not divided by 4", 4.0, 1.0))  # fmt: skip
SCALES = (("", 0.0), ("samples are 16-bit numbers, not divided by 32768", 2 * log(32768) / log(10)),
          ("samples are divided by 32767, not by 32768", 2 * log(32768 / 32767) / log(10)),
          ("samples are divided by 32768 twice", -2 * log(32768) / log(10)))  # fmt: skip


def of_sound(found: Fit, is_whisper: bool, lowest: tuple[float, float]) -> tuple[str, str]:
    """The step that a sound's line shows, and what it did; ``lowest``: a dump's value, and the processor's."""
    gain, offset = float(found.gain[0]), float(found.offset[0])
    if abs(gain - 1) < 1e-4 and abs(offset) < 1e-4:
        floor = f", as a power of {10 ** (4 * lowest[0] - 4):.3g} is" if is_whisper else ""
        return "clamp", f"values are cut off below at {lowest[0]:.4g}{floor}; the processor's at {lowest[1]:.4g}"
    own_add, own_divide = (4.0, 4.0) if is_whisper else (0.0, 1.0)
    for end, add, divide in ENDS if is_whisper else (("", 0.0, 1.0),):
        for name, factor in LOGS:
            for scale, shift in SCALES:
                # x = (L + own_add) / own_divide; y = (factor * (L + shift) + add) / divide
                a = factor * own_divide / divide
                b = (factor * (shift - own_add) + add) / divide
                said = ", ".join(each for each in (name, end, scale) if each)
                if said and abs(gain / a - 1) < 1e-3 and abs(offset - b) < 1e-3 * max(1.0, abs(b)):
                    return ("logarithm" if name else "scale" if scale else "normalization"), said
    if abs(gain - 1) < 1e-3:
        factor = 10 ** (offset * own_divide / 2)
        return "scale", f"samples are {factor:.4g} times as large"
    return "scale", f"values are {gain:.5g} times the processor's, and {offset:.5g} more"
