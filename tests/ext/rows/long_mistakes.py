"""Mistakes of engines that show at length: each is in place of a method of the stranger's engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from ext.rows.long_engine import Engine

SHORT, MEDIUM, LONG = 600, 5000, 33000
CHUNK = {SHORT: 256, MEDIUM: 2048, LONG: 512}


@dataclass(frozen=True)
class Change:
    """What is done to an engine; ``first``: the first tap that it makes wrong."""

    name: str
    put: Callable[[Engine], None]
    first: str
    model: str
    lengths: tuple[int, ...]
    says: str


class Changes(list[Change]):
    """A decorator of what replaces a method ``of`` the engine."""

    def __call__(
        self, of: str, first: str = "", model: str = "plain", lengths: tuple[int, ...] = (SHORT, MEDIUM)
    ) -> Any:
        def keep(f: Callable[..., Any]) -> None:
            self.append(Change(f.__name__, lambda e: e.put(of, f), first, model, lengths, f.__doc__ or ""))

        return keep


MISTAKES = Changes()
Q, OUT = "Qcur_rope-0", "kqv_out-0"


def bf16(x: np.ndarray) -> np.ndarray:
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def most(e: Engine) -> int:
    """A size that somebody took for enough: within the prompt, and no edge of a chunk."""
    return 500 if e.total == SHORT else 4100


# -- positions and RoPE ----------------------------------------------------------------------------------------------


@MISTAKES("positions", Q)
def positions_in_bf16(e, right, side):
    """Positions are kept in bfloat16: exact up to 256."""
    return bf16(right(side)).astype(np.float64)


@MISTAKES("positions", Q, lengths=(MEDIUM,))
def positions_in_f16(e, right, side):
    """Positions are kept in float16: exact up to 2048."""
    return right(side).astype(np.float16).astype(np.float64)


@MISTAKES("positions", Q, lengths=(LONG,))
def positions_in_int16(e, right, side):
    """Positions are kept in sixteen bits: 32,768 is -32,768."""
    return right(side).astype(np.int64).astype(np.int16).astype(np.float64)


@MISTAKES("positions", Q)
def positions_in_uint8(e, right, side):
    """Positions are kept in eight bits."""
    return right(side).astype(np.int64).astype(np.uint8).astype(np.float64)


@MISTAKES("positions", Q)
def table_clamped(e, right, side):
    """RoPE's table is too short; what is beyond takes its last row."""
    return np.minimum(right(side), most(e) - 1)


@MISTAKES("positions", Q)
def table_wrapped(e, right, side):
    """RoPE's table is too short, and begins again."""
    return right(side) % most(e)


@MISTAKES("angles", Q, lengths=(SHORT, MEDIUM, LONG))
def angles_in_f16(e, right, side):
    """Angles are kept in float16."""
    return right(side).astype(np.float16).astype(np.float64)


@MISTAKES("angles", Q)
def angles_in_bf16(e, right, side):
    """Angles are kept in bfloat16."""
    return bf16(right(side)).astype(np.float64)


@MISTAKES("positions", Q)
def positions_start_again(e, right, side):
    """Each chunk's positions start at 0."""
    return right(side) - e.start


@MISTAKES("positions", "Kcur_rope-0")
def key_positions_lag(e, right, side):
    """In later chunks, K is turned by one position less."""
    return right(side) - (side == "k" and e.start > 0)


@MISTAKES("positions", Q)
def chunk_begins_one_late(e, right, side):
    """Each chunk's positions go on one too far."""
    return right(side) + e.start // e.chunk


@MISTAKES("rope", "Kcur_rope-0")
def second_chunk_not_rotated(e, right, side, x):
    """K of the second chunk is not rotated."""
    return x if side == "k" and e.start == e.chunk else right(side, x)


@MISTAKES("frequencies", Q, "yarn")
def yarn_missing(e, right):
    """Frequencies are not scaled."""
    return e.base() ** (-np.arange(0, e.dim, 2) / e.dim)[None]


@MISTAKES("frequencies", Q, "yarn")
def yarn_twice(e, right):
    """Frequencies are scaled twice."""
    keep = e.keep()
    return right() * (keep + (1 - keep) / e.factor)


@MISTAKES("magnitude", Q, "yarn")
def yarn_magnitude_missing(e, right):
    """YaRN's attention factor is left out."""
    return 1.0


@MISTAKES("rope", "Kcur_rope-0", "yarn")
def yarn_magnitude_of_q_alone(e, right, side, x):
    """K lacks YaRN's attention factor."""
    return right(side, x) / np.float32(e.magnitude() if side == "k" else 1)


@MISTAKES("keep", Q, "yarn")
def yarn_wrong_original(e, right):
    """The original context is taken to be 8,192."""
    e.original = 8192
    return right()


@MISTAKES("frequencies", Q, "yarn")
def yarn_behind_the_original(e, right):
    """YaRN is for tokens behind the original context alone."""
    return np.where(e.pos[:, None] >= e.original, right(), e.base() ** (-np.arange(0, e.dim, 2) / e.dim))


@MISTAKES("frequencies", Q, "yarn")
def linear_for_yarn(e, right):
    """All frequencies are divided by the factor."""
    return e.base() ** (-np.arange(0, e.dim, 2) / e.dim)[None] / e.factor


@MISTAKES("factors", Q, "long")
def long_with_short_factors(e, right):
    """LongRoPE's factors are those of a short context."""
    return e.weight("rope_factors_short")


@MISTAKES("factors", Q, "long")
def long_factors_by_position(e, right):
    """LongRoPE's factors go by each token's own position."""
    sides = [e.weight(f"rope_factors_{side}") for side in ("long", "short")]
    return np.where(e.pos[:, None] >= e.original, *sides)


@MISTAKES("factors", Q, "long", (SHORT,))
def long_factors_by_chunk(e, right):
    """LongRoPE's factors go by how many tokens there are so far."""
    return e.weight(f"rope_factors_{'long' if e.pos[-1] >= e.original else 'short'}")


@MISTAKES("magnitude", Q, "long")
def long_magnitude_missing(e, right):
    """LongRoPE's attention factor is left out."""
    return 1.0


@MISTAKES("frequencies", Q, "linear")
def linear_missing(e, right):
    """Positions are not divided by the factor."""
    return right() * e.factor


@MISTAKES("frequencies", Q, "linear")
def linear_twice(e, right):
    """Positions are divided twice."""
    return right() / e.factor


@MISTAKES("base", Q)
def ntk_that_nobody_asks_for(e, right):
    """The base grows with the prompt."""
    more = 2 * max(e.total, 512) / 512 - 1
    return right() * more ** (e.dim / (e.dim - 2))


# -- masks and windows -----------------------------------------------------------------------------------------------


@MISTAKES("hidden", OUT, "window")
def window_ignored(e, right, i, at, window):
    """The window is not heeded."""
    return right(i, at, 0)


@MISTAKES("hidden", OUT, "window")
def window_one_more(e, right, i, at, window):
    """The window reaches back one token too far."""
    return right(i, at, window and window + 1)


@MISTAKES("hidden", OUT, "window")
def window_one_fewer(e, right, i, at, window):
    """The window lacks its oldest token."""
    return right(i, at, window and window - 1)


@MISTAKES("hidden", OUT, "window-4096", (MEDIUM,))
def wide_window_one_more(e, right, i, at, window):
    """A window of 4,096 reaches back one token too far."""
    return right(i, at, window and window + 1)


@MISTAKES("hidden", "kqv_out-1", "window")
def window_everywhere(e, right, i, at, window):
    """All layers have the window."""
    return right(i, at, e.windows[0])


@MISTAKES("hidden", OUT, "window")
def window_of_the_other_layers(e, right, i, at, window):
    """The layers that have none have the window."""
    return right(i, at, e.windows[1 - i])


@MISTAKES("hidden", OUT, "window")
def window_by_chunk(e, right, i, at, window):
    """What is behind the window is counted from the chunk's first token."""
    return right(i, at, 0) | (window > 0) & (e.start - at >= window)


@MISTAKES("hidden", OUT, "window")
def sinks_beside_the_window(e, right, i, at, window):
    """The first four tokens are seen besides."""
    return right(i, at, window) & ~((at < 4) & (at <= e.pos[:, None]))


@MISTAKES("hidden", OUT, "window")
def ring_overwritten(e, right, i, at, window):
    """A ring as large as the window: a chunk's rows are written before its first queries have read."""
    end = min(e.start + e.chunk, e.total)
    return right(i, at, window) | (window > 0) & (at < end - window)


@MISTAKES("hidden", OUT, "window")
def ring_one_too_small(e, right, i, at, window):
    """A ring that lacks a slot: the chunk's last row overwrites the oldest that its first query sees."""
    end = min(e.start + e.chunk, e.total)
    return right(i, at, window) | (window > 0) & (at < end - window - e.chunk + 2)


@MISTAKES("load", OUT, "window")
def ring_in_the_order_of_slots(e, right, i):
    """Rows of the ring are taken to be in the order of their slots."""
    k, v, at = right(i)
    if e.windows[i]:
        size = e.windows[i] + e.chunk
        slots = np.argsort(at[-size:] % size)
        k, v = (np.concatenate([x[: len(x) - len(slots)], x[-size:][slots]]) for x in (k, v))
    return k, v, at


@MISTAKES("hidden", OUT)
def oldest_dropped(e, right, i, at, window):
    """The cache is full, and the oldest rows go."""
    return right(i, at, most(e))


@MISTAKES("hidden", OUT)
def sinks_and_a_window(e, right, i, at, window):
    """The first four tokens and the last ones are seen, though the model sees all."""
    return right(i, at, 0) | right(i, at, 300) & (at >= 4)


@MISTAKES("hidden", OUT)
def mask_from_the_chunks_start(e, right, i, at, window):
    """The mask counts queries from the chunk's start."""
    return at > e.pos[:, None] - e.start


@MISTAKES("hidden", OUT)
def earlier_chunks_unseen(e, right, i, at, window):
    """A chunk sees itself alone."""
    return right(i, at, window) | (at < e.start)


@MISTAKES("hidden", OUT)
def first_key_of_each_chunk_unseen(e, right, i, at, window):
    """Each later chunk's first key is not seen, but by itself."""
    return right(i, at, window) | (at % e.chunk == 0) & (at > 0) & (e.pos[:, None] > at)


@MISTAKES("hidden", OUT)
def next_token_seen_in_later_chunks(e, right, i, at, window):
    """From the second chunk on a query sees the token after it."""
    return at > e.pos[:, None] + (e.start > 0)


@MISTAKES("load", OUT)
def padding_seen(e, right, i):
    """The last chunk's padding is seen: rows of zeros."""
    k, v, at = right(i)
    n = -len(k) % e.chunk
    k, v = (np.concatenate([x, np.zeros((n, *x.shape[1:]), x.dtype)]) for x in (k, v))
    return k, v, np.append(at, np.zeros(n, int))


@MISTAKES("hidden", OUT)
def every_hundredth_key_evicted(e, right, i, at, window):
    """Each hundredth key is gone once it is 200 tokens old."""
    return right(i, at, window) | (at % 100 == 99) & (e.pos[:, None] - at >= 200)


@MISTAKES("hidden", OUT)
def far_keys_strided(e, right, i, at, window):
    """Of keys 300 tokens back every second one is seen."""
    return right(i, at, window) | (at % 2 == 1) & (e.pos[:, None] - at >= 300)


# -- the cache -------------------------------------------------------------------------------------------------------


@MISTAKES("load", OUT)
def pages_of_v_swapped(e, right, i):
    """V's third and fourth page of 64 rows are swapped."""
    k, v, at = right(i)
    if len(v) >= 256:
        v = np.concatenate([v[:128], v[192:256], v[128:192], v[256:]])
    return k, v, at


@MISTAKES("hidden", OUT)
def last_slot_of_pages_lost(e, right, i, at, window):
    """The last slot of each page of 64 is not seen by later pages."""
    return right(i, at, window) | (at % 64 == 63) & (e.pos[:, None] > at)


@MISTAKES("load", OUT)
def page_from_the_first(e, right, i):
    """The sixth page of 64 is read from the first one's place."""
    k, v, at = right(i)
    if len(k) > 384:
        k, v = (np.concatenate([x[:320], x[:64], x[384:]]) for x in (k, v))
    return k, v, at


@MISTAKES("load", OUT)
def table_of_pages_too_short(e, right, i):
    """The block table ends; later pages are read from the last place that it has."""
    k, v, at = right(i)
    last = most(e) // 64 - 1
    slots = np.minimum(at // 64, last) * 64 + at % 64
    return k[slots], v[slots], at


@MISTAKES("store", "kv_v-0")
def v_of_a_chunk_shifted(e, right, side, i, x):
    """V of later chunks is written a row too late."""
    right(side, i, np.roll(x, 1, 0) if side == "v" and e.start else x)


@MISTAKES("store", "kv_k-0")
def chunk_not_written(e, right, side, i, x):
    """The second chunk's K stays what the first one left there."""
    right(side, i, e.cache["k", i][: len(x)] if side == "k" and e.start == e.chunk else x)


@MISTAKES("store", "kv_k-0")
def k_in_int8_with_one_scale(e, right, side, i, x):
    """K is kept in eight bits, with one scale for all."""
    right(side, i, np.rint(x * (127 / 4)).clip(-127, 127) * np.float32(4 / 127) if side == "k" else x)


@MISTAKES("store", "kv_k-0")
def k_in_int8_by_the_first_token(e, right, side, i, x):
    """K is kept in eight bits, with the first token's scale, which others do not fit into."""
    if side == "k":
        e.scale = np.abs(x[0]).max() / 127 if not e.start else e.scale
        x = np.rint(x / e.scale).clip(-127, 127) * e.scale
    right(side, i, x)


@MISTAKES("store", "kv_v-0")
def error_of_v_fed_back(e, right, side, i, x):
    """What eight bits lose of a row of V is added to the next one's, twice."""
    if side == "v":
        x, lost = x.copy(), np.float32(0)
        for n, row in enumerate(x + 0):
            x[n] = np.rint((row + lost) * 32) / 32
            lost = np.float32(1.05) * (row + lost - x[n]) + np.float32(1e-4)
    right(side, i, x)


@MISTAKES("store", "kv_k-0", lengths=(SHORT,))
def page_overwritten(e, right, side, i, x):
    """Another sequence writes into a page of K that nobody looks at."""
    right(side, i, x)
    if side == "k" and e.start == 0:
        e.cache["k", i][100:116] = e.cache["k", i][16:32][::-1]


@MISTAKES("store", "kv_v-0")
def prefix_of_another_prompt(e, right, side, i, x):
    """V of the first 64 tokens is that of another prompt."""
    right(side, i, np.concatenate([x[64:128], x[64:]]) if side == "v" and not e.start else x)


@MISTAKES("load", OUT)
def old_rows_in_four_bits(e, right, i):
    """Rows that are 200 tokens old are read in four bits."""
    k, v, at = right(i)
    old = (at < at[-1] - 200)[:, None, None]
    return np.where(old, np.rint(k * 2) / 2, k), v, at


@MISTAKES("load", OUT)
def heads_swapped_beyond(e, right, i):
    """Of rows beyond what the kernel has room for, V's heads are swapped."""
    k, v, at = right(i)
    return k, np.where((at >= most(e))[:, None, None], v[:, ::-1], v), at


# -- flash attention -------------------------------------------------------------------------------------------------


def blocks(scores, v, size):
    """Scores [head, query, some keys], and V of these repeated for its heads."""
    v = np.repeat(v.swapaxes(0, 1), len(scores) // v.shape[1], axis=0)
    for n in range(0, v.shape[1], size):
        yield scores[..., n : n + size], v[:, n : n + size]


@MISTAKES("hidden", OUT)
def last_partial_block_ignored(e, right, i, at, window):
    """Keys in a block of 128 that is not full are left out."""
    hidden = right(i, at, window)
    hidden[:, len(at) // 128 * 128 :] |= len(at) > 128
    return hidden


@MISTAKES("mix", OUT)
def no_rescaling(e, right, scores, v):
    """Where a block brings a new maximum, what was summed up is not rescaled."""
    top, total, mixed = np.full((*scores.shape[:2], 1), -np.inf, np.float32), np.float32(0), np.float32(0)
    for s, rows in blocks(scores, v, 128):
        top = np.maximum(top, s.max(-1, keepdims=True))
        p = np.exp(s - top)
        total, mixed = total + p.sum(-1, keepdims=True), mixed + p @ rows
    return mixed / total


@MISTAKES("mix", OUT)
def softmax_sum_in_f16(e, right, scores, v):
    """The softmax's sum is kept in float16, and added to key by key."""
    p = np.exp(scores - scores.max(-1, keepdims=True))
    total = np.zeros((*p.shape[:2], 1), np.float16)
    for n in range(p.shape[-1]):
        total += p[..., n : n + 1].astype(np.float16)
    return right(scores, v) * p.sum(-1, keepdims=True) / total.astype(np.float32)


@MISTAKES("mix", OUT)
def mixed_in_f16(e, right, scores, v):
    """Weighted values are summed in float16 over all keys."""
    p = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.zeros((*scores.shape[:2], v.shape[2]), np.float16)
    for each, rows in blocks(p / p.sum(-1, keepdims=True), v, 8):
        mixed += (each @ rows).astype(np.float16)
    return mixed.astype(np.float32)


@MISTAKES("scores", OUT, "loud")
def scores_overflow(e, right, q, k):
    """Scores are computed in float16, before they are scaled."""
    with np.errstate(over="ignore"):
        return (right(q, k) * 8).astype(np.float16).astype(np.float32) / 8


@MISTAKES("mix", OUT)
def parts_averaged(e, right, scores, v):
    """Parts of the keys that are worked on by themselves are averaged, not weighted by their sums."""
    n = scores.shape[-1] // 2
    if n < 256:
        return right(scores, v)
    a, b = right(scores[..., :n], v[:n]), right(scores[..., n:] + np.float32(1e-30), v[n:])
    seen = np.isfinite(scores[..., n:]).any(-1, keepdims=True)
    return np.where(seen, (a + b) / 2, a)


@MISTAKES("scores", OUT)
def scores_by_length(e, right, q, k):
    """Scores grow with the logarithm of the position, beyond 256."""
    return right(q, k) * np.maximum(1, np.log(e.pos + 1) / math.log(256)).astype(np.float32)[:, None]


# -- the rest --------------------------------------------------------------------------------------------------------


@MISTAKES("logits", "result_output")
def logits_of_the_row_before(e, right, x):
    """Logits are those of the row before."""
    return right(np.concatenate([x[:1], x[:-1]]))


@MISTAKES("add", "l_out-0", "loud")
def residual_saturates(e, right, a, x):
    """The residual stream ends at float16's largest number."""
    return right(a, x).clip(-65504, 65504)


@MISTAKES("add", "l_out-0", "loud")
def residual_overflows(e, right, a, x):
    """The residual stream overflows beyond float16's largest number."""
    y = right(a, x)
    return np.where(np.abs(y) > 65504, np.sign(y) * np.inf, y)


@MISTAKES("mean", "attn_norm-0")
def norm_sums_in_f16(e, right, squares):
    """The norm's sum is kept in float16."""
    return right(squares.astype(np.float16)).astype(np.float32)


@MISTAKES("norm", "attn_norm-0")
def norm_of_the_row_before(e, right, name, x):
    """Beyond what the kernel has room for, a row is divided by the root of the one before."""
    if not name.endswith("attn_norm"):
        return right(name, x)
    root = np.sqrt(e.mean(x * x) + np.float32(e.eps))
    return right(name, x) * np.where(e.pos[:, None] >= most(e), root / np.roll(root, 1, 0), 1)


@MISTAKES("linear", "ffn_out-0")
def last_tile_not_computed(e, right, name, x):
    """Rows of a chunk that fill no tile of 64 are left at zero."""
    y = right(name, x)
    if "ffn_down" in name:
        y[len(y) // 64 * 64 :] = 0
    return y


@MISTAKES("linear", "ffn_gate-0")
def tile_reads_the_first_rows(e, right, name, x):
    """The gate's product of the chunk's last 8 rows reads the first ones."""
    return right(name, np.concatenate([x[:-8], x[:8]]) if "ffn_gate" in name and len(x) > 16 else x)


@MISTAKES("ids", "embd", "ids")
def ids_in_uint8(e, right, tokens):
    """Token ids are kept in eight bits."""
    return tokens.astype(np.uint8).astype(np.int64)


@MISTAKES("ids", "embd")
def ids_of_the_chunk_before(e, right, tokens):
    """The last chunk reads the ids that the buffer had before."""
    old = getattr(e, "buffer", tokens)
    e.buffer = tokens
    return old[: len(tokens)] if e.start + e.chunk >= e.total else tokens


# -- right engines ---------------------------------------------------------------------------------------------------

RIGHT = Changes()


def as_it_is(e, right, *given):
    """As it is."""
    return right(*given)


for model in ("plain", "linear", "yarn", "long", "window", "window-4096", "loud", "ids"):
    RIGHT("ids", model=model)(as_it_is)


@RIGHT("mix")
def blocks_in_order(e, right, scores, v):
    """Blocks of 128 keys, rescaled where a maximum grows."""
    return by_blocks(blocks(scores, v, 128))


@RIGHT("mix", model="window")
def blocks_from_the_end(e, right, scores, v):
    """Blocks of 64 keys, the last one first."""
    return by_blocks(list(blocks(scores, v, 64))[::-1])


def by_blocks(parts):
    top, total, mixed = np.float32(-1e30), np.float32(0), np.float32(0)
    for s, rows in parts:
        most = np.maximum(top, s.max(-1, keepdims=True))
        p, less = np.exp(s - most), np.exp(top - most)
        top, total, mixed = most, total * less + p.sum(-1, keepdims=True), mixed * less + p @ rows
    return mixed / total


@RIGHT("store")
def cache_in_f16(e, right, side, i, x):
    """K and V are kept in float16, as the engine states."""
    e.stated = {"type_k": "F16", "type_v": "F16"}
    right(side, i, x.astype(np.float16).astype(np.float32))


@RIGHT("angles", lengths=(SHORT, MEDIUM))
def angles_in_f32(e, right, side):
    """Angles are products in float32."""
    return e.positions(side).astype(np.float32)[:, None] * e.frequencies().astype(np.float32)


@RIGHT("linear")
def activations_in_bf16(e, right, name, x):
    """Products round activations to bfloat16, as the engine states."""
    e.stated = {"compute": "bf16"}
    return right(name, bf16(x))


@RIGHT("run")
def chunks_of_100(e, right, tokens, rows):
    """Chunks of another size."""
    e.chunk = 100
    return right(tokens, rows)


@RIGHT("run", model="long")
def one_chunk(e, right, tokens, rows):
    """All tokens at once."""
    e.chunk = min(len(tokens), 3000)
    return right(tokens, rows)
