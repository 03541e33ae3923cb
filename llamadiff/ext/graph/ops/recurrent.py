"""Recurrent ops: a state that is carried from token to token (Mamba, RWKV, gated linear attention, delta nets).

Each op reads one token after the other and gives what it read out at every token, followed in the same tensor by the
state it ended with.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from llamadiff.ext.graph.op import Array, Op, op
from llamadiff.ext.graph.ops.unary import softplus

RECURRENT = ("SSM_SCAN", "GATED_DELTA_NET", "GATED_LINEAR_ATTN", "RWKV_WKV6", "RWKV_WKV7")  # all but convolutions
# One token: the state before it and the token's own arrays -> what is read out, the state after it.
Step = Callable[..., tuple[Array, Array]]


@op("SSM_CONV")
def ssm_conv(n: Op) -> Array:
    """Causal convolution of every channel with its own kernel (arXiv:2312.00752; ggml_compute_forward_ssm_conv)."""
    x, kernel = _wide(n.x()), _wide(n.x(1))  # [1, seq, channel, taps - 1 + token], [1, 1, channel, taps]
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[-1], axis=-1)
    return np.asarray(np.einsum("...sctk,...ck->...stc", windows, kernel[..., 0, :, :, :]), np.float32)


@op("SSM_SCAN")
def ssm_scan(n: Op) -> Array:
    """Mamba's selective scan (arXiv:2312.00752, 2405.21060; ggml_compute_forward_ssm_scan).

    s = s exp(softplus(dt) A) + softplus(dt) x B; y = s C. A has one value a head (Mamba 2) or one for each of its
    states (Mamba 1). Groups of heads share B and C; ids say which of the states each sequence starts from.
    params[0]: how many states to give, newest first; older versions give one, and say nothing.
    """
    return selective_scan(n, softplus(_wide(n.x(2))))


def selective_scan(n: Op, dt: Array) -> Array:
    """The scan with step sizes dt [1, seq, token, head], whatever was made of the op's own."""
    x, decay = _wide(n.x(1)), _wide(n.x(3))[..., 0, :, :, :]  # [seq, token, head, dim], [1, head, state or 1]
    step_size = _wide(dt)[..., 0, :, :, :, None]  # [seq, token, head, 1]
    b, c = (np.repeat(_wide(n.x(i)), x.shape[-2] // n.x(i).shape[-2], axis=-2) for i in (4, 5))

    def step(s: Array, x: Array, dt: Array, b: Array, c: Array) -> tuple[Array, Array]:
        s = s * np.exp(dt * decay)[..., None, :] + _outer(x * dt, b)
        return _applied(s, c), s

    return _scan(n, step, _chosen(_wide(n.x()), n.x(6)), [x, step_size, b, c], kept=max(1, int(n.ints[0])))


@op("RWKV_WKV6")
def rwkv_wkv6(n: Op) -> Array:
    """RWKV 6 (arXiv:2404.05892; ggml_compute_forward_rwkv_wkv6): y = r (s + u k v); s = w s + k v.

    Sources: k, v, r [1, token, head, S], u [head, S], w like k, states [seq, head, key, value].
    """
    states = _states(n.x(5), n.x())
    k, v, r, w = (_by_sequence(n.x(i), states) for i in (0, 1, 2, 4))
    first = _wide(n.x(3)).reshape(*n.x(3).shape[:-4], 1, *n.x().shape[-2:])

    def step(s: Array, k: Array, v: Array, r: Array, w: Array) -> tuple[Array, Array]:
        return _read(r, s + _outer(first * k, v)), s * w[..., None] + _outer(k, v)

    return _scan(n, step, states, [k, v, r, w])


@op("GATED_LINEAR_ATTN")
def gated_linear_attention(n: Op) -> Array:
    """Gated linear attention (arXiv:2312.06635; ggml_compute_forward_gla): s = g s + k v; y = scale * q s.

    Sources: k, v, q, g [1, token, head, S], states [seq, head, key, value]. params[0] is the scale.
    """
    states = _states(n.x(4), n.x())
    scale = float(n.floats[0])

    def step(s: Array, k: Array, v: Array, q: Array, g: Array) -> tuple[Array, Array]:
        s = s * g[..., None] + _outer(k, v)
        return _read(q * scale, s), s

    return _scan(n, step, states, [_by_sequence(n.x(i), states) for i in range(4)])


@op("RWKV_WKV7")
def rwkv_wkv7(n: Op) -> Array:
    """RWKV 7 (arXiv:2503.14456; ggml_compute_forward_rwkv_wkv7): s = s w + (s a) b + v k; y = s r.

    Sources: r, w, k, v, a, b [1, token, head, S], states [seq, head, value, key].
    """
    states = _states(n.x(6), n.x())

    def step(s: Array, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array) -> tuple[Array, Array]:
        s = s * w[..., None, :] + _outer(v, k) + _outer(_applied(s, a), b)
        return _applied(s, r), s

    return _scan(n, step, states, [_by_sequence(n.x(i), states) for i in range(6)])


@op("GATED_DELTA_NET")
def gated_delta_net(n: Op) -> Array:
    """The gated delta rule (arXiv:2412.06464; ggml_compute_forward_gated_delta_net_one_chunk).

    s = s exp(g); s = s + beta (v - s k) k; y = s q / sqrt(S). The gate g is one value a head, or one for each key
    (KDA). Sources: q, k, v [seq, token, head, S], g [.., 1 or S], beta [.., 1], states [seq, head, value, key]; heads
    of q and k repeat in turn (0 1 0 1), sequences each for itself (0 0 1 1). params[0]: how many states to give;
    before it was there, one.
    """
    v, g, beta, states = (_wide(n.x(i)) for i in (2, 3, 4, 5))
    q, k = (_spread(_wide(n.x(i)), v) for i in (0, 1))
    scale = 1 / math.sqrt(v.shape[-1])

    def step(s: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
        s = s * np.exp(g)[..., None, :]
        s = s + _outer((v - _applied(s, k)) * beta, k)
        return _applied(s, q) * scale, s

    return _scan(n, step, states, [q, k, v, g, beta], kept=max(1, int(n.ints[0])))


def _scan(n: Op, step: Step, state: Array, inputs: list[Array], kept: int = 1) -> Array:
    """What each token [seq, token, head, ..] reads out, then the last ``kept`` states, newest first, as one tensor.

    ggml leaves the places of states before the first token as they were: they are NaN here.
    """
    outputs, states = [], deque[Array](maxlen=kept)
    lead = np.broadcast_shapes(*(x.shape[:-4] for x in (state, *inputs)))
    state = np.broadcast_to(state, (*lead, *state.shape[-4:]))
    for token in zip(*(np.moveaxis(x, -3, 0) for x in inputs), strict=True):
        y, state = step(state, *token)
        outputs.append(y)
        states.appendleft(state)
    unwritten = [np.full_like(state, np.nan)] * (kept - len(states))
    parts = [np.stack(outputs, axis=-3), *states, *unwritten]
    lead = np.broadcast_shapes(*(x.shape[:-4] for x in parts))
    flat = [np.broadcast_to(x, (*lead, *x.shape[-4:])).reshape(*lead, -1) for x in parts]
    return np.concatenate(flat, axis=-1).astype(np.float32).reshape(*lead, *n.shape)


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def _outer(column: Array, row: Array) -> Array:
    return np.asarray(column[..., :, None] * row[..., None, :])


def _applied(s: Array, x: Array) -> Array:
    """S x."""
    return np.asarray(np.einsum("...ij,...j->...i", s, x))


def _read(x: Array, s: Array) -> Array:
    """X s."""
    return np.asarray(np.einsum("...i,...ij->...j", x, s))


def _states(states: Array, like: Array) -> Array:
    """[1, 1, seq, head * S * S] -> [seq, head, S, S]; heads and S are those of [1, token, head, S]."""
    heads, size = like.shape[-2:]
    return _wide(states).reshape(*states.shape[:-4], states.shape[-2], heads, size, size)


def _by_sequence(x: Array, states: Array) -> Array:
    """[1, seq * token, head, S] -> [seq, token, head, S]."""
    return _wide(x).reshape(*x.shape[:-4], states.shape[-4], -1, *x.shape[-2:])


def _chosen(states: Array, ids: Array) -> Array:
    """The states [state, head, dim, ..] that ids [1, 1, 1, seq] name."""
    places = ids[..., 0, 0, 0, :, None, None, None].astype(np.int64)  # [seq, 1, 1, 1]
    lead = np.broadcast_shapes(states.shape[:-4], places.shape[:-4])
    states, places = (np.broadcast_to(x, (*lead, *x.shape[-4:])) for x in (states, places))
    return np.take_along_axis(states, places, axis=-4)


def _spread(x: Array, like: Array) -> Array:
    """Sequences and heads of q or k repeated for all those of v."""
    x = np.repeat(x, like.shape[-4] // x.shape[-4], axis=-4)
    return np.asarray(np.take(x, np.arange(like.shape[-2]) % x.shape[-2], axis=-2))
