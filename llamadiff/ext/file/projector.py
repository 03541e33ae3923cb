"""A projector file (mmproj) against its checkpoint: the tensors of the encoder and the projector, and their keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import permutations
from pathlib import Path

import numpy as np

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.against import OtherSide, label_of
from llamadiff.ext.file.explain import Guess, explained
from llamadiff.ext.file.mistakes import LARGEST, Made, guesses_of, head_counts
from llamadiff.ext.file.pairs import Measured, Pair, floor_of, in_file
from llamadiff.ext.file.projector_keys import Stated, key_oddities, processor_config
from llamadiff.ext.file.projector_sources import THIRDS, Origins, Source, encoder_tensors, layer_of, role_of
from llamadiff.ext.file.safetensors_files import open_checkpoint
from llamadiff.ext.file.same_model import check_same_matrices, config_json
from llamadiff.ext.file.transforms import Sizes, permuted, plus
from llamadiff.ext.file.views import (
    Array,
    Picked,
    Shaped,
    Stored,
    View,
    blocks_of_rows,
    length_of,
    plain,
    rows_of,
    whole,
)
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UserError

BREAK = "v.token_embd.img_break"  # a row of the language model's embedding
# Parts of encoders that language models are not given: SigLIP's pooling, what follows the layer that is read.
UNUSED = re.compile(r"(^|\.)(head|pooler|logit_scale|audio_bos_eos_token)(\.|$)")
BEHIND = re.compile(r"post_layernorm|post_layer_norm")
AXES = ("channels", "rows", "columns")


class Projector(OtherSide):
    """A directory with config.json and .safetensors files, beside a projector file. Raises UserError for none."""

    def __init__(self, model: ModelFile, folder: Path) -> None:
        self.model, self.folder, self.label = model, folder, label_of(folder)
        self.config = config_json(folder)
        fields = model.weights.fields
        keys = ("clip.projector_type", "clip.vision.projector_type", "clip.audio.projector_type")
        said = next((str(fields[key]) for key in keys if fields.get(key)), "")
        self.stated = Stated(self.config, processor_config(folder), said)
        self.tensors, self.unread = open_checkpoint(folder)
        if not encoder_tensors(self.tensors):
            raise UserError(
                f"{folder}: has the tensors of a language model alone, {model.path.name} holds a multimodal projector "
                "(mmproj); give the checkpoint that it was converted from"
            )
        check_same_matrices(model, self.tensors, str(folder))
        kind = "vision" if fields.get("clip.has_vision_encoder") is True else "audio"
        heads = self.stated.heads(kind)
        self.sizes = Sizes(heads, heads)
        self.origins = Origins(model, self.tensors, self.stated.projector, self.sizes)

    @cached_property
    def made(self) -> dict[str, Made]:
        """Tensor of the file -> what should be in it."""
        found: dict[str, Made] = {}
        for name, origin in self.origins.found.items():
            try:
                view = origin.view(self.model.weights.shape(name), self.sizes)
            except (ValueError, IndexError, ZeroDivisionError):
                view = origin.source.view
            says = origin.source.says + (f", {origin.rule}" if origin.rule != "identity" else "")
            found[name] = Made(says, view, origin.rule, (origin.source.view,))
        if BREAK in self.model.tensors and (row := self._break()) is not None:
            found[BREAK] = row
        return found

    def _break(self) -> Made | None:
        """The row of the embedding that ends a row of patches."""
        ends = ("embed_tokens.weight", "tok_embeddings.weight")
        name = next((name for name in self.tensors if name.endswith(ends)), "")
        if not name:
            return None
        view, row = self.tensors[name], whole(in_file(self.model, BREAK)).reshape(-1)
        if view.shape[-1] != row.size:
            return None
        _, nearest = min(
            (float(apart.min()), int(rows[apart.argmin()]))
            for rows in blocks_of_rows(view)
            for apart in [np.square(view.take(rows) - row).sum(axis=1)]
        )
        return Made(f"row {nearest} of {name}", Stored(view.take(np.array([nearest]))[0], "F32"))

    def pairs(self) -> Sequence[Pair]:
        shape = self.model.weights.shape
        return [
            Pair(in_file(self.model, name), made.view, made.says, floor_of(made.rule, made.view.kind))
            for name, made in self.made.items() if plain(made.view.shape) == plain(shape(name))
        ]  # fmt: skip

    def oddities(self) -> Iterator[Oddity]:
        for name in self.model.tensors:
            made, shape = self.made.get(name), self.model.weights.shape(name)
            if made is None and self.origins.is_known:
                yield self._with_fix(Oddity(name, f"no tensor of {self.label} makes it", "unexpected"))
            elif made is not None and plain(made.view.shape) != plain(shape):
                says = f"has shape {list(shape)}; {made.says} gives {list(made.view.shape)}"
                yield self._with_fix(Oddity(name, says, "shape"))
        yield from self._missing()
        if self.origins.projector == "pixtral" and BREAK not in self.model.tensors:
            why = "some converters leave it out where the embedding is called language_model.*"
            says = f"is missing: the row of the embedding that is [IMG_BREAK]'s; llama.cpp refuses the file ({why})"
            yield self._with_fix(Oddity(BREAK, says, "missing"))
        yield from key_oddities(self.model, self.stated)

    def _missing(self) -> Iterator[Oddity]:
        """Tensors of the encoder or the projector that are in none of the file's."""
        for source, called in self.origins.missing():
            if self._is_unused(source.name):
                continue
            name = self._name_of(source, called)
            certain = bool(name) or self.origins.is_known or self._is_of_others(source.name)
            then = "adds nothing there" if source.name.endswith("bias") else "does without it, or refuses the file"
            says = f"is missing: {source.says} of {self.label} is in no tensor of the file; llama.cpp {then}"
            yield self._with_fix(Oddity(name or source.name, says, "missing", certain=certain))

    def _name_of(self, source: Source, called: str) -> str:
        """What a lost tensor is called in the file: as its module's other half, or its fellows in other layers are."""
        if source.part:
            return called
        module, _, suffix = source.name.rpartition(".")
        for name, origin in self.origins.found.items():
            if origin.source.name.rpartition(".")[0] == module and not origin.source.part:
                return f"{name.rpartition('.')[0]}.{suffix}"
        for name, origin in self.origins.found.items():
            if role_of(origin.source.name) == role_of(source.name) and layer_of(name) is not None:
                return re.sub(r"\.[0-9]+\.", f".{layer_of(source.name)}.", name, count=1)
        return called if self.origins.is_known else ""

    def _is_of_others(self, name: str) -> bool:
        """Whether the same tensor of another layer is in the file."""
        return any(role_of(each.source.name) == role_of(name) for each in self.origins.found.values())

    def _is_unused(self, name: str) -> bool:
        """Whether llama.cpp's graph rightly does without a tensor: behind the layer whose output is read."""
        layer, feature = layer_of(name), self.config.get("vision_feature_layer")
        if UNUSED.search(name):
            return True
        if not isinstance(feature, int) or feature >= -1:
            return False
        count = self.stated.part("vision")[0].get("num_hidden_layers", 0)
        return bool(BEHIND.search(name)) or (layer is not None and layer > count + feature)

    def unchecked(self) -> Iterator[tuple[str, str]]:
        for name in self.model.tensors:
            if name not in self.made:
                yield name, "was not compared: it may be computed, or made of several tensors"
        for name, kind in self.unread.items():
            yield name, f"is of type {kind[:20]} in {self.label}, which is not read"

    def notes(self) -> Iterator[str]:
        other = len(self.tensors) - len(encoder_tensors(self.tensors))
        yield f"{other} tensors of {self.label} are its language model's, which another file holds"
        if not self.origins.is_known:
            yield (
                f"it is not known what converters do for the projector {self.stated.projector or '(not named)'}: names "
                "and values say what each tensor was made of, and what all layers went through is taken for right"
            )

    def explain(self, measured: Measured) -> Oddity:
        pair = measured.pair
        return self._with_fix(explained(measured, self._guesses(pair), self._heads(pair.name)))

    def _heads(self, name: str) -> int:
        return self.sizes.heads if re.search(r"attn_[qkv]\.", name) else 0

    def _with_fix(self, found: Oddity) -> Oddity:
        return replace(found, says=f"{found.says}; convert {self.model.path.name} again")

    def _guesses(self, pair: Pair) -> Iterator[Guess]:
        yield from self._others(pair)
        yield from _turned(pair, self.made[pair.name])
        yield from self._permuted(pair)
        yield from self._cut_by_heads(pair)
        yield from guesses_of(pair, self.made, self.sizes)
        if re.search(r"(ln|norm)[0-9]?\.weight$", pair.name) and self.made[pair.name].rule != "plus one":
            says = "one is added; this encoder multiplies by the weight itself"
            yield Guess("plus-one-extra", says, plus(pair.theirs, 1.0))

    def _permuted(self, pair: Pair) -> Iterator[Guess]:
        """Q or K permuted by heads, where converters leave them as they are."""
        if self.made[pair.name].rule == "identity" and re.search(r"attn_[qk]\.", pair.name):
            rows = length_of(pair.theirs)
            for count in (self.sizes.heads, *head_counts(rows, self.sizes.heads)):
                if count and rows % (2 * count) == 0:
                    says = f"is permuted with {count} heads; converters permute nothing of {self.origins.projector}"
                    yield Guess("permutation-extra", says, permuted(pair.theirs, count))

    def _cut_by_heads(self, pair: Pair) -> Iterator[Guess]:
        """Q, K or V cut out of a matrix as if that had them head by head."""
        own, heads = self.origins.found.get(pair.name), self.sizes.heads
        if own is None or own.source.part not in THIRDS or not heads:
            return
        fused = self.tensors[own.source.name]
        rows = length_of(fused)
        if rows % (3 * heads) == 0:
            order = np.arange(rows).reshape(heads, 3, -1)[:, THIRDS.index(own.source.part)].reshape(-1)
            says = f"is cut head by head; {own.source.name} holds all of Q, then K, then V"
            yield Guess("qkv-order", says, Shaped(picked(fused, order), pair.theirs.shape))

    def _others(self, pair: Pair) -> Iterator[Guess]:
        """Other tensors of the checkpoint, by what it calls them."""
        own = self.origins.found.get(pair.name)
        shape = self.model.weights.shape(pair.name)
        for name, origin in self.origins.found.items():
            if name != pair.name and plain(self.made[name].view.shape) == plain(shape):
                says = f"these are the values of {origin.source.says}, which {name} should have"
                yield Guess("another-tensor", says, Shaped(self.made[name].view, shape))
        for name, view in self.tensors.items():
            if (own is None or name != own.source.name) and plain(view.shape) == plain(shape):
                yield Guess("another-tensor", f"these are the values of {name}", Shaped(view, shape))


def _turned(pair: Pair, own: Made) -> Iterator[Guess]:
    """A kernel [out, channel, row, column] with its axes in another order, or its channels."""
    view = own.view
    if len(view.shape) not in (3, 4) or rows_of(view) * view.shape[-1] > LARGEST:
        return
    array = whole(view).reshape(view.shape)
    names = AXES[-(array.ndim - 1) :] if array.ndim == 4 else ("channels", "steps")
    for order in list(permutations(range(array.ndim)))[1:]:
        turned = np.ascontiguousarray(array.transpose(order))
        kept = [("outputs", *names)[axis] for axis in order]
        says = f"is transposed: its values lie as {' x '.join(kept)}; outputs x {' x '.join(names)} is right"
        yield Guess("transposed", says, Stored(turned.reshape(pair.ours.shape), view.kind))
    if array.ndim == 4:
        for axes, word in (((2,), "rows"), ((3,), "columns"), ((2, 3), "rows and columns")):
            flipped = np.ascontiguousarray(np.flip(array, axes))
            yield Guess("flipped", f"its {word} are in reverse order", Stored(flipped, view.kind))
        says = "its channels are in reverse order: blue, green, red"
        yield Guess("channel-order", says, Stored(np.ascontiguousarray(array[:, ::-1]), view.kind))


def picked(view: View, order: Array) -> View:
    """Some rows of a matrix, or values of a vector."""
    if len(view.shape) > 1:
        return Picked(view, order)
    return Stored(whole(view).reshape(-1)[order], "F32")
