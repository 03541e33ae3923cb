"""What an encoder is fed, against processors of transformers': mistakes are named, and what is right is right.

Dumps are made by strangers.py, which shares nothing with llamadiff.
"""

from __future__ import annotations

import io
import json
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from command import run
from ext.preprocess.strangers import (
    CLIP,
    HALF,
    IMAGENET,
    RESAMPLE,
    clip,
    cropped,
    htk,
    linear,
    llava_next,
    normalized,
    patched,
    photograph,
    shortest,
    slaney,
    smolvlm,
    tone,
    whisper,
    write_wav,
)  # fmt: skip
from optional import needs
from PIL import Image, ImageFilter

from llamadiff.ext.preprocess.judge import judge_dump
from llamadiff.ext.preprocess.processor import processor_of

SIDE, GRIDS = 64, [[48, 96], [96, 48], [96, 96], [144, 48], [48, 144]]
PROCESSORS = {
    "clip": ("CLIPImageProcessorPil",
             {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}),
    "siglip": ("SiglipImageProcessorPil", {"size": {"height": SIDE, "width": SIDE}}),
    "qwen": ("Qwen2VLImageProcessorPil", {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 60}),
    "llava": ("LlavaNextImageProcessorPil", {"size": {"shortest_edge": 48}, "image_grid_pinpoints": GRIDS,
                                             "crop_size": {"height": 48, "width": 48}}),
    "smolvlm": ("SmolVLMImageProcessorPil", {"size": {"longest_edge": 120}, "max_image_size": {"longest_edge": 40}}),
    "whisper": ("WhisperFeatureExtractor", {"chunk_length": 5}),
}  # fmt: skip
PERIODIC = np.arange(400)


@cache
def wide():
    return photograph()


@cache
def small():
    return photograph(150, 100)


@cache
def glass():
    """The picture with a slope of transparency."""
    picture = photograph().convert("RGBA")
    picture.putalpha(Image.fromarray(np.tile(np.linspace(0, 255, 180), (130, 1)).astype(np.uint8)))
    return picture


@cache
def spoken():
    return np.clip(np.rint(tone() * 32767), -32768, 32767) / 32768


@cache
def both():
    """Two channels of 44,100 samples a second, as the file has them."""
    return np.stack([np.clip(np.rint(tone(44100, seed=n) * 32767), -32768, 32767) / 32768 for n in (5, 9)])


def write_turned(path):
    exif = Image.Exif()
    exif[0x0112] = 6
    wide().save(path, exif=exif)


FILES = {
    "wide.png": lambda path: wide().save(path),
    "small.png": lambda path: small().save(path),
    "turned.png": write_turned,
    "glass.png": lambda path: glass().save(path),
    "speech.wav": lambda path: write_wav(path, [tone()]),
    "stereo.wav": lambda path: write_wav(path, [tone(44100, seed=5), tone(44100, seed=9)], 44100),
}


def by_torch(image, width, height, rounded, mean_std=CLIP):
    """Bicubic with antialiasing, by torch."""
    import torch

    values = torch.from_numpy(np.asarray(image, np.float32).transpose(2, 0, 1)[None].copy())
    found = torch.nn.functional.interpolate(values, (height, width), mode="bicubic", antialias=True).clamp(0, 255)
    found = found.round() if rounded else found
    mean, std = (each.reshape(3, 1, 1) for each in mean_std)
    return (found[0].numpy() / 255 - mean) / std


def by_loops(image, width, height):
    """Bilinear with antialiasing, in float64, rounded once; the filter is a tent written out."""
    values = np.asarray(image, np.float64)
    for axis, target in ((0, height), (1, width)):
        scale = values.shape[axis] / target
        rows = []
        for n in range(target):
            centre = (n + 0.5) * scale
            tent = np.maximum(0, 1 - np.abs((np.arange(values.shape[axis]) + 0.5 - centre) / max(scale, 1)))
            rows.append(np.tensordot(tent / tent.sum(), values, (0, axis)))
        values = np.stack(rows, axis)
    return Image.fromarray(np.clip(np.floor(values + 0.5), 0, 255).astype(np.uint8))


def by_stft(samples):
    """Whisper's features, by torch's STFT."""
    import torch

    whole = torch.zeros(80000)
    whole[: len(samples)] = torch.from_numpy(samples.astype(np.float32))
    power = torch.stft(whole, 400, 160, window=torch.hann_window(400), return_complex=True)[:, :-1].abs() ** 2
    logs = (torch.from_numpy(slaney().astype(np.float32)).T @ power).clamp(min=1e-10).log10()
    return ((torch.maximum(logs, logs.max() - 8) + 4) / 4).numpy()


def resampled(samples, rate=44100, target=16000):
    """Kaiser's window over a sinc, as SciPy and librosa have it."""
    reach, cut = 40 * rate / target, target / rate * 0.95
    at = np.arange(int(len(samples) * target / rate)) * rate / target
    padded = np.pad(samples, int(reach) + 1)
    taken = np.floor(at).astype(int)[:, None] + np.arange(-int(reach), int(reach) + 1)
    away = taken - at[:, None]
    window = np.kaiser(2 * int(reach) + 3, 9.0)
    window = np.interp(away, np.arange(-int(reach) - 1, int(reach) + 2), window)
    return (padded[taken + int(reach) + 1] * np.sinc(away * cut) * cut * window).sum(1)


def squares(values, size=16, columns_first=False):
    """Patches [patch, values] of a picture."""
    cut = values.reshape(3, SIDE // size, size, SIDE // size, size)
    return cut.transpose((3, 1, 0, 2, 4) if columns_first else (1, 3, 0, 2, 4)).reshape(-1, 3 * size * size)


def qwen(size=(168, 140), filter_=RESAMPLE.BICUBIC):
    return normalized(wide().resize(size, filter_))


def bf16(values):
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)


def fitted(image, fill, corner=False):
    """Padded to a square, in its proportions."""
    scale = SIDE / max(image.size)
    inner = image.resize((round(image.width * scale), round(image.height * scale)), RESAMPLE.BICUBIC)
    canvas = Image.new("RGB", (SIDE, SIDE), fill)
    canvas.paste(inner, (0, 0) if corner else ((SIDE - inner.width) // 2, (SIDE - inner.height) // 2))
    return canvas


def grey(image):
    return Image.merge("RGB", [image.convert("L")] * 3)


def curved(image, power):
    return Image.fromarray(np.rint(255 * (np.asarray(image) / 255) ** power).astype(np.uint8))


def averaged(image):
    return Image.fromarray(np.repeat(np.rint(np.asarray(image).mean(-1))[..., None], 3, -1).astype(np.uint8))


def decoded(image):
    """Encoded with BT.709's weights, decoded with BT.601's."""
    values = np.asarray(image, np.float64)
    y = values @ (0.2126, 0.7152, 0.0722)
    cb, cr = (values[..., 2] - y) / 1.8556, (values[..., 0] - y) / 1.5748
    red, blue = y + 1.402 * cr, y + 1.772 * cb
    found = np.stack([red, (y - 0.299 * red - 0.114 * blue) / 0.587, blue], -1)
    return Image.fromarray(np.clip(np.rint(found), 0, 255).astype(np.uint8))


def packed(image, quality):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


def fir(samples, *weights):
    return np.convolve(samples, weights)[: len(samples)]


def by_bands(features):
    return (features - features.mean(1, keepdims=True)) / features.std(1, keepdims=True)


def without(features, every):
    """Features without every so many frames, as long as before."""
    kept = np.delete(features, np.arange(every - 1, features.shape[1], every), 1)
    return np.pad(kept, ((0, 0), (0, features.shape[1] - kept.shape[1])), mode="edge")


def laid_over(colour):
    canvas = Image.new("RGBA", glass().size, (*colour, 255))
    return Image.alpha_composite(canvas, glass()).convert("RGB")


def turned():
    """The picture as its EXIF orientation says."""
    return wide().transpose(Image.Transpose.ROTATE_270)


RIGHT = {
    ("clip", "wide.png"): {
        "as Pillow does it": lambda: clip(wide()),
        "HWC": lambda: clip(wide()).transpose(1, 2, 0),
        "a batch of one": lambda: clip(wide())[None, None],
        "flat": lambda: clip(wide()).ravel(),
        "float16": lambda: clip(wide()).astype(np.float16),
        "bfloat16": lambda: bf16(clip(wide())),
        "patches of 16": lambda: squares(clip(wide())),
        "patches of 8": lambda: squares(clip(wide()), 8),
        "by torch": lambda: by_torch(wide(), 88, 64, True)[:, :, 12:76],
        "by torch, not rounded": lambda: by_torch(wide(), 88, 64, False)[:, :, 12:76],
    },
    ("clip", "turned.png"): {"as EXIF says": lambda: clip(turned())},
    ("clip", "glass.png"): {"alpha dropped": lambda: clip(glass().convert("RGB"))},
    ("siglip", "wide.png"): {
        "as Pillow does it": lambda: normalized(wide().resize((SIDE, SIDE), RESAMPLE.BICUBIC), HALF),
        "by torch": lambda: by_torch(wide(), SIDE, SIDE, True, HALF),
    },
    ("qwen", "wide.png"): {
        "patches": lambda: patched(qwen()),
        "patches of one frame": lambda: patched(qwen(), times=1),
        "whole": lambda: qwen()[None],
        "whole, HWC": lambda: qwen().transpose(1, 2, 0),
        "by torch": lambda: patched(by_torch(wide(), 168, 140, True)),
    },
    ("llava", "small.png"): {
        "as Pillow does it": lambda: llava_next(small())[None],
        "HWC": lambda: llava_next(small()).transpose(0, 2, 3, 1),
    },
    ("smolvlm", "small.png"): {"as Pillow does it": lambda: smolvlm(small())[None]},
    ("whisper", "speech.wav"): {
        "in float64": lambda: whisper(spoken()),
        "in float32": lambda: whisper(spoken(), dtype=np.float32),
        "by torch": lambda: by_stft(spoken()),
        "frames first": lambda: whisper(spoken()).T[None],
        "float16": lambda: whisper(spoken()).astype(np.float16),
    },
    ("whisper", "stereo.wav"): {"by Kaiser's window": lambda: whisper(resampled(both().mean(0)))},
}
WRONG = {
    ("clip", "wide.png"): {
        "bilinear": (lambda: clip(wide(), filter_=RESAMPLE.BILINEAR), "resized by bilinear; "),
        "lanczos": (lambda: clip(wide(), filter_=RESAMPLE.LANCZOS), "resized by lanczos; "),
        "nearest": (lambda: clip(wide(), filter_=RESAMPLE.NEAREST), "resized by nearest; "),
        "four pixels": (lambda: normalized(cropped(linear(wide(), 88, 64), 64)), "bilinear without antialiasing; "),
        "four pixels, cut": (
            lambda: normalized(cropped(linear(wide(), 88, 64, True), 64)),
            "bilinear without antialiasing, rounded down",
        ),
        "ImageNet": (lambda: clip(wide(), mean_std=IMAGENET), "the mean and the deviation are ImageNet's"),
        "ImageNet's mean": (lambda: clip(wide(), mean_std=(IMAGENET[0], CLIP[1])), "the mean is ImageNet's"),
        "BGR": (lambda: clip(wide())[::-1], "in the order BGR"),
        "levels": (lambda: normalized(cropped(shortest(wide(), 64), 64), factor=1), "not multiplied by rescale_factor"),
        "factor twice": (
            lambda: normalized(cropped(shortest(wide(), 64), 64), factor=1 / 255**2),
            "rescale_factor twice",
        ),
        "stretched": (lambda: normalized(wide().resize((64, 64), RESAMPLE.BICUBIC)), "the whole picture is stretched"),
        "corner": (lambda: normalized(shortest(wide(), 64).crop((0, 0, 64, 64))), "at the top left"),
        "flipped": (lambda: clip(wide())[..., ::-1], "flipped from left to right"),
        "transposed": (lambda: clip(wide()).swapaxes(1, 2), "rows and columns are exchanged"),
        "resized to more": (lambda: normalized(cropped(shortest(wide(), 73), 64)), "shorter side is resized to 73"),
        "patches": (lambda: squares(clip(wide()), columns_first=True), "column by column"),
        "twice": (lambda: normalized(cropped(shortest(shortest(wide(), 96), 64), 64)), "first to 132 x 96 by bicubic"),
        "gamma": (lambda: clip(curved(wide(), 2.2)), "before the resize: the power 2.2 of it is taken"),
        "gamma after": (lambda: normalized(curved(cropped(shortest(wide(), 64), 64), 0.45)), "the power 0.45 of it"),
        "mean": (lambda: normalized(averaged(cropped(shortest(wide(), 64), 64))), "grey, by the weights of the mean"),
        "BT.709": (lambda: clip(decoded(wide())), "encoded as Y, Cb, Cr of BT.709 and decoded as of BT.601"),
        "JPEG": (lambda: clip(packed(wide(), 60)), "JPEG, of quality 60 (4:2:0)"),
        "a part": (
            lambda: normalized(wide().crop((17, 9, 151, 118)).resize((64, 64), RESAMPLE.BICUBIC)),
            "rows 9 to 117 and columns 17 to 150",
        ),
        "memory": (lambda: clip(wide()).transpose(1, 2, 0).reshape(3, 64, 64), "values lie as HWC in memory"),
    },
    ("clip", "turned.png"): {"EXIF": (lambda: clip(wide()), "EXIF orientation is ignored")},
    ("clip", "glass.png"): {"over white": (lambda: clip(laid_over((255, 255, 255))), "laid over white")},
    ("siglip", "wide.png"): {
        "padded": (lambda: normalized(fitted(wide(), (128, 128, 128)), HALF), "the mean is padded around"),
        "0 to 1": (
            lambda: np.asarray(wide().resize((64, 64), RESAMPLE.BICUBIC)).transpose(2, 0, 1) / 255,
            "not normalized",
        ),
        "grey": (lambda: normalized(grey(wide()).resize((64, 64), RESAMPLE.BICUBIC), HALF), "made grey"),
    },
    ("qwen", "wide.png"): {
        "rows": (lambda: patched(qwen(), merge=1), "ordered row by row, not in blocks of 2 x 2"),
        "bilinear": (lambda: patched(qwen(filter_=RESAMPLE.BILINEAR)), "resized by bilinear; "),
        "down": (lambda: patched(qwen((168, 112))), "rounded down to a multiple"),
        "frames": (lambda: patched(qwen()).reshape(-1, 3, 2, 196).swapaxes(1, 2), "frames stand before channels"),
        "inside": (
            lambda: patched(qwen()).reshape(-1, 6, 14, 14).swapaxes(2, 3).reshape(120, -1),
            "each patch of 14 has its rows and columns exchanged",
        ),
    },
    ("llava", "small.png"): {
        "thumbnail": (lambda: np.roll(llava_next(small()), -1, 0), "the first tile comes last"),
        "columns": (lambda: llava_next(small())[[0, 1, 3, 2, 4]], "ordered column by column"),
        "border": (lambda: llava_next(small(), fill=(123, 117, 104)), "padded with the mean"),
        "stretched": (
            lambda: np.concatenate([llava_next(small())[:1], llava_next(small().resize((96, 96), 3))[1:]]),
            "resized to 96 x 96 and cut out at (0, 0), (48, 0), (0, 48), (48, 48)",
        ),
        "corner": (lambda: llava_next(small(), corner=True), "padded below and to the right"),
    },
    ("smolvlm", "small.png"): {
        "bicubic": (lambda: smolvlm(small(), filter_=RESAMPLE.BICUBIC), "resized by bicubic; "),
        "no thumbnail": (lambda: smolvlm(small())[:-1], "6 tiles, where the processor gives 7"),
    },
    ("whisper", "speech.wav"): {
        "symmetric": (lambda: whisper(spoken(), window=0.5 - 0.5 * np.cos(2 * np.pi * PERIODIC / 399)), "symmetric"),
        "HTK": (lambda: whisper(spoken(), bands=htk()), "htk scale"),
        "not normalized": (lambda: whisper(spoken(), bands=slaney(normed=False)), "bands are not normalized"),
        "natural": (lambda: whisper(spoken(), log=np.log), "natural logarithm"),
        "16 bits": (lambda: whisper(spoken() * 32768), "16-bit numbers"),
        "magnitudes": (lambda: whisper(spoken(), power=1), "magnitudes"),
        "zeros": (lambda: whisper(spoken(), pad="constant"), "padded with zeros"),
        "512": (lambda: whisper(spoken(), n_fft=512), "n_fft is 512"),
        "clamp": (lambda: whisper(spoken(), clamp=None), "nothing is clamped"),
        "late": (lambda: np.roll(whisper(spoken()), 1, 1), "the frames are 1 late"),
        "emphasized": (lambda: whisper(fir(spoken(), 1, -0.95)), "emphasized: 0.95 of the one before"),
        "smoothed": (lambda: whisper(fir(spoken(), 0.25, 0.5, 0.25)), "go through a filter: 0.25, 0.5, 0.25"),
        "Blackman": (lambda: whisper(spoken(), window=np.blackman(401)[:400]), "the window is Blackman's, periodic"),
        "clipped": (lambda: whisper(np.clip(spoken(), -0.3, 0.3)), "samples are clipped at 0.3"),
        "7000 Hz": (lambda: whisper(spoken(), bands=slaney(top=7000.0)), "the bands end at 7000 Hz"),
        "by bands": (lambda: by_bands(whisper(spoken())), "each band is normalized to mean 0 and deviation 1"),
        "begins late": (lambda: whisper(spoken()[3000:]), "the sound begins 3000 samples early"),
        "missing": (
            lambda: without(whisper(spoken()), 10),
            "the processor's 9, 19, 29, 39, 49, 59 and so on are missing",
        ),
        "differences": (
            lambda: np.diff(whisper(spoken()), prepend=-0.5),
            "values are mixed: -1 of 1 frame before, 1 of",
        ),
        "two chunks": (lambda: np.stack([whisper(spoken()), np.full((80, 500), -0.5)]), "the rest is silent"),
    },
    ("whisper", "stereo.wav"): {
        "one channel": (lambda: whisper(resampled(both()[0])), "only the first channel"),
        "rate": (lambda: whisper(both().mean(0)), "not resampled"),
    },
}


QUICK = ("siglip", "wide.png"), ("clip", "turned.png")


def cases_of(table):
    """The processors and files of a table; but for a few they are slow, since each case is many runs."""
    marks = {each: () if each in QUICK else (pytest.mark.slow,) for each in table}
    return [pytest.param(*each, marks=marks[each]) for each in table]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A function: what is said of a dump, of a processor and a file by their names."""
    import transformers

    folder, started = tmp_path_factory.mktemp("preprocess"), {}
    with ExitStack() as stack:

        def judge(processor, name, dump):
            if (processor, name) not in started:
                save(transformers, processor, folder)
                FILES[name](folder / name)
                started[processor, name] = stack.enter_context(processor_of(folder / processor, folder / name))
            return judge_dump(started[processor, name], Path(name), "dump", np.asarray(dump, np.float32), print)

        yield judge


def save(transformers, processor, folder):
    kind, how = PROCESSORS[processor]
    getattr(transformers, kind)(**how).save_pretrained(folder / processor)


@needs("transformers", "PIL")
@pytest.mark.parametrize(("processor", "name"), cases_of(RIGHT))
def test_what_is_right_is_right(judged, processor, name):
    found = {case: judged(processor, name, make()) for case, make in RIGHT[processor, name].items()}
    assert {case: each.verdict for case, each in found.items()} == dict.fromkeys(found, "match")


@needs("transformers", "PIL")
@pytest.mark.parametrize(("processor", "name"), cases_of(WRONG))
def test_mistakes_are_named(judged, processor, name):
    found = {case: (judged(processor, name, make()), words) for case, (make, words) in WRONG[processor, name].items()}
    assert {case: each.verdict for case, (each, _) in found.items()} == dict.fromkeys(found, "wrong")
    said = {case: [cause.says for cause in each.causes] for case, (each, _) in found.items()}
    assert {case: says for case, says in said.items() if len(says) != 1 or found[case][1] not in says[0]} == {}


# -- the command -------------------------------------------------------------------------------------------------------


def command(*words):
    done = run("preprocess", *words)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def given(tmp_path):
    """A checkpoint, a picture, and a right dump of it."""
    transformers = pytest.importorskip("transformers")
    save(transformers, "clip", tmp_path)
    FILES["wide.png"](tmp_path / "wide.png")
    np.save(tmp_path / "right.npy", clip(wide()))
    return tmp_path


@needs("transformers", "PIL")
def test_the_command_says_what_is_wrong(given):
    checkpoint, picture = given / "clip", given / "wide.png"
    code, said = command(checkpoint, picture, "--candidate", given / "right.npy")
    assert code == 0
    assert said.startswith("MATCH")
    np.savez(given / "two.npz", other=np.zeros(3, np.float32), pixel_values=clip(wide())[::-1])
    code, said = command(checkpoint, picture, "--candidate", given / "two.npz", "-o", given / "found.json")
    assert code == 1
    found = json.loads((given / "found.json").read_text())
    assert (found["verdict"], found["name"], found["causes"][0]["step"]) == ("wrong", "pixel_values", "channels")
    assert "in the order BGR" in said


@needs("transformers", "PIL")
def test_what_cannot_be_read_is_said_in_a_line(given):
    right, checkpoint, picture = given / "right.npy", given / "clip", given / "wide.png"
    (given / "empty").mkdir()
    (given / "broken").mkdir()
    (given / "broken/preprocessor_config.json").write_text('{"image_processor_type": "None"}')
    (given / "text.png").write_text("no picture")
    (given / "mute.wav").write_bytes(b"RIFF\0\0\0\0WAVEdata\0\0\0\0")
    np.savez(given / "two.npz", a=np.zeros(3), b=np.zeros(3))
    np.save(given / "none.npy", np.zeros((0, 3)))
    cases = {
        (given / "empty", picture, right): "has no preprocessor_config.json",
        (given / "broken", picture, right): "transformers cannot load its processor",
        (checkpoint, given / "text.png", right): "cannot identify image file",
        (checkpoint, given / "mute.wav", right): "mute.wav: no sound in it",
        (checkpoint, given / "lacking.png", right): "lacking.png: no such file",
        (checkpoint, picture, given / "lacking.npy"): "lacking.npy: no such file",
        (checkpoint, picture, given / "two.npz"): "holds several tensors; give --name with one of a, b",
        (checkpoint, picture, given / "none.npy"): "none is empty",
        (checkpoint, picture, picture): "is of no kind that is read",
    }
    for (folder, file, dump), words in cases.items():
        code, said = command(folder, file, "--candidate", dump)
        assert (code, words in " ".join(said.split()), "Traceback" in said) == (2, True, False), said


@needs("transformers", "PIL")
def test_nothing_in_a_checkpoint_is_run(given):
    config = json.loads((given / "clip/preprocessor_config.json").read_text())
    config |= {"auto_map": {"AutoImageProcessor": "own.Own"}, "image_processor_type": "Own"}
    (given / "clip/preprocessor_config.json").write_text(json.dumps(config))
    (given / "clip/own.py").write_text(f"open({str(given / 'ran')!r}, 'w')\nclass Own: pass\n")
    code, _ = command(given / "clip", given / "wide.png", "--candidate", given / "right.npy")
    assert code == 2
    assert not (given / "ran").exists()


@needs("transformers", "PIL")
def test_values_that_are_not_finite_are_a_cause(judged):
    found = judged("clip", "wide.png", np.where(np.arange(64) == 5, np.nan, clip(wide())))
    assert (found.verdict, found.causes[0].says) == ("wrong", "192 of 12288 values are NaN or Inf")


@needs("transformers", "PIL")
def test_what_nothing_explains_is_wrong_where_it_is(judged):
    rows = np.arange(64)[:, None]
    found = judged("clip", "wide.png", np.where(rows > 50, 0.3 * clip(wide()) ** 2, clip(wide())))
    assert (found.verdict, list(found.causes)) == ("wrong", [])
    assert "row 51 to 63 of 64" in found.where


@needs("transformers", "PIL")
def test_what_explains_a_part_is_said_with_what_it_leaves(judged):
    rough = clip(curved(wide(), 2.2))
    rough[:, 20] = 0.1
    found = judged("clip", "wide.png", rough)
    assert (found.verdict, list(found.causes)) == ("wrong", [])
    assert "of it is taken (gamma)" in found.partly[0]
    assert 0 < found.partly[1] < found.error / 2
    assert "row 20 of 64 hold one value" in found.where


@needs("transformers", "PIL")
def test_noise_is_said_to_look_like_noise(judged):
    level = 1 / 255 / CLIP[1].reshape(3, 1, 1)
    noise = 5 * level * np.random.default_rng(7).standard_normal((3, 64, 64))
    found = judged("clip", "wide.png", clip(wide()) + noise)
    assert (found.verdict, list(found.causes)) == ("wrong", [])
    assert "noise of 4.9" in found.noise
    assert judged("clip", "wide.png", clip(wide().filter(ImageFilter.MedianFilter(3)))).noise is None


@needs("transformers", "PIL")
def test_what_a_picture_cannot_show_is_said(judged, monkeypatch):
    monkeypatch.setitem(FILES, "plain.png", lambda path: Image.new("RGB", (180, 130), (90, 90, 90)).save(path))
    found = judged("clip", "plain.png", clip(Image.new("RGB", (180, 130), (90, 90, 90))))
    assert found.verdict == "match"
    assert any("resized by bilinear" in each for each in found.unseen)
