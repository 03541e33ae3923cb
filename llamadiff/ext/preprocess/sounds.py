"""What explains a sound's features in general: bands, frames, filters, windows, numbers that are searched for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.preprocess.changes import Change
from llamadiff.ext.preprocess.dials import Dial
from llamadiff.ext.preprocess.fitting import above_floor
from llamadiff.ext.preprocess.orders import nearest
from llamadiff.ext.preprocess.pictures import Reread
from llamadiff.ext.preprocess.samples import framed

Array = NDArray[Any]
FRAMES = 96  # that filters and windows are read off
COSINES = 5  # of a window
ORDERS = (1, 2, 4, 8)  # of filters
ROUNDS = 25
GROUPS = 4  # of bands, each of which shows noise that is white
EVEN = 4.0  # times as much power as in another group, the most of noise that is white
SOFT = 20  # the share of values, the softest, that show noise
EDGE = 4  # frames at either end, which look beyond the sound
SMALL = 0.01  # a weight of a mixture that is none
RUNS = 6  # of frames in order, the most that are told
TIMES, BANDS = range(-3, 4), range(-1, 2)  # frames and bands that a value may be mixed with
WINDOWS = (("boxcar: none is taken", (1.0,)), ("Hann's", (0.5, -0.5)), ("Hamming's", (0.54, -0.46)),
           ("Hamming's", (25 / 46, -21 / 46)), ("Blackman's", (0.42, -0.5, 0.08)),
           ("Hann's, taken twice", (0.375, -0.5, 0.125)),
           ("Blackman and Harris's", (0.35875, -0.48829, 0.14128, -0.01168)),
           ("Nuttall's", (0.3635819, -0.4891775, 0.1365995, -0.0106411)),
           ("flat-topped", (0.21557895, -0.41663158, 0.277263158, -0.083578947, 0.006947368)))  # fmt: skip


@dataclass(frozen=True)
class Heard:
    """A dump's features and the processor's, [band, frame]; how to ask the processor; what its spectrogram is given."""

    dump: Array
    truth: Array
    ask: Callable[[Mapping[str, Any]], Array | None]
    samples: Callable[[], tuple[Array, Mapping[str, Any]] | None]
    about: Mapping[str, Any]


def readings_of(heard: Heard) -> Iterator[Change | Reread]:
    """All of them but for numbers, what is cheap first."""
    yield from _without_logarithm(heard)
    yield from _by_bands(heard)
    yield from _by_frames(heard)
    yield from _in_order(heard)
    yield from _mixed(heard)
    given = heard.samples()
    if given is not None:
        yield from _of_spectrum(heard, *given)


def _planes(step: str, says: str, dump: Array, run: Array) -> Reread:
    return Reread(step, says, dump[None, None], run[None, None])


def _without_logarithm(heard: Heard) -> Iterator[Reread]:
    if heard.dump.min() >= 0 and np.ptp(heard.dump) > 0:
        least = max(float(heard.dump.max()) * 1e-30, 1e-30)
        yield _planes("logarithm", "no logarithm is taken", np.log10(np.maximum(heard.dump, least)), heard.truth)


def _by_bands(heard: Heard) -> Iterator[Reread]:
    """A gain and an offset of each band, or an offset alone."""
    gains, offsets, shifts = (np.ones(len(heard.dump)), np.zeros(len(heard.dump)), np.zeros(len(heard.dump)))
    for band, (y, x) in enumerate(zip(heard.dump, heard.truth, strict=True)):
        gains[band], offsets[band], shifts[band] = _line(x, y)
    most = np.abs(heard.dump.mean(1)).max()
    if most < 1e-3:
        says = "each band's mean is taken off"
        if np.abs(heard.dump.std(1) - 1).max() < 1e-2:
            says = "each band is normalized to mean 0 and deviation 1"
    else:
        says = f"each band has a gain of its own, of {gains.min():.4g} to {gains.max():.4g}, and a summand"
    yield _planes("normalization", says, heard.dump, heard.truth * gains[:, None] + offsets[:, None])
    says = f"each band is louder or softer by its own: {shifts.min():+.4g} to {shifts.max():+.4g} of the features"
    yield _planes("scale", says, heard.dump, heard.truth + shifts[:, None])


def _by_frames(heard: Heard) -> Iterator[Reread]:
    lines = [_line(x, y) for x, y in zip(heard.truth.T, heard.dump.T, strict=True)]
    gains, offsets, shifts = (np.array(each) for each in zip(*lines, strict=True))
    says = "each frame has a gain and a summand of its own"
    if np.abs(heard.dump.mean(0)).max() < 1e-3:
        says = "each frame's mean is taken off"
    yield _planes("scale", f"each frame is louder or softer by its own: {shifts.min():+.4g} to {shifts.max():+.4g} "
                  "of the features", heard.dump, heard.truth + shifts)  # fmt: skip
    yield _planes("normalization", says, heard.dump, heard.truth * gains + offsets)


def _line(x: Array, y: Array) -> tuple[float, float, float]:
    """The gain and offset that make y of x, and the offset without a gain."""
    inside = (x > x.min() + 1e-6) & (y > y.min() + 1e-6)
    a, b = (x[inside], y[inside]) if inside.sum() > 4 else (x, y)
    spread = a.var()
    gain = float(((a - a.mean()) * (b - b.mean())).mean() / spread) if spread > 1e-12 else 1.0
    return gain, float(b.mean() - gain * a.mean()), float(np.median(b - a))


def _mixed(heard: Heard) -> Iterator[Reread]:
    """Each value a weighted sum of those of frames and bands around it."""
    bands, frames = (np.arange(n) for n in heard.truth.shape)
    places, edge = [(band, frame) for band in BANDS for frame in TIMES], slice(max(TIMES), -max(TIMES))
    parts = [heard.truth[np.clip(bands + band, 0, bands[-1])][:, np.clip(frames + frame, 0, frames[-1])][:, edge]
             for band, frame in places]  # fmt: skip
    dump = heard.dump[:, edge]
    table = np.stack([*(part.ravel() for part in parts), np.ones(dump.size)], 1)
    squares, by = table.T @ table, table.T @ dump.ravel()
    found, some = np.zeros(len(squares)), np.ones(len(squares), bool)
    for _ in range(2):  # again with those alone that count
        found[some] = np.linalg.lstsq(squares[some][:, some], by[some], rcond=None)[0]
        some = np.abs(found) > SMALL
        found[~some] = 0
    words = [f"{weight:.3g} of {_away_said(*place)}" for weight, place in zip(found, places, strict=False) if weight]
    yield _planes("frames", f"values are mixed: {', '.join(words[:RUNS])}", dump, (table @ found).reshape(dump.shape))


def _away_said(band: int, frame: int) -> str:
    words = [f"{abs(n)} {name}{'s' if abs(n) > 1 else ''} {'later' if n > 0 else 'before'}"
             for n, name in ((frame, "frame"), (band, "band")) if n]  # fmt: skip
    return " and ".join(words) or "its own"


def _in_order(heard: Heard) -> Iterator[Reread]:
    """Frames, or bands, of the processor's in another order."""
    for step, axis in (("frame", 1), ("band", 0)):
        dump, truth = (np.moveaxis(x, axis, 0) for x in (heard.dump, heard.truth))
        chosen = np.array(nearest(dump, truth))
        same = (dump == truth).all(1) | (np.abs(dump - truth).max(1) < 1e-3)
        chosen = np.where(same, np.arange(len(chosen)), chosen)
        quiet = np.ptp(truth[chosen], axis=1) < 1e-6  # frames of silence are all alike
        if len(set(chosen.tolist())) > len(chosen) // 8 and (chosen != np.arange(len(chosen)))[~quiet].any():
            says = f"{step}s are in other places: of {len(chosen)}, {_order_said(_runs(chosen, quiet))}"
            yield _planes(f"{step}s", says, heard.dump, np.moveaxis(truth[chosen], 0, axis))


def _order_said(runs: Sequence[tuple[int, int, tuple[int, int]]]) -> str:
    """What stands where, and what is left out between."""
    gaps = [b for (_, a), (b, _) in zip([of for _, _, of in runs], [of for _, _, of in runs[1:]], strict=False)
            if b == a + 2]  # fmt: skip
    if len(gaps) > 2 and len(gaps) >= len(runs) - 2:
        return f"the processor's {', '.join(str(each - 1) for each in gaps[:RUNS])} and so on are missing"
    other = [f"{_from_to(a, b)} {'are' if b > a else 'is'} the processor's {_from_to(*of)}"
             for a, b, of in runs if (a, b) != of]  # fmt: skip
    return "; ".join(other[:RUNS]) + ("; and so on" if len(other) > RUNS else "")


def _from_to(a: int, b: int) -> str:
    return f"{a}" if a == b else f"{a} to {b}"


def _runs(chosen: Array, quiet: Array) -> list[tuple[int, int, tuple[int, int]]]:
    """First and last place of what follows in one step, and what stands there."""
    runs = list[tuple[int, int, tuple[int, int]]]()
    for place, of in enumerate(chosen.tolist()):
        if quiet[place]:
            continue
        if runs:
            a, b, (low, high) = runs[-1]
            step = (high - low) / (b - a) if b > a else None
            if place == b + 1 and (step is None or abs(of - high - step) < 1e-9):
                runs[-1] = (a, place, (low, of))
                continue
        runs.append((place, place, (of, of)))
    return runs


Powers = tuple[Array, Array, int, Array, Array, Array, Array]


def _powers(heard: Heard, samples: Array, how: Mapping[str, Any]) -> Powers | None:
    """The window, the bands of bins, the FFT's size, frames of samples, their powers [frame, band], the logarithms of
    those that a dump was made of, and where neither is cut off below."""
    window, mel = np.array(how["window"]), np.array(how["mel"])
    size = how.get("fft_length") or how["frame_length"]
    if mel.ndim != 2 or len(window) != how["frame_length"] or len(mel) != size // 2 + 1:
        return None
    frames = framed(samples, len(window), how["hop_length"], how.get("center", True), how.get("pad_mode", "reflect"))
    count = min(len(frames), heard.truth.shape[1])
    frames = frames[:count]
    power = np.maximum((np.abs(np.fft.rfft(frames * window, size, axis=1)) ** 2) @ mel, 1e-10)  # [frame, band]
    own, dump = heard.truth.T[:count], heard.dump.T[:count]
    inside = above_floor(own, dump)
    if inside.sum() < 1000:
        return None
    gain, offset = np.polyfit(np.log10(power)[inside], own[inside], 1)
    return window, mel, size, frames, power, (dump - offset) / gain, inside


def noise_said(heard: Heard) -> str | None:
    """Whether white noise was added to samples: what is soft has so much more power, in each band by its width."""
    given = heard.samples()
    found = None if given is None else _powers(heard, *given)
    if found is None:
        return None
    window, mel, _, _, power, logs, inside = found
    area = mel.sum(0) * (window**2).sum()
    inside = inside & (power > 1e-9)
    inside[:EDGE] = inside[-EDGE:] = False
    more = (10.0 ** np.clip(logs, -30, 30) - power) / area
    parts = list[float]()
    for bands in np.array_split(np.arange(len(mel[0])), GROUPS):
        there = inside[:, bands]
        if there.sum() < 100:
            return None
        order = np.argsort((power / area)[:, bands][there])[: max(50, there.sum() // SOFT)]
        parts.append(float(np.median(more[:, bands][there][order])))
    least, most = min(parts), max(parts)
    if least <= 0 or most > EVEN * least:
        return None
    return f"it looks like white noise of {np.sqrt(np.median(parts)):.2g} rms that was added to the samples (dither)"


def _of_spectrum(heard: Heard, samples: Array, how: Mapping[str, Any]) -> Iterator[Change | Reread]:
    """Filters of samples and windows, read off the powers of frames that sound."""
    found = _powers(heard, samples, how)
    if found is None:
        return
    window, mel, size, frames, _, logs, inside = found
    some = EDGE + np.argsort(-inside[EDGE:-EDGE].sum(1), kind="stable")[: 4 * FRAMES : 4]
    logs, there = logs[some], inside[some]
    fitting = (mel, size, logs, there)
    delayed = list[Array]()
    for late in range(max(ORDERS) + 1):
        moved = np.concatenate([np.zeros(late), samples[: len(samples) - late]])
        delayed.append(framed(moved, len(window), how["hop_length"], how.get("center", True),
                              how.get("pad_mode", "reflect"))[some] * window)  # fmt: skip
    yield from _filters(delayed, fitting)
    yield from _windows(frames[some], fitting)


Fitting = tuple[Array, int, Array, Array]  # bands of bins, the FFT's size, logarithms of powers, which are known


def _filters(delayed: Sequence[Array], fitting: Fitting) -> Iterator[Change]:
    """The filter of samples that makes powers what they are: of frames [frame, sample], each a sample later."""
    mel, size, logs, there = fitting
    spectra = [np.fft.rfft(each, size, axis=1) for each in delayed]
    power, wanted = np.abs(spectra[0]) ** 2, 10.0 ** np.clip(logs, -30, 30)
    angle = 2 * np.pi * np.arange(len(mel)) / size
    for order in ORDERS:
        parts = [((power * np.cos(n * angle)) @ mel) / wanted for n in range(order + 1)]
        table = np.stack([part[there] for part in parts], 1)
        start = factored(np.linalg.lstsq(table, np.ones(len(table)), rcond=None)[0])
        if start is None:
            continue
        weights = _solved(spectra[: order + 1], start, fitting)
        for digits in (2, 4):
            given = [round(float(each), digits) for each in weights]
            step, says = "filter", f"samples go through a filter: {', '.join(f'{each:.4g}' for each in given)}"
            if order == 1 and abs(given[0] - 1) < 0.01:
                step, says = "pre-emphasis", _emphasis_said(-given[1] / given[0])
            yield Change(step, says, {"samples": {"filter": given}})


def _emphasis_said(share: float) -> str:
    return f"samples are emphasized: {share:.4g} of the one before is taken off each"


def factored(cosines: Array) -> Array | None:
    """The filter, the first weight 1, whose response squared is a sum of cosines; None where there is none."""
    half = cosines[1:] / 2
    roots = np.roots(np.concatenate([half[::-1], cosines[:1], half]))
    if len(roots) != 2 * len(half):
        return None
    return np.asarray(np.real(np.poly(sorted(roots, key=abs)[: len(half)])), np.float64)


def _solved(spectra: Sequence[Array], start: Array, fitting: Fitting) -> Array:
    """Weights of spectra [frame, bin] whose sum has the powers in bands that are wanted."""
    mel, _, logs, there = fitting
    found, there = start.copy(), there.copy()
    for tried in range(ROUNDS):
        total = sum(c * each for c, each in zip(found, spectra, strict=True))
        power = np.maximum((np.abs(total) ** 2) @ mel, 1e-20)
        if tried == ROUNDS // 3:  # frames that are off by themselves, as where a sound ends
            away = np.log(10) * logs - np.log(power)
            away = np.where(there, np.abs(away - np.median(away[there])), 0)
            each = away.sum(1) / np.maximum(there.sum(1), 1)
            there[each > 4 * np.median(each[there.any(1)]) + 1e-6] = False
        slopes = [(2 * np.real(np.conj(total) * each) @ mel / power)[there] for each in spectra]
        table = np.stack([*slopes, np.ones(there.sum())], 1)
        left = np.log(10) * logs - np.log(power)
        left = (left - np.median(left[there]))[there]
        step = np.linalg.lstsq(table.T @ table + 1e-6 * len(left) * np.eye(len(found) + 1), table.T @ left,
                               rcond=None)[0][: len(found)]  # fmt: skip
        found = found + step * min(1.0, 0.3 / max(float(np.abs(step).max()), 1e-9))
    total = sum(c * each for c, each in zip(found, spectra, strict=True))
    louder = (logs - np.log10(np.maximum((np.abs(total) ** 2) @ mel, 1e-20)))[there]
    return np.asarray(found * 10.0 ** (np.median(louder) / 2))


def _windows(frames: Array, fitting: Fitting) -> Iterator[Change]:
    """The window, as a sum of cosines."""
    length = frames.shape[1]
    for symmetric in (False, True):
        at = 2 * np.pi * np.arange(length) / (length - 1 if symmetric else length)
        spectra = [np.fft.rfft(frames * np.cos(n * at), fitting[1], axis=1) for n in range(COSINES)]
        found = _solved(spectra, np.array([0.5, -0.5, *[0.0] * (COSINES - 2)]), fitting)
        found = found / found.dot((-1.0) ** np.arange(COSINES))  # 1 in the middle
        name, cosines = _window_said(found)
        yield Change("window", f"the window is {name}, {'symmetric' if symmetric else 'periodic'}",
                     {"window": {"cosines": cosines, "symmetric": symmetric}})  # fmt: skip


def _window_said(cosines: Array) -> tuple[str, list[float]]:
    for name, known in WINDOWS:
        full = np.array([*known, *[0.0] * (COSINES - len(known))])
        if np.abs(full / full.dot((-1.0) ** np.arange(COSINES)) - cosines).max() < 3e-3:
            return name, [*known]
    return f"a sum of cosines of {', '.join(f'{each:.4g}' for each in cosines)}", [float(each) for each in cosines]


def _frames_late(heard: Heard) -> int:
    """By how many frames a dump is later than the processor's, where the two agree best."""
    count = heard.truth.shape[1]
    sounding = np.flatnonzero(np.ptp(heard.truth, axis=0) > 1e-6)
    if len(sounding) < 16:
        return 0
    most = min(len(sounding) - 8, count - 1)
    apart = dict[int, float]()
    for late in range(-most, most + 1):
        here = sounding[(sounding + late >= 0) & (sounding + late < count)]
        if len(here) >= max(8, len(sounding) // 4):
            apart[late] = float(np.abs(heard.dump[:, here + late] - heard.truth[:, here]).mean())
    return min(apart, key=lambda each: (apart[each], abs(each)), default=0)


def dials_of(about: Mapping[str, Any], heard: Heard) -> Iterator[Dial]:
    """Steps with a number, from samples to the floor."""
    config, samples = about["config"], about["samples"]
    hop = config.get("hop_length") or 160
    around = _frames_late(heard) * hop
    yield Dial("pre-emphasis", _emphasis_said, lambda n: {"samples": {"filter": [1.0, -n]}},
               (-0.9, -0.5, 0.3, 0.6, 0.8, 0.9, 0.97, 0.995))  # fmt: skip
    yield Dial("pre-emphasis", lambda n: f"frames are emphasized: {n:.4g} of the sample before is taken off each",
               lambda n: {"spectrogram": {"preemphasis": n}}, (0.3, 0.6, 0.8, 0.9, 0.97, 0.995))  # fmt: skip
    yield Dial("place", lambda n: f"the sound begins {abs(n):.0f} samples {'late' if n > 0 else 'early'}",
               lambda n: {"samples": {"moved": int(n)}}, range(around - 3 * hop, around + 3 * hop + 1, hop // 4),
               whole=True)  # fmt: skip
    yield Dial("speed", lambda n: f"the sound is {n:.6g} times as fast",
               lambda n: {"samples": {"faster": n}},
               (0.5, 0.75, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.005, 1.01, 1.02, 1.05, 1.1, 1.25, 1.333, 1.5, 2.0),
               )  # fmt: skip
    yield Dial("scale", lambda n: f"samples are clipped at {n:.4g}", lambda n: {"samples": {"cut": n}},
               (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9))  # fmt: skip
    yield Dial("scale", lambda n: f"samples are rounded to {n:.0f} steps of the largest value there may be",
               lambda n: {"samples": {"steps": int(n)}}, (7, 15, 31, 63, 127, 128, 255, 511, 1023, 2047), whole=True,
               )  # fmt: skip
    yield Dial("scale", lambda n: f"{n:.4g} is added to each sample", lambda n: {"samples": {"more": n}},
               (-0.1, -0.01, -0.001, -0.0001, 0.0001, 0.001, 0.01, 0.1))  # fmt: skip
    yield Dial("padding", lambda n: f"only the first {n:.0f} of {samples} samples are there",
               lambda n: {"samples": {"kept": int(n)}},
               [round(samples * share) for share in (0.1, 0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)], whole=True,
               )  # fmt: skip
    yield Dial("power", lambda n: f"magnitudes are taken to the power {n:.4g} before they are summed in bands",
               lambda n: {"spectrogram": {"power": n}}, (0.5, 0.75, 1.0, 1.5, 2.5, 3.0, 4.0))  # fmt: skip
    half = config.get("sampling_rate", 16000) / 2
    yield Dial("mel bins", lambda n: f"the bands begin at {n:.5g} Hz", lambda n: {"mel": {"min_frequency": n}},
               (0.0, 10.0, 20.0, 50.0, 64.0, 100.0, 125.0, 200.0, 300.0))  # fmt: skip
    yield Dial("mel bins", lambda n: f"the bands end at {n:.6g} Hz", lambda n: {"mel": {"max_frequency": n}},
               [half * share for share in (0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.05, 1.2, 1.4)],
               )  # fmt: skip
    size = config.get("n_fft")
    if size:
        yield Dial("window", lambda n: f"the window is {n:.0f} samples long, in the middle of {size}",
                   lambda n: {"window": {"cosines": [0.5, -0.5], "inner": int(n)}},
                   [round(size * share) for share in (0.3, 0.4, 0.5, 0.6, 0.64, 0.7, 0.8, 0.9, 0.98)], whole=True,
                   )  # fmt: skip
    yield Dial("floor", lambda n: f"the least power is {10**n:.3g}", lambda n: {"spectrogram": {"mel_floor": 10.0**n}},
               range(-14, 2))  # fmt: skip
    yield Dial("floor", lambda n: f"{10**n:.3g} is added to powers, not the least of them",
               lambda n: {"spectrogram": {"sums": 10.0**n}}, range(-14, 2))  # fmt: skip
    yield Dial("clamp", lambda n: f"values are clamped to {n:.4g} below the largest, not 8",
               lambda n: {"clamp": str(n)}, (1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 16, 20))  # fmt: skip


def changes_of() -> Sequence[Change]:
    """Samples in another order, or companded."""
    return (
        Change("axes", "the sound is reversed", {"samples": {"reversed": True}}),
        Change("padding", "silence comes before the sound, not behind it", {"samples": {"last": True}}),
        Change("padding", "the sound is repeated, not padded with silence", {"samples": {"repeated": True}}),
        Change("scale", "samples are companded (mu = 255)", {"samples": {"companded": 255.0}}),
    )
