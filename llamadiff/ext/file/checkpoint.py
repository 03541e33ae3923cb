"""A Hugging Face directory as the other side: its tensors, through the transforms that converters legally do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llamaref.file_kind import other_kind
from llamaref.known_tensors import stem_of

from llamadiff import plugins
from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.against import OtherSide, label_of
from llamadiff.ext.file.architectures import IGNORED, TABLES, Origin, Table
from llamadiff.ext.file.by_names import pairs_by_names
from llamadiff.ext.file.config_keys import Stated, metadata_oddities, rope_tensors, stated_by
from llamadiff.ext.file.decides import module_oddities, routing_oddities
from llamadiff.ext.file.explain import Guess, explained
from llamadiff.ext.file.mistakes import Made, guesses_of
from llamadiff.ext.file.pairs import Measured, Pair, floor_of, in_file, with_lacking_scale
from llamadiff.ext.file.rules import assumptions
from llamadiff.ext.file.safetensors_files import open_checkpoint
from llamadiff.ext.file.same_model import check_same_kind, config_json, same_checkpoint
from llamadiff.ext.file.transforms import TRANSFORMS, Sizes, cut_qkv, joined_experts
from llamadiff.ext.file.views import Stored, concatenated, plain
from llamadiff.ext.file.weight_faults import heads_of
from llamadiff.result.oddity import CheckpointTokenizer, Oddity
from llamadiff.system.errors import UserError

COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # of config.json
HEAD, EMBEDDING = "output.weight", "token_embd.weight"
# What tensors of the language model begin with, where a checkpoint has encoders, too.
LANGUAGE = ("model.language_model.", "language_model.model.", "language_model.", "model.text_model.")
QKV = ("attn_q", "attn_k", "attn_v")
_SUFFIX = re.compile(r"\.(weight|bias)$")


@dataclass(frozen=True)
class _Named:
    """A tensor of the file by its parts."""

    layer: int | None
    stem: str
    suffix: str

    @classmethod
    def of(cls, name: str) -> _Named:
        layer, stem = stem_of(name)
        match = _SUFFIX.search(name)
        return cls(layer, stem, match[0] if match else "")


class Checkpoint(OtherSide):
    """A directory with config.json and .safetensors files. Raises UserError for what is none, or of another model.

    ``tokenizer``: whether the tokenizers are compared, too.
    """

    def __init__(self, model: ModelFile, folder: Path, tokenizer: bool = True) -> None:
        self.model, self.folder, self.label = model, folder, label_of(folder)
        self.with_tokenizer = tokenizer
        self.config = config_json(folder)
        if model.architecture not in TABLES:
            raise UserError(
                f"{model.path}: no table says how {model.architecture} is converted; known are {', '.join(TABLES)}"
            )
        found, self.unread = same_checkpoint(model, folder, self.config)
        self.table, self.used = TABLES[model.architecture], set[str]()
        self.tensors = {_canonical(name, self.table): view for name, view in found.items()}
        sees = any(name.startswith(LANGUAGE) for name in found)
        heads = {rule.source + ".weight" for rule in self.table.outside.get("output", ())}
        self.encoders = {name for name in found if sees and name not in heads and not name.startswith(LANGUAGE)}
        self.stated: Stated = stated_by(self.config, model.architecture)

    @cached_property
    def sizes(self) -> Sizes:
        number = self.stated.number
        return Sizes(number("attention.head_count"), number("attention.head_count_kv"),
                     max(number("ssm.group_count"), 1))  # fmt: skip

    @cached_property
    def made(self) -> dict[str, Made]:
        """Tensor of the file -> what should be in it."""
        found = {name: self._made(_Named.of(name)) for name in self.model.tensors}
        return {name: made for name, made in found.items() if made is not None}

    def complete(self) -> dict[str, Made]:
        """What a right file would hold: the tensors of this one, and those that it lacks."""
        lacking = [f"{stem}.weight" for stem in ("output", *rope_tensors(self.config))]
        others = {name: self._made(_Named.of(name)) for name in lacking if name not in self.made}
        if self._is_tied():
            others.pop("output.weight", None)
        return {**self.made, **{name: made for name, made in others.items() if made is not None}}

    def _made(self, place: _Named) -> Made | None:
        rules = (self.table.outside if place.layer is None else self.table.layer).get(place.stem, ())
        for rule in rules:
            made = self._by_rule(rule, place)
            if made is not None:
                return made
        return self._otherwise(place)

    def _by_rule(self, rule: Origin, place: _Named) -> Made | None:
        """What a rule makes of the checkpoint, if its sources are there."""
        name = rule.source.replace("{i}", str(place.layer)) + ("" if rule.exact else place.suffix)
        names = [name]
        if "{x}" in name:
            count = next((x for x in range(1 << 16) if name.replace("{x}", str(x)) not in self.tensors), 0)
            names = [name.replace("{x}", str(x)) for x in range(count)]
        if not names or any(each not in self.tensors for each in names):
            return None
        self.used.update(names)
        views = [self.tensors[each] for each in names]
        told = f"{name.replace('{x}', '*')}" + (f", {rule.make}" if rule.make != "identity" else "")
        try:
            return Made(told, TRANSFORMS[rule.make](views, self.sizes), rule.make, tuple(views))
        except (ValueError, IndexError, ZeroDivisionError):  # sizes that do not fit what config.json says
            return None

    def _otherwise(self, place: _Named) -> Made | None:
        """What is legally fused, split, computed or used twice."""
        try:
            return self._fused(place)
        except (ValueError, IndexError, ZeroDivisionError):
            return None

    def _fused(self, place: _Named) -> Made | None:
        """Raises what NumPy does where sizes do not fit."""
        if place == _Named.of(HEAD):
            return self._made(_Named.of(EMBEDDING)) if self._is_tied() else None
        computed = rope_tensors(self.config).get(place.stem)
        if computed is not None:
            return Made("computed from the RoPE scaling of config.json", Stored(computed, "F32"), "computed")
        if place.stem == "attn_qkv":
            parts = [self._made(_Named(place.layer, stem, place.suffix)) for stem in QKV]
            views = tuple(part.view for part in parts if part is not None)
            whole = len(views) == len(QKV)
            return Made("Q, K and V, one after the other", concatenated(views), "fused", views) if whole else None
        if place.stem in QKV and "attn_qkv" in self.table.layer:
            return self._split(place)
        if place.stem == "ffn_gate_up_exps":
            gate, up = (self._made(_Named(place.layer, f"ffn_{part}_exps", place.suffix)) for part in ("gate", "up"))
            if gate is not None and up is not None:
                return Made("gate and up of each expert", joined_experts(gate.view, up.view), "fused experts")
        return None

    def _split(self, place: _Named) -> Made | None:
        """Q, K or V of a fused matrix."""
        whole = self._made(_Named(place.layer, "attn_qkv", place.suffix))
        if whole is None:
            return None
        part = cut_qkv(whole.view, self.sizes)[place.stem[-1].upper()]
        return Made(f"{whole.says}, its part", part, "split")

    def _is_tied(self) -> bool:
        """Whether the embedding is the head too: config.json says so, or there is no other."""
        heads = [rule.source + ".weight" for rule in self.table.outside.get("output", ())]
        said = self.config.get("tie_word_embeddings", self.model.architecture.startswith("gemma"))
        return said is True or not any(head in self.tensors for head in heads)

    def pairs(self) -> Sequence[Pair]:
        weights = self.model.weights
        return [
            Pair(in_file(self.model, name), made.view, made.says, floor_of(made.rule, made.view.kind))
            for name, made in self.made.items() if plain(made.view.shape) == plain(weights.shape(name))
        ]  # fmt: skip

    def oddities(self) -> Iterator[Oddity]:
        weights = self.model.weights
        for name in self.model.tensors:
            made = self.made.get(name)
            if made is None:
                yield Oddity(name, f"no tensor of {self.label} makes it", "unexpected", certain=name != HEAD)
            elif plain(made.view.shape) != plain(weights.shape(name)):
                yield _misshapen(name, weights.shape(name), made)
        yield from self._missing()
        yield from metadata_oddities(self.model, self.stated, self.config)
        yield from routing_oddities(self.model, self.config)
        yield from module_oddities(self.model, self.folder)
        yield from self.tokenizer.oddities(self.model) if self.tokenizer is not None else ()
        yield from (found for found in self.ids if isinstance(found, Oddity))

    @cached_property
    def tokenizer(self) -> CheckpointTokenizer | None:
        """The checkpoint's; None where no slice knows tokenizers, or nobody asks."""
        return plugins.ask_first(lambda each: each.tokenizer(self.folder)) if self.with_tokenizer else None

    @cached_property
    def ids(self) -> Sequence[Oddity | str]:
        """What asking both tokenizers comes to."""
        if self.tokenizer is None:
            return ["no tokenizer was compared: the slice that does so is missing"]
        return self.tokenizer.ids(self.model)

    def _missing(self) -> Iterator[Oddity]:
        """Tensors of the checkpoint that are in none of the file's."""
        heads = {rule.source + ".weight" for rule in self.table.outside.get("output", ())}
        for name in sorted(self.tensors.keys() - self.used - {_canonical(name, self.table) for name in self.encoders}):
            if name.endswith(IGNORED):
                continue
            if name in heads:
                yield from self._headless(name)
            else:
                yield Oddity(name, "of the checkpoint is in no tensor of the file", "missing")
        for stem in rope_tensors(self.config):
            if not any(stem_of(name)[1] == stem for name in self.model.tensors):
                says = "is missing: config.json scales RoPE by it, and llama.cpp then does not"
                yield Oddity(f"{stem}.weight", says, "rope-scaling")

    def _headless(self, name: str) -> Iterator[Oddity]:
        """The file has no head: right where it is the embedding once more."""
        made = self._made(_Named.of(EMBEDDING))
        if made is not None and not Made("", self.tensors[name]).same_as(made):
            said = ", though config.json says tie_word_embeddings = true" if self._is_tied() else ""
            says = f"is missing: llama.cpp multiplies by {EMBEDDING} (a tied head), and {name} holds other values{said}"
            yield Oddity(HEAD, says, "tied-head")

    def unchecked(self) -> Iterator[tuple[str, str]]:
        for name, kind in self.unread.items():
            yield name, f"is of type {kind[:20]} in {self.label}, which is not read"

    def notes(self) -> Iterator[str]:
        yield from assumptions(self.model)
        if self.encoders:
            parts = sorted({name.removeprefix("model.").partition(".")[0] for name in self.encoders})
            yield (
                f"{len(self.encoders)} tensors of {self.label} are not its language model's ({', '.join(parts)}): "
                "a file for --mmproj has them"
            )
        yield from (found for found in self.ids if isinstance(found, str))

    def explain(self, measured: Measured) -> Oddity:
        pair = measured.pair
        return with_lacking_scale(explained(measured, self._guesses(pair), heads_of(self.model, pair.name)), pair)

    def _guesses(self, pair: Pair) -> Iterator[Guess]:
        yield from guesses_of(pair, self.made, self.sizes)


class CheckpointByNames(OtherSide):
    """A directory of an architecture whose conversion no table knows. Raises UserError for none."""

    def __init__(self, model: ModelFile, folder: Path) -> None:
        self.model, self.folder, self.label = model, folder, label_of(folder)
        self.config = config_json(folder)
        check_same_kind(model, self.config, folder)
        is_model = other_kind(model.weights.fields, model.tensors) is None
        self.tokenizer = plugins.ask_first(lambda each: each.tokenizer(folder)) if is_model else None
        self.ids = self.tokenizer.ids(model) if self.tokenizer is not None else ()

    def pairs(self) -> Sequence[Pair]:
        return self._pairs

    @cached_property
    def _pairs(self) -> list[Pair]:
        """None where the directory has no weights that are read."""
        try:
            return list(pairs_by_names(self.model, open_checkpoint(self.folder)[0]))
        except UserError:
            return []

    def oddities(self) -> Iterator[Oddity]:
        yield from routing_oddities(self.model, self.config)
        yield from module_oddities(self.model, self.folder)
        yield from self.tokenizer.oddities(self.model) if self.tokenizer is not None else ()
        yield from (found for found in self.ids if isinstance(found, Oddity))

    def explain(self, measured: Measured) -> Oddity:
        return with_lacking_scale(explained(measured, (), heads_of(self.model, measured.pair.name)), measured.pair)

    def unchecked(self) -> Iterator[tuple[str, str]]:
        compared = {pair.name for pair in self._pairs}
        for name in self.model.tensors:
            if name not in compared and name not in COMPUTED:
                yield name, "was not compared"

    def notes(self) -> Iterator[str]:
        yield (
            f"no table says how {self.model.architecture}'s tensors are converted: they were found by the converters' "
            f"names, and of metadata how experts are chosen, pooling{' and the tokenizer' if self.tokenizer else ''} "
            f"were compared; tables are there for {', '.join(TABLES)}"
        )
        yield from (found for found in self.ids if isinstance(found, str))


def _canonical(name: str, table: Table) -> str:
    """A tensor's name as the table has it: without the prefix of models that see, with that of whole models.

    Checkpoints of a model without its head (embedding models, a part that was saved by itself) lack the latter.
    """
    for prefix in LANGUAGE:
        if name.startswith(prefix):
            return ("" if name.startswith(prefix + "lm_head") else "model.") + name.removeprefix(prefix)
    rules = [rule for of in (table.outside, table.layer) for some in of.values() for rule in some]
    sources = {_pattern(rule.source): rule.source for rule in rules}
    whole = {source.partition(".")[0] for source in sources.values() if "." in source}
    own = _pattern(name)
    if own in sources:
        return name
    return next((f"{prefix}.{name}" for prefix in sorted(whole) if f"{prefix}.{own}" in sources), name)


def _pattern(name: str) -> str:
    """A name without its suffix, whatever the layer and the expert."""
    return re.sub(r"(?<=\.)(\{\w\}|[0-9]+)(?=\.)", "N", f".{_SUFFIX.sub('', name)}.").strip(".")


def _misshapen(name: str, shape: tuple[int, ...], made: Made) -> Oddity:
    wanted = made.view.shape
    if plain(shape) == plain(wanted)[::-1]:
        says = f"is transposed: its shape is {list(shape)}, {made.says} gives {list(wanted)}"
        return Oddity(name, says, "transposed")
    return Oddity(name, f"has shape {list(shape)}; {made.says} gives {list(wanted)}", "shape")
