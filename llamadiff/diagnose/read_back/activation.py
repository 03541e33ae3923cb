"""Activations read back: the output over up, as a curve of gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from llamaref import ops
from numpy.typing import NDArray

from llamadiff.diagnose.read_back.observed import Facts, Observed, first_told
from llamadiff.judge.pattern.deviation import SAME, Fact, listed, numbered

Array = NDArray[Any]
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

    def fits(self, values: Array) -> bool:
        return self.o.fits(values)


def activation(o: Observed) -> Facts:
    """Another function of gate, everywhere or beyond a bound."""
    g = _parts(o)
    if g is None:
        return
    yield from first_told((_clamped, _steeper, _of_up, _other_channels, _beyond, _everywhere), g)


def _parts(o: Observed) -> ActivationCurve | None:
    """Gate and up; None where the right values are not the activation of gate, times up."""
    if o.case.tap.kind.op not in RIGHT or len(o.input_names()) != 2:
        return None
    name, act = RIGHT[o.case.tap.kind.op]
    gate, up = o.input(0), o.input(1)
    left = np.square(act(gate) * up - o.expected).sum()
    g = ActivationCurve(o, gate, up, act, name, o.input_names()[0])
    return g if left <= SAME / 100 * np.square(o.expected).sum() else None


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


def _clamped(g: ActivationCurve) -> Facts:
    """Gate, or up, that is cut off at a bound."""
    bad, a = g.o.is_bad, g.act(g.gate)
    ups = bad & (np.abs(a) > LEAST * np.sqrt(np.mean(a**2)))  # where what is recorded tells up
    size = _alike(np.abs(g.o.recorded[ups] / a[ups]))
    if size is not None and g.fits(a * np.clip(g.up, -size, size)):
        yield Fact("clamped", f"its up is cut off beyond {size:.4g}", ("up", size))
        return
    for limit, side, end in ((np.minimum, "above", np.min), (np.maximum, "below", np.max)):
        value, up = _alike(g.curve[bad & g.there]), _alike(g.o.recorded[ups] / a[ups])
        if value is not None:
            value = _where(g.act, value, float(end(g.gate[bad & g.there])))
        if value is not None and g.fits(g.act(limit(g.gate, value)) * g.up):
            yield Fact("clamped", f"its gate is cut off {side} {value:.4g}", ("gate", value))
            return
        if up is not None and g.fits(a * limit(g.up, up)):
            yield Fact("clamped", f"its up is cut off {side} {up:.4g}", ("up", up))
            return


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


def _steeper(g: ActivationCurve) -> Facts:
    """x * sigmoid(slope * x) with another slope than one."""
    if g.name != "silu":
        return
    slopes = SLOPES
    for _ in range(ROUNDS):
        left = [np.square(g.o.recorded - g.gate * ops.sigmoid(s * g.gate) * g.up).sum() for s in slopes]
        best = int(np.argmin(left))
        slope = float(slopes[best])
        slopes = np.linspace(slopes[max(best - 1, 0)], slopes[min(best + 1, len(slopes) - 1)], 21)
    if abs(slope - 1) > 1e-2 and g.fits(g.gate * ops.sigmoid(slope * g.gate) * g.up):
        yield Fact("slope", f"it is gate * sigmoid({slope:.3g} * gate) * up, where the slope 1 is right", (slope,))


def _of_up(g: ActivationCurve) -> Facts:
    """The activation times a multiple of up plus a constant."""
    a = g.act(g.gate)
    terms = np.stack([(a * g.up).ravel(), a.ravel()], axis=1)
    (times, plus), *_ = np.linalg.lstsq(terms, g.o.recorded.ravel(), rcond=None)
    if abs(plus) > 1e-3 and g.fits(a * (times * g.up + plus)):
        many = "up" if abs(times - 1) < ALIKE else f"{np.round(times, 6):.4g} * up"
        says = f"it is {g.name}({g.of}) * ({many} + {plus:.4g}), where up alone is right"
        yield Fact("of up", says, (float(times), float(plus)))


def _other_channels(g: ActivationCurve) -> Facts:
    """Channels that take the gate of others, or their up."""
    wrong = np.flatnonzero(g.o.is_bad.any(axis=0))
    if g.gate.ndim != 2 or not len(wrong) or len(wrong) * g.gate.size > MOST_TRIED or len(wrong) == g.gate.shape[1]:
        return
    a = g.act(g.gate)
    for words, one, other in (("gate", a, g.up), ("up", g.up, a)):
        gaps = [np.square(one * other[:, [c]] - g.o.recorded[:, [c]]).sum(axis=0).argmin() for c in wrong]
        values = g.o.expected.copy()
        values[:, wrong] = one[:, gaps] * other[:, wrong]
        if g.fits(values):
            taken = numbered([int(c) for c in gaps]) if (np.diff(gaps) > 0).all() else listed([int(c) for c in gaps])
            says = f"channels {numbered([int(c) for c in wrong])} take the {words} of channels {taken}"
            yield Fact("other channels", says, (words, *(int(c) for c in gaps)))
            return


def _beyond(g: ActivationCurve) -> Facts:
    """Another function of gate beyond a bound: one with a name, or by how much it is off."""
    for bound, beyond, side in _bounds(g):
        shown = f"where {g.of} {side} {bound:.4g}"
        for name, function in _functions(g):
            if g.fits(np.where(beyond, function(g.gate) * g.up, g.o.expected)):
                yield Fact("other beyond", f"{shown}, it is {name} * up", (name, side, bound))
                return
        gap = np.where(beyond & g.there, np.abs(g.curve - g.act(g.gate)), 0.0)
        if _is_curve(g, beyond):
            off = float(gap.max())
            says = f"{shown}, {g.name}({g.of}) is another function, off by up to {off:.2g}"
            yield Fact("off beyond", says, (side, bound, off))
            return


def _everywhere(g: ActivationCurve) -> Facts:
    """Another function of gate for every value: one with a name, or by how much it is off."""
    for name, function in _functions(g):
        if g.fits(function(g.gate) * g.up):
            yield Fact("other function", f"it is {name} * up, where {g.name}(gate) * up is right", (name,))
            return
    if _is_curve(g, np.ones(g.gate.shape, bool)):
        off = float(np.where(g.there, np.abs(g.curve - g.act(g.gate)), 0.0).max())
        yield Fact("off", f"{g.name}({g.of}) is another function, off by up to {off:.2g}", (off,))


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


def _is_curve(g: ActivationCurve, beyond: Array) -> bool:
    """Whether what is off is a function of gate: neighbours on it differ by little of what values differ by."""
    some = beyond & g.there
    order = np.argsort(g.gate[some])
    off = (g.curve - g.act(g.gate))[some][order]
    if len(off) < 2 * FEW:
        return False
    return bool(np.square(np.diff(off)).mean() <= SMOOTH**2 * max(float(np.square(off).mean()), 1e-300))
