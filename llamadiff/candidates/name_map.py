"""Name maps: what an engine calls its tensors, how it lays them out, and what was done to them.

A map is TOML, one table a tap:

    [Qcur_rope]
    name = "blocks.{i}.attn.hook_rot_q"
    axes = "batch token head dim"
    done = ["permuted"]

What a table leaves out is the tap's own, and so is all of a tap without a table. Everything is explicit and checked,
nothing is guessed; but an error proposes the line that would fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate, permutations
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.engines.model_file import Runnable
from llamadiff.engines.treatments import factor_of, undone
from llamadiff.numerics.transposes import advice
from llamadiff.system.errors import UserError
from llamadiff.trace import taps

Array = NDArray[Any]

# What may have been done to a tensor, and how it is undone.
DONE = {
    "permuted": "each head of Q and K in halves (i, i+n/2), as Hugging Face has it, where a llama file has pairs",
    "paired": "each head of Q and K in pairs (2i, 2i+1) where the file has halves",
    "repeated": "K or V heads repeated, one copy for each query head",
    "scaled": "scores, Q or K already divided by sqrt(head size)",
    "times 0.5": "multiplied by this or any other number",
    "unweighted": "normalised, but not yet multiplied by the norm's weight, nor its bias added",
}


MAX_NAME = 200  # characters of a name that is worth a proposal
_ZEROS = re.compile("(?<![0-9])0+(?=[0-9])")


class OtherSizeError(UserError):
    """A tensor has more or fewer values than its tap: no order of axes makes it fit."""


@dataclass(frozen=True)
class Entry:
    """One tap's line of a map. ``axes`` outermost first (None: the tap's own)."""

    word: str
    name: str
    axes: tuple[str, ...] | None = None
    done: tuple[str, ...] = ()

    def names(self, layer: int | None) -> str:
        if layer is None:
            return self.name
        return self.name.replace("{i}", str(layer)).replace("{i+1}", str(layer + 1))


Map = Mapping[str, Entry]
AUTO: Map = {}  # in place of a map: find one, by the values


def identity_map() -> dict[str, Entry]:
    """Every tap by its own name."""
    return {kind.word: Entry(kind.word, kind.word + ("-{i}" if kind.layered else "")) for kind in taps.KINDS}


def most_values(shape: tuple[int, ...] | None, tap: taps.Tap, entry: Entry, model: Runnable, n_tokens: int) -> int:
    """How many values a tensor of a tap can have. Raises UserError for a shape of more, before any is read."""
    sizes = _sizes(model, n_tokens, entry)
    wanted = taps.shape_of(tap, n_tokens, sizes)
    if shape is not None and math.prod(shape) > math.prod(wanted):
        raise UserError(_misfit(shape, wanted, tap, entry, sizes))
    return math.prod(wanted)


def fit_to_tap(array: Array, tap: taps.Tap, entry: Entry, model: Runnable, n_tokens: int) -> Array:
    """An engine's tensor as the tap: axes in order, treatments undone.

    Raises UserError, with the map line that would fit if there is one, for a shape that does not.
    """
    sizes = _sizes(model, n_tokens, entry)
    if entry.axes is not None:
        array = _transpose_axes(array, tap, entry, sizes)
    shape = taps.shape_of(tap, n_tokens, sizes)
    if array.size != math.prod(shape) or not _same_order(array.shape, shape):
        raise _misfit(array.shape, shape, tap, entry, sizes)
    return undone(array.reshape(shape), tap, entry.done, model)


def _sizes(model: Runnable, n_tokens: int, entry: Entry) -> dict[str, int]:
    sizes = {**model.sizes, "token": n_tokens, "query": n_tokens, "key": n_tokens, "batch": 1}
    if "repeated" in entry.done:
        sizes["kv_head"] = sizes["head"]
    return sizes


def _same_order(have: Sequence[int], want: Sequence[int]) -> bool:
    """Whether two shapes are one memory order: they differ by axes of one, or by axes merged or split."""
    mine, theirs = (set(accumulate(reversed(shape), mul)) for shape in (have, want))
    return mine <= theirs | {1} or theirs <= mine | {1}


def _transpose_axes(array: Array, tap: taps.Tap, entry: Entry, sizes: Mapping[str, int]) -> Array:
    """Transpose from the stated axes to the tap's."""
    assert entry.axes is not None
    if "batch" in entry.axes and array.ndim == len(entry.axes) - 1:  # a batch of one may be left out, or be there
        array = np.expand_dims(array, entry.axes.index("batch"))
    if "batch" not in entry.axes and array.ndim == len(entry.axes) + 1 and array.shape[0] == 1:
        array = array[0]
    stated = [part for axis in entry.axes for part in axis.split("*")]
    own, sizes = _named_axes(tap, entry, sizes)
    if "kv_head" in own and "kv_head" not in stated:
        stated = ["kv_head" if part == "head" else part for part in stated]
    if not set(own) <= set(stated) <= set(sizes):
        axes = ", ".join(tap.kind.axes)
        raise UserError(f"{entry.names(tap.layer)}: its axes have no names in llama.cpp's graph; write [{axes}]")
    split = tuple(sizes[part] for part in stated)
    if array.shape != taps_shape(entry.axes, dict(zip(stated, split, strict=True)), own):
        raise _misfit(array.shape, split, tap, entry, sizes)
    moved = array.reshape(split).transpose([stated.index(part) for part in ["batch"] * ("batch" in stated) + own])
    return np.ascontiguousarray(moved[0] if "batch" in stated else moved)


def _named_axes(tap: taps.Tap, entry: Entry, sizes: Mapping[str, int]) -> tuple[list[str], Mapping[str, int]]:
    """The names and sizes of a tap's own axes: llama.cpp's graph has sizes alone, and the vocabulary the names."""
    axes = tap.kind.axes
    known = taps.BY_WORD[entry.word].axes
    if any(axis.isdigit() for axis in axes) and len(known) == len(axes):
        sizes = {**sizes, **{name: taps.size_of(axis, sizes) for name, axis in zip(known, axes, strict=True)}}
        axes = known
    return [part for axis in axes for part in axis.split("*")], sizes


def taps_shape(axes: Iterable[str], sizes: Mapping[str, int], own: Sequence[str]) -> tuple[int, ...]:
    """The shape that stated axes have: products for merged ones."""
    names = {"head": "kv_head"} if "kv_head" in own else {}
    return tuple(math.prod(sizes[names.get(part, part)] for part in axis.split("*")) for axis in axes)


def _misfit(
    have: Sequence[int], want: Sequence[int], tap: taps.Tap, entry: Entry, sizes: Mapping[str, int]
) -> UserError:
    axes = " ".join(entry.axes or tap.kind.axes)
    name = entry.names(tap.layer)
    text = f"{name} has shape {list(have)}; {'it' if name == tap.name else tap.name} needs {list(want)} ({axes})"
    if 2 * math.prod(have) == math.prod(want) and len(have) == 1:
        return UserError(f"{text}: half as many values; are they 16 bits wide (.f16, .bf16)?")
    proposal = _proposal(have, tap, sizes)
    line = f'; in the map, [{tap.kind.word}] axes = "{proposal}" would fit' if proposal else ""
    kind = OtherSizeError if math.prod(have) != math.prod(want) else UserError
    return kind(f"{text}{line}{advice(have, want)}")


def _proposal(have: Sequence[int], tap: taps.Tap, sizes: Mapping[str, int]) -> str | None:
    """The axes, in another order, with others merged or with a batch, that have this shape."""
    return next((" ".join(order) for order in _orders(have, tap.kind.axes, sizes)), None)


def _orders(have: Sequence[int], own: Sequence[str], sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    parts = tuple(part for axis in own for part in axis.split("*"))
    for names in dict.fromkeys([tuple(own), parts, ("batch", *own), ("batch", *parts)]):
        for order in permutations(names):
            if [taps.size_of(axis, sizes) for axis in order] == list(have):
                yield order


def readings(name: str, shape: Sequence[int], tap: taps.Tap, model: Runnable, n_tokens: int) -> Iterator[Entry]:
    """The map's lines under which a tensor of this name and shape fits a tap, the plainest first."""
    kind, own = tap.kind, [part for axis in tap.kind.axes for part in axis.split("*")]
    for done in ((), *((each,) for each in DONE if _may_be_done(each, tap, model))):
        sizes = _sizes(model, n_tokens, Entry(kind.word, name, None, done))
        whole = taps.shape_of(tap, n_tokens, sizes)
        is_plain = math.prod(shape) == math.prod(whole) and _same_order(shape, whole)
        if is_plain:
            yield Entry(kind.word, name, None, done)
        for axes in _orders(shape, kind.axes, sizes) if not any(part.isdigit() for part in own) else ():
            if not is_plain or [part for axis in axes for part in axis.split("*") if part != "batch"] != own:
                yield Entry(kind.word, name, axes, done)


def concerns(treatment: str, kind: taps.Kind) -> bool:
    """Whether a tap of this kind has what a treatment is done to."""
    parts = {part for axis in kind.axes for part in axis.split("*")}
    if treatment in ("permuted", "paired"):
        return "dim" in parts
    if treatment == "unweighted":
        return kind.op == "RMS_NORM"
    return treatment != "repeated" or "kv_head" in parts


def _may_be_done(treatment: str, tap: taps.Tap, model: Runnable) -> bool:
    """Whether a treatment makes a difference to a tap of a model, and an engine may have its reasons for it."""
    if not concerns(treatment, tap.kind) or factor_of(treatment):
        return False
    if treatment in ("permuted", "paired"):
        return model.rope_pairs == (treatment == "permuted")
    if treatment == "repeated":
        return model.sizes["head"] != model.sizes["kv_head"]
    return tap.name in model.weight_names if treatment == "unweighted" else tap.kind.word.startswith(("kq", "Qcur"))


class Names:
    """The names that a map has for a model's taps; a layer's number may have zeros before it."""

    def __init__(self, mapping: Map, model: Runnable) -> None:
        by_word: dict[str, list[taps.Tap]] = {}
        for tap in model.taps:
            by_word.setdefault(tap.kind.word, []).append(tap)
        self._taps: dict[str, tuple[taps.Tap, Entry]] = {}
        for entry in mapping.values():
            for tap in by_word.get(entry.word, ()):
                self._taps.setdefault(_without_zeros(entry.names(tap.layer)), (tap, entry))

    def tap(self, name: str) -> tuple[taps.Tap, Entry] | None:
        """The tap that an engine's name stands for, and the map's line for it."""
        return self._taps.get(_without_zeros(name))


def _without_zeros(name: str) -> str:
    return _ZEROS.sub("", name)


def propose_name(name: str, shape: Sequence[int], model: Runnable, n_tokens: int) -> str | None:
    """A map line for a name that no entry has: the tap whose word is nearest and whose shape fits."""
    if len(name) > MAX_NAME:
        return None
    layer = re.search(r"[0-9]+", name)
    pattern = name.replace(layer[0], "{i}", 1) if layer else name
    sizes = {**model.sizes, "token": n_tokens, "query": n_tokens, "key": n_tokens, "batch": 1}
    fitting = [tap for tap in model.taps if tap.layer in (None, 0) and tap.kind.layered == bool(layer)
               and _proposal(shape, tap, sizes) is not None]  # fmt: skip
    near = get_close_matches(re.sub(r"\W*[0-9]+\W*", "", name), [tap.kind.word for tap in fitting], 1, 0.3)
    if not near:
        return None
    return f'[{near[0]}] name = "{pattern}"'
