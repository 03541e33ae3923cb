"""Preprocessing as an engine's author writes it, with Pillow and NumPy; it shares nothing with llamadiff."""

from __future__ import annotations

import wave

import numpy as np
import pytest

pytest.importorskip("PIL")  # which they resize with

from PIL import Image

CLIP = (np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711]))
HALF = (np.full(3, 0.5), np.full(3, 0.5))
IMAGENET = (np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225]))
RESAMPLE = Image.Resampling


def photograph(width=180, height=130, seed=3):
    """A picture with edges, texture and slopes, no two parts of which are alike."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    red = 128 + 90 * np.sin(x / 7 + y / 23) + 30 * random.standard_normal((height, width))
    green = 255 * x / width * (0.5 + 0.5 * ((x // 9 + y // 5) % 2)) + 12 * random.standard_normal((height, width))
    blue = 200 - 150 * y / height + 40 * np.cos(y / 3) + 20 * random.standard_normal((height, width))
    values = np.stack([red, green, blue], -1)
    values[20:40, 30:90] = (250, 240, 20)
    values[70:75, :] = (5, 10, 0)
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def shortest(image, size, filter_=RESAMPLE.BICUBIC):
    """Resized so that the shorter side has a size."""
    width, height = image.size
    if width < height:
        return image.resize((size, int(size * height / width)), filter_)
    return image.resize((int(size * width / height), size), filter_)


def cropped(image, size, dx=0, dy=0):
    """The centre of a picture."""
    left, top = int((image.width - size) / 2.0) + dx, int((image.height - size) / 2.0) + dy
    return image.crop((left, top, left + size, top + size))


def normalized(image, mean_std=CLIP, factor=1 / 255):
    """[channel, row, column] of a picture."""
    mean, std = mean_std
    values = (np.asarray(image, np.float32) * np.float32(factor) - mean.astype(np.float32)) / std.astype(np.float32)
    return values.transpose(2, 0, 1).astype(np.float32)


def clip(image, size=64, filter_=RESAMPLE.BICUBIC, mean_std=CLIP):
    """CLIP's steps."""
    return normalized(cropped(shortest(image, size, filter_), size), mean_std)


def linear(image, width, height, down=False):
    """Bilinear, pixel by pixel from the four beside it, as is written without a library."""
    source = np.asarray(image, np.float64)
    ys = np.clip((np.arange(height) + 0.5) * source.shape[0] / height - 0.5, 0, source.shape[0] - 1)
    xs = np.clip((np.arange(width) + 0.5) * source.shape[1] / width - 0.5, 0, source.shape[1] - 1)
    y0, x0 = np.floor(ys).astype(int), np.floor(xs).astype(int)
    y1, x1 = np.minimum(y0 + 1, source.shape[0] - 1), np.minimum(x0 + 1, source.shape[1] - 1)
    fy, fx = (ys - y0)[:, None, None], (xs - x0)[None, :, None]
    top = source[y0][:, x0] * (1 - fx) + source[y0][:, x1] * fx
    bottom = source[y1][:, x0] * (1 - fx) + source[y1][:, x1] * fx
    values = top * (1 - fy) + bottom * fy
    return Image.fromarray((values if down else np.rint(values)).astype(np.uint8))


def patched(values, patch=14, merge=2, times=2):
    """Qwen2-VL's patches of a picture [channel, row, column], written as loops."""
    _, height, width = values.shape
    rows = []
    for by in range(0, height // patch, merge):
        for bx in range(0, width // patch, merge):
            for y in range(by, by + merge):
                for x in range(bx, bx + merge):
                    one = values[:, y * patch : (y + 1) * patch, x * patch : (x + 1) * patch]
                    rows.append(np.repeat(one[:, None], times, 1).ravel())
    return np.stack(rows)


def tone(rate=16000, seconds=2.0, seed=5):
    """A sound whose pitch rises, with noise, and a pause."""
    random = np.random.default_rng(seed)
    t = np.arange(int(rate * seconds)) / rate
    sound = 0.4 * np.sin(2 * np.pi * (200 + 900 * t) * t) + 0.1 * np.sin(2 * np.pi * 3100 * t)
    sound += 0.02 * random.standard_normal(len(t))
    sound[int(0.9 * rate) : int(1.1 * rate)] *= 0.01
    return sound


def write_wav(path, channels, rate=16000):
    """16-bit samples of one or two channels."""
    samples = np.clip(np.rint(np.stack(channels, -1) * 32767), -32768, 32767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return samples.astype(np.float64) / 32768


def slaney(n_mels=80, n_fft=400, rate=16000, top=8000.0, normed=True):
    """Slaney's bands, as librosa's docs state them: [frequency, band]."""

    def hertz(mel):
        return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))

    most = 15 + np.log(top / 1000) / (np.log(6.4) / 27)
    edges = hertz(np.linspace(0, most, n_mels + 2))
    at = np.linspace(0, rate / 2, n_fft // 2 + 1)
    up = (at[:, None] - edges[None, :-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[None, 2:] - at[:, None]) / (edges[2:] - edges[1:-1])
    bands = np.maximum(0, np.minimum(up, down))
    return bands * (2 / (edges[2:] - edges[:-2])) if normed else bands


def htk(n_mels=80, n_fft=400, rate=16000):
    """HTK's bands, normalized by their area."""
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), n_mels + 2) / 2595) - 1)
    at = np.linspace(0, rate / 2, n_fft // 2 + 1)
    up = (at[:, None] - edges[None, :-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[None, 2:] - at[:, None]) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(up, down)) * (2 / (edges[2:] - edges[:-2]))


def whisper(samples, seconds=5, n_fft=400, hop=160, bands=None, window=None, power=2, pad="reflect", log=np.log10,
            clamp=8.0, finish=lambda x: (x + 4) / 4, dtype=np.float64):  # fmt: skip
    """Whisper's features [band, frame], as its authors wrote them."""
    whole = np.zeros(seconds * 16000)
    whole[: len(samples)] = samples[: len(whole)]
    padded = np.pad(whole, n_fft // 2, mode=pad).astype(dtype)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n_fft) / n_fft) if window is None else window
    count = len(whole) // hop
    frames = np.stack([padded[n * hop : n * hop + n_fft] * window for n in range(count)]).astype(dtype)
    spectrum = np.abs(np.fft.rfft(frames, axis=1)) ** power
    mel = np.maximum(spectrum @ (slaney(n_fft=n_fft) if bands is None else bands), 1e-10)
    logs = log(mel).T
    logs = np.maximum(logs, logs.max() - clamp) if clamp else logs
    return finish(logs).astype(np.float32)


def llava_next(image, side=48, grid=(96, 96), filter_=RESAMPLE.BICUBIC, fill=(0, 0, 0), corner=False):
    """LLaVA-NeXT's thumbnail and tiles [tile, channel, row, column] of one resolution (width, height)."""
    scale = min(grid[0] / image.width, grid[1] / image.height)
    inner = (min(-int(-image.width * scale // 1), grid[0]), min(-int(-image.height * scale // 1), grid[1]))
    canvas = Image.new("RGB", grid, fill)
    place = (0, 0) if corner else ((grid[0] - inner[0]) // 2, (grid[1] - inner[1]) // 2)
    canvas.paste(image.resize(inner, filter_), place)
    tiles = [image.resize((side, side), filter_)]
    for y in range(0, grid[1], side):
        tiles += [canvas.crop((x, y, x + side, y + side)) for x in range(0, grid[0], side)]
    return np.stack([normalized(tile) for tile in tiles])


def smolvlm(image, longest=120, side=40, filter_=RESAMPLE.LANCZOS):
    """SmolVLM's tiles, and the whole picture last; of a picture that is wider than high."""
    image = image.resize((longest, int(longest / (image.width / image.height))), filter_)
    width = -(-image.width // side) * side
    height = -(-int(width / (image.width / image.height)) // side) * side
    image = image.resize((width, height), filter_)
    tiles = []
    for y in range(0, height, side):
        tiles += [image.crop((x, y, x + side, y + side)) for x in range(0, width, side)]
    tiles.append(image.resize((side, side), filter_))
    return np.stack([normalized(tile, HALF) for tile in tiles])
