"""Another GGUF file as the other side: the same names, whatever the types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from llamaref.file_kind import other_kind
from llamaref.known_tensors import stem_of

from llamadiff import plugins
from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.against import OtherSide, label_of
from llamadiff.ext.file.alone import refusal
from llamadiff.ext.file.config_keys import CAUSES
from llamadiff.ext.file.explain import Guess, explained
from llamadiff.ext.file.lacking import lacking, told
from llamadiff.ext.file.mistakes import of_experts
from llamadiff.ext.file.pairs import SCALED, Measured, Pair, in_file, with_lacking_scale
from llamadiff.ext.file.statistics import gguf_decoder
from llamadiff.ext.file.views import Mapped, Shaped, Transposed
from llamadiff.ext.file.weight_faults import heads_of
from llamadiff.result.oddity import Oddity
from llamadiff.system.commands import quote
from llamadiff.system.errors import UserError

IGNORED = ("GGUF.", "general.", "split.", "quantize.")  # keys that say nothing of what the model computes
ROPE_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")  # tensors that llama.cpp does without
TOKENIZER, TEMPLATE = "tokenizer.", "tokenizer.chat_template"  # keys that the slice of tokenizers compares
SMALLER = 0.9  # of a file's bytes: another quantization, and not other metadata
MOST = 200  # characters of a value that are told


class OtherFile(OtherSide):
    """A GGUF file that should hold the same model. Raises UserError if it is of another one."""

    def __init__(self, model: ModelFile, path: str | Path) -> None:
        self.model, self.other = model, ModelFile(path)
        self.label, self.own = label_of(path), label_of(model.path)
        if self.label == self.own:
            self.label, self.own = f"{path}", f"{model.path}"
        self.tokenizer = plugins.ask_first(lambda each: each.tokenizer(Path(path)))
        self._check_same()

    def _check_same(self) -> None:
        a, b = self.model, self.other
        kinds = [other_kind(side.weights.fields, side.tensors) for side in (a, b)]
        odd = next((kind for kind in reversed(kinds) if kind is not None), None)
        if odd is not None and kinds[0] is not kinds[1]:
            path = b.path if kinds[1] is not None else a.path
            raise UserError(f"{path}: holds {odd.name}, the other file does not; {odd.use}")
        if a.architecture != b.architecture:
            raise UserError(
                f"{b.path}: holds {b.architecture}, {a.path.name} holds {a.architecture}; give two files of one model"
            )
        for key in ("block_count", "embedding_length", "attention.head_count"):
            ours, theirs = a.hyper_parameter(key), b.hyper_parameter(key)
            if ours is not None and theirs is not None and ours != theirs:
                raise UserError(
                    f"{b.path}: {key} = {str(theirs)[:40]}, {a.path.name} has {str(ours)[:40]}; "
                    "give two files of one model"
                )

    def notes(self) -> Iterator[str]:
        """That the file that is asked about is the larger one: a quantized file is asked about beside its original."""
        ours, theirs = (sum(file.stat().st_size for file in side.weights.files) for side in (self.model, self.other))
        if theirs < SMALLER * ours:
            command = " ".join(quote(str(word)) for word in ("llamadiff", "weights", self.other.path, self.model.path))
            yield f"{self.label} is the smaller file: what it lost is asked with it first, {command}"

    def _common(self) -> list[str]:
        return [name for name in self.model.tensors if name in self.other.weights]

    def _differ(self, name: str) -> bool:
        return self.model.weights.shape(name) != self.other.weights.shape(name)

    def _undecoded(self, name: str) -> str:
        """The type of a tensor that cannot be decoded; empty where both sides can be."""
        sides = (self.model, self.other)
        return next((side.weights.type(name) for side in sides if undecodable(side, name)), "")

    def pairs(self) -> Sequence[Pair]:
        names = [name for name in self._common() if not self._differ(name) and not self._undecoded(name)]
        return [Pair(in_file(self.model, name), in_file(self.other, name)) for name in names]

    def unchecked(self) -> Iterator[tuple[str, str]]:
        for name in self._common():
            kind = self._undecoded(name)
            if kind and not self._differ(name):
                yield name, f"{kind} is decoded by neither gguf-py nor ggml, and the bytes differ"

    def oddities(self) -> Iterator[Oddity]:
        for name in self._common():
            if self._differ(name):
                shapes = [list(side.weights.shape(name)) for side in (self.model, self.other)]
                yield Oddity(name, f"has shape {shapes[0]}, in {self.label} {shapes[1]}", "shape")
        for has, lacks, where in ((self.model, self.other, f" in {self.label}"), (self.other, self.model, "")):
            for name in has.tensors:
                if name in lacks.weights or self._is_factor(name):
                    continue
                if stem_of(name)[1] in ROPE_FACTORS:
                    label, other = (self.label, self.own) if lacks is self.other else (self.own, self.label)
                    takes = "llama.cpp then scales no frequency of RoPE"
                    says = f"is not in {label}: {takes}; {other} has it; convert {label} again"
                    yield Oddity(name, says, "rope-scaling")
                else:
                    yield Oddity(name, f"is missing{where}", "missing", certain=not self._tied(name, has))
        yield from self._metadata()

    def _is_factor(self, name: str) -> bool:
        """Whether it is a factor of blocks that both have: it is in the values that are compared, or cost no output."""
        of = re.sub(r"\.(input_)?scale$", ".weight", name)
        kinds = {side.weights.type(of) for side in (self.model, self.other) if of in side.weights}
        return of != name and bool(kinds & {*SCALED})

    def _tied(self, name: str, side: ModelFile) -> bool:
        """Whether a tensor is a head that is the embedding once more."""
        weights = side.weights
        if name != "output.weight" or "token_embd.weight" not in weights:
            return False
        a, b = (in_file(side, each) for each in (name, "token_embd.weight"))
        some = np.arange(min(64, a.shape[0]))
        return a.shape == b.shape and bool(np.allclose(a.take(some), b.take(some), rtol=0.2, atol=0.02))

    def _metadata(self) -> Iterator[Oddity]:
        """Keys that both have and that say other things, and those that one has alone."""
        ours, theirs = self.model.weights.fields, self.other.weights.fields
        both, one = ours.keys() & theirs.keys(), ours.keys() ^ theirs.keys()
        of_tokenizer = [*self.tokenizer.oddities(self.model)] if self.tokenizer is not None else []
        if self.tokenizer is not None:
            said = {each.where for each in of_tokenizer}
            both = {key for key in both if not key.startswith(TEMPLATE) and key not in said}
            one = {key for key in one if not key.startswith(TOKENIZER)}
        for key in sorted(both):
            if not key.startswith(IGNORED) and ours[key] != theirs[key]:
                yield Oddity(key, _apart(ours[key], theirs[key], self.label), "metadata")
        for key in sorted(one):
            if not key.startswith(IGNORED):
                yield from self._lacking(key)
        yield from of_tokenizer

    def _lacking(self, key: str) -> Iterator[Oddity]:
        """A key that one file has alone; nothing where llama.cpp takes the same without it."""
        ours, theirs = (self.own, self.model), (self.label, self.other)
        (name, file), (other, has) = (theirs, ours) if key in self.model.weights.fields else (ours, theirs)
        value = has.weights.fields[key]
        found = lacking(file, key, value, lambda: refusal(file) is not None)
        if found.decides:
            says = f"is not in {name}: {found.takes}; {other} has {told(key, value)}; convert {name} again"
            yield Oddity(key, says, CAUSES.get(key.removeprefix(f"{file.architecture}."), "metadata"))
        elif found.decides is None:
            yield Oddity(key, f"is not in {name}; {other} has {told(key, value)}", "metadata", certain=False)

    def explain(self, measured: Measured) -> Oddity:
        pair = measured.pair
        found = explained(measured, self._guesses(pair), heads_of(self.model, pair.name))
        return with_lacking_scale(found, pair)

    def _guesses(self, pair: Pair) -> Iterator[Guess]:
        """Done once more or undone, experts in another order, transposed, another tensor of that file."""
        view = pair.theirs
        yield Guess("negated", "every value has the other sign", Mapped(view, np.negative))
        yield from of_experts(pair)
        if len(view.shape) > 1:
            turned = Shaped(Transposed(view), view.shape)  # under the shape that the file states
            yield Guess("transposed", f"is transposed: its rows should be those of {list(view.shape)}", turned)
        for name in self.other.tensors:
            if name != pair.name and self.other.weights.shape(name) == view.shape:
                yield Guess("another-tensor", f"these are the values of {name}", in_file(self.other, name))


def undecodable(file: ModelFile, name: str) -> bool:
    """Whether neither gguf-py nor ggml decodes a tensor."""
    by_ggml = file.dequantizer.of_type(file.weights.type(name))
    return by_ggml is None and gguf_decoder(file.weights, name) is None


def _apart(ours: object, theirs: object, label: str) -> str:
    """Two values of a key; of lists, the first entry where they part."""
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"has {len(ours)} entries, in {label} {len(theirs)}"
        place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        return f"entry {place} is {_told(ours[place])}, in {label} {_told(theirs[place])}"
    return f"is {_told(ours)}, in {label} {_told(theirs)}"


def _told(value: object) -> str:
    text = f"{value:.7g}" if isinstance(value, float) else f"'{value}'" if isinstance(value, str) else repr(value)
    return text if len(text) <= MOST else text[:MOST] + "..."
