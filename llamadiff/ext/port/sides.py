"""Who is wrong where a model and llama.cpp part: llama.cpp's graph, or the file that it was given."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from llamaref import Tap
from numpy.typing import NDArray

from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.select import in_engine
from llamadiff.ext.file.config_keys import NAMES, Stated, metadata_oddities, stated_by
from llamadiff.ext.port.alignment import distance
from llamadiff.result.oddity import Oddity
from llamadiff.trace.stated import brief

Array = NDArray[Any]
GRAPH, FILE, MODEL = "llama.cpp's graph", "the file", "the model"
UNSURE = "the file, or llama.cpp's graph"  # where no key has what config.json has, and perhaps none can
EITHER = "the file, or the model's code"  # a third reading of the file is llama.cpp's, and the code is one's own
AGREES = 1e-6  # NMSE of logits
MOST = 4096  # numbers of a key that are looked at
ALIKE = 1e-5  # relative, of numbers that are one
# Words of keys, and the ops at which what they say shows. Sizes show in the tensors.
SHOWS: dict[str, tuple[str, ...]] = {
    "rope": ("ROPE",), "epsilon": ("NORM",), "window": ("SOFT_MAX",), "expert": ("ARGSORT", "SIGMOID", "SOFT_MAX"),
    "softcap": ("TANH", "SCALE", "SOFT_MAX"), "scale": ("SCALE", "ADD", "SOFT_MAX", "GET_ROWS", "MUL_MAT"),
    "clamp": ("CLAMP",), "pooling": ("result_embd_pooled",),
}  # fmt: skip
EYES_SHOW: dict[str, tuple[str, ...]] = {  # and of keys of a projector file
    "epsilon": ("NORM",), "head_count": ("MUL_MAT", "SOFT_MAX", "ROPE"), "use_": ("GELU", "SILU", "SWIGLU"),
    "scale_factor": ("MUL_MAT", "POOL", "RESHAPE", "NORM"), "merge": ("MUL_MAT", "RESHAPE", "NORM"),
    "window": ("SOFT_MAX", "attn_scores"), "wa_pattern": ("SOFT_MAX", "attn_scores"), "deepstack": ("CONCAT", "ADD"),
    "patch_size": ("MUL_MAT", "IM2COL"),
}  # fmt: skip
EYES = "clip."
KEYLESS = ("rope-yarn-unrounded",)  # known bugs by which a model may part from llama.cpp, and no key can say so
UNUSED = ("initializer", "dropout", "pdrop", "_std", "aux_loss")  # of training alone


def other_keys(file: ModelFile, config: Mapping[str, Any]) -> Iterator[Oddity]:
    """Each key that the file has, and the config has otherwise."""
    stated = stated_by(config, file.architecture)
    own = {key: value for key, value in stated.values.items() if stated.names[key] in NAMES.get(key, stated.names[key])}
    own = {key: value for key, value in own.items() if any(word in key for word in SHOWS)}
    for found in metadata_oddities(file, Stated(own, stated.names), {}):
        if found.certain and found.where in file.weights.fields:
            yield found
    for key, value in file.weights.fields.items():  # keys that have a config's own name
        wanted = config.get(key.rpartition(".")[2])
        if key.removeprefix(f"{file.architecture}.") in own or not any(word in key for word in SHOWS):
            continue
        if _is_number(value) and _is_number(wanted) and not np.isclose(value, wanted, rtol=ALIKE, atol=0):
            yield Oddity(key, f"is {value:g}; config.json has {wanted:g}", "metadata")


def unstated(file: ModelFile, config: Mapping[str, Any], read: Iterable[str]) -> dict[str, float]:
    """The numbers of a config that the model has read, and no key of the file has: name -> number."""
    known = np.array([x for value in file.weights.fields.values() for x in _fractions(value)])
    found = {name: x for read_name in sorted(read) for name, x in _floats(read_name, config.get(read_name))}
    return {name: x for name, x in found.items() if not np.isclose(known, x, rtol=ALIKE, atol=0).any()}


def uneven(file: ModelFile, config: Mapping[str, Any], read: Iterable[str], layers: int) -> dict[str, list[Any]]:
    """Lists of a config that the model has read, which differ between layers and are in no key of the file."""
    known = [value for value in file.weights.fields.values() if isinstance(value, list) and len(value) == layers]
    found = {name: config.get(name) for name in sorted(read)}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, list) and len(value) == layers and value not in known and any(x != value[0] for x in value)
    }


@dataclass(frozen=True)
class Blame:
    """Who is wrong at a place of which no tensor tells: by ``keys`` and numbers of the config that are otherwise in the
    file (``side_of``), by the third ``opinion``, and by ``lists`` of the config, an entry a layer, that no key has.
    """

    keys: Sequence[str]
    unsaid: Mapping[str, float]
    opinion: str | None
    is_own: bool
    lists: Mapping[str, list[Any]]

    def of(self, place: str, says: str, text: str, layers: Sequence[int]) -> str:
        """Of a place (op and name) in these layers."""
        blamed = UNSURE if any(_tells(value, layers) for value in self.lists.values()) else FILE
        blamed = GRAPH if self.opinion != GRAPH else EITHER if self.is_own else blamed
        return side_of(place, says, text, self.keys, self.unsaid, blamed)

    def unkept(self, places: Iterable[Sequence[int]]) -> list[str]:
        """That no key has the lists that tell layers apart as these places are."""
        layers = list(places)
        return [
            f"no key has {name} = {brief(value)} of config.json, which the model reads"
            for name, value in self.lists.items() if any(_tells(value, each) for each in layers)
        ]  # fmt: skip


def _tells(value: Sequence[Any], layers: Sequence[int]) -> bool:
    """Whether a list has one value in these layers."""
    return bool(layers) and len({str(value[layer]) for layer in layers if layer < len(value)}) == 1


class _Last(Tap):
    """Keeps what one tap gave."""

    def __init__(self, name: str) -> None:
        self.name, self.values = name, np.empty(0)

    def __call__(self, name: str, x: Array) -> Array:
        if name == self.name:
            self.values = x
        return x


def third_opinion(file: ModelFile, tokens: tuple[int, ...], graph: Array, model: Array, end: str) -> str | None:
    """Whose values the reference engine has at the ``end`` of this file: llama.cpp's, or the model's; None if it has
    neither.
    """
    engine, _ = in_engine(file)
    if engine is None:
        return None
    tap = _Last(end)
    logits = engine.engine.forward(tokens, tap=tap)
    own = (tap.values if tap.values.size else logits).ravel()
    near = {who: distance(own, x) for who, x in ((GRAPH, graph), (MODEL, model)) if x.size == own.size}
    who = min(near, key=lambda each: near[each], default=None)
    return who if who is not None and near[who] <= AGREES else None


def side_of(place: str, says: str, line: str, keys: Iterable[str], numbers: Mapping[str, float], blamed: str) -> str:
    """Whose a ``place`` (op and name) is, of which no tensor of the file tells. ``line`` is the model's code there.

    ``keys`` are of the file and not as the config has them, ``numbers`` of the config and in no key; ``blamed``: who is
    wrong where these say nothing of it.
    """
    said = [float(x) for x in re.findall(r"(?<![\w.{-])\d+(?:\.\d+)?(?:e[+-]\d+)?(?![\w}])", says)]
    may = {name: x for name, x in numbers.items() if shows_at(name, place) is not False}
    stated = any(np.isclose(said, x, rtol=1e-3, atol=0).any() for x in may.values()) if said else False
    stated = stated or any(name.rpartition(".")[2] in line for name in may)
    shows = any(shows_at(key, place) for key in keys)
    if stated or shows:
        return FILE
    return blamed


def shows_at(name: str, place: str) -> bool | None:
    """Whether what a key or a number says shows at a place; None where its name does not tell."""
    known = EYES_SHOW if name.startswith(EYES) else SHOWS
    found = [any(where in place for where in ops) for word, ops in known.items() if word in name]
    return any(found) if found else None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _fractions(value: Any) -> Iterator[float]:
    """The numbers of a key that is no count."""
    values = value if isinstance(value, list) else [value]
    yield from (x for x in values[:MOST] if isinstance(x, float))


def _floats(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Numbers with a fraction, or that no count would be: others are in any file."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _floats(f"{name}.{key}", inner)
    elif isinstance(value, float) and value not in (0.0, 1.0) and not any(word in name for word in UNUSED):
        yield name, value
