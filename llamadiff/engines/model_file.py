"""One model file under study: the engine that runs it, and what a report says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from llamaref import Engine, ModelError, Weights
from llamaref.config import Rope
from llamaref.models import ARCHITECTURES

from llamadiff.llamacpp.dequantize import Dequantizer
from llamadiff.system.errors import UserError
from llamadiff.system.hashing import model_sha256
from llamadiff.trace import taps
from llamadiff.trace.taps import Tap
from llamadiff.trace.token_text import Vocabulary

Opened = TypeVar("Opened")
ENGINE = "the reference engine"


class ModelFile:
    """A GGUF file and what a report says of it, whatever its architecture. Raises UserError if it cannot be read."""

    def __init__(
        self, path: str | Path, precision: str = "f32", threads: int = 0, weights: Weights | None = None
    ) -> None:
        """``weights``: the file's, where it was opened before."""
        self.path = Path(path)
        dtype: type[np.floating[Any]] = np.float64 if precision == "f64" else np.float32
        self.weights = weights if weights is not None else self._opened(lambda: Weights(self.path, dtype, threads))
        self.dequantizer = Dequantizer(self.weights)
        self.weights.decoder = self.dequantizer.decoder
        self.tensors = list(self.weights)
        self.vocabulary = Vocabulary(self.weights.fields)
        self.architecture = str(self.weights.fields.get("general.architecture"))

    def _opened(self, open_it: Callable[[], Opened]) -> Opened:
        try:
            return open_it()
        except ModelError as error:
            message = str(error)
            raise UserError(message if message.startswith(str(self.path)) else f"{self.path}: {message}") from None

    @property
    def has_engine(self) -> bool:
        """Whether the reference engine knows the architecture."""
        return self.architecture in ARCHITECTURES

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


class Runnable(ModelFile):
    """A file and an engine that runs it: its taps, what each is computed from, and which weight makes it."""

    producer: ClassVar[Mapping[str, str]]  # who it is, as traces say it
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

    def inputs(self, tap: Tap) -> list[str]:
        """The taps that one is computed from."""
        raise NotImplementedError

    def make_room(self, n_ctx: int) -> None:
        """Run as with room for so many tokens (0: for those that are run), where that changes anything."""


class Model(Runnable):
    """A GGUF file, opened by the reference engine. Raises UserError in one line if it cannot be run."""

    producer: ClassVar[Mapping[str, str]] = {"name": ENGINE, "version": "numpy"}
    engine: Engine

    def __init__(
        self, path: str | Path, precision: str = "f32", threads: int = 0, weights: Weights | None = None
    ) -> None:
        super().__init__(path, precision, threads, weights)
        self.engine = self._opened(lambda: Engine(self.weights))
        self.n_layer = self.engine.config.n_layer
        norm = self.engine.architecture.NORM
        self.taps = [taps.with_norm(tap, norm) for tap in taps.taps_of(self.tensors, self._traits())]
        self._check_complete()

    def _traits(self) -> list[set[str]]:
        """What the taps of each layer depend on besides its tensors."""
        everywhere = set(self.engine.architecture.TRAITS.split())
        router = self.engine.config.router
        everywhere |= {"NORMED_WEIGHTS"} if router.normalized else set()
        everywhere |= {"SCALED_WEIGHTS"} if router.scale != 1 else set()
        return [everywhere | ({"ROPE"} if rope is not None else set()) for rope in self.engine.config.ropes]

    def _check_complete(self) -> None:
        """Raise UserError if a tap's weight is missing."""
        for tap in self.taps:
            if tap.kind.weight is not None and tap.name not in self.weight_names:
                name = f"{tap.kind.weight}.weight" if tap.layer is None else f"blk.{tap.layer}.{tap.kind.weight}.weight"
                raise UserError(f"{self.path}: tensor {name} is missing from the file")

    @property
    def ropes(self) -> Sequence[Rope | None]:
        return self.engine.config.ropes

    def make_room(self, n_ctx: int) -> None:
        self.engine.n_ctx = n_ctx

    def inputs(self, tap: Tap) -> list[str]:
        return self._inputs[tap.name]

    @cached_property
    def _inputs(self) -> dict[str, list[str]]:
        """Tap name -> the taps that one is computed from."""
        found: dict[str, list[str]] = {}
        for tap in self.taps:
            found[tap.name] = taps.inputs_of(tap, found, self.n_layer)
        return found

    @cached_property
    def weight_names(self) -> dict[str, str]:  # type: ignore[override]
        """Tap name -> the weight it multiplies by."""
        present = set(self.tensors)
        names = {tap.name: taps.weight_name(tap, present) for tap in self.taps}
        return {tap: name for tap, name in names.items() if name is not None}

    @property
    def rope_pairs(self) -> bool:
        """Whether RoPE rotates neighbours, so that the file's Q and K rows are permuted against Hugging Face's."""
        return bool(self.engine.architecture.ROPE_PAIRS)

    @cached_property
    def sizes(self) -> dict[str, int]:  # type: ignore[override]
        """The sizes of the axes that taps have."""
        config, weights = self.engine.config, self.engine.w
        ssm, latent, n_rot = config.ssm, config.latent, config.rope.n_rot

        def columns(*stems: str) -> int:
            """Those of the first matrix that a layer has."""
            names = [f"blk.{i}.{stem}.weight" for stem in stems for i in range(config.n_layer)]
            return next((weights.shape(name)[-1] for name in names if name in weights), 0)

        ff = columns("ffn_down", "ffn_down_exps")
        return {
            "embd": config.n_embd, "head": config.n_head, "kv_head": config.n_head_kv, "one": 1,
            "dim": latent.head_k or config.head_k, "ff": ff, "gate_up": 2 * ff, "vocab": self.engine.n_vocab,
            "cached": config.head_k, "expert": config.n_expert, "used": config.n_expert_used,
            "ff_exp": columns("ffn_down_exps"), "ff_shexp": columns("ffn_down_shexp"),
            "lora_q": latent.n_lora_q, "lora": latent.n_lora_kv, "lora_rope": latent.n_lora_kv + n_rot, "rope": n_rot,
            "dim_v": latent.head_v, "nope_v": latent.n_nope + latent.head_v,
            "ssm_in": ssm.d_inner + ssm.conv_dim + ssm.n_head, "ssm_conv": ssm.conv_dim,
            "ssm_head": ssm.n_head, "ssm_dim": ssm.d_inner // max(ssm.n_head, 1),
            "ssm_group": ssm.n_group, "ssm_width": ssm.d_inner // max(ssm.n_group, 1),
        }  # fmt: skip


def check_same_model(info: Mapping[str, Any], sha256: str, whose: str) -> None:
    """Raise UserError if a trace names another model file."""
    named: str | None = info.get("sha256")
    if named is not None and named != sha256:
        raise UserError(f"{whose} was recorded with another model: its sha256 is {named[:80]}, this file's is {sha256}")
