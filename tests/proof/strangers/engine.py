"""A stranger's engine: a forward pass in small ops, each of which an arithmetic carries out and a bug may replace.

Arrays are [token, ...]. Every tap passes ``Engine.tap`` under llama.cpp's word for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from proof.strangers.arithmetic import Arithmetic
from proof.strangers.attention import Attention
from proof.strangers.experts import Experts
from proof.strangers.model import File
from proof.strangers.recurrent import Recurrent

Array = np.ndarray
Edit = Callable[..., Any]
OUTSIDE = ("output", "token_embd", "output_norm", "token_embd_norm")
HEADS_FIRST = ("kq-", "kq_soft_max-", "kqv-", "kqv_mla-", "q_nope_absorbed-")  # [head, query, ...]
INNER = ("kqv", "ffn_moe_weighted")  # what a graph of small ops has, and kernels that do more at once have not
FOLDED = {
    "attn_q": "attn_norm", "attn_k": "attn_norm", "attn_v": "attn_norm", "attn_qkv": "attn_norm",
    "ffn_gate": "ffn_norm", "ffn_up": "ffn_norm", "ffn_gate_inp": "ffn_norm", "ffn_gate_exps": "ffn_norm",
    "ffn_up_exps": "ffn_norm", "output": "output_norm", "token_embd": "output_norm",
}  # fmt: skip


@dataclass(frozen=True)
class Bug:
    """What an engine does wrongly.

    ``edits`` replace ops: name -> edit(engine, right op, *arguments); ``faults`` change what passes a tap: word ->
    fault(engine, value). ``needs`` are places that some arithmetics lack (Arithmetic.lacks).
    """

    name: str
    edits: Mapping[str, Edit] = field(default_factory=dict)
    faults: Mapping[str, Edit] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()


NONE = Bug("none")


class Engine(Attention, Experts, Recurrent):
    """Runs one file with one arithmetic, and perhaps one bug; ``inner``: what is INNER is recorded, too."""

    def __init__(self, file: File, arithmetic: Arithmetic, bug: Bug = NONE, inner: bool = False) -> None:
        self.file, self.a, self.bug, self.h, self.inner = file, arithmetic, bug, file.hyper, inner
        self.layer, self.start, self.stop, self.n_prefill = 0, 0, 0, 0
        self.seen: dict[str, Array] = {}
        self.given: Mapping[str, Array] = {}
        self.recorded: dict[str, list[Array]] = {}
        self.caches: dict[tuple[str, int], Array] = {}
        self.states: dict[tuple[str, int], Array] = {}  # of what is recurrent
        self.residual: Array = np.zeros(0)  # what goes into the layer, or into the last norm
        self.between: Array = np.zeros(0)  # what goes into the FFN's norm
        self.attended: Array = np.zeros(0)  # what attention's norm gave
        for op, edit in bug.edits.items():
            setattr(self, op, partial(edit, self, getattr(self, op)))

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(
        self,
        tokens: Sequence[int],
        n_prefill: int = 0,
        given: Mapping[str, Array] | None = None,
        batches: Sequence[int] = (),
    ) -> dict[str, Array]:
        """Every tap: a prefill, then one token a step, or ``batches`` of so many tokens. Of taps that are ``given``,
        those values are gone on with."""
        self.begin(n_prefill or len(tokens), given)
        steps = range(self.n_prefill, len(tokens) + 1)
        edges = list(accumulate(batches, initial=0)) if batches else [0, *steps]
        for start, stop in pairwise(edges):
            self.step(tokens[start:stop])
        return self.taps()

    def begin(self, n_prefill: int, given: Mapping[str, Array] | None = None) -> None:
        """A run of which nothing has passed."""
        self.n_prefill, self.stop, self.given = n_prefill, 0, given or {}
        self.recorded, self.caches, self.states = {}, {}, {}

    def step(self, tokens: Sequence[int]) -> Array:
        """The next batch of tokens -> their logits."""
        self.seen, self.start, self.stop = {}, self.stop, self.stop + len(tokens)
        with np.errstate(all="ignore"):
            return self.forward(np.asarray(tokens))

    def taps(self) -> dict[str, Array]:
        """What has passed so far."""
        return {name: self._joined(name, parts) for name, parts in self.recorded.items()}

    def _joined(self, name: str, parts: list[Array]) -> Array:
        axis = int(name.startswith(HEADS_FIRST))
        if is_scores(name):
            parts = [np.pad(part, ((0, 0), (0, 0), (0, self.stop - part.shape[2]))) for part in parts]
        return np.concatenate(parts, axis=axis)

    def tap(self, word: str, x: Array, layered: bool = True) -> Array:
        """A named value: rounded as results are, recorded, and gone on with."""
        if word in INNER and not self.inner:
            return x
        name = self.tap_name(word, self.layer) if layered else self.h.arch.names.get(word, word)
        if word in self.bug.faults:
            x = np.asarray(self.bug.faults[word](self, x), x.dtype)
        if x.dtype.kind == "f":
            x = self.a.results(x)
        if word not in self.a.unrecorded:
            self.recorded.setdefault(name, []).append(x)
        if name in self.given:
            x = self._of_given(name, x)
        self.seen[name] = x
        return x

    def tap_name(self, word: str, layer: int) -> str:
        return f"{self.h.arch.names.get(word, word)}-{layer}"

    def _of_given(self, name: str, x: Array) -> Array:
        rows = slice(self.start, self.start + x.shape[int(name.startswith(HEADS_FIRST))])
        values = self.given[name]
        values = values[:, rows, : x.shape[2]] if name.startswith(HEADS_FIRST) else values[rows]
        return values.reshape(x.shape).astype(x.dtype)

    def here(self, word: str, layer: int | None = None) -> Array:
        """A tap that has passed: of this layer, another one, or outside the layers."""
        layer = self.layer if layer is None else layer
        return self.seen[word] if word in self.seen else self.seen[self.tap_name(word, layer)]

    def layer_input(self, layer: int | None = None) -> Array:
        layer = self.layer if layer is None else layer
        return self.seen["embd"] if layer <= 0 else self.seen[f"l_out-{layer - 1}"]

    @property
    def positions(self) -> Array:
        """Those of the present step's tokens."""
        return np.arange(self.start, self.stop)

    @property
    def decoding(self) -> bool:
        return self.start >= self.n_prefill

    def has(self, word: str) -> bool:
        """Whether a choice of layout was made."""
        return word in self.a.layout

    # -- weights as they are loaded --------------------------------------------------------------------------------

    def name(self, stem: str, end: str = "weight") -> str:
        return f"{stem}.{end}" if stem in OUTSIDE else f"blk.{self.layer}.{stem}.{end}"

    def stores(self, stem: str, end: str = "weight") -> bool:
        """Whether the file has such a tensor, in this layer or outside the layers."""
        return self.name(stem, end) in self.file

    def matrix(self, stem: str) -> Array:
        """A weight as the file has it: [out, in], or [expert, out, in]."""
        return self.file[self.name(stem)]

    def bias(self, stem: str) -> Array | None:
        return self.file.tensors.get(self.name(stem, "bias"))

    def factor(self, stem: str) -> Array | None:
        """The weight's own scale, which attention and llama's FFN have."""
        return self.file.tensors.get(self.name(stem, "scale"))

    def norm_weight(self, stem: str) -> Array:
        return self.file[self.name(stem)]

    def head_stem(self) -> str:
        return "output" if "output.weight" in self.file else "token_embd"

    def loaded(self, stem: str) -> Array:
        """A matrix as this engine keeps it."""
        w = self.matrix(stem)
        if self.has("norms folded") and stem in FOLDED:
            w = w * self.norm_weight(FOLDED[stem])
        return self.a.weights(self._reordered(stem, w).astype(self.a.dtype))

    def loaded_bias(self, stem: str) -> Array | None:
        b = self.bias(stem)
        if self.has("norms folded") and self.h.layer_norm and stem in FOLDED:
            shift = self.matrix(stem) @ self.bias(FOLDED[stem])
            b = shift if b is None else b + shift
        return None if b is None else self._reordered(stem, b).astype(self.a.dtype)

    def _reordered(self, stem: str, rows: Array) -> Array:
        """Rows of Q and K in the other order of RoPE, Q's times the scale: as the layout has them."""
        normed = self.name("attn_q_norm") in self.file
        if self.has("other heads") and stem in ("attn_q", "attn_k"):
            rows = self._other_heads(rows)
        if self.has("scale in Wq") and stem == "attn_q" and not normed:
            rows = rows * np.float32(self.scale())
        return rows

    def _other_heads(self, rows: Array) -> Array:
        """Rows of each head [n, ...] from pairs to halves, or from halves to pairs: those that RoPE rotates."""
        heads = rows.reshape(-1, self.h.dim, *rows.shape[1:])
        part = heads[:, : self.h.n_rot]
        split = part.reshape(len(heads), *((-1, 2) if self.h.pairs else (2, -1)), *rows.shape[1:]).swapaxes(1, 2)
        return np.concatenate([split.reshape(part.shape), heads[:, self.h.n_rot :]], axis=1).reshape(rows.shape)

    def head_norm_weight(self, stem: str) -> Array:
        """QK-norm's weight in this engine's layout."""
        w = self.norm_weight(stem)
        if self.has("other heads"):
            w = self._other_heads(w)
        if self.has("scale in Wq") and stem == "attn_q_norm":
            w = w * np.float32(self.scale())
        return w

    # -- ops -------------------------------------------------------------------------------------------------------

    def embed(self, tokens: Array) -> Array:
        return self.a.weights(self.file["token_embd.weight"].astype(self.a.dtype))[tokens]

    def embedding_scale(self) -> float:
        own = self.file.get("embedding_scale") or 1.0
        return math.sqrt(self.h.embd) if self.h.arch.embedding_of_root else float(own)

    def learned(self, positions: Array) -> Array:
        return self.file["position_embd.weight"][positions]

    def with_positions(self, x: Array, positions: Array) -> Array:
        return x + positions

    def epsilon(self) -> float:
        return self.h.eps

    def centred(self, x: Array) -> Array:
        """Without its mean, where the model has LayerNorm."""
        return x - x.mean(axis=-1, keepdims=True) if self.h.layer_norm else x

    def root(self, x: Array) -> Array:
        """What a norm divides by: sqrt(mean square + epsilon)."""
        return np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(self.epsilon()))

    def normalised(self, x: Array) -> Array:
        x = self.centred(x)
        return x / np.asarray(self.root(x), x.dtype)

    def norm(self, x: Array, stem: str) -> Array:
        y = self.a.norms(self.normalised(x))
        if stem in ("attn_q_norm", "attn_k_norm"):
            return self.weighed(y, self.head_norm_weight(stem), None)
        if self.has("norms folded"):
            return y
        return self.weighed(y, self.norm_weight(stem), self.bias(stem) if self.h.layer_norm else None)

    def weighed(self, y: Array, weight: Array, bias: Array | None) -> Array:
        y = y * weight.astype(y.dtype)
        return y if bias is None else y + bias.astype(y.dtype)

    def multiplied(self, x: Array, w: Array) -> Array:
        return self.a.multiply(self.a.activations(x), w)

    def product(self, x: Array, stem: str) -> Array:
        """x @ W.T."""
        return self.a.products(self.multiplied(x, self.loaded(stem)))

    def linear(self, x: Array, stem: str) -> Array:
        """The product with the weight's scale and bias; in the FFN the scale is last."""
        return self.finished(self.product(x, stem), stem)

    def finished(self, y: Array, stem: str) -> Array:
        factor, bias = self.factor(stem), self.loaded_bias(stem)
        if bias is not None and stem.startswith("ffn_"):
            y, bias = y + bias, None
        if factor is not None:
            y = y * factor.astype(y.dtype)
        return y if bias is None else y + bias

    def qkv(self, x: Array) -> tuple[Array, Array, Array]:
        if self.name("attn_qkv") in self.file:
            return self.split(self.linear(x, "attn_qkv"))
        if not self.has("fused"):
            return self.linear(x, "attn_q"), self.linear(x, "attn_k"), self.linear(x, "attn_v")
        order = ("attn_v", "attn_k", "attn_q")
        parts = [self.loaded(stem) for stem in order]
        y = self.a.products(self.multiplied(x, np.concatenate(parts)))
        v, k, q = np.split(y, np.cumsum([len(part) for part in parts])[:-1], axis=-1)
        return self.finished(q, "attn_q"), self.finished(k, "attn_k"), self.finished(v, "attn_v")

    def split(self, y: Array) -> tuple[Array, Array, Array]:
        """Q, K and V of the fused product [token, (q, k, v)]."""
        q, k, v = np.split(y, np.cumsum([self.h.heads, self.kv_heads]) * self.h.dim, axis=-1)
        if self.has("other heads"):
            q, k = (self._other_heads(part.T).T for part in (q, k))
        if self.has("scale in Wq"):
            q = q * q.dtype.type(self.scale())
        if self.name("attn_qkv", "bias") in self.file:
            return q, k, v
        return self.finished(q, "attn_q"), self.finished(k, "attn_k"), self.finished(v, "attn_v")

    def add(self, branch: Array, residual: Array) -> Array:
        return branch + residual

    def residual_scale(self) -> float:
        """What branches are multiplied by."""
        return float(self.file.get("residual_scale") or 1.0)

    def activated(self, x: Array) -> Array:
        if self.h.arch.activation != "gelu":
            return self.a.silu(x)
        inner = x.dtype.type(math.sqrt(2 / math.pi)) * x * (1 + x.dtype.type(0.044715) * x * x)
        return x * (1 + np.tanh(inner)) / 2

    def gated(self, gate: Array, up: Array) -> Array:
        return self.clamped(gate, up) if self.h.arch.activation == "oai" else self.activated(gate) * up

    def clamped(self, gate: Array, up: Array, limit: float = 7.0, alpha: float = 1.702, one: float = 1.0) -> Array:
        """The SwiGLU of OpenAI's gpt-oss."""
        gate, up = np.minimum(gate, gate.dtype.type(limit)), np.clip(up, -limit, limit).astype(up.dtype)
        return gate / (1 + np.exp(gate.dtype.type(-alpha) * gate)) * (up + up.dtype.type(one))

    # -- the layers ------------------------------------------------------------------------------------------------

    def forward(self, tokens: Array) -> Array:
        self.layer = 0
        x = self.embed(tokens)
        x = self.tap("embd", x * x.dtype.type(self.embedding_scale()), layered=False)
        if self.h.arch.positions == "learned":
            positions = self.tap("pos_embd", self.learned(self.positions), layered=False)
            x = self.tap("inpL", self.with_positions(x, positions), layered=False)
        if self.h.arch.positions == "alibi":
            x = self.tap("inp_norm", self.norm(x, "token_embd_norm"))
        for layer in range(self.h.layers):
            self.layer, self.residual = layer, x
            x = self.block(x)
        self.residual = x
        stem = "output_norm" if self.stores("output_norm") else "token_embd_norm"
        y = self.tap("result_norm", self.norm(x, stem), layered=False)
        return self.tap("result_output", self.a.logits(self.head(y)), layered=False)

    def head(self, y: Array) -> Array:
        return self.linear(y, self.head_stem()) * y.dtype.type(self.logit_scale())

    def logit_scale(self) -> float:
        return 1 / float(self.file.get("logit_scale") or 1.0)

    def block(self, x: Array) -> Array:
        before, between = self.h.arch.norms
        self.attended = self.tap(before if self.h.arch.parallel else "attn_norm", self.norm(x, before))
        y = self.mixed_tokens(self.attended)
        if between != "post_attention_norm" and self.stores("post_attention_norm"):
            y = self.tap("attn_post_norm", self.norm(y, "post_attention_norm"))
        if self.h.arch.parallel:
            return self.tap("l_out", self.beside(y, x))
        if not self.stores(between):
            return self.tap("l_out", self.add(self.branch(y), x))
        self.between = x = self.tap("ffn_inp", self.add(self.branch(y), x))
        y = self.fed_forward(self.tap("ffn_norm", self.norm(x, between)))
        if self.stores("post_ffw_norm"):
            y = self.tap("ffn_post_norm", self.norm(y, "post_ffw_norm"))
        return self.tap("l_out", self.add(self.branch(y), x))

    def branch(self, y: Array) -> Array:
        return y * y.dtype.type(self.residual_scale())

    def mixed_tokens(self, y: Array) -> Array:
        """What lets tokens see each other: attention, a state space, a short convolution."""
        if self.stores("ssm_in"):
            return self.state_space(y)
        if self.stores("shortconv.in_proj"):
            return self.short_convolution(y)
        return self.latent_attention(y) if self.latent else self.heads_attended(y)

    def beside(self, attended: Array, x: Array) -> Array:
        """Attention and the FFN of the same input, added to it."""
        return self.fed_forward(self.side_norm(x)) + attended + x

    def side_norm(self, x: Array) -> Array:
        """The norm before an FFN that lies beside attention."""
        stem = self.h.arch.norms[1]
        return self.tap(stem, self.norm(x, stem))

    def fed_forward(self, y: Array) -> Array:
        return self.tap("ffn_out", self.mixture(y) if self.stores("ffn_gate_inp") else self.ffn(y))

    def ffn(self, y: Array) -> Array:
        if self.stores("ffn_gate"):
            gate, up = self.gate_up(y)
            gate, up = self.tap("ffn_gate", gate), self.tap("ffn_up", up)
            word = "ffn_geglu" if self.h.arch.activation == "gelu" else "ffn_swiglu"
            return self.linear(self.tap(word, self.gated(gate, up)), "ffn_down")
        both = self.tap("ffn_up", self.linear(y, "ffn_up"))
        if both.shape[-1] > self.matrix("ffn_down").shape[-1]:
            return self.linear(self.tap("ffn_swiglu", self.gated(*self.halves(both))), "ffn_down")
        return self.linear(self.tap("ffn_gelu", self.activated(both)), "ffn_down")

    def halves(self, both: Array) -> Any:
        """Gate and up of a matrix that holds both."""
        return np.split(both, 2, axis=-1)

    def gate_up(self, y: Array) -> tuple[Array, Array]:
        if not self.has("fused"):
            return self.linear(y, "ffn_gate"), self.linear(y, "ffn_up")
        gate, up = self.loaded("ffn_gate"), self.loaded("ffn_up")
        rows = np.stack([gate, up], axis=1).reshape(-1, gate.shape[1])
        both = self.a.products(self.multiplied(y, rows))
        return self.finished(both[:, 0::2], "ffn_gate"), self.finished(both[:, 1::2], "ffn_up")


def is_scores(name: str) -> bool:
    """Whether a tap is [head, query, key]."""
    return name.startswith(("kq-", "kq_soft_max-"))
