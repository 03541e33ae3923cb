"""The engine: one model file, its configuration, and the building blocks its architecture file is written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from llamaref import ops
from llamaref import sums as sums_
from llamaref.adapters import EMBEDDING, LowRank
from llamaref.config import Rope
from llamaref.configure import read_config
from llamaref.errors import ModelError
from llamaref.models import ARCHITECTURES
from llamaref.shapes import check_layers, check_shapes
from llamaref.sums import Matrices, WeightProduct
from llamaref.weights import Weights

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = NDArray[Any]
_overflowing = partial(np.errstate, all="ignore")  # what overflows shows as Inf or NaN where it arises
SCORES = 1 << 20  # attention scores of more are made in blocks, a quarter of that at once


class Tap:
    """What the engine calls while it runs; as it is, it does nothing. The first axis of every array is a batch of runs
    of the same tokens; the ``embd`` tap may widen it, and every later op carries it through.
    """

    def __call__(self, name: str, x: Array) -> Array:
        """A named point: returns what the engine goes on with."""
        return x

    def operands(self, kind: str, *arrays: Array) -> tuple[Array, ...]:
        """The operands of a product, as the arithmetic under study would see them.

        ``kind`` is the type of the weights (``Q4_K``), or ``cache_k`` / ``cache_v`` for the two products of
        attention, or ``gelu`` for that function's argument and again for its value. Index arrays come back as they
        are. For weights whose blocks have a minimum (Q4_1, Q5_1) one more array may follow: what to add to the sum of
        each block's activations before the minimum multiplies it, [..., in / 32].
        """
        return arrays

    def multiply(self, product: WeightProduct) -> Array:
        """A product by a weight, [b, t, out]: ``product.compute()``, or what is known to be that."""
        return product.compute()

    def accumulate(self, y: Array, kind: str, parts: Matrices, start: int = 0, by_row: bool = False) -> Array:
        """A product as the arithmetic under study would add it, of operands that ``operands`` gave for this ``kind``.

        Rows of its ``parts`` are tokens from the ``start``-th on, or by themselves (``by_row``).
        """
        return y

    def product(self, y: Array) -> Array:
        """A product before its bias is added: an arithmetic may round it there."""
        return y

    def store(self, kind: str, x: Array) -> Array:
        """K or V rows on their way into the cache (``cache_k``, ``cache_v``)."""
        return x

    def is_wanted(self, name: str) -> bool:
        """Whether a tap of attention scores is wanted; if not, those of a long prompt are never made whole."""
        return False

    def angles(
        self, cos: Array, sin: Array, rope: Rope, positions: Array, factors: Array | None
    ) -> tuple[Array, Array]:
        """cos and sin of the RoPE angles [t, n_rot / 2], with a leading batch axis if they differ between runs."""
        return cos, sin


@dataclass
class Cache:
    """Keys and values of the tokens seen so far, per layer: [b, s, k, d]; ``positions`` [s].

    Of recurrent layers: the last inputs of the convolution, ``conv`` [b, k - 1, c], and ``states`` [b, h, d, n].
    """

    positions: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    keys: dict[int, Array] = field(default_factory=dict)
    values: dict[int, Array] = field(default_factory=dict)
    conv: dict[int, Array] = field(default_factory=dict)
    states: dict[int, Array] = field(default_factory=dict)

    def append(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Add rows of one layer and return all of its rows."""
        for store, rows in ((self.keys, k), (self.values, v)):
            store[layer] = np.concatenate([store[layer], rows], axis=1) if layer in store else rows
        return self.keys[layer], self.values[layer]


@dataclass(frozen=True)
class Step:
    """One forward pass: positions of its tokens and of all keys, RoPE angles, cache, tap."""

    positions: Array  # [t]
    key_positions: Array  # [s]
    cos: Array  # [..., t, n_rot / 2]
    sin: Array  # [..., t, n_rot / 2]
    cache: Cache
    tap: Tap
    angles: Mapping[Rope | None, tuple[Array, Array]]  # cos and sin of every RoPE that a layer has


class Scoring(TypedDict, total=False):
    """How an attention makes probabilities of raw scores, where it is not the softmax of all before.

    ``window``: how many positions it reaches back (0: all); ``cap`` that raw scores come near (0: none); ``sinks`` [h],
    what each head's softmax has besides.
    """

    window: int
    cap: float
    sinks: Array | None


class Engine:
    """Runs one GGUF file: ``forward``, or its parts one by one.

    ``ops`` is the maths it computes with; a faulty copy of it makes a faulty engine, which is how
    the tests inject bugs. ``n_ctx`` is how many tokens there is room for (0: no more than are run), by which
    LongRoPE chooses its factors. Raises ModelError for a file that cannot be run faithfully.
    """

    def __init__(
        self, model: str | Path | Weights, dtype: type[np.floating[Any]] = np.float32, maths: Any = ops, n_ctx: int = 0
    ) -> None:
        self.w = model if isinstance(model, Weights) else Weights(model, dtype)
        name = self.w.fields.get("general.architecture")
        if isinstance(name, str) and name not in ARCHITECTURES:
            raise ModelError(f"architecture {name!r} is not implemented; the engine has {', '.join(ARCHITECTURES)}")
        if "token_embd.weight" not in self.w:
            raise ModelError("tensor token_embd.weight is missing from the file: every language model has it")
        check_layers(self.w)
        self.config = read_config(self.w.fields)
        check_shapes(self.config, self.w)
        self.architecture = ARCHITECTURES[self.config.architecture]
        self.ops = maths
        self.n_ctx = n_ctx
        self._vectors: dict[str, Array] = {}
        self.n_vocab = self.w.shape("token_embd.weight")[0]

    @property
    def n_layer(self) -> int:
        """How many layers the model has."""
        return self.config.n_layer

    @property
    def windows(self) -> tuple[int, ...]:
        """How many positions each layer's attention reaches back, its own included; 0: all."""
        return self.config.windows

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int] | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
    ) -> Array:
        """Run tokens after those in ``cache`` (none: a fresh one) -> logits [b, token, vocab]; see ``step``."""
        step = self.step(tokens, positions, cache, tap)
        x = self.begin(tokens, step)
        for i in range(self.n_layer):
            x = self.layer(i, x, step)
        return self.end(x, step)

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int] | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
    ) -> Step:
        """What the parts of a pass share: ``begin``, every ``layer``, and ``end``.

        ``positions`` default to those that follow the cache. Raises ModelError for a token id out of range.
        """
        self._check_tokens(tokens)
        cache = cache if cache is not None else Cache()
        start = int(cache.positions[-1]) + 1 if cache.positions.size else 0
        here = np.asarray(positions if positions is not None else range(start, start + len(tokens)), np.int64)
        cache.positions = np.concatenate([cache.positions, here])
        tap, rope, factors = tap or Tap(), self.config.rope, self.rope_factors(len(cache.positions))
        angles: dict[Rope | None, tuple[Array, Array]] = {}
        for each in dict.fromkeys(each for each in (rope, *self.config.ropes) if each is not None):
            cos, sin = self.ops.rope_angles(each, here, factors)
            angles[each] = tap.angles(cos, sin, each, here, factors)
        return Step(here, cache.positions, *angles[rope], cache, tap, angles)

    def begin(self, tokens: Sequence[int], step: Step) -> Array:
        """What the first layer reads: the tokens' embeddings, with vectors of their positions where those are learned.

        [t] token ids -> [b, t, embd].
        """
        with _overflowing():
            x = self._adapted_rows(self.embed(np.asarray(tokens)), np.asarray(tokens), step.tap)
            x = step.tap("embd", x * self.config.embedding_scale)
            if self.config.traits.learned_positions:
                x = step.tap("inpL", x + step.tap("pos_embd", self.positions(step.positions)))
            return x

    def layer(self, i: int, x: Array, step: Step) -> Array:
        """Layer i: [b, t, embd] -> [b, t, embd]."""
        with _overflowing():
            y: Array = self.architecture.layer(self, i, x, step)
            return y

    def end(self, x: Array, step: Step) -> Array:
        """The final norm and the output head: [b, t, embd] -> logits [b, t, vocab]."""
        c, norm = self.config, self.norm if self.config.traits.norm == "RMS_NORM" else self.layer_norm
        with _overflowing():
            x = self.logits(step.tap("result_norm", norm(x, "output_norm")), step.tap)
            x = x if c.logit_scale == 1 else x * (1 / c.logit_scale)
            return step.tap("result_output", self.ops.softcap(x, c.logit_cap) if c.logit_cap else x)

    def rope_factors(self, n_tokens: int) -> Array | None:
        """What the file divides RoPE's frequencies by, if anything: LongRoPE does so by the room there is for tokens.

        Ding et al. 2024, arXiv:2402.13753; llama.cpp, llama_model::get_rope_factors.
        """
        if "rope_freqs.weight" in self.w:
            return self.vector("rope_freqs.weight")
        longer = (self.n_ctx or n_tokens) > self.config.rope.n_ctx_orig
        return self._optional(f"rope_factors_{'long' if longer else 'short'}.weight")

    def embed(self, tokens: Array) -> Array:
        """Embedding rows of the tokens -> [1, token, embd]; no other row is read."""
        return self.w.rows("token_embd.weight", tokens)[None]

    def positions(self, positions: Array) -> Array:
        """Learned vectors of positions -> [1, token, embd]."""
        count = self.w.shape("position_embd.weight")[0]
        beyond = positions[(positions < 0) | (positions >= count)]
        if beyond.size:
            raise ModelError(f"position {beyond[0]} is out of range: position_embd.weight has {count}")
        return self.w.rows("position_embd.weight", positions)[None]

    def norm(self, x: Array, name: str) -> Array:
        """RMSNorm with the weight ``name``.weight."""
        weight = self.vector(f"{name}.weight", x.shape[-1])
        return np.asarray(self.ops.rms_norm(x, weight, self.config.rms_eps))

    def layer_norm(self, x: Array, name: str) -> Array:
        """LayerNorm with the weight ``name``.weight, [..., dim] or one a head [head, dim], and ``name``.bias if any."""
        weight = self.vector(f"{name}.weight")
        weight = weight if weight.size == x.shape[-1] else weight.reshape(x.shape[-2:])
        return np.asarray(self.ops.layer_norm(x, weight, self._optional(f"{name}.bias"), self.config.norm_eps))

    def linear(self, x: Array, name: str, tap: Tap) -> Array:
        """x @ W.T with its scale and ``name``.bias where there are any: [..., in] -> [..., out].

        The scale comes before the bias in attention and after it in the FFN (llama.cpp, llama-graph.cpp).
        """
        weight = f"{name}.weight"
        kind, scale, bias = self.w.type(weight), self.scale(name), self._optional(f"{name}.bias")
        given = x
        x, *sums = tap.operands(kind, x)

        def compute() -> Array:
            y = tap.accumulate(self.w.product(weight, x, *sums), kind, sums_.by_weight(self.w, weight, x))
            if ".ffn_" in name:
                y = self._adapted(y, weight, given, tap)
                y = y if bias is None else tap.product(y) + bias
                return y if scale is None else y * scale
            y = self._adapted(y if scale is None else y * scale, weight, given, tap)
            return y if bias is None else tap.product(y) + bias

        if self._low_rank(weight) is not None:  # which is no product by one weight
            return compute()
        return tap.multiply(WeightProduct(compute, self.w, weight, x, sums[0] if sums else None, scale, bias))

    def _low_rank(self, weight: str) -> LowRank | None:
        """What the adapter, if there is one, has for a matrix that is multiplied by."""
        pairs = self.w.adapter.pairs if self.w.adapter is not None and weight != EMBEDDING else {}
        return pairs.get(weight)

    def _adapted(self, y: Array, weight: str, x: Array, tap: Tap, chosen: Array | None = None) -> Array:
        """y + s B (A x): y [..., out] is the product of x [..., in] with a matrix, or each row's with its expert's."""
        pair, adapter = self._low_rank(weight), self.w.adapter
        if pair is None or adapter is None:
            return y
        low = adapter.weights
        for half in (pair.a, pair.b):
            kind = low.type(half)
            if chosen is None:
                x, *sums = tap.operands(kind, x)
                x = tap.accumulate(low.product(half, x, *sums), kind, sums_.by_weight(low, half, x))
            else:
                x, chosen, *sums = tap.operands(kind, x, chosen)
                made = low.experts(half, x, chosen, *sums)
                x = tap.accumulate(made, kind, sums_.by_experts(low, half, x, chosen), by_row=True)
        return y + x * adapter.factor(weight)

    def _adapted_rows(self, rows: Array, tokens: Array, tap: Tap) -> Array:
        """Embedding rows [1, t, embd] with what the adapter adds: s B A[token]; its A is looked up as the rows are."""
        adapter = self.w.adapter
        if adapter is None or EMBEDDING not in adapter.pairs:
            return rows
        pair, low = adapter.pairs[EMBEDDING], adapter.weights
        kind = low.type(pair.b)
        x, *sums = tap.operands(kind, low.rows(pair.a, tokens)[None])
        x = tap.accumulate(low.product(pair.b, x, *sums), kind, sums_.by_weight(low, pair.b, x))
        return np.asarray(rows + x * adapter.factor(EMBEDDING))

    def scale(self, name: str) -> Array | None:
        """``name``.scale, if the file has it and the architecture asks for it."""
        asked = ".ffn_" not in name or self.config.traits.ffn_scales
        return self._optional(f"{name}.scale") if asked else None

    def qkv(self, x: Array, i: int, tap: Tap) -> tuple[Array, Array, Array]:
        """Queries, keys and values of layer i: [b, t, embd] -> [b, t, head, dim] each."""
        projected = zip("QKV", self.projections(x, i, tap), strict=True)
        parts = [tap(f"{side}cur_proj-{i}", part) for side, part in projected]
        q, k, v = (part.reshape(*part.shape[:-1], *heads) for part, heads in zip(parts, self._heads, strict=True))
        return q, k, v

    def projections(self, x: Array, i: int, tap: Tap) -> list[Array]:
        """Of layer i, from three matrices or one that holds all: [b, t, embd] -> [b, t, head*dim] each."""
        names = [f"blk.{i}.attn_{part}" for part in "qkv"]
        if f"blk.{i}.attn_qkv.weight" not in self.w:
            return [self.linear(x, name, tap) for name in names]
        ends = np.cumsum([count * dim for count, dim in self._heads])
        parts = np.split(self.linear(x, f"blk.{i}.attn_qkv", tap), ends[:-1], axis=-1)
        if f"blk.{i}.attn_qkv.bias" in self.w:
            return parts
        biases = [self._optional(f"{name}.bias") for name in names]
        return [y if bias is None else tap.product(y) + bias for y, bias in zip(parts, biases, strict=True)]

    @property
    def _heads(self) -> tuple[tuple[int, int], ...]:
        """How many heads Q, K and V have, of how many channels."""
        c = self.config
        return (c.n_head, c.head_k), (c.n_head_kv, c.head_k), (c.n_head_kv, c.head_v)

    def experts(self, x: Array, name: str, chosen: Array, tap: Tap) -> Array:
        """Each token's chosen experts' products: x [b, t, 1 or used, in], chosen [b, t, used] -> [b, t, used, out]."""
        kind, given = self.w.type(f"{name}.weight"), np.broadcast_to(x, (*chosen.shape, x.shape[-1]))
        x, chosen, *sums = tap.operands(kind, given, chosen)
        out = self.w.experts(f"{name}.weight", x, chosen, *sums)
        out = tap.accumulate(out, kind, sums_.by_experts(self.w, f"{name}.weight", x, chosen), by_row=True)
        scale, bias = self.scale(name), self._optional(f"{name}.bias")  # [expert], [expert * out]
        out = out if scale is None else out * scale[chosen][..., None]
        out = self._adapted(out, f"{name}.weight", given, tap, chosen)
        return out if bias is None else tap.product(out) + bias.reshape(-1, out.shape[-1])[chosen]

    def gelu(self, x: Array, tap: Tap) -> Array:
        """GELU, which an arithmetic may look up in a table: then argument and value have the table's precision."""
        (x,) = tap.operands("gelu", x)
        (y,) = tap.operands("gelu", self.ops.gelu(x))
        return y

    def logits(self, x: Array, tap: Tap) -> Array:
        """The output head; a file without one ties it to the embedding."""
        return self.linear(x, "output" if "output.weight" in self.w else "token_embd", tap)

    def attention(
        self,
        i: int,
        q: Array,
        k: Array,
        v: Array,
        step: Step,
        **scoring: Unpack[Scoring],
    ) -> Array:
        """Causal attention of layer i over the cache: q [b, t, h, d], k and v [b, t, k, d] -> [b, t, h*d]."""
        tap = step.tap
        keys, values = step.cache.append(i, tap.store("cache_k", k), tap.store("cache_v", v))
        keys, values = tap(f"kv_k-{i}", keys), tap(f"kv_v-{i}", values)  # [b, s, k, d]
        if self.config.traits.scales_queries:
            q = q * self.config.attention_scale
        q, keys = tap.operands("cache_k", q, keys)
        many = q.shape[0] * q.shape[1] * q.shape[2] * keys.shape[1] > SCORES
        if many and not any(tap.is_wanted(f"{word}-{i}") for word in ("kq", "kq_soft_max")):
            of_many = partial(self._probabilities, self.ops.causal_softmax_of_many, **scoring)
            return tap(f"kqv_out-{i}", self._attend(q, keys, values, step, of_many))
        scores = tap(f"kq-{i}", self.scores(q, keys, tap))  # [b, h, t, s]
        probs = self._probabilities(self.ops.causal_softmax, scores, step.positions, step.key_positions, **scoring)
        probs = tap(f"kq_soft_max-{i}", probs)  # [b, h, t, s]
        probs, values = tap.operands("cache_v", probs, values)
        return tap(f"kqv_out-{i}", self.values(probs, values, tap))

    def scores(self, q: Array, keys: Array, tap: Tap, start: int = 0) -> Array:
        """Raw scores of queries from the ``start``-th on: [b, t, h, d], [b, s, k, d] -> [b, h, t, s]."""
        return tap.accumulate(self.ops.attention_scores(q, keys), "cache_k", sums_.of_scores(q, keys), start)

    def values(self, probs: Array, values: Array, tap: Tap, start: int = 0) -> Array:
        """Weighted sums of values for queries from the ``start``-th on: [b, h, t, s], [b, s, k, d] -> [b, t, h*d]."""
        return tap.accumulate(
            self.ops.attention_values(probs, values), "cache_v", sums_.of_values(probs, values), start
        )

    def _probabilities(
        self,
        softmax: Callable[..., Array],
        scores: Array,
        positions: Array,
        key_positions: Array,
        window: int = 0,
        cap: float = 0.0,
        sinks: Array | None = None,
    ) -> Array:
        """Attention probabilities of raw scores: [b, h, t, s] -> the same."""
        if cap:
            scores = self.ops.softcap(scores, cap)
        if window:
            scores = self.ops.mask_window(scores, window, positions, key_positions)
        scale = 1.0 if self.config.traits.scales_queries else self.config.attention_scale
        beside = () if sinks is None else (sinks,)
        return np.asarray(softmax(scores, scale, positions, key_positions, *beside))

    def _attend(self, q: Array, keys: Array, values: Array, step: Step, probabilities: Callable[..., Array]) -> Array:
        """Attention some queries at a time, over the keys that they can see: [b, t, h, d] -> [b, t, h*d]."""
        b, t, h, _ = q.shape
        out = np.empty((b, t, h * values.shape[-1]), q.dtype)
        ordered = bool((np.diff(step.key_positions) >= 0).all())
        rows = max(1, SCORES // (4 * b * h * len(step.key_positions)))
        # V is rounded once, beside the probabilities of no query
        _, values = step.tap.operands("cache_v", np.empty((b, h, 0, values.shape[1]), q.dtype), values)

        def attend(start: int) -> None:
            some, there = slice(start, start + rows), step.key_positions
            here = step.positions[some]
            if ordered:
                there = there[: np.searchsorted(there, here.max(), "right")]
            scores = self.scores(q[:, some], keys[:, : len(there)], step.tap, start)
            (probs,) = step.tap.operands("cache_v", probabilities(scores, here, there))
            out[:, some] = self.values(probs, values[:, : len(there)], step.tap, start)

        list(self.w.map(attend, range(0, t, rows)))
        return out

    def gate_up(self, x: Array, i: int, chosen: Array, tap: Tap) -> tuple[Array, Array]:
        """Gate and up of the chosen experts of layer i, from two tensors or one that holds both."""
        if f"blk.{i}.ffn_gate_up_exps.weight" in self.w:
            gate, up = np.split(self.experts(x, f"blk.{i}.ffn_gate_up_exps", chosen, tap), 2, axis=-1)
            return gate, up
        gate, up = (self.experts(x, f"blk.{i}.ffn_{part}_exps", chosen, tap) for part in ("gate", "up"))
        return gate, up

    def heads(self, x: Array, name: str, tap: Tap) -> Array:
        """Every head's product with a matrix of its own: [b, h, t, in] -> [b, h, t, out]."""
        kind = self.w.type(f"{name}.weight")
        x, *sums = tap.operands(kind, x)
        y = self.w.heads(f"{name}.weight", x, *sums)
        return tap.accumulate(y, kind, sums_.by_heads(self.w, f"{name}.weight", x))

    def conv(self, x: Array, i: int, step: Step) -> Array:
        """The causal convolution of layer i with its bias, over this pass's tokens and the last before: [b, t, c]."""
        name, spans = f"blk.{i}.ssm_conv1d", self.config.ssm.d_conv
        weight = self.vector(f"{name}.weight", x.shape[-1] * spans).reshape(x.shape[-1], spans)
        before = step.cache.conv.get(i, np.zeros((len(x), spans - 1, x.shape[-1]), x.dtype))
        rows = np.concatenate([before, x], axis=1)  # [b, k - 1 + t, c]
        step.cache.conv[i] = rows[:, x.shape[1] :]
        return np.asarray(self.ops.causal_conv(rows, weight) + self.vector(f"{name}.bias", x.shape[-1]))

    def scan(self, x: Array, dt: Array, b: Array, c: Array, i: int, step: Step) -> Array:
        """The selective scan of layer i, from the state that the tokens before left: [b, t, h, d]."""
        state = step.cache.states.get(i, np.zeros((len(x), *x.shape[2:], b.shape[-1]), x.dtype))
        a = self.vector(f"blk.{i}.ssm_a", x.shape[2])
        y, step.cache.states[i] = self.ops.ssm_scan(x, dt, a, b, c, state)
        return np.asarray(y)

    def vector(self, name: str, size: int | None = None) -> Array:
        """A small tensor whole -> [size], read once."""
        if name not in self._vectors:
            self._vectors[name] = self.w.vector(name, size)
        return self._vectors[name]

    def _optional(self, name: str) -> Array | None:
        return self.vector(name) if name in self.w else None

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.n_vocab:
                raise ModelError(f"token id {token} is out of range: the vocabulary has {self.n_vocab} entries")
        if not len(tokens):
            raise ModelError("no tokens to run")
