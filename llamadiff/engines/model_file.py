"""One model file under study: the engine that runs it, and what a report says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from llamaref import ModelError, Weights
from llamaref.adapters import adapted
from llamaref.config import Rope
from llamaref.file_kind import check_is_model
from llamaref.models import ARCHITECTURES
from numpy.typing import NDArray

from llamadiff import plugins
from llamadiff.llamacpp.dequantize import Dequantizer
from llamadiff.llamacpp.request import Settings
from llamadiff.system.errors import UserError
from llamadiff.trace.hashing import model_sha256
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import Tap
from llamadiff.trace.token_text import Vocabulary

Array = NDArray[Any]
USUAL = Settings()
Opened = TypeVar("Opened")


class ModelFile:
    """A GGUF file and what a report says of it, whatever its architecture. Raises UserError if it cannot be read."""

    taps: Sequence[Tap] = ()  # known once an engine has opened the file
    scales_queries: bool | None = None  # whether Q has the attention scale before scores are made; None: nobody knows

    def __init__(
        self, path: str | Path, precision: str = "f32", settings: Settings = USUAL, weights: Weights | None = None
    ) -> None:
        """``settings``: threads that decode it, its adapter; ``weights``: the file's, where it was opened before."""
        self.path, self.settings = Path(path), settings
        dtype: type[np.floating[Any]] = np.float64 if precision == "f64" else np.float32
        self.weights = weights if weights is not None else self._open(lambda: Weights(self.path, dtype))
        if settings.lora and weights is None:
            self._open(lambda: adapted(self.weights, settings.lora, settings.lora_scale))
        self.dequantizer = Dequantizer.of(self.weights, settings.threads)
        self.tensors = list(self.weights)
        self.vocabulary = Vocabulary(self.weights.fields)
        self.architecture = str(self.weights.fields.get("general.architecture"))

    def _open(self, open_it: Callable[[], Opened]) -> Opened:
        try:
            return open_it()
        except ModelError as error:
            message = plugins.ask_first(lambda each: each.mistake(self.path, "model")) or str(error)
            raise UserError(message if message.startswith(str(self.path)) else f"{self.path}: {message}") from None

    def check_is_model(self) -> None:
        """Raise UserError for a file that holds something else: an adapter, a projector, a vocabulary."""
        self._open(lambda: check_is_model(self.weights.fields, self.tensors))

    @property
    def has_engine(self) -> bool:
        """Whether the reference engine knows the architecture."""
        return self.architecture in ARCHITECTURES

    @cached_property
    def values(self) -> int:
        """How many the file has in all tensors."""
        return sum(prod(self.weights.shape(name)) for name in self.tensors)

    @cached_property
    def sha256(self) -> str:
        return model_sha256(self.weights.files)

    @property
    def chat_template(self) -> str | None:
        template = self.weights.fields.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def special_id(self, kind: str) -> int | None:
        """The id of the file's bos or eos token, if it has one."""
        index = self.weights.fields.get(f"tokenizer.ggml.{kind}_token_id")
        return index if isinstance(index, int) else None

    def hyper_parameter(self, key: str) -> Any:
        """A metadata value, by its key with or without the architecture's prefix; None if the file has none."""
        fields = self.weights.fields
        return fields.get(f"{self.architecture}.{key}", fields.get(key))

    def special_token(self, kind: str) -> str:
        """The text of the file's bos or eos token; empty if it has none."""
        index = self.special_id(kind)
        return (self.vocabulary.text(index) or "") if index is not None else ""

    def describe(self, sha256: str | None = None) -> dict[str, Any]:
        """The ``model`` object of the report."""
        types = Counter(self.weights.type(name) for name in self.tensors)
        counts = {"layers": "block_count", "embd": "embedding_length", "heads": "attention.head_count",
                  "kv_heads": "attention.head_count_kv"}  # fmt: skip
        sizes = {name: _largest(self.hyper_parameter(key)) for name, key in counts.items()}
        embedding = "token_embd.weight"
        return {
            "file": self.path.name, "sha256": self.sha256 if sha256 is None else sha256,
            "architecture": self.architecture,
            **sizes, "kv_heads": sizes["kv_heads"] or sizes["heads"],
            "vocab": self.weights.shape(embedding)[0] if embedding in self.weights else 0,
            "weight_types": dict(types.most_common()),
        }  # fmt: skip

    def token_texts(self, tokens: tuple[int, ...]) -> tuple[tuple[int, str | None], ...]:
        return tuple((token, self.vocabulary.text(token)) for token in tokens)


def _largest(value: Any) -> int:
    """A count, the largest where layers differ."""
    values = value if isinstance(value, list) else [value]
    return max((item for item in values if isinstance(item, int)), default=0)


class Part(NamedTuple):
    """Some of an engine's ops, one after another: ``run(x, step)``, from what the part before it gives (the first one
    needs nothing). ``end``: the tap that it gives, which is all that the part after it reads; none for the last one.
    """

    run: Callable[[Any, Any], Array]
    end: str = ""


class Runnable(ModelFile):
    """A file and an engine that runs it: its taps, what each is computed from, and which weight makes it.

    ``engine.step(tokens, positions, tap=tap)`` is one pass over tokens, of which parts are run.
    """

    producer: ClassVar[Mapping[str, str]]  # who it is, as traces say it
    by_graph: ClassVar[bool]  # whether it runs llama.cpp's graph
    tokens: tuple[int, ...] | None = None  # those that alone can be run; None: any
    engine: Any
    n_layer: int
    taps: list[Tap]
    weight_names: Mapping[str, str]
    sizes: Mapping[str, int]

    @cached_property
    def weight_types(self) -> dict[str, str]:
        """Tap name -> the type of the weight that makes it."""
        return {tap: self.weights.type(name) for tap, name in self.weight_names.items()}

    @property
    def products(self) -> Mapping[str, str]:
        """Weight -> the tap that is its product and nothing else, where one is."""
        return {}

    @property
    def rope_pairs(self) -> bool:
        """Whether RoPE rotates neighbours, so that the file's Q and K rows are permuted against Hugging Face's."""
        return False

    @property
    def n_ctx_train(self) -> int:
        return _largest(self.hyper_parameter("context_length")) or 1 << 30

    @property
    def ropes(self) -> Sequence[Rope | None]:
        """Each layer's RoPE, where it is known."""
        return ()

    def parts(self, tokens: Sequence[int]) -> list[Part]:
        """What a pass over these tokens consists of."""
        raise NotImplementedError

    def inputs(self, tap: Tap) -> list[str]:
        """The taps that one is computed from."""
        raise NotImplementedError

    def shape_of(self, tap: Tap, n_tokens: int) -> tuple[int, ...] | None:
        """A tap's shape as the file's sizes make it; None where they do not tell."""
        return None

    def make_room(self, n_ctx: int) -> None:
        """Run as with room for so many tokens (0: for those that are run), where that changes anything."""


def adapter_settings(trace: Trace, model: str | Path, before: Settings) -> Settings:
    """Settings with the adapter that a trace states. Raises UserError where it is not there."""
    found = plugins.ask_first(lambda each: each.adapter_of(trace, Path(model)))
    return before if found is None else replace(before, lora=found[0], lora_scale=found[1])


def check_same_model(info: Mapping[str, Any], sha256: str, whose: str, path: object = "the baseline's file") -> None:
    """Raise UserError if a trace names another model file than that of this ``path``."""
    named: str | None = info.get("sha256")
    if named is not None and named != sha256:
        file = f"{str(info.get('file') or 'another model')[:80]} (sha256 {str(named)[:12]})"
        other = f"{path} is another (sha256 {sha256[:12]}); give the former, or record it anew with this one"
        raise UserError(f"{whose} was recorded with {file}, and {other}")
