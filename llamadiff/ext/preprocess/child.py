"""The child process that runs a checkpoint's processor, as it is and with one step changed; arrays go into files.

A line of JSON is a request: ``to`` is where the result goes, all else what is changed. Nothing in a checkpoint's
folder is run, and nothing is fetched.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.preprocess import curves, pixels, samples
from llamadiff.ext.preprocess.filters import OF_PILLOW, resized
from llamadiff.ext.preprocess.wav import Sound, read_wav, resampled
from llamadiff.system.input import read_bytes
from llamadiff.system.python_child import leave_no_core, watch_parent

Array = NDArray[Any]
Request = Mapping[str, Any]
LOCAL = {"local_files_only": True, "trust_remote_code": False}
MAX_PICTURE = 1 << 28  # bytes of a file
CHANGES = ("spectrogram", "window", "mel", "attributes", "clamp", "numpy", "heard")


def main(checkpoint: str, file: str, kind: str) -> None:
    """Answer requests until the parent closes its end."""
    leave_no_core()
    os.environ["HF_HUB_OFFLINE"] = "1"
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is none of the answers
    lines = watch_parent(lambda: None)

    def say(answer: Mapping[str, Any]) -> None:
        said.write(json.dumps(answer) + "\n")
        said.flush()

    try:
        made = Sounds(checkpoint, Path(file)) if kind == "sound" else Pictures(checkpoint, Path(file))
    except Exception as error:  # its loaders raise many kinds
        say({"error": _words(error)})
        return
    say(made.about)
    while True:
        request = json.loads(lines.get())
        try:
            values, more = made.run(request)
            np.save(request["to"], np.asarray(values, np.float32))
            say(more)
        except Exception as error:  # a step that this processor does not have
            say({"error": _words(error)})


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextmanager
def replaced(original: Any, instead: Any) -> Iterator[None]:
    """Whatever module of transformers knows a function has another in its place."""
    places = _places(original)
    for module, name in places:
        setattr(module, name, instead)
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, original)


@cache
def _places(original: Any) -> Sequence[tuple[Any, str]]:
    return [
        (module, name)
        for key, module in list(sys.modules.items())
        if key.startswith("transformers") and module is not None
        for name, value in list(vars(module).items())
        if value is original
    ]


@contextmanager
def attribute(owner: Any, name: str, instead: Any) -> Iterator[None]:
    """An attribute that is another for a while."""
    before = getattr(owner, name)
    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Pictures:
    """A picture and the image processor of a checkpoint."""

    def __init__(self, checkpoint: str, path: Path) -> None:
        import transformers
        from PIL import Image

        transformers.logging.set_verbosity_error()
        self.image = Image.open(io.BytesIO(read_bytes(path, MAX_PICTURE, "a picture")))
        self.image.load()
        self.processor = transformers.AutoImageProcessor.from_pretrained(checkpoint, backend="pil", **LOCAL)
        self.config = self.processor.to_dict()
        self.about = {
            "class": type(self.processor).__name__, "config": self.config, "size": self.image.size,
            "mode": self.image.mode, "turned": self.image.getexif().get(0x0112, 1) != 1,
            "see_through": self.image.has_transparency_data,
        }  # fmt: skip

    def run(self, request: Request) -> tuple[Array, dict[str, Any]]:
        image = self._picture(request.get("picture", {}))
        if request.get("source"):
            return np.asarray(image), {}
        processor = self.processor
        if "attributes" in request:
            processor = type(processor)(**{**self.config, **request["attributes"]})
        with ExitStack() as stack:
            for step in self._changed(request, processor):
                stack.enter_context(step)
            given = processor(images=image, return_tensors=request.get("tensors", "np"))
        values = given["pixel_values"]
        more = {
            name: np.asarray(given[name]).tolist() for name in ("image_grid_thw", "spatial_shapes") if name in given
        }
        more["kept"] = {name: value for name, value in processor.to_dict().items() if isinstance(value, int)}
        return _array(values), more

    def _picture(self, how: Request) -> Any:
        """The picture as transformers loads one, or with a step of that changed."""
        from PIL import Image, ImageFilter, ImageOps

        image = ImageOps.exif_transpose(self.image) if how.get("exif", True) else self.image
        if "over" in how:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, (*how["over"], 255)), image)
        image = image.convert("RGB")
        if "mode" in how:
            image = image.convert(how["mode"])
        if "first" in how:
            image = _first(image, how["first"], how["by"])
        if "blur" in how:
            name, radius = how["blur"]
            image = image.filter(getattr(ImageFilter, name)(radius))
        if "jpeg" in how:
            packed = io.BytesIO()
            image.save(packed, "JPEG", quality=how["jpeg"], subsampling=how["chroma"])
            image = Image.open(packed)
        values = pixels.edited(np.asarray(image)[..., :3], how)  # [row, column, channel]
        if how.get("square"):  # the middle of it
            side = min(values.shape[:2])
            top, left = ((size - side) // 2 for size in values.shape[:2])
            values = values[top : top + side, left : left + side]
        return Image.fromarray(np.ascontiguousarray(values, np.uint8))

    def _changed(self, request: Request, processor: Any) -> Iterator[Any]:
        from transformers import image_transforms

        if "resize" in request:
            yield replaced(image_transforms.resize, partial(self._resize, request["resize"]))
        if "pad" in request:
            yield attribute(np, "pad", partial(_pad, np.pad, request["pad"]))
        if "crop" in request:
            yield replaced(image_transforms.center_crop, partial(_crop, request["crop"]))
        module = sys.modules[type(processor).__module__]
        if "smart" in request:
            yield attribute(module, "smart_resize", partial(_smart, request["smart"]))
        if "pinpoint" in request:
            yield attribute(module, "select_best_resolution", partial(_always, tuple(request["pinpoint"])))

    def _resize(
        self, how: Request, image: Any, size: Any, resample: Any = None, reducing_gap: Any = None,
        data_format: Any = None, return_numpy: bool = True, input_data_format: Any = None,
    ) -> Any:  # fmt: skip
        values = np.moveaxis(np.asarray(image), -1, 0) if hasattr(image, "resize") and not _is_array(image) else image
        is_last = str(getattr(input_data_format, "value", input_data_format)) == "channels_last"
        values = np.moveaxis(values, -1, 0) if is_last and values is image else values
        kernel = how.get("kernel") or OF_PILLOW[int(resample if resample is not None else 2)]
        height, width = how.get("to") or size
        found = _fitted(values, height, width, kernel, how)
        found = found.astype(np.float32) if how.get("round") == "not" else found.astype(np.uint8)
        return np.moveaxis(found, 0, -1) if is_last else found


def _first(image: Any, size: Sequence[int], kernel: str) -> Any:
    """A picture that is resized before a processor has it; by whole factors, as its reduce does."""
    factor = image.width // size[0]
    if kernel == "box" and factor > 1 and [-(-n // factor) for n in image.size] == list(size):
        return image.reduce(factor)
    return image.resize(size, next(n for n, name in OF_PILLOW.items() if name == kernel))


def _always(value: Any, *_: Any) -> Any:
    return value


def _is_array(image: Any) -> bool:
    return isinstance(image, np.ndarray)


def _fitted(values: Array, height: int, width: int, kernel: str, how: Request) -> Array:
    """Stretched to a size; or, with its proportions kept, within that with a border, or beyond it and cut."""
    way = how.get("fit")
    if how.get("light"):
        return _in_light(values, height, width, kernel, how)
    if way is None:
        return resized(values, height, width, kernel, how)
    _, rows, columns = values.shape
    ratio = (min if way != "cover" else max)(height / rows, width / columns)
    inner = [max(1, round(rows * ratio)), max(1, round(columns * ratio))]
    found = resized(values, inner[0], inner[1], kernel, how)
    if way == "cover":
        top, left = ((found.shape[1] - height) // 2, (found.shape[2] - width) // 2)
        return found[:, top : top + height, left : left + width]
    whole = np.empty((values.shape[0], height, width))
    whole[:] = np.asarray(how.get("fill", [0, 0, 0]), np.float64)[:, None, None]
    top, left = ((height - inner[0]) // 2, (width - inner[1]) // 2) if way == "centre" else (0, 0)
    whole[:, top : top + inner[0], left : left + inner[1]] = found
    return whole


def _in_light(values: Array, height: int, width: int, kernel: str, how: Request) -> Array:
    """Resized as light, and encoded again."""
    found = resized(255 * curves.linear(values / 255), height, width, kernel, {**how, "round": "not"})
    return np.asarray(np.rint(255 * curves.encoded(found / 255)))


def _pad(original: Callable[..., Array], how: Request, array: Any, pad_width: Any, mode: Any = "constant", **more: Any
         ) -> Array:  # fmt: skip
    """A border of another value, or on other sides."""
    widths = np.broadcast_to(np.asarray(pad_width, int), (np.ndim(array), 2)).tolist()
    if how.get("side"):
        total = [sum(each) for each in widths]
        sides = {"end": [[0, n] for n in total], "start": [[n, 0] for n in total],
                 "centre": [[n // 2, n - n // 2] for n in total]}  # fmt: skip
        widths = sides[how["side"]]
    if "mode" in how:
        return original(array, widths, mode=how["mode"])
    if "value" not in how:
        return original(array, widths, mode=mode, **more)
    whole = original(array, widths, mode="constant", constant_values=0)
    inside = original(np.ones(np.shape(array), bool), widths, mode="constant", constant_values=False)
    value = np.broadcast_to(np.asarray(how["value"]).reshape(-1, 1, 1), whole.shape) if whole.ndim == 3 else whole
    return np.where(inside, whole, value).astype(whole.dtype)


def _crop(where: str, image: Array, size: Any, *_: Any, **__: Any) -> Array:
    """The part of a picture [channel, row, column] that is kept."""
    height, width = size
    spare = [image.shape[1] - height, image.shape[2] - width]
    if min(spare) < 0:
        raise ValueError("smaller than what is cut out of it")
    places = {"start": [0, 0], "end": spare, "up": [-(-n // 2) for n in spare], "before": [n // 2 - 1 for n in spare]}
    top, left = (max(0, n) for n in places[where])
    return image[:, top : top + height, left : left + width]


def _smart(
    way: str, height: int, width: int, factor: int = 28, min_pixels: int = 56 * 56, max_pixels: int = 28 * 28 * 1280
) -> tuple[int, int]:
    """Sizes that are multiples of a factor, with a mistake in how they are found."""
    rounding: Callable[[float], int] = math.ceil if way == "up" else math.floor if way == "down" else round
    factor = factor // 2 if way == "half" else factor * 2 if way == "double" else factor
    rows, columns = (max(factor, rounding(n / factor) * factor) for n in (height, width))
    if way != "no limits" and (rows * columns > max_pixels or rows * columns < min_pixels):
        limit = max_pixels if rows * columns > max_pixels else min_pixels
        ratio = (limit / (height * width)) ** 0.5
        rows, columns = (max(factor, rounding(n * ratio / factor) * factor) for n in (height, width))
    return rows, columns


def _array(values: Any) -> Array:
    """One array of what a processor gave of one picture."""
    if isinstance(values, list) and len(values) == 1:
        return _array(values[0])
    return np.asarray(values, np.float32)


class Sounds:
    """A sound and the feature extractor of a checkpoint."""

    def __init__(self, checkpoint: str, path: Path) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        self.sound = read_wav(path)
        self.resampled = dict[str, Array]()
        self.bytes = read_bytes(path, 1 << 28, "a sound")
        self.heard: Array | None = None
        self.how_heard = dict[str, Any]()
        self.extractor = transformers.AutoFeatureExtractor.from_pretrained(checkpoint, **LOCAL)
        self.config = self.extractor.to_dict()
        self.rate = int(self.extractor.sampling_rate)
        self.module = sys.modules[type(self.extractor).__module__]
        self.about = {
            "class": type(self.extractor).__name__, "config": _plain(self.config), "rate": self.sound.rate,
            "wanted": self.rate, "channels": self.sound.samples.shape[1], "samples": len(self.sound.samples),
        }  # fmt: skip

    def run(self, request: Request) -> tuple[Array, dict[str, Any]]:
        mono = self._samples(request.get("samples", {}))
        changes = {key: request[key] for key in CHANGES if key in request}
        with ExitStack() as stack:
            if changes:
                for step in self._changed(request):
                    stack.enter_context(step)
                kind = type(self.extractor)
                extractor = kind(**{**_plain(self.config), **request.get("attributes", {})})
            else:
                extractor = self.extractor
            rate = int(extractor.sampling_rate)
            given = extractor(mono, sampling_rate=rate, return_tensors="np", **request.get("call", {}))
        if self.heard is not None and "heard" in request:
            return self.heard, self.how_heard
        name = next(name for name in ("input_features", "input_values", "audio_values") if name in given)
        return _array(given[name]), {"name": name}

    def _samples(self, how: Request) -> Array:
        sound: Sound = self.sound
        values, rate = sound.samples, how.get("rate", sound.rate)
        if how.get("header"):
            whole = self.bytes[: len(self.bytes) // 2 * 2]
            values = np.frombuffer(whole, "<i2")[:, None] / 32768.0
        channel = how.get("channel", "mean")
        if channel == "interleaved":
            mono = values.reshape(-1)
        else:
            mono = {"mean": values.mean(1), "sum": values.sum(1), "left": values[:, 0], "right": values[:, -1]}[channel]
        if rate != self.rate:
            key = json.dumps([how.get(name) for name in ("header", "channel", "rate", "way")])
            if key not in self.resampled:
                self.resampled[key] = resampled(mono, rate, self.rate, how.get("way", "sinc"))
            mono = self.resampled[key]
        return np.asarray(samples.edited(mono, how, self._chunk()), np.float32)

    def _chunk(self) -> int:
        """How many samples the extractor takes at once."""
        return int(getattr(self.extractor, "n_samples", 0))

    def _hear(self, original: Callable[..., Array], waveform: Array, window: Array, **more: Any) -> Array:
        """A spectrogram, of which is kept what it is made of."""
        if self.heard is None:
            self.heard = np.asarray(waveform, np.float32)
            kept = ("frame_length", "hop_length", "fft_length", "power", "center", "pad_mode", "log_mel")
            self.how_heard = {"window": window.tolist(), "mel": np.asarray(more.get("mel_filters", ())).tolist(),
                              **{key: more[key] for key in kept if key in more}}  # fmt: skip
        return original(waveform, window, **more)

    def _changed(self, request: Request) -> Iterator[Any]:
        module = self.module
        if hasattr(module, "is_torch_available"):
            yield attribute(module, "is_torch_available", bool)  # it says no
        if "heard" in request:
            yield attribute(module, "spectrogram", partial(self._hear, module.spectrogram))
        elif hasattr(module, "spectrogram"):
            how = request.get("spectrogram", {})
            yield attribute(module, "spectrogram", partial(_spectrogram, module.spectrogram, how))
        if "cosines" in request.get("window", {}):
            yield attribute(module, "window_function", partial(samples.of_cosines, **request["window"]))
        for name, function in (("window", "window_function"), ("mel", "mel_filter_bank")):
            if name in request and "cosines" not in request[name]:
                yield attribute(module, function, partial(_with, getattr(module, function), request[name]))
        if "clamp" in request:
            yield attribute(module, "np", _Clamped(request["clamp"]))


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not isinstance(value, np.ndarray)}


def _with(original: Callable[..., Any], changed: Request, *given: Any, **more: Any) -> Any:
    bound = signature(original).bind(*given, **more)
    bound.arguments.update(changed)
    return original(*bound.args, **bound.kwargs)


def _spectrogram(original: Callable[..., Array], how: Request, waveform: Array, window: Array, **more: Any) -> Array:
    changed = {**more, **{name: value for name, value in how.items() if name != "float32"}}
    if changed.get("center") is False and more.get("center", True):  # as many frames as before
        waveform = np.pad(waveform, (0, len(window)))
    if how.get("float32"):
        return _in_float32(waveform, window, changed)
    found = samples.spectrogram(waveform, window, changed)
    return original(waveform, window, **changed) if found is None else found


def _in_float32(waveform: Array, window: Array, more: Mapping[str, Any]) -> Array:
    """A spectrogram by a table of sines in float32, as engines without an FFT compute it."""
    size, hop = more["frame_length"], more["hop_length"]
    padded = np.pad(np.asarray(waveform, np.float32), size // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop] * window.astype(np.float32)
    angle = 2 * np.pi * np.outer(np.arange(size), np.arange(size // 2 + 1)) / size
    real, imaginary = (frames @ table(angle).astype(np.float32) for table in (np.cos, np.sin))
    power = (real**2 + imaginary**2) @ np.asarray(more["mel_filters"], np.float32)
    return np.asarray(np.log10(np.maximum(power, np.float32(1e-10))).T, np.float32)


class _Clamped:
    """NumPy, with another lower limit where an extractor has one below its largest value."""

    def __init__(self, way: str) -> None:
        self.way = way

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def maximum(self, x: Array, low: Any) -> Array:
        if self.way == "none":
            return x
        if self.way == "frame":
            return np.asarray(np.maximum(x, x.max(0, keepdims=True) - 8.0))
        return np.asarray(np.maximum(x, low + 8.0 - float(self.way)))
