"""What was done to each value by itself: another level for each level, a mixture of the three channels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Said = tuple[str, str, Array]  # the step, what it says, the levels that it makes of a run's
SHOWN = (0, 64, 128, 192, 255)
MOST = 256
UNRELATED = 0.1  # the most that noise goes with what is beside it
GREYS = 0.3  # of what colour is off by, the most of brightness where colour alone is wrong
ALIKE = 1.01  # levels between two curves that are called the same
LUMAS = (("BT.601", (0.299, 0.587, 0.114)), ("BT.709", (0.2126, 0.7152, 0.0722)), ("the mean", (1 / 3, 1 / 3, 1 / 3)),
         ("BT.601 of BGR", (0.114, 0.587, 0.299)))  # fmt: skip


def of_levels(dump: Array, run: Array) -> Iterator[Said]:
    """Curves and mixtures that make a dump's levels [tile, channel, row, column] of a run's."""
    curves = [curve_of(dump[:, n], run[:, n]) for n in range(run.shape[1])]
    whole = curve_of(dump, run)
    for each in ([whole] * len(curves), curves):
        made = np.stack([curve[levels_of(run[:, n])] for n, curve in enumerate(each)], 1)
        yield "levels", f"each level is another: {curve_said(each, run)}", made
    if run.shape[1] == 3:
        mixed, offset = mixture_of(dump, run)
        made = np.einsum("ij,tjrc->tirc", mixed, run) + offset[:, None, None]
        made = np.clip(made, 0, 255) if dump.min() >= -0.01 and dump.max() <= 255.01 else made
        yield "colours", mixture_said(mixed, offset), made


def levels_of(x: Array) -> NDArray[np.intp]:
    """The levels of 0 to 255 that values are nearest to."""
    return np.clip(np.rint(x), 0, MOST - 1).astype(np.intp)


def curve_of(dump: Array, run: Array) -> Array:
    """What each level of a run is in a dump, on average; between levels that it has none of, a line."""
    at = levels_of(run).ravel()
    counts = np.bincount(at, minlength=MOST)
    sums = np.bincount(at, weights=dump.ravel(), minlength=MOST)
    has = np.flatnonzero(counts)
    return np.asarray(np.interp(np.arange(MOST), has, sums[has] / counts[has]))


def curve_said(curves: Sequence[Array], run: Array) -> str:
    """What curves of levels do, by a name where one has it."""
    seen = [np.unique(levels_of(run[:, n])) for n in range(run.shape[1])]
    names = [_name(curve, levels) for curve, levels in zip(curves, seen, strict=True)]
    if names[0] and len(set(names)) == 1:
        return names[0]
    if any(names):
        channels = "RGB" if len(names) == 3 else [str(n) for n in range(len(names))]
        return "; ".join(f"of {channel}, {name or _points(curve)}"
                         for channel, name, curve in zip(channels, names, curves, strict=True))  # fmt: skip
    return _points(curves[0])


def _points(curve: Array) -> str:
    return f"{', '.join(map(str, SHOWN))} become {', '.join(f'{curve[n]:.3g}' for n in SHOWN)}"


def _name(curve: Array, seen: NDArray[np.intp]) -> str:
    """What does the same to the levels that are there."""
    if len(seen) < 4:
        return ""
    for name, known in known_curves(curve, seen):
        if (np.abs(known[seen] - curve[seen]) <= ALIKE).all():
            return name
    return ""


def known_curves(curve: Array, seen: NDArray[np.intp]) -> Iterator[tuple[str, Array]]:
    """Curves that have a name, with the number that brings them nearest to one."""
    x = np.arange(float(MOST))
    yield "as it is", x
    yield "inverted, 255 less the level", 255 - x
    for bits in range(7, 0, -1):
        kept = 8 - bits
        yield f"{bits} bits are kept of 8", (x.astype(int) >> kept << kept).astype(float)
    low, high = _ends(curve, seen)
    if high > low:
        yield f"{low:.3g} to {high:.3g} are stretched to 0 to 255", np.clip((x - low) * 255 / (high - low), 0, 255)
    inside = seen[(seen > 8) & (seen < 247) & (curve[seen] > 2) & (curve[seen] < 253)]
    if len(inside) > 4:
        gamma = float(np.median(np.log(curve[inside] / 255) / np.log(inside / 255)))
        nice = round(gamma, 2) if abs(gamma - round(gamma, 2)) < 0.003 else gamma
        for each in (nice, gamma):
            yield f"the power {each:.4g} of it is taken (gamma)", 255 * (x / 255) ** each
    yield "sRGB is made linear", 255 * linear(x / 255)
    yield "linear light is made sRGB, which it was already", 255 * encoded(x / 255)


def _ends(curve: Array, seen: NDArray[np.intp]) -> tuple[float, float]:
    """The levels that become 0 and 255, where a line is between."""
    inside = seen[(curve[seen] > 0.6) & (curve[seen] < 254.4)]
    if len(inside) < 4:
        return 0.0, 0.0
    slope, offset = np.polyfit(inside, curve[inside], 1)
    if slope <= 0.05:
        return 0.0, 0.0
    low, high = -offset / slope, (255 - offset) / slope
    return tuple(float(round(n) if abs(n - round(n)) < 0.2 else n) for n in (low, high))  # type: ignore[return-value]


def linear(x: Array) -> Array:
    """sRGB's values of 0 to 1 as light."""
    return np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)


def encoded(x: Array) -> Array:
    """Light as sRGB's values."""
    return np.where(x <= 0.0031308, x * 12.92, 1.055 * np.maximum(x, 0) ** (1 / 2.4) - 0.055)


def mixture_of(dump: Array, run: Array, whole: Array | None = None) -> tuple[Array, Array]:
    """The matrix and the summand that make a dump's channels of a run's, by least squares; of what is left of a dump,
    where it is not cut off as a ``whole``."""
    x = run.transpose(1, 0, 2, 3).reshape(run.shape[1], -1)
    y = dump.transpose(1, 0, 2, 3).reshape(dump.shape[1], -1)
    levels = y if whole is None else whole.transpose(1, 0, 2, 3).reshape(dump.shape[1], -1)
    inside = ((levels > 0.5) & (levels < 254.5)).all(0)
    if inside.sum() > 100:
        x, y = x[:, inside], y[:, inside]
    full = np.concatenate([x, np.ones((1, x.shape[1]))])
    found = np.linalg.lstsq(full @ full.T, full @ y.T, rcond=None)[0].T
    return found[:, :3], found[:, 3]


def mixture_said(mixed: Array, offset: Array) -> str:
    """What a mixture of channels is called, or its numbers."""
    mixed, offset = mixed.round(4) + 0.0, offset.round(2) + 0.0  # no -0
    for name, matrix, add in known_mixtures():
        if np.abs(mixed - matrix).max() < 0.01 and np.abs(offset - add).max() < 1.5:
            return name
    if np.ptp(mixed, 0).max() < 0.01 and np.abs(offset).max() < 2:
        return f"the picture is made grey by {_row(mixed.mean(0))} of R, G and B"
    gains = np.diag(mixed)
    if np.abs(mixed - np.diag(gains)).max() < 0.01 and np.ptp(gains) < 0.01 and np.ptp(offset) < 1.5:
        return f"each level is {gains.mean():.4g} times itself, {offset.mean():+.3g} (contrast, brightness)"
    grey = _saturation(mixed)
    if grey is not None and np.abs(offset).max() < 2:
        return f"saturation is {grey:.3g} times as much"
    rows = "; ".join(f"{name} = {_row(row)} of R, G, B{f' {add:+.3g}' if abs(add) > 0.5 else ''}"
                     for name, row, add in zip("RGB", mixed, offset, strict=True))  # fmt: skip
    return f"channels are mixed: {rows}"


def _row(numbers: Array) -> str:
    return ", ".join(f"{each.round(3) + 0.0:.3f}" for each in numbers)


def _saturation(mixed: Array) -> float | None:
    """How much of a colour is kept beside its grey."""
    for _, luma in LUMAS[:3]:
        away = np.eye(3) - np.array(luma)
        by = float((mixed - np.array(luma)).ravel() @ away.ravel() / (away.ravel() @ away.ravel()))
        if np.abs(np.array(luma) + by * away - mixed).max() < 0.01:
            return by
    return None


def known_mixtures() -> Iterator[tuple[str, Array, Array]]:
    """Matrices of colour spaces, with what they are called."""
    zero = np.zeros(3)
    for name, luma in LUMAS:
        yield f"the picture is made grey, by the weights of {name}", np.array([luma] * 3), zero
    for name, matrix, add in SPACES:
        yield f"the channels are Y, Cb, Cr ({name}), not R, G, B", matrix, add
        yield f"the channels are Y, Cr, Cb ({name}), not R, G, B", matrix[[0, 2, 1]], add
        back = np.linalg.inv(matrix)
        yield f"R, G, B are taken for Y, Cb, Cr ({name}) and decoded", back, -back @ add
        for other, encoded_by, shift in SPACES:
            if other != name:
                yield (f"the picture is encoded as Y, Cb, Cr of {other} and decoded as of {name}", back @ encoded_by,
                       back @ (shift - add))  # fmt: skip


def _spaces() -> Iterator[tuple[str, Array, Array]]:
    """Y, Cb, Cr of R, G, B by what each standard weighs red and blue."""
    for name, red, blue in (("BT.601", 0.299, 0.114), ("BT.709", 0.2126, 0.0722), ("BT.2020", 0.2627, 0.0593)):
        luma = np.array([red, 1 - red - blue, blue])
        full = np.stack([luma, (np.eye(3)[2] - luma) / (2 - 2 * blue), (np.eye(3)[0] - luma) / (2 - 2 * red)])
        yield name, full, np.array([0.0, 128, 128])
        narrow = np.array([[219], [224], [224]]) / 255
        yield f"{name}, limited range", full * narrow, np.array([16.0, 128, 128])


SPACES = tuple(_spaces())


def noise_said(dump: Array, run: Array) -> str | None:
    """Whether what two differ by looks like noise: it goes with nothing beside it or in the picture."""
    left = dump - run
    size = float(left.std())
    rows, columns = left.shape[-2:]
    if size < 0.5 or rows < 16 or columns < 16:
        return None
    beside = (_goes_with(left[..., 1:], left[..., :-1]), _goes_with(left[..., 1:, :], left[..., :-1, :]))
    sharp = np.abs(np.diff(run, axis=-1, append=run[..., -1:]))
    if max(abs(each) for each in (*beside, _goes_with(left, run), _goes_with(np.abs(left), sharp))) > UNRELATED:
        return None
    return f"it looks like noise of {size:.3g} levels rms in each value: it goes with nothing in the picture"


def colour_alone(dump: Array, run: Array) -> str:
    """Whether brightness is right and colour alone is not, in words."""
    left = np.einsum("ij,tjrc->tirc", SPACES[0][1], dump - run).transpose(1, 0, 2, 3).reshape(3, -1).std(1)
    if left[0] > GREYS * left[1:].max():
        return ""
    return f"brightness differs by {left[0]:.2g} levels rms alone, blue by {left[1]:.2g} and red by {left[2]:.2g}"


def _goes_with(a: Array, b: Array) -> float:
    spread = a.std() * b.std()
    return float(((a - a.mean()) * (b - b.mean())).mean() / spread) if spread > 1e-12 else 0.0
