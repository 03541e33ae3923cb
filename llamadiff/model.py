"""One model file under study: the engine that runs it, and what a report says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llamaref import Engine, ModelError, Weights

from llamadiff import taps
from llamadiff.errors import UserError
from llamadiff.hashing import file_sha256
from llamadiff.vocabulary import Vocabulary


class Model:
    """A GGUF file, opened by the reference engine. Raises UserError in one line if it cannot be run."""

    def __init__(self, path: str | Path, precision: str = "f32", threads: int = 0) -> None:
        self.path = Path(path)
        dtype: type[np.floating[Any]] = np.float64 if precision == "f64" else np.float32
        try:
            weights = Weights(self.path, dtype, threads)
            self.engine = Engine(weights)
        except ModelError as error:
            message = str(error)
            raise UserError(message if message.startswith(str(path)) else f"{self.path}: {message}") from None
        self.tensors = list(weights)
        self.vocabulary = Vocabulary(weights.fields)
        config = self.engine.config
        self.n_layer, self.architecture = config.n_layer, config.architecture
        norm = self.engine.architecture.NORM
        every = taps.taps_of(self.n_layer, self.tensors, lambda layer: self._stated("taps", layer, "").split())
        self.taps = [taps.fitted(tap, norm, self._stated("axes", tap.layer, {})) for tap in every]
        self._check_complete()

    def _stated(self, what: str, layer: int | None, default: Any) -> Any:
        """What the architecture's file says of a layer's taps: in a constant, or in a function of layers."""
        own = self.engine.architecture
        if layer is not None and hasattr(own, what):
            return getattr(own, what)(self.engine.config, layer)
        return getattr(own, what.upper(), default)

    def _check_complete(self) -> None:
        """Raise UserError if a tap's weight is missing."""
        for tap in self.taps:
            if tap.kind.weight is not None and tap.name not in self.weight_names:
                name = f"{tap.kind.weight}.weight" if tap.layer is None else f"blk.{tap.layer}.{tap.kind.weight}.weight"
                raise UserError(f"{self.path}: tensor {name} is missing from the file")

    @cached_property
    def sha256(self) -> str:
        return file_sha256(self.path)

    @cached_property
    def weight_names(self) -> dict[str, str]:
        """Tap name -> the weight it multiplies by."""
        present = set(self.tensors)
        names = {tap.name: taps.weight_name(tap, present) for tap in self.taps}
        return {tap: name for tap, name in names.items() if name is not None}

    @cached_property
    def weight_types(self) -> dict[str, str]:
        """Tap name -> the type of that weight."""
        return {tap: self.engine.w.type(name) for tap, name in self.weight_names.items()}

    @property
    def rope_pairs(self) -> bool:
        """Whether RoPE rotates neighbours, so that the file's Q and K rows are permuted against Hugging Face's."""
        return bool(self.engine.architecture.ROPE_PAIRS)

    @property
    def chat_template(self) -> str | None:
        template = self.engine.w.fields.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def special_id(self, kind: str) -> int | None:
        """The id of the file's bos or eos token, if it has one."""
        index = self.engine.w.fields.get(f"tokenizer.ggml.{kind}_token_id")
        return index if isinstance(index, int) else None

    def hyper_parameter(self, key: str) -> Any:
        """A metadata value, by its key with or without the architecture's prefix; None if the file has none."""
        fields = self.engine.w.fields
        return fields.get(f"{self.architecture}.{key}", fields.get(key))

    def special_token(self, kind: str) -> str:
        """The text of the file's bos or eos token; empty if it has none."""
        index = self.special_id(kind)
        return (self.vocabulary.text(index) or "") if index is not None else ""

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes that taps have."""
        config, weights, ssm = self.engine.config, self.engine.w, self.engine.config.ssm

        def rows(*stems: str, axis: int = -2) -> int:
            """The rows (or columns) of the first tensor that a layer has."""
            names = (f"blk.{i}.{stem}.weight" for stem in stems for i in range(config.n_layer))
            return next((weights.shape(name)[axis] for name in names if name in weights), 0)

        return {
            "embd": config.n_embd, "head": config.n_head, "kv_head": config.n_head_kv,
            "dim": config.head_k_mla or config.head_k, "vocab": self.engine.n_vocab,
            "ff": rows("ffn_gate") or rows("ffn_gate_exps") or rows("ffn_down", axis=-1),
            "expert": config.n_expert, "used": config.n_expert_used,
            "ff_exp": rows("ffn_down_exps", axis=-1), "ff_shexp": rows("ffn_gate_shexp"),
            "rope": config.rope.n_rot, "lora": config.n_lora_kv, "lora_q": config.n_lora_q,
            "lora_rope": config.n_lora_kv + config.rope.n_rot, "dim_v": config.head_v_mla,
            "nope_v": config.n_nope + config.head_v_mla,
            "ssm_in": rows("ssm_in"), "ssm_conv": ssm.conv_dim, "ssm_head": ssm.n_head, "ssm_group": ssm.n_group,
            "ssm_dim": ssm.d_inner // max(ssm.n_head, 1), "ssm_width": ssm.d_inner // max(ssm.n_group, 1),
        }  # fmt: skip

    def describe(self, sha256: str | None = None) -> dict[str, Any]:
        """The ``model`` object of the report."""
        config = self.engine.config
        types = Counter(self.engine.w.type(name) for name in self.tensors)
        return {
            "file": self.path.name, "sha256": sha256 or self.sha256, "architecture": self.architecture,
            "layers": config.n_layer, "embd": config.n_embd, "heads": config.n_head, "kv_heads": config.n_head_kv,
            "vocab": self.engine.n_vocab, "weight_types": dict(types.most_common()),
        }  # fmt: skip

    def token_texts(self, tokens: tuple[int, ...]) -> tuple[tuple[int, str | None], ...]:
        return tuple((token, self.vocabulary.text(token)) for token in tokens)


def check_same_model(info: Mapping[str, Any], sha256: str, whose: str) -> None:
    """Raise UserError if a trace names another model file."""
    named = info.get("sha256")
    if named is not None and named != sha256:
        raise UserError(f"{whose} was recorded with another model: its sha256 is {named}, this file's is {sha256}")
