"""A model file in the reference engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

from llamaref import Engine, Weights
from llamaref.config import Rope

from llamadiff.engines.model_file import USUAL, Part, Runnable
from llamadiff.llamacpp.request import Settings
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.trace.taps import Tap

ENGINE = "the reference engine"


class Model(Runnable):
    """A GGUF file, opened by the reference engine. Raises UserError in one line if it cannot be run."""

    producer: ClassVar[Mapping[str, str]] = {"name": ENGINE, "version": "numpy"}
    by_graph = False
    engine: Engine

    def __init__(
        self, path: str | Path, precision: str = "f32", settings: Settings = USUAL, weights: Weights | None = None
    ) -> None:
        super().__init__(path, precision, settings, weights)
        self.engine = self._open(lambda: Engine(self.weights))
        self.n_layer = self.engine.config.n_layer
        norm, self.scales_queries = self.engine.config.traits.norm, self.engine.config.traits.scales_queries
        self.taps = [taps.with_norm(tap, norm) for tap in taps.taps_of(self.tensors, self._traits())]
        self._check_complete()

    def _traits(self) -> list[set[str]]:
        """What the taps of each layer depend on besides its tensors."""
        everywhere = set(self.engine.config.traits.layers.split())
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

    def shape_of(self, tap: Tap, n_tokens: int) -> tuple[int, ...]:
        return taps.shape_of(tap, n_tokens, self.sizes)

    def make_room(self, n_ctx: int) -> None:
        self.engine.n_ctx = n_ctx

    def parts(self, tokens: Sequence[int]) -> list[Part]:
        engine = self.engine
        begin = Part(lambda _, step: engine.begin(tokens, step), taps.input_of(0, {tap.name for tap in self.taps}))
        layers = [Part(partial(engine.layer, i), f"{taps.RESIDUAL}-{i}") for i in range(self.n_layer)]
        return [begin, *layers, Part(engine.end)]

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

    @cached_property
    def products(self) -> Mapping[str, str]:
        config, names = self.engine.config, self.weight_names
        made = [tap.name for tap in self.taps if tap.kind.op == "MUL_MAT" and tap.name in names]
        if config.logit_scale != 1 or config.logit_cap:
            made = [name for name in made if name != taps.LOGITS]
        count = Counter(names[name] for name in made)
        return {names[name]: name for name in made if count[names[name]] == 1}

    @property
    def rope_pairs(self) -> bool:
        """Whether RoPE rotates neighbours, so that the file's Q and K rows are permuted against Hugging Face's."""
        return self.engine.config.traits.rope_pairs

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
