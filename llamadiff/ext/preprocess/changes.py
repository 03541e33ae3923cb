"""Steps of a processor done otherwise: what each is called, and what the child is asked for to have it so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from llamadiff.ext.preprocess.filters import OF_PILLOW

Request = Mapping[str, Any]
BLACK, GREY, WHITE = [0, 0, 0], [127, 127, 127], [255, 255, 255]
USUAL = ("bilinear", "bicubic", "lanczos", "nearest", "box", "hamming")
ONCE = {"antialias": False, "round": "once"}  # as those resize that look at four or sixteen pixels


@dataclass(frozen=True)
class Change:
    """``step`` is the step that is wrong, ``says`` how; ``request`` has the processor do it so."""

    step: str
    says: str
    request: Request


def rounding_of(kind: str) -> Sequence[Request]:
    """What is right too: a processor's own arithmetic in another order or precision."""
    if kind == "sound":
        return ({"numpy": True}, {"spectrogram": {"float32": True}})
    return tuple({"resize": {"round": way}} for way in ("each", "once", "not"))


def other_rates() -> Sequence[Request]:
    """Resamplers that are as right as the one that is taken."""
    return ({"samples": {"way": "sharp"}}, {"samples": {"way": "soft"}})


def changes_of(about: Mapping[str, Any], kind: str) -> Iterator[Change]:
    """All that is tried of a processor, the plain things first."""
    if kind == "sound":
        yield from _of_samples(about)
        yield from _of_spectrum(about["config"])
    else:
        yield from _of_loading(about)
        yield from filters(about["config"])
        yield from _of_sizes(about["config"])
        yield from _of_borders(about["config"])


def _of_loading(about: Mapping[str, Any]) -> Iterator[Change]:
    """How the picture itself is read."""
    if about["turned"]:
        yield Change("orientation", "the EXIF orientation is ignored", {"picture": {"exif": False}})
    if about["see_through"]:
        for name, over in (("white", WHITE), ("black", BLACK), ("grey", GREY)):
            yield Change(
                "alpha", f"what is transparent is laid over {name}; the processor drops alpha",
                {"picture": {"over": over}},
            )  # fmt: skip
    config, swapped = about["config"], {"channels": [2, 1, 0]}
    for says, keys in (("", ("image_mean", "image_std")), (", and the means and deviations in that of RGB", ())):
        reverse = {key: config[key][::-1] for key in keys if isinstance(config.get(key), list)}
        yield Change("channels", f"channels are in the order BGR{says}", {"picture": swapped, "attributes": reverse})
    for axes, says in (([1], "from left to right"), ([0], "upside down")):
        yield Change("axes", f"the picture is flipped {says}", {"picture": {"flip": axes}})
    yield Change(
        "channels",
        "the picture is made grey",
        {"picture": {"matrix": [[0.299, 0.587, 0.114]] * 3, "offset": [0, 0, 0]}},
    )
    for channel, name in enumerate(("red", "green", "blue")):
        yield Change("channels", f"all channels are the {name} one", {"picture": {"channels": [channel] * 3}})
    for mode in ("HSV", "LAB", "YCbCr"):
        yield Change("colours", f"the channels are those of {mode}, as Pillow converts to it",
                     {"picture": {"mode": mode}})  # fmt: skip
    yield Change("axes", "rows and columns of the picture are exchanged", {"picture": {"transposed": True}})
    for turns in (1, 2, 3):
        yield Change("axes", f"the picture is turned by {90 * turns} degrees", {"picture": {"quarter": turns}})


def filters(config: Mapping[str, Any]) -> Iterator[Change]:
    """Resizing by other filters, at other places, with other roundings."""
    own = OF_PILLOW.get(config.get("resample", 2), "bilinear")
    has = f"the checkpoint has {own}"
    for number, kernel in sorted(OF_PILLOW.items(), key=lambda each: USUAL.index(each[1])):
        if kernel != own:
            yield Change("filter", f"resized by {kernel}; {has}", {"attributes": {"resample": number}})
    yield _resize(f"resized by nearest, corners first; {has}", {"kernel": "nearest", "at": "corner"})
    for kernel, a in (("bilinear", 0.0), ("bicubic", -0.75), ("bicubic", -0.5), ("lanczos", 0.0)):
        name = f"{kernel} (a = {a})" if a else kernel
        for at, says in (("centre", ""), ("aligned", ", with aligned corners"), ("corner", ", from pixels' corners")):
            how = {"kernel": kernel, "a": a, "at": at, **ONCE}
            yield _resize(f"resized by {name} without antialiasing{says}; {has}", how)
            if kernel == "bilinear":
                yield _resize(f"resized by {name} without antialiasing{says}, rounded down; {has}",
                              {**how, "round": "down"})  # fmt: skip
    yield _resize(
        f"resized by bilinear as llama.cpp's clip once did, (size - 1) / target, rounded down; {has}",
        {"kernel": "bilinear", "antialias": False, "at": "clip", "round": "down"},
    )
    yield _resize("resized levels are rounded down, not to the nearest", {"round": "down"})
    yield _resize("what a resize takes beyond 0 to 255 is not cut off", {"round": "not", "clip": False})
    yield _resize(
        "what a resize takes beyond 0 to 255 wraps around, as a byte does", {"round": "once", "clip": "wraps"}
    )
    yield _resize("resized in linear light, not in sRGB", {"light": True})
    yield Change("resize", "not resized", {"attributes": {"do_resize": False}})


def _resize(says: str, how: Request) -> Change:
    return Change("filter", says, {"resize": how})


def _of_sizes(config: Mapping[str, Any]) -> Iterator[Change]:
    """Whether proportions are kept, what is cut out, which size is chosen."""
    crop = config.get("crop_size") if config.get("do_center_crop") else None
    whole = dict[str, Any]()
    if crop:
        whole = {"attributes": {"size": {key: crop[key] for key in ("height", "width")}, "do_center_crop": False}}
        yield Change("proportions", "the whole picture is stretched, not resized by its shorter side and cut", whole)
        yield from _of_crops()
    yield from _of_proportions(config, whole)
    for name, value in config.items():
        if isinstance(value, bool) and name.startswith(("do_", "use_", "crop_")) and name not in NOT_STEPS:
            says = f"{name} is {str(not value).lower()}; the checkpoint has {str(value).lower()}"
            yield Change(name.removeprefix("do_"), says, {"attributes": {name: not value}})
    if "merge_size" in config:
        yield Change("resolution", "sizes are multiples of a patch alone, not of those that are merged",
                     {"attributes": {"merge_size": 1}})  # fmt: skip
    for way, says in (("down", "sizes are rounded down to a multiple"), ("up", "sizes are rounded up to a multiple"),
                      ("half", "sizes are multiples of half of what patches and merging need"),
                      ("double", "sizes are multiples of twice what patches and merging need"),
                      ("no limits", "the least and the largest number of pixels are ignored")):  # fmt: skip
        yield Change("resolution", says, {"smart": way})
    for height, width in config.get("image_grid_pinpoints") or ():
        says = f"the resolution {width} x {height} is chosen of image_grid_pinpoints"
        yield Change("resolution", says, {"pinpoint": [height, width]})


def _of_crops() -> Iterator[Change]:
    """Where a picture is cut out."""
    for where, says in (("start", "at the top left"), ("end", "at the bottom right"),
                        ("up", "a pixel further down or right (half of an odd rest rounded up)"),
                        ("before", "a pixel further up and left")):  # fmt: skip
        yield Change("crop", f"cut out {says}, not at the centre", {"crop": where})


def _of_proportions(config: Mapping[str, Any], whole: Request) -> Iterator[Change]:
    """A picture in its proportions, with what is beyond cut off, or with a border; or its middle square."""
    has = "resizes by the shorter side and cuts" if whole else "resizes it to the whole size"
    yield Change("proportions", f"proportions are kept and the rest is cut off; the checkpoint {has}",
                 {**whole, "resize": {"fit": "cover"}})  # fmt: skip
    for fill, colour in _colours(config):
        for way, side in (("centre", "around"), ("corner", "below and to the right of")):
            yield Change(
                "proportions", f"{colour} is padded {side} the picture, in its proportions; the checkpoint {has}",
                {**whole, "resize": {"fit": way, "fill": fill}},
            )  # fmt: skip
    yield Change("proportions", "the middle square is cut out before the resize",
                 {**whole, "picture": {"square": True}})  # fmt: skip


def _colours(config: Mapping[str, Any]) -> Sequence[tuple[Sequence[int], str]]:
    mean = [round(255 * each) for each in config.get("image_mean") or (0.5, 0.5, 0.5)]
    return ((BLACK, "black"), (WHITE, "white"), (GREY, "grey"), (mean, "the mean"))


NOT_STEPS = ("do_rescale", "do_normalize", "do_convert_rgb", "do_resize")


def _of_borders(config: Mapping[str, Any]) -> Iterator[Change]:
    """Where a border is, and of which value."""
    for side, says in (("end", "below and to the right"), ("start", "above and to the left"), ("centre", "around")):
        yield Change("padding", f"padded {says}", {"pad": {"side": side}})
    for value, name in _colours(config):
        yield Change("padding", f"padded with {name}", {"pad": {"value": value}})
    for mode in ("edge", "reflect"):
        yield Change("padding", f"padded with {mode} values", {"pad": {"mode": mode}})


def sizes_of(shape: Sequence[int], about: Mapping[str, Any]) -> Iterator[Change]:
    """The picture resized to the size that a dump seems to have, stretched or with its proportions kept."""
    plain = [n for n in shape if n > 1]
    sides = {(plain[-2], plain[-1])} if len(plain) >= 2 else set()
    if len(plain) >= 3 and plain[-1] == 3:
        sides = {(plain[-3], plain[-2])}
    patch = about["config"].get("patch_size")
    if len(plain) == 2 and patch:  # patches: any rows and columns of so many
        sides = {(n * patch, plain[0] // n * patch) for n in range(1, plain[0] + 1) if plain[0] % n == 0}
        ratio = about["size"][1] / about["size"][0]
        sides = set(sorted(sides, key=lambda each: abs(each[0] / each[1] - ratio))[:4])
    if len(plain) == 1 and plain[0] % 3 == 0 and isqrt(plain[0] // 3) ** 2 == plain[0] // 3:
        sides = {(isqrt(plain[0] // 3),) * 2}
    for height, width in sides:
        if 4 <= height <= 1 << 13 and 4 <= width <= 1 << 13:
            base: dict[str, Any] = {"attributes": {"do_center_crop": False}}
            to = f"{width} x {height}"
            yield Change("resolution", f"resized to {to}", {**base, "resize": {"to": [height, width]}})
            for way, says in (("cover", "cut"), ("centre", "padded around"), ("corner", "padded at the end")):
                yield Change("resolution", f"resized to {to} with its proportions kept, {says}",
                             {**base, "resize": {"to": [height, width], "fit": way}})  # fmt: skip


def _of_samples(about: Mapping[str, Any]) -> Iterator[Change]:
    """How samples are read, mixed and brought to a rate."""
    if about["channels"] > 1:
        for way, says in (("left", "only the first channel is taken"), ("right", "only the last channel is taken"),
                          ("sum", "channels are added, not averaged"),
                          ("interleaved", "channels are read one after the other as one")):  # fmt: skip
            yield Change("channels", says, {"samples": {"channel": way}})
    if about["rate"] != about["wanted"]:
        yield Change("rate", f"not resampled: {about['rate']} samples a second are taken for {about['wanted']}",
                     {"samples": {"rate": about["wanted"]}})  # fmt: skip
        for way in ("linear", "nearest"):
            yield Change("rate", f"resampled by {way} interpolation, without a filter", {"samples": {"way": way}})
    else:
        for rate in (8000, 22050, 24000, 32000, 44100, 48000):
            if rate != about["rate"]:
                yield Change("rate", f"resampled as if the file had {rate} samples a second, which has {about['rate']}",
                             {"samples": {"rate": rate}})  # fmt: skip
    for scale, says in ((32768.0, "samples are 16-bit numbers, not divided by 32768"),
                        (1 / 32768.0, "samples are divided by 32768 twice")):  # fmt: skip
        yield Change("scale", says, {"samples": {"scale": scale}})
    yield Change("scale", "samples are brought to a largest value of 1", {"samples": {"level": 1.0}})
    yield Change("scale", "the mean of the samples is taken off", {"samples": {"centred": True}})
    yield Change("header", "the file's header is read as samples", {"samples": {"header": True}})


def _of_spectrum(config: Mapping[str, Any]) -> Iterator[Change]:
    """Windows, bands, logarithms."""
    yield Change("window", "the window is symmetric, not periodic", {"window": {"periodic": False}})
    for name in ("hamming", "povey", "boxcar"):
        yield Change("window", f"the window is {name}", {"window": {"name": name}})
    yield Change("power", "magnitudes are summed in bands, not powers", {"spectrogram": {"power": 1.0}})
    for mode, says in (("constant", "with zeros"), ("edge", "with the first and last sample")):
        yield Change("padding", f"ends are padded {says}, not by reflection", {"spectrogram": {"pad_mode": mode}})
    yield Change("padding", "frames begin at their sample, not centred on it", {"spectrogram": {"center": False}})
    yield Change("scale", "each frame's mean is taken off", {"spectrogram": {"remove_dc_offset": True}})
    for scale in ("htk", "kaldi"):
        yield Change("mel scale", f"the bands are on the {scale} scale", {"mel": {"mel_scale": scale}})
        yield Change("mel scale", f"the bands are on the {scale} scale, and not normalized",
                     {"mel": {"mel_scale": scale, "norm": None}})  # fmt: skip
    yield Change("mel norm", "the bands are not normalized", {"mel": {"norm": None}})
    in_mel = {"triangularize_in_mel_space": True}
    yield Change("mel scale", "the bands are triangles in mel, not in Hz", {"mel": in_mel})
    size, hop = config.get("n_fft"), config.get("hop_length")
    if size and hop:
        bigger = 1 << (size - 1).bit_length()
        yield Change("n_fft", f"windows of {size} are padded to {bigger} for the FFT",
                     {"spectrogram": {"fft_length": bigger},
                      "mel": {"num_frequency_bins": bigger // 2 + 1}})  # fmt: skip
        for other in {bigger, 2 * size, size // 2, 320, 480, 1024, 2048} - {size}:
            yield Change("n_fft", f"n_fft is {other}; the checkpoint has {size}", {"attributes": {"n_fft": other}})
        for other in (128, 200, 256, 512, 80, 320):
            if other != hop:
                yield Change("hop", f"the hop is {other}; the checkpoint has {hop}",
                             {"attributes": {"hop_length": other}})  # fmt: skip
    for bands in {40, 64, 80, 96, 128} - {config.get("feature_size")}:
        yield Change("mel bins", f"there are {bands} bands; the checkpoint has {config.get('feature_size')}",
                     {"attributes": {"feature_size": bands}})  # fmt: skip
    yield Change("clamp", "nothing is clamped to 8 below the largest", {"clamp": "none"})
    yield Change("clamp", "each frame is clamped below its own largest", {"clamp": "frame"})
    yield Change("normalization", "samples are normalized to mean 0 and variance 1",
                 {"call": {"do_normalize": True}, "numpy": True})  # fmt: skip
    yield Change("padding", "not padded: as long as the sound is", {"call": {"padding": "longest"}, "numpy": True})


def merged(first: Request, second: Request) -> dict[str, Any]:
    """Two requests as one."""
    found = dict(first)
    for key, value in second.items():
        own = found.get(key)
        found[key] = {**own, **value} if isinstance(own, Mapping) and isinstance(value, Mapping) else value
    return found
