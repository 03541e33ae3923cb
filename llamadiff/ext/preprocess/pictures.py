"""What explains a picture's planes in general: curves, colours, neighbourhoods, where pixels come from, numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.preprocess import maps, pixels
from llamadiff.ext.preprocess.changes import Change
from llamadiff.ext.preprocess.curves import curve_said, known_curves, levels_of, mixture_of, mixture_said, of_levels
from llamadiff.ext.preprocess.dials import Dial
from llamadiff.ext.preprocess.filters import OF_PILLOW, SUPPORT

Array = NDArray[Any]
KNOTS = (0, 8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 255)
RINGS = tuple(product(range(5), range(5)))
PLAIN = {"resize": {"round": "not", "clip": False}}  # a resize that is a sum and no more
CURVED = 0.5  # of what a dump is off by, the most that a curve leaves where it is worth a closer look
MOST_PIXELS = 20_000  # that a curve is read off
LEVELS = 255.0
FULL = 4.0  # levels by which the knots of a pixel may miss the whole, as at a border
USUAL = (64, 96, 128, 160, 192, 224, 240, 256, 288, 320, 336, 378, 384, 392, 448, 480, 490, 512, 560, 640, 672, 720,
         768, 800, 896, 960, 980, 1024, 1080, 1120, 1280, 1344, 1536, 1600, 1920, 2048)  # fmt: skip
MIXTURES = 8  # times that a mixture is read off what the last one leaves
PLACED = 0.98  # how alike two tiles are whose pixels come from the same places
FIRSTS = 48  # sizes that are tried between the least and the picture's
AGAIN, FAR = 3, 4.0  # times that a curve is read off without what is so many times as far off as most
NEAR = 6.0  # levels between a curve of some knots and one that has a name


@dataclass(frozen=True)
class Reread:
    """A dump, as far as it can be compared, and what should be it; what that is, and in which step."""

    step: str
    says: str
    dump: Array
    run: Array


@dataclass(frozen=True)
class Seen:
    """A dump's planes in levels, the processor's, and how to ask the processor: None for what it cannot do."""

    dump: Array
    truth: Array
    ask: Callable[[Mapping[str, Any]], Array | None]
    source: Callable[[], Array]
    about: Mapping[str, Any]


def readings_of(seen: Seen) -> Iterator[Change | Reread]:
    """All of them, what is cheap first; a Reread's planes are in levels."""
    for step, says, run in of_levels(seen.dump, seen.truth):
        yield Reread(step, says, seen.dump, run)
        yield Reread(step, says, seen.dump, np.clip(np.rint(run), 0, 255))
    yield from _mixed_before(seen)
    yield from _around(seen)
    yield from _curved_before(seen)


def _mixed_before(seen: Seen) -> Iterator[Change]:
    if seen.truth.shape[1] == 3:
        mixed, offset = mixture_of(seen.dump, seen.truth)
        for _ in range(MIXTURES):
            change = Change("colours", mixture_said(mixed, offset),
                            {"picture": {"matrix": mixed.tolist(), "offset": offset.tolist()}})  # fmt: skip
            yield change
            run = seen.ask(change.request)
            if run is None or run.shape != seen.dump.shape:
                return
            more, add = mixture_of(seen.dump - run, seen.truth, seen.dump)
            mixed, offset = mixed + more, offset + add


def _curved_before(seen: Seen) -> Iterator[Change]:
    """Each level another, and then resized: how much of the picture is near each of some levels tells the curve."""
    levels = levels_of(seen.truth)
    some = [np.unique(levels[:, n]) for n in range(seen.truth.shape[1])]
    for knots in (KNOTS, tuple(range(256))):
        found = _curves(seen, knots)
        if found is None:
            return
        curves, left = found
        for named in _named([np.mean(curves, 0)], [np.unique(levels)]):
            yield _curved(f"{named[0][0]}", [named[0][1]] * len(curves))
        for named in _named(curves, some):
            said = "; ".join(f"of channel {n}, {name}" for n, (name, _) in enumerate(named))
            yield _curved(said, [curve for _, curve in named])
        if knots != KNOTS:
            yield _curved(curve_said(curves, seen.truth), [np.rint(curve) for curve in curves])
        if left > CURVED * np.sqrt(np.mean((seen.dump - seen.truth) ** 2)):
            return  # no curve does much


def _curves(seen: Seen, knots: Sequence[int]) -> tuple[list[Array], float] | None:
    """What levels become in each channel by least squares, and what that leaves, rms."""
    every = max(1, seen.dump[:, 0].size // MOST_PIXELS)
    shares = []
    for low, peak, high in zip((knots[0], *knots), knots, (*knots[1:], knots[-1]), strict=False):
        share = seen.ask({"picture": {"hat": [low, peak, high]}, **PLAIN})
        if share is None or share.shape != seen.dump.shape:
            return None
        shares.append((share / LEVELS).swapaxes(0, 1).reshape(share.shape[1], -1)[:, ::every].astype(np.float32))
    curves, left = list[Array](), 0.0
    for channel in range(seen.dump.shape[1]):
        table = np.stack([share[channel] for share in shares], 1).astype(np.float64)
        full = np.abs(table.sum(1) - 1) * LEVELS < FULL
        if full.sum() < 100:
            return None
        table, values = table[full], seen.dump[:, channel].ravel()[::every][full]
        found = _smoothly(table, values)
        for _ in range(AGAIN):  # without what is far off, which is something else
            off = np.abs(table @ found - values)
            near = off <= FAR * np.median(off) + 1
            found = _smoothly(table[near], values[near]) if near.sum() >= 100 else found
        left += float(np.sqrt(np.mean((table @ found - values) ** 2))) / seen.dump.shape[1]
        curves.append(np.interp(np.arange(256), knots, found))
    return curves, left


def _smoothly(table: Array, values: Array) -> Array:
    """Weights of a table's columns by least squares, no more bent than need be."""
    count = table.shape[1]
    bent = np.diff(np.eye(count), 2, axis=0) * 1e-3 * np.sqrt(len(values))
    return np.asarray(np.linalg.solve(table.T @ table + bent.T @ bent + 1e-9 * np.eye(count), table.T @ values))


def _named(curves: Sequence[Array], seen: Sequence[Array]) -> Iterator[list[tuple[str, Array]]]:
    """Each curve's nearest ones that have a name, the first of each, the second of each."""
    near = [sorted(((float(np.abs(known - curve)[levels].mean()), name, known)
                    for name, known in known_curves(curve, levels)), key=lambda each: each[0])
            for curve, levels in zip(curves, seen, strict=True)]  # fmt: skip
    for place in range(2):
        if all(len(each) > place and each[place][0] < NEAR for each in near):
            yield [(each[place][1], each[place][2]) for each in near]


def _curved(says: str, curves: Sequence[Array]) -> Change:
    return Change("levels", f"each level is another before the resize: {says}",
                  {"picture": {"curve": [np.clip(curve, 0, 255).round(4).tolist() for curve in curves]}})  # fmt: skip


def _around(seen: Seen) -> Iterator[Change | Reread]:
    """Each pixel a weighted sum of those around it: after the resize, or before it."""
    rows, columns = seen.truth.shape[-2:]
    if min(rows, columns) < 16:
        return
    planes = seen.truth.reshape(-1, rows, columns).transpose(1, 2, 0)
    after = [pixels.ring(planes, *place).transpose(2, 0, 1).reshape(seen.truth.shape) for place in RINGS]
    weights = _weights(after, seen.dump)
    run = np.clip(sum(weight * each for weight, each in zip(weights, after, strict=True)), 0, 255)
    yield Reread("neighbourhood", f"{_sum_said(weights)}, after the resize", seen.dump, run)
    before = [seen.ask({"picture": {"ring": place}, **PLAIN}) for place in RINGS]
    if any(each is None or each.shape != seen.dump.shape for each in before):
        return
    weights = _weights([each for each in before if each is not None], seen.dump)
    yield Change("neighbourhood", f"{_sum_said(weights)}, before the resize",
                 {"picture": {"rings": [[float(weight), *place] for weight, place in
                                        zip(weights, RINGS, strict=True)]}})  # fmt: skip


def _weights(parts: Sequence[Array], dump: Array) -> Array:
    table = np.stack([part.ravel() for part in parts], 1)
    some = (dump.ravel() > 0.5) & (dump.ravel() < 254.5)
    table, values = table[some], dump.ravel()[some]
    ridge = 1e-6 * np.trace(table.T @ table) / len(parts) ** 2 * np.eye(len(parts))
    return np.asarray(np.linalg.solve(table.T @ table + ridge, table.T @ values))


def _sum_said(weights: Array) -> str:
    own, total = weights[0], weights.sum()
    far = np.array([np.hypot(*place) for place in RINGS])
    kind = "sharpened" if own > 1.02 * total else "blurred"
    wide = float(np.sqrt(np.abs((weights * far**2).sum() / total) / 2))
    return f"the picture is {kind}: each pixel is {own:.3g} of itself, the rest of those around it" + (
        f" (as a Gaussian of {wide:.2g} pixels does)" if kind == "blurred" else ""
    )


def dials_of(about: Mapping[str, Any], truth: Array) -> Iterator[Dial]:
    """Numbers of steps before a picture is cut into tiles."""
    config, (width, height) = about["config"], about["size"]
    own = OF_PILLOW.get(config.get("resample", 2), "bilinear")
    shorter = min(width, height)
    least = max(8, min(truth.shape[-2:]) // 2)

    def first(kernel: str) -> Dial:
        def to(number: float) -> list[int]:
            return [max(1, int(width * number / shorter)), max(1, int(height * number / shorter))]

        spread = np.linspace(least, shorter, FIRSTS + 1)[:-1] if least < shorter else [shorter]
        tries = sorted({*(n for n in USUAL if least <= n < shorter), *(round(n) for n in spread)})
        return Dial(
            "resize", lambda n: f"resized twice: first to {to(n)[0]} x {to(n)[1]} by {kernel}",
            lambda n: {"picture": {"first": to(n), "by": kernel}}, tries, whole=True,
        )  # fmt: skip

    for kernel in dict.fromkeys((own, "bilinear", "box", "lanczos")):
        yield first(kernel)
    yield Dial("neighbourhood", lambda n: f"the picture is {'sharpened' if n > 0 else 'blurred'} before the resize: to "
               f"each pixel {abs(n):.3g} times its difference from the eight around it is "
               f"{'added' if n > 0 else 'taken off'}", lambda n: {"picture": {"rings": _sharp(n)}},
               (-1.0, -0.5, 0.25, 0.5, 1.0, 2.0, 4.0))  # fmt: skip
    yield from (_blur(name) for name in ("GaussianBlur", "BoxBlur"))
    yield from (_jpeg(chroma, says) for chroma, says in ((2, "4:2:0"), (0, "4:4:4")))
    yield Dial("filter", lambda n: f"resized by bicubic with a = {n:.4g}, not Pillow's -0.5",
               lambda n: {"resize": {"kernel": "bicubic", "a": n}},
               (-1.0, -0.75, -0.6, -0.5, -0.4, -0.25, 0.0))  # fmt: skip
    yield Dial("filter", lambda n: f"the resize looks {abs(n):.4g} pixels of the picture too far "
               f"{'down and right' if n > 0 else 'up and left'}",
               lambda n: {"resize": {"moved": n}}, (-2, -1, -0.5, -0.25, 0.0, 0.25, 0.5, 1, 2))  # fmt: skip
    if own in SUPPORT:
        yield Dial("filter", lambda n: f"the resize's filter is {n:.4g} times as wide as it should be",
                   lambda n: {"resize": {"wider": n}}, (0.25, 0.4, 0.6, 0.8, 1.1, 1.25, 1.6, 2.0, 3.0))  # fmt: skip
    edge = (config.get("size") or {}).get("shortest_edge")
    if config.get("do_center_crop") and edge:
        side = min(config["crop_size"].values())
        yield Dial("resolution", lambda n: f"the shorter side is resized to {n:.0f}; the checkpoint has {edge}",
                   lambda n: {"attributes": {"size": {"shortest_edge": int(n)}}},
                   sorted({*range(side, 2 * side + 1, max(1, side // 32)), edge}), whole=True)  # fmt: skip


def lies(seen: Seen) -> Iterator[Reread]:
    """Where each tile comes from, with the filter that leaves least."""
    source = seen.source().transpose(2, 0, 1).astype(np.float64)
    own = OF_PILLOW.get(seen.about["config"].get("resample", 2), "bilinear")
    found = _lying(seen.dump, seen.truth, source, own)
    if found is None:
        return
    cuts, kernels, run = found
    here = _cuts_said(cuts, source.shape[1:])
    is_near = np.abs(run - seen.dump).mean() < 1
    theirs = _lying(seen.truth, None, source, own) if is_near else None
    there = f"; the processor's {_cuts_said(theirs[0], source.shape[1:])}" if theirs else ""
    kernel = f", by {', '.join(kernels)}" if set(kernels) != {own} else ""
    yield Reread("place", f"{here}{kernel}{there}", seen.dump, run)


def _jpeg(chroma: int, says: str) -> Dial:
    return Dial("compression", lambda n: f"the picture went through JPEG, of quality {n:.0f} ({says})",
                lambda n: {"picture": {"jpeg": int(n), "chroma": chroma}},
                (5, 20, 40, 60, 75, 85, 90, 95, 100), whole=True)  # fmt: skip


def _blur(name: str) -> Dial:
    return Dial("neighbourhood", lambda n: f"blurred before the resize, as Pillow's {name}({n:.4g}) does",
                lambda n: {"picture": {"blur": [name, n]}}, (0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0))  # fmt: skip


def _sharp(amount: float) -> list[list[float]]:
    share = amount / 8
    return [[1 + amount, 0, 0], [-2 * share, 0, 1], [-2 * share, 1, 0], [-4 * share, 1, 1]]


WAYS: tuple[tuple[str, dict[str, Any]], ...] = ((" without antialiasing", {"antialias": False, "round": "once"}),)


def _lying(dump: Array, truth: Array | None, source: Array, own: str
           ) -> tuple[list[maps.Cut | None], list[str], Array] | None:  # fmt: skip
    """The cut of each tile that is not as the processor's, the filters, and what these give."""
    cuts, kernels, run = list[maps.Cut | None](), list[str](), dump.copy()
    known, ways = list[maps.Map](), [(own, own, dict[str, Any]())]
    for kernel in (k for k in SUPPORT if k != own):
        ways.append((kernel, kernel, {}))
    ways += [(f"{kernel}{says}", kernel, how) for says, how in WAYS for kernel in SUPPORT if kernel != "hamming"]
    for number, tile in enumerate(dump):
        cuts.append(None)
        if truth is not None and np.corrcoef(tile.ravel(), truth[number].ravel())[0, 1] > PLACED:
            run[number] = truth[number]
            continue
        where = maps.map_of(tile, source, known)
        if where is None or where.like < 0.8:
            if np.ptp(tile.reshape(len(tile), -1), 1).max() > 0.01:
                return None
            continue  # of one colour
        known.append(where)
        part = tile[:, where.inside[0], where.inside[1]]
        shape = maps.turned(part[0], where.turn).shape
        best: tuple[float, maps.Cut, str, Array] | None = None
        for name, kernel, how in ways:
            tried = [best[1]] if best is not None else maps.cuts_of(where, shape, source.shape[1:])
            for cut in tried:
                given = maps.made(cut, source, shape, kernel, how)
                if given is not None:
                    away = _away(given, part)
                    if best is None or away < best[0] - 1e-3:
                        best = (away, cut, name, given)
            if best is None or best[0] < 0.3:
                break
        if best is None:
            return None
        run[number][:, where.inside[0], where.inside[1]] = best[3]
        cuts[-1] = best[1]
        kernels.append(best[2])
        ways.sort(key=lambda each: each[0] != best[2])
    return (cuts, list(dict.fromkeys(kernels)), run) if kernels else None


def _away(given: Array, part: Array) -> float:
    """How far two are apart after a gain and an offset of each channel."""
    total = 0.0
    for x, y in zip(given, part, strict=True):
        spread = x.var()
        gain = ((x - x.mean()) * (y - y.mean())).mean() / spread if spread > 1e-9 else 1.0
        gain = gain if abs(gain) > 0.05 else 1.0
        total += float(np.sqrt(np.mean(((y - y.mean()) / gain - (x - x.mean())) ** 2)))
    return total / len(part)


def _cuts_said(cuts: Sequence[maps.Cut | None], source: Sequence[int]) -> str:
    """Cuts in words."""
    some = [each for each in cuts if each is not None]
    turns = {maps.TURNS[each.turn] for each in some if each.turn}
    turned = f", {', '.join(sorted(turns))}" if turns else ""
    boxes = [each.box for each in some if each.box is not None]
    if boxes and len(boxes) == len(some):
        top, bottom, left, right = boxes[0]
        more = f" (the first of {len(boxes)} tiles)" if len(boxes) > 1 else ""
        return (f"rows {top} to {bottom - 1} and columns {left} to {right - 1} of {source[0]} x {source[1]} are resized"
                f"{more}{turned}")  # fmt: skip
    sizes = dict.fromkeys(each.size for each in some if each.box is None)
    parts = []
    for height, width in sizes:
        places = [f"({each.place[1]}, {each.place[0]})" for each in some if each.size == (height, width)]
        whole = f"resized to {width} x {height}"
        parts.append(f"{whole} and cut out at {', '.join(places[:8])}")
    return f"picture is {', and '.join(parts)}{turned}"
