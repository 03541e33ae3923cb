"""The reference engine over some tokens of a prompt, whose attention reads what a run kept of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from llamaref import Engine, Weights
from llamaref import Tap as EngineTap
from llamaref.config import Rope
from llamaref.engine import Cache, Scoring, Step
from llamaref.sums import Matrices, WeightProduct
from numpy.typing import NDArray

from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.reference_model import Model
from llamadiff.ext.rows.choose import AUTO, ranges
from llamadiff.judge.replay import Replay
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.trace.reader import Trace

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = NDArray[Any]
KEPT = ("kv_k", "kv_v")
BASELINE = "baseline"


def keys_of(model: Model) -> dict[str, str]:
    """Tap -> the tap of the cache that keeps it, of all layers. Raises UserError for a model of which more is kept."""
    names, found = {tap.name for tap in model.taps}, dict[str, str]()
    for tap in model.taps:
        if tap.kind.word in KEPT:
            inputs = model.inputs(tap)
            if len(inputs) == 1 and inputs[0] in names:
                found[inputs[0]] = tap.name
    if len(found) != len(KEPT) * model.n_layer:
        raise UserError(
            f"{model.path}: --rows goes by K and V of all tokens, and {model.architecture} keeps something else in "
            "some layers; give a prompt of at most 2,048 tokens, or --rows all"
        )
    return found


def words_of(model: Model, words: str) -> str:
    """Rows in words for llama.cpp's process: ``auto`` with the model's edges. Raises UserError for what is no row."""
    if words != AUTO:
        if ranges(words) is None:
            raise UserError(f"--rows {words[:40]}: expected rows such as 0-7,4096-4100, auto, or all")
        return words
    edges = {window for window in model.engine.windows if window}
    edges |= {rope.n_ctx_orig for rope in model.ropes if rope is not None and rope.n_ctx_orig}
    return f"{AUTO}:{','.join(map(str, sorted(edges)))}"


class RowModel(Model):
    """A model some of whose tokens are run."""

    def __init__(self, file: ModelFile) -> None:
        super().__init__(file.path, settings=file.settings, weights=file.weights)
        self.engine: RowEngine = self._open(lambda: RowEngine(self.weights))
        self.engine.model = self

    def keep(self, kept: Mapping[str, Trace], traces: Mapping[str, Trace]) -> None:
        """Take K and V of the other tokens from what each source ``kept``; ``traces``: what it recorded of the rows."""
        self.engine.kept, self.engine.traces = kept, traces


class RowEngine(Engine):
    """Runs tokens between which others are left out."""

    model: RowModel
    kept: Mapping[str, Trace]
    traces: Mapping[str, Trace]  # and what each source recorded of the rows

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.seen: dict[int, Any] = {}  # by layer, what is known of the keys that queries saw (seen.py)

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int] | None = None,
        cache: Cache | None = None,
        tap: EngineTap | None = None,
    ) -> Step:
        assert positions is not None
        assert tap is not None
        step, here = super().step(tokens, positions, None, tap), np.asarray(positions)
        everyone = np.arange(int(here[-1]) + 1)
        return replace(step, key_positions=everyone, cache=_Kept(self.kept, here, tap), tap=_OwnRows(tap, here))

    def attention(self, i: int, q: Array, k: Array, v: Array, step: Step, **scoring: Unpack[Scoring]) -> Array:
        """One lane after the other, so that K and V of all tokens are there for one at a time."""
        assert isinstance(step.tap, _OwnRows)
        tap = step.tap.tap
        if not isinstance(tap, Replay) or any(tap.is_wanted(f"{word}-{i}") for word in ("kq", "kq_soft_max")):
            return super().attention(i, q, k, v, step, **scoring)
        k, v = tap(f"kv_k-{i}", tap.store("cache_k", k)), tap(f"kv_v-{i}", tap.store("cache_v", v))
        lanes, out, lost = tap.lanes, list[Array](), dict[int, float]()
        for n, lane in enumerate(lanes):
            tap.carry([lane])
            own, alone = slice(n, n + 1), replace(step, tap=_Rounding(tap))
            out.append(super().attention(i, q[own], k[own], v[own], alone, **scoring)[0])
            lost.update((n, nmse) for nmse in tap.carrier.take_lost().values())
        tap.carry(lanes)
        tap.carrier.lost |= lost
        return tap(f"kqv_out-{i}", np.stack(out))


class _Kept(Cache):
    """K and V of all tokens up to the last one that is run."""

    def __init__(self, kept: Mapping[str, Trace], rows: Array, tap: EngineTap) -> None:
        super().__init__()
        self._kept, self._rows, self._tap = kept, rows, tap

    def append(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        return self._all(f"kv_k-{layer}", "cache_k", k), self._all(f"kv_v-{layer}", "cache_v", v)

    def _all(self, name: str, kind: str, own: Array) -> Array:
        """The rows that each lane's source kept, as it keeps them, with this pass's own: [lane, key, head, dim]."""
        lanes = getattr(self._tap, "lanes", None) or (None,) * len(own)
        sources = [str(getattr(lane, "source", None) or BASELINE) for lane in lanes]
        n = int(self._rows[-1]) + 1
        kept = {source: self._kept[source][name][:n].reshape(n, *own.shape[2:]) for source in set(sources)}
        out = self._tap.store(kind, np.stack([kept[source] for source in sources]).astype(own.dtype, copy=False))
        out[:, self._rows] = own
        return out


@dataclass
class _Rounding(EngineTap):
    """How another tap has ops computed; what they give it is not shown."""

    tap: EngineTap

    def operands(self, kind: str, *arrays: Array) -> tuple[Array, ...]:
        return self.tap.operands(kind, *arrays)

    def multiply(self, product: WeightProduct) -> Array:
        return self.tap.multiply(product)

    def accumulate(self, y: Array, kind: str, parts: Matrices, start: int = 0, by_row: bool = False) -> Array:
        return self.tap.accumulate(y, kind, parts, start, by_row)

    def product(self, y: Array) -> Array:
        return self.tap.product(y)

    def angles(
        self, cos: Array, sin: Array, rope: Rope, positions: Array, factors: Array | None
    ) -> tuple[Array, Array]:
        return self.tap.angles(cos, sin, rope, positions, factors)


@dataclass
class _OwnRows(_Rounding):
    """What a tap is shown of a cache are the rows of the tokens that are run; all else goes through."""

    rows: Array

    def __call__(self, name: str, x: Array) -> Array:
        tap = taps.parse(name)
        if tap is None or tap.kind.word not in KEPT:
            return self.tap(name, x)
        x[:, self.rows] = self.tap(name, x[:, self.rows])
        return x

    def store(self, kind: str, x: Array) -> Array:
        return self.tap.store(kind, x)

    def is_wanted(self, name: str) -> bool:
        return self.tap.is_wanted(name)
