"""Activations read back: the output over up, as a curve of gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from llamaref import ops

from llamadiff.ext.explain.pattern.deviation import listed, numbered
from llamadiff.ext.explain.read_back.observed import Array, Facts, Observed, Readings, first_fit
from llamadiff.judge.fact import Fact

RIGHT = {"SWIGLU": ("silu", ops.silu), "GEGLU": ("gelu", ops.gelu)}
LEAST = 1e-2  # of up's rms: smaller values of up show no curve
ALIKE = 1e-3  # of a value, that two may differ by and be one
FEW = 4  # values beyond a bound
SMOOTH = 0.2  # how much neighbours on a curve differ, of what values differ
SLOPES = np.geomspace(0.2, 5.0, 60)
MOST_TRIED = 1 << 26  # channels, and values that each is held to
ROUNDS = 4  # of a search in ever smaller ranges


@dataclass(frozen=True)
class ActivationCurve:
    """gate, up and what is recorded of act(gate) * up; ``curve`` is that over up, ``there`` where it shows."""

    o: Observed
    gate: Array
    up: Array
    act: Callable[[Array], Array]
    name: str
    of: str  # gate's tap

    @property
    def there(self) -> Array:
        return np.asarray(np.abs(self.up) > LEAST * np.sqrt(np.mean(self.up**2)))

    @property
    def curve(self) -> Array:
        return np.where(self.there, self.o.recorded / np.where(self.there, self.up, 1.0), 0.0)


def activation(o: Observed) -> Facts:
    """Another function of gate, everywhere or beyond a bound."""
    g = _parts(o)
    if g is None:
        return
    yield from first_fit(
        o.fits, *(each(g) for each in (_clamped, _steeper, _of_up, _other_channels, _beyond, _everywhere))
    )


def _parts(o: Observed) -> ActivationCurve | None:
    """Gate and up; None where the right values are not the activation of gate, times up."""
    if o.case.tap.kind.op not in RIGHT or len(o.input_names()) != 2:
        return None
    name, act = RIGHT[o.case.tap.kind.op]
    gate, up = o.input(0), o.input(1)
    return ActivationCurve(o, gate, up, act, name, o.input_names()[0]) if o.is_right(act(gate) * up) else None


def _bounds(g: ActivationCurve) -> Iterator[tuple[float, Array, str]]:
    """The bounds of gate beyond which alone values are wrong."""
    bad = g.o.is_bad
    if bad.sum() < FEW:
        return
    for sign, side in ((1.0, "<="), (-1.0, ">=")):
        bound = float((sign * g.gate)[bad].max())
        beyond = sign * g.gate <= bound
        if (~beyond).sum() >= FEW and bad[beyond].mean() >= 0.5:
            yield sign * bound, beyond, side


def _clamped(g: ActivationCurve) -> Readings:
    """Gate, or up, that is cut off at a bound."""
    bad, a = g.o.is_bad, g.act(g.gate)
    ups = bad & (np.abs(a) > LEAST * np.sqrt(np.mean(a**2)))  # where what is recorded tells up
    size = _alike(np.abs(g.o.recorded[ups] / a[ups]))
    if size is not None:
        says = f"its up is cut off beyond {size:.4g}"
        yield a * np.clip(g.up, -size, size), Fact("clamped", says, ("up", size))
    for limit, side, end in ((np.minimum, "above", np.min), (np.maximum, "below", np.max)):
        value, up = _alike(g.curve[bad & g.there]), _alike(g.o.recorded[ups] / a[ups])
        if value is not None:
            value = _where(g.act, value, float(end(g.gate[bad & g.there])))
            says = f"its gate is cut off {side} {value:.4g}"
            yield g.act(limit(g.gate, value)) * g.up, Fact("clamped", says, ("gate", value))
        if up is not None:
            yield a * limit(g.up, up), Fact("clamped", f"its up is cut off {side} {up:.4g}", ("up", up))


def _alike(values: Array) -> float | None:
    """The one number that some values are; None if they are few, or differ."""
    if len(values) < FEW or np.ptp(values) > ALIKE * np.abs(values).max():
        return None
    return float(np.median(values))


def _where(act: Callable[[Array], Array], wanted: float, near: float) -> float:
    """Where near a place a function has a value."""
    width = 0.05 * max(1.0, abs(near))
    for _ in range(2 * ROUNDS):
        tried = np.linspace(near - width, near + width, 41)
        near, width = float(tried[int(np.abs(act(tried) - wanted).argmin())]), width / 8
    return near


def _steeper(g: ActivationCurve) -> Readings:
    """x * sigmoid(slope * x) with another slope than one."""
    if g.name != "silu":
        return
    slopes = SLOPES
    for _ in range(ROUNDS):
        left = [np.square(g.o.recorded - g.gate * ops.sigmoid(s * g.gate) * g.up).sum() for s in slopes]
        best = int(np.argmin(left))
        slope = float(slopes[best])
        slopes = np.linspace(slopes[max(best - 1, 0)], slopes[min(best + 1, len(slopes) - 1)], 21)
    if abs(slope - 1) > 1e-2:
        says = f"it is gate * sigmoid({slope:.3g} * gate) * up, where the slope 1 is right"
        yield g.gate * ops.sigmoid(slope * g.gate) * g.up, Fact("slope", says, (slope,))


def _of_up(g: ActivationCurve) -> Readings:
    """The activation times a multiple of up plus a constant."""
    a = g.act(g.gate)
    terms = np.stack([(a * g.up).ravel(), a.ravel()], axis=1)
    (times, plus), *_ = np.linalg.lstsq(terms, g.o.recorded.ravel(), rcond=None)
    if abs(plus) > 1e-3:
        many = "up" if abs(times - 1) < ALIKE else f"{np.round(times, 6):.4g} * up"
        says = f"it is {g.name}({g.of}) * ({many} + {plus:.4g}), where up alone is right"
        yield a * (times * g.up + plus), Fact("of up", says, (float(times), float(plus)))


def _other_channels(g: ActivationCurve) -> Readings:
    """Channels that take the gate of others, or their up. Of a few values some channel has the like by chance."""
    wrong = np.flatnonzero(g.o.is_bad.any(axis=0))
    if g.gate.ndim != 2 or not len(wrong) or len(wrong) * g.gate.size > MOST_TRIED or len(wrong) == g.gate.shape[1]:
        return
    if (g.o.is_bad[:, wrong].sum(axis=0) < FEW).any():
        return
    a = g.act(g.gate)
    for words, one, other in (("gate", a, g.up), ("up", g.up, a)):
        gaps = [np.square(one * other[:, [c]] - g.o.recorded[:, [c]]).sum(axis=0).argmin() for c in wrong]
        values = g.o.expected.copy()
        values[:, wrong] = one[:, gaps] * other[:, wrong]
        taken = (numbered if (np.diff(gaps) > 0).all() else listed)(gaps)
        says = f"channels {numbered(wrong)} take the {words} of channels {taken}"
        says = says if len(wrong) > 1 else f"channel {wrong[0]} takes the {words} of channel {taken}"
        yield values, Fact("other channels", says, (words, *(int(c) for c in gaps)))


def _beyond(g: ActivationCurve) -> Readings:
    """Another function of gate beyond a bound: one with a name, or by how much it is off."""
    for bound, beyond, side in _bounds(g):
        shown = f"where {g.of} {side} {bound:.4g}"
        for name, function in _functions(g):
            values = np.where(beyond, function(g.gate) * g.up, g.o.expected)
            yield values, Fact("other beyond", f"{shown}, it is {name} * up", (name, side, bound))
        off = _off(g, beyond)
        if off is not None:
            says = f"{shown}, {g.name}({g.of}) is another function, off by up to {off:.2g}"
            yield None, Fact("off beyond", says, (side, bound, off))


def _everywhere(g: ActivationCurve) -> Readings:
    """Another function of gate for every value: one with a name, or by how much it is off."""
    for name, function in _functions(g):
        says = f"it is {name} * up, where {g.name}(gate) * up is right"
        yield function(g.gate) * g.up, Fact("other function", says, (name,))
    off = _off(g, np.ones(g.gate.shape, bool))
    if off is not None:
        yield None, Fact("off", f"{g.name}({g.of}) is another function, off by up to {off:.2g}", (off,))


def _functions(g: ActivationCurve) -> Iterator[tuple[str, Callable[[Array], Array]]]:
    yield f"{g.name}(-gate)", lambda x: g.act(-x)
    yield f"-{g.name}(gate)", lambda x: -g.act(x)
    yield f"-{g.name}(-gate)", lambda x: -g.act(-x)
    yield "0", np.zeros_like
    yield "gate", lambda x: x
    yield "0.01 * gate", lambda x: 0.01 * x
    yield "exp(gate) * gate", lambda x: np.exp(x) * x
    yield "exp(gate) - 1", np.expm1
    yield "gate * clip(gate / 6 + 1/2, 0, 1)", lambda x: x * np.clip(x / 6 + 0.5, 0, 1)
    yield "max(gate, 0)^2", lambda x: np.maximum(x, 0) ** 2
    yield "gate / (1 + |gate|)", lambda x: x / (1 + np.abs(x))


def _off(g: ActivationCurve, beyond: Array) -> float | None:
    """How far off it is as a function of gate; None if it is none: neighbours on one differ by little."""
    some = beyond & g.there
    off = (g.curve - g.act(g.gate))[some][np.argsort(g.gate[some])]
    if len(off) < 2 * FEW or np.square(np.diff(off)).mean() > SMOOTH**2 * max(float(np.square(off).mean()), 1e-300):
        return None
    return float(np.abs(off).max())
