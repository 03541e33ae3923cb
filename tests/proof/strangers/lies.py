"""Right traces in which one row, head, channel or value is moved: the judge is to say so above the size it states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from models.options import write_long

from llamadiff.engines.run_spec import How
from llamadiff.result.comparison import Comparison
from llamadiff.verbs.verbs import diff
from proof.strangers import recording
from proof.strangers.arithmetic import BY_NAME
from proof.strangers.crossing import INFLATED, Size, baseline, opened, size_of, stated
from proof.strangers.engine import Engine, is_scores

Array = np.ndarray
PLACES = ("row", "head", "channel", "value")
PRECISIONS = ("f32", "f16", "bf16")
LENGTHS, LONG = (5, 8, 12, 24, 48), (200, 600)
MODELS = (("llama", "F32"), ("qwen3", "F16"), ("llama", "Q8_0"), ("moe", "F32"), ("qwen2", "Q8_0"))
ARITHMETICS = {
    "F32": ("float32", "cache f16"),
    "F16": ("float32", "f16 operands"),
    "Q8_0": ("float32", "Q8_0", "int8 of 64"),
}
LEAST, MOST = (
    {"f32": 1e-6, "f16": 1e-4, "bf16": 1e-3},
    10.0,
)  # what is moved, in the tap's rms: less would be rounded off
KEPT = 0.4  # of the taps, in a sparse trace


@dataclass(frozen=True)
class Setting:
    """A right trace: how it was made, and which of its taps are there (``sparse`` draws them; 0: all)."""

    model: str
    kind: str
    arithmetic: str
    length: int
    precision: str
    sparse: int


@dataclass(frozen=True)
class Lie:
    """What is moved in a trace: everything about it is drawn by ``seed``."""

    setting: Setting
    seed: int
    place: str
    size: float  # of the move, in the tap's rms
    factor: bool  # values are multiplied, not shifted


@dataclass(frozen=True)
class Told:
    """What became of a lie: its size as it is stored, beside what is stated to hide in this report, and in that of the
    untouched trace."""

    lie: Lie
    tap: str
    size: Size
    stated: Size
    untouched: Size
    comparison: Comparison

    @property
    def due(self) -> bool:
        """Whether it is larger than what is stated to hide."""
        return self.size.above(self.stated) or self.size.above(self.untouched, INFLATED)

    @property
    def first(self) -> str | None:
        row = self.comparison.first_divergence
        return row.tap if row else None

    @property
    def unclear(self) -> bool:
        """Whether the report says that it cannot tell, at this tap: that lets nothing pass either."""
        return any(row.tap == self.tap and row.local is not None and row.local.unclear for row in self.comparison.rows)

    @property
    def missed(self) -> bool:
        return self.due and self.first != self.tap and not self.unclear

    @property
    def line(self) -> str:
        s, words = self.lie.setting, "MISSED" if self.missed else "found" if self.due else "hidden"
        parts = [words, self.comparison.verdict, f"{s.model} {s.kind} {s.arithmetic} n{s.length} {s.precision}"]
        parts += [f"sparse {s.sparse}" if s.sparse else "whole", f"{self.lie.place} of {self.tap}"]
        parts += [f"{name} {size:.1e}/{limit:.0e}/{before:.0e}" for name, size, limit, before in
                  zip(("tensor", "row", "value"), self.size, self.stated, self.untouched, strict=True)]  # fmt: skip
        return "; ".join([*parts, f"first wrong {self.first}", f"seed {self.lie.seed}"])


def drawn(seed: int, long: bool = False) -> Lie:
    """A lie, from a number."""
    rng = np.random.default_rng([seed, 5])
    model, kind = MODELS[seed % len(MODELS)]
    setting = Setting(
        model, kind, str(rng.choice(ARITHMETICS[kind])), int(rng.choice(LONG if long else LENGTHS)),
        PRECISIONS[seed // 2 % 3], int(rng.integers(1, 5)) if seed % 2 else 0,
    )  # fmt: skip
    size = float(np.exp(rng.uniform(np.log(LEAST[setting.precision]), np.log(MOST))))
    return Lie(setting, seed, str(rng.choice(PLACES)), size, bool(rng.integers(2)))


def model_of(setting: Setting, folder: Path) -> Path:
    path = folder / f"long.{setting.model}.{setting.kind}.gguf"
    return path if path.exists() else write_long(path, setting.model, setting.kind, 1024)


@lru_cache(maxsize=16)
def _whole(path: Path, arithmetic: str, tokens: tuple[int, ...]) -> Mapping[str, Array]:
    return recording.without_cache(Engine(opened(path), BY_NAME[arithmetic]).run(tokens))


def right_taps(setting: Setting, folder: Path) -> dict[str, Array]:
    """A right trace's taps as they are stored."""
    taps = _whole(model_of(setting, folder), setting.arithmetic, tokens_of(setting))
    rng = np.random.default_rng(setting.sparse)
    kept = {name for name in taps if not setting.sparse or rng.uniform() < KEPT or name == "result_output"}
    return {name: stored(values, setting.precision) for name, values in taps.items() if name in kept}


def tokens_of(setting: Setting) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(setting.length).integers(0, 96, setting.length))


def stored(values: Array, precision: str) -> Array:
    """Values as a trace keeps them."""
    if values.dtype.kind == "i":
        return values
    packed = recording.packed(values, precision)
    if precision == "bf16":
        return (packed.astype(np.uint32) << 16).view(np.float32)
    return packed.astype(np.float32)


def moved(values: Array, name: str, lie: Lie) -> Array:
    """A tap with one place of it moved, by a part of its rms."""
    rng = np.random.default_rng([lie.seed, 7])
    out, rms = values.copy(), float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
    where = _place(values, name, lie.place, rng)
    chosen = out[where]
    shift = lie.size * rms * rng.choice([-1.0, 1.0], np.shape(chosen))
    out[where] = chosen * (1 + lie.size) if lie.factor else chosen + shift
    return stored(out, lie.setting.precision)


def _place(values: Array, name: str, place: str, rng: np.random.Generator) -> tuple[object, ...]:
    """Where a lie is: an index. Scores are [head, query, key], and what lies above the diagonal means nothing."""
    if is_scores(name):
        head, query = int(rng.integers(values.shape[0])), int(rng.integers(values.shape[1]))
        key = int(rng.integers(query + 1)) if name.startswith("kq-") or rng.uniform() < 0.9 else query
        return {"row": (head, query), "head": (head,), "channel": (head, slice(key, None), key),
                "value": (head, query, key)}[place]  # fmt: skip
    row, channel = int(rng.integers(len(values))), tuple(int(rng.integers(n)) for n in values.shape[1:])
    if place == "head":
        width = 64 if values.ndim == 2 else values.shape[-1]
        start = channel[-1] // width * width
        return (slice(None), *channel[:-1], slice(start, start + width))
    return {"row": (row,), "channel": (slice(None), *channel), "value": (row, *channel)}[place]


@lru_cache(maxsize=256)
def untouched(setting: Setting, folder: Path) -> Comparison:
    """The report on the right trace itself."""
    return _compared(right_taps(setting, folder), setting, folder, None)


def _compared(taps: Mapping[str, Array], setting: Setting, folder: Path, tap: str | None) -> Comparison:
    """The report on a trace with a lie in one tap; causes are looked for only where another one is accused."""
    path, tokens = model_of(setting, folder), tokens_of(setting)
    trace = recording.save(folder / "lie.safetensors", taps, tokens, 0, setting.precision)
    right = baseline(path, tokens, len(tokens))
    result = diff(right, trace, path, how=How(diagnose=False))
    first = result.first_divergence
    return result if first is None or first.tap == tap else diff(right, trace, path)


def told(lie: Lie, folder: Path) -> Told:
    """A lie, judged."""
    taps = right_taps(lie.setting, folder)
    names = [name for name, values in taps.items() if values.dtype.kind == "f"]
    tap = str(np.random.default_rng([lie.seed, 3]).choice(names))
    changed = moved(taps[tap], tap, lie)
    result = _compared({**taps, tap: changed}, lie.setting, folder, tap)
    said, before = (
        stated(next(row for row in each.rows if row.tap == tap)) for each in (result, untouched(lie.setting, folder))
    )
    return Told(lie, tap, size_of(changed, taps[tap], tap), said, before, result)
