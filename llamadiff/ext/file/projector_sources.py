"""Which tensors of a checkpoint make those of a projector file (mmproj): by the names that llama.cpp's converters give
them, and where those say nothing, by values.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from llamaref.known_tensors import projector_stems

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.pairs import in_file
from llamadiff.ext.file.transforms import TRANSFORMS, Sizes, Transform
from llamadiff.ext.file.views import (
    Array,
    InFile,
    Picked,
    Shaped,
    Stored,
    View,
    concatenated,
    cut,
    length_of,
    plain,
    sample,
    whole,
)

# Tensors of a checkpoint that no encoder and no projector has: its language model's, a generator's, buffers.
_ELSEWHERE = re.compile(
    r"(^|\.)(language_model|text_model|text_decoder|lm_head|embed_tokens|tok_embeddings|talker|token2wav|mtp|rotary_emb)\b"
    r"|^((thinker|model)\.)*(layers|norm|output)\."
    r"|(inv_freq|position_ids|num_batches_tracked)$"
)
_SUFFIX = re.compile(r"[._](weight|bias)$")
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")
_LAYER = re.compile(r"\.([0-9]+)\.")
THIRDS = ("Q", "K", "V")
ROWS = 16  # that tell which tensor or transform fits
NEAR = 0.5  # the NMSE of a tensor that was quantized, or changed, and is still the same

# What converters do besides cutting and renaming, of projectors that were converted and compared; the others' tensors
# may have gone through any transform that their values show, if it is the same one in all layers.
DONE: Mapping[str, Mapping[str, str]] = {
    "gemma3": {"mm.soft_emb_norm": "plus one"},
    "pixtral": {"attn_q": "permuted by heads", "attn_k": "permuted by heads"},
    **{name: {} for name in ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "idefics3", "internvl", "mlp",
                             "qwen2a", "voxtral", "ultravox")},
}  # fmt: skip


def _sum_of_frames(parts: Sequence[View], _: Sizes) -> View:
    array = whole(parts[0]).reshape(parts[0].shape).sum(axis=2)
    return Stored(array, "F32")


def _channels_first(parts: Sequence[View], _: Sizes) -> View:
    """A patch's values that are stored as [out, row, column, channel]."""
    rows, width = parts[0].shape[0], int(np.prod(parts[0].shape[1:]))
    side = int((width // 3) ** 0.5)
    array = whole(parts[0]).reshape(rows, side, side, 3)
    return Stored(np.ascontiguousarray(array.transpose(0, 3, 1, 2)), "F32")


OPEN: Mapping[str, Transform] = {
    **{name: TRANSFORMS[name] for name in ("identity", "plus one", "permuted by heads", "transposed")},
    "sum of frames": _sum_of_frames,
    "channels first": _channels_first,
}


@dataclass(frozen=True)
class Source:
    """A tensor of a checkpoint, or a ``part`` of it: a third of Q, K and V, a frame of a kernel."""

    name: str
    view: View
    part: str = ""

    @property
    def says(self) -> str:
        return f"{self.name}, its {self.part}" if self.part else self.name


@dataclass(frozen=True)
class Origin:
    """What makes a tensor of the file. ``named``: by its name; else by its values alone."""

    source: Source
    rule: str
    named: bool

    def view(self, shape: tuple[int, ...], sizes: Sizes) -> View:
        """The values that the tensor should have. Raises ValueError where the sizes do not fit."""
        return transformed(self.source, self.rule, shape, sizes)


def transformed(source: Source, rule: str, shape: tuple[int, ...], sizes: Sizes) -> View:
    """A source after a transform, under a shape. Raises ValueError where the sizes do not fit."""
    view = OPEN[rule]([source.view], sizes)
    if plain(view.shape) != plain(shape) and not (rule == "identity" and len(shape) > 2 and view.shape[0] == shape[0]):
        raise ValueError(f"{list(view.shape)} cannot be {list(shape)}")
    return Shaped(view, shape)


def encoder_tensors(tensors: Mapping[str, View]) -> dict[str, View]:
    """Those of a checkpoint that a projector file may hold."""
    return {name: view for name, view in tensors.items() if not _ELSEWHERE.search(name)}


def layer_of(name: str) -> int | None:
    """The number of a tensor's layer; None of one outside the layers."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def role_of(name: str) -> str:
    """A tensor's name without the numbers of layers."""
    return _NUMBER.sub("N", name)


class Origins:
    """What makes each tensor of a projector file, and what of the checkpoint is in none."""

    def __init__(self, model: ModelFile, tensors: Mapping[str, View], projector: str, sizes: Sizes) -> None:
        self.model, self.projector, self.sizes = model, projector, sizes
        self.tensors = encoder_tensors(tensors)
        self.names = _Names(self.tensors, max((layer_of(name) or 0 for name in tensors), default=0) + 1, model)
        self.is_known = projector in DONE
        self.found: dict[str, Origin] = {}
        self._by_names()
        self._by_values()
        self._as_other_layers()
        self._left_over()

    def _by_names(self) -> None:
        self._named = self.names.sources({*self.model.tensors})
        for name, choices in self._named.items():
            ours = in_file(self.model, name)
            fitting = [each for each in choices if self._rules(name, ours, each)]
            near = [(off, n) for n, each in enumerate(fitting) if (off := self._nearest(name, ours, each)[0]) < NEAR]
            if fitting:
                source = fitting[min(near)[1] if near else 0]
                self.found[name] = Origin(source, self._nearest(name, ours, source)[1], True)

    def _rules(self, name: str, ours: InFile, source: Source) -> list[str]:
        """The transforms that may have made a tensor of a source, which have its shape."""
        fits = []
        for rule in [self.rule(name)] if self.is_known else OPEN:
            try:
                transformed(source, rule, ours.shape, self.sizes)
                fits.append(rule)
            except (ValueError, IndexError, ZeroDivisionError):
                continue
        return fits

    def rule(self, name: str) -> str:
        """The transform that a converter does to a tensor, where that is known."""
        table = DONE.get(self.projector, {})
        return next((rule for stem, rule in table.items() if f"{stem}." in name), "identity")

    def _nearest(self, name: str, ours: InFile, source: Source) -> tuple[float, str]:
        """The NMSE of some rows under the transform that comes nearest, and that."""
        some = sample(ours, ROWS)
        values, best = ours.take(some), (float("inf"), "identity")
        for rule in self._rules(name, ours, source):
            view = transformed(source, rule, ours.shape, self.sizes)
            best = min(best, (_apart(values, view.take(some)), rule))
        return best

    def _by_values(self) -> None:
        """The nameless: each of the source that it is most like, in the order of all others of its kind."""
        taken = {(each.source.name, each.source.part) for each in self.found.values()}
        free = [each for each in _parts(self.tensors) if (each.name, each.part) not in taken]
        free = [each for each in free if not any(key == (each.name, "") for key in taken)]
        for name in self.model.tensors:
            if name in self.found:
                continue
            ours = in_file(self.model, name)
            size = int(np.prod(ours.shape))
            near = [
                (*self._nearest(name, ours, each), number)
                for number, each in enumerate(free)
                if int(np.prod(each.view.shape)) == size and _suffix(each.name) == _suffix(name)
            ]
            off, rule, number = min(near, default=(1.0, "", 0))
            if off < NEAR:
                self.found[name] = Origin(free[number], rule, False)
        self._in_order()

    def _in_order(self) -> None:
        """Numbered siblings that were found by values lie in the checkpoint's order, and a bias beside its matrix."""
        groups = defaultdict[str, list[str]](list)
        for name, origin in self.found.items():
            if not origin.named:
                groups[role_of(name)].append(name)
        for names in groups.values():
            names.sort(key=_natural)
            sources = sorted((self.found[name].source for name in names), key=lambda each: _natural(each.says))
            fits = all(
                plain(source.view.shape) == plain(self.found[name].source.view.shape)
                for name, source in zip(names, sources, strict=True)
            )
            if fits:
                for name, source in zip(names, sources, strict=True):
                    self.found[name] = Origin(source, self.found[name].rule, False)

    def _as_other_layers(self) -> None:
        """One transform, and one kind of source, of a tensor in all layers: what most of them have."""
        roles = defaultdict[str, list[str]](list)
        for name in self.model.tensors:
            if layer_of(name) is not None:
                roles[role_of(name)].append(name)
        for names in roles.values():
            known = [self.found[name] for name in names if name in self.found]
            if not known:
                continue
            rule = Counter(each.rule for each in known).most_common(1)[0][0]
            for name in names:
                origin = self.found.get(name) or self._like(known, name)
                if origin is not None:
                    self.found[name] = Origin(origin.source, rule, origin.named)

    def _like(self, known: Sequence[Origin], name: str) -> Origin | None:
        """The source of a layer's tensor that is called as those of other layers are."""
        for each in known:
            pattern, layer = role_of(each.source.name), layer_of(name)
            other = next((x for x in self.tensors if role_of(x) == pattern and layer_of(x) == layer), None)
            if other is not None:
                parts = [x for x in _parts({other: self.tensors[other]}) if x.part == each.source.part]
                return Origin(parts[0], each.rule, True) if parts else None
        return None

    def _left_over(self) -> None:
        """Of a known projector: what is left on both sides, and has one shape, belongs together."""
        if not self.is_known:
            return
        used = {each.source.name for each in self.found.values()}
        left = {name: view for name, view in self.tensors.items() if name not in used}
        for name in self.model.tensors:
            if name in self.found:
                continue
            shape = self.model.weights.shape(name)
            alike = [x for x in left if plain(left[x].shape) == plain(shape) and _suffix(x) == _suffix(name)]
            alike = [x for x in alike if (".blk." in next(self.names.called(x), [name])[0]) is (".blk." in name)]
            if len(alike) == 1:
                self.found[name] = Origin(Source(alike[0], left.pop(alike[0])), self.rule(name), False)
            elif name in self._named:  # of another shape
                self.found[name] = Origin(self._named[name][0], self.rule(name), True)

    def missing(self) -> Iterator[tuple[Source, str]]:
        """What of the checkpoint makes no tensor of the file, and what it would be called there, if that is known."""
        used = defaultdict[str, set[str]](set)
        for each in self.found.values():
            used[each.source.name].add(each.source.part)
        for name, view in self.tensors.items():
            if name not in used:
                yield Source(name, view), next(self.names.called(name), [""])[0]
            elif "" not in used[name]:
                for part in _parts({name: view}):
                    is_third = bool(used[name] & {*THIRDS})
                    if part.part and part.part not in used[name] and (part.part in THIRDS) is is_third:
                        yield part, self._sibling(name, part)

    def _sibling(self, name: str, part: Source) -> str:
        """What the file would call a part whose fellow is there."""
        fellow = next((own for own, each in self.found.items() if each.source.name == name), "")
        other = self.found[fellow].source.part if fellow else ""
        if part.part in THIRDS:
            return fellow.replace(f"attn_{other.lower()}.", f"attn_{part.part.lower()}.")
        number = part.part.removeprefix("frame ")
        return fellow.removesuffix(".1") + (f".{number}" if number != "0" else "")


def _apart(values: Array, right: Array) -> float:
    size = float(np.mean(np.square(right, dtype=np.float64)))
    off = float(np.mean(np.square(values.astype(np.float64) - right)))
    return off / size if size else float(off > 0)


def _suffix(name: str) -> str:
    found = _SUFFIX.search(name.removesuffix(".1"))
    return found[1] if found else "weight"


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(x), "") if x.isdigit() else (-1, x) for x in re.split(r"([0-9]+)", name)]


def _parts(tensors: Mapping[str, View]) -> Iterator[Source]:
    """Every tensor whole, by thirds where it may be Q, K and V, and a 3-D kernel by its frames."""
    for name, view in tensors.items():
        yield Source(name, view)
        if len(view.shape) <= 2 and length_of(view) % 3 == 0 and ("qkv" in name or "in_proj" in name):
            third = length_of(view) // 3
            yield from (Source(name, cut(view, i * third, (i + 1) * third), part) for i, part in enumerate(THIRDS))
        if len(view.shape) == 5:
            out, channels, frames, rows, width = view.shape
            order = np.arange(out * channels * frames * rows).reshape(out, channels, frames, rows)
            for frame in range(min(frames, 8)):
                kernel = Picked(view, order[:, :, frame].reshape(-1))
                yield Source(name, Shaped(kernel, (out, channels, rows, width)), f"frame {frame}")


class _Names:
    """The names that converters give a checkpoint's tensors, whatever stands before what they know of a name."""

    def __init__(self, tensors: Mapping[str, View], layers: int, model: ModelFile) -> None:
        self.tensors = tensors
        parts = [kind for kind in ("vision", "audio") if model.weights.fields.get(f"clip.has_{kind}_encoder") is True]
        self._tails = defaultdict[str, dict[str, None]](dict)
        for known, stem in projector_stems(layers):
            kind = "audio" if stem.startswith(("a.", "mm.a.")) else "vision"
            if parts in ([], [kind], ["vision", "audio"]):
                for tail in _tails(known):
                    self._tails[tail][stem] = None

    def called(self, name: str) -> Iterator[list[str]]:
        """What a tensor may be called in the file: by all of its name that is known, by less of its end, and so on."""
        found = _SUFFIX.search(name)
        module, suffix = (name[: found.start()], f".{found[1]}") if found else (name, ".weight")
        ends = (suffix, "") if suffix == ".weight" else (suffix,)
        for tail in _tails(module):
            if tail in self._tails:
                yield [stem + end for stem in self._tails[tail] for end in ends]

    def sources(self, own: set[str]) -> dict[str, list[Source]]:
        """Tensor of the file -> the sources that it may be made of."""
        found = defaultdict[str, list[Source]](list)
        for name, view in self.tensors.items():
            for names in self.called(name):
                cuts = [each for called in names for each in _cut_for(called, Source(name, view), own)]
                for target, source in cuts:
                    found[target].append(source)
                if cuts:
                    break
        self._joined(own, found)
        return found

    def _joined(self, own: set[str], found: dict[str, list[Source]]) -> None:
        """Q, K and V one after the other, where the file has them so and the checkpoint does not."""
        for target in own - found.keys():
            if "attn_qkv" not in target:
                continue
            parts = [target.replace("attn_qkv", f"attn_{letter}") for letter in "qkv"]
            views = [
                next(((name, view) for name, view in self.tensors.items() if part in next(self.called(name), ())), None)
                for part in parts
            ]
            if all(views):
                some = [view for view in views if view is not None]
                joined = concatenated([view for _, view in some])
                found[target] = [Source(" and ".join(name for name, _ in some), joined)]


def _tails(module: str) -> Iterable[str]:
    """A name's ends, the longest first, to the last two parts, the number of a layer among them."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts[:-1]) if part.isdigit()]
    last = min(len(parts) - 2, numbers[0]) if numbers else len(parts) - 2
    return [".".join(parts[start:]) for start in range(max(0, last) + 1)]


def _cut_for(called: str, source: Source, own: set[str]) -> Iterator[tuple[str, Source]]:
    """The tensors of the file that a source makes: one, a kernel for each frame, Q, K and V by themselves."""
    frames = [each for each in _parts({source.name: source.view}) if each.part.startswith("frame")]
    if frames and called in own:
        yield from ((called if i == 0 else f"{called}.{i}", each) for i, each in enumerate(frames)
                    if i == 0 or f"{called}.{i}" in own)  # fmt: skip
        yield called, source
    elif called in own:
        yield called, source
    elif "attn_qkv" in called:
        for part in _parts({source.name: source.view}):
            target = called.replace("attn_qkv", f"attn_{part.part.lower()}")
            if part.part in THIRDS and target in own:
                yield target, part
