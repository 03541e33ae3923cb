"""Ops of newer architectures: sparse attention's indexer, hyper-connections; triangular solving, regions."""

from __future__ import annotations

import numpy as np

from llamadiff.ext.graph.op import Array, Op, op


@op("LIGHTNING_INDEXER")
def lightning_indexer(n: Op) -> Array:
    """How much a query wants a key (DeepSeek-V3.2, equation 1; ggml_compute_forward_lightning_indexer).

    sum over heads of w relu(q k), plus mask: q [stream, token, head, S], k [stream, key, 1, S],
    w [stream, 1, token, head], mask [stream, 1, token, key] -> [stream, 1, token, key].
    """
    q, k, w, mask = (_wide(n.x(i)) for i in range(4))
    keys = k[..., 0, :].swapaxes(-1, -2)  # [stream, S, key]
    heads = (np.maximum(q[..., h, :] @ keys, 0) * w[..., 0, :, h, None] for h in range(q.shape[-2]))
    score = np.asarray(sum(heads))[..., None, :, :]
    return _narrow(score + np.take(mask, np.arange(score.shape[-4]) % mask.shape[-4], axis=-4))


@op("DSV4_HC_COMB")
def hyper_connection_mix(n: Op) -> Array:
    """How the residual streams mix (arXiv:2512.24880; ggml_compute_forward_dsv4_hc_comb): [1, token, from, to].

    Softmax over ``to``, then Sinkhorn's normalisation. The logits are the last of mixes [1, 1, token, (2 + hc) * hc],
    times scale[2], plus base. params: eps, number of iterations.
    """
    mixes, scale, base = (_wide(n.x(i)) for i in range(3))
    eps, streams = float(n.floats[0]), n.shape[-1]
    logits = (mixes * scale[..., 2:3] + base)[..., 0, :, 2 * streams :]  # [1, token, from * to]
    logits = logits.reshape(*logits.shape[:-1], streams, streams)
    mix = np.exp(logits - logits.max(axis=-1, keepdims=True))
    mix = mix / mix.sum(axis=-1, keepdims=True) + eps
    mix = mix / (mix.sum(axis=-2, keepdims=True) + eps)
    for _ in range(int(n.ints[1]) - 1):
        mix = mix / (mix.sum(axis=-1, keepdims=True) + eps)
        mix = mix / (mix.sum(axis=-2, keepdims=True) + eps)
    return _narrow(mix)


@op("DSV4_HC_PRE")
def hyper_connection_in(n: Op) -> Array:
    """Streams summed into one (arXiv:2512.24880; ggml_compute_forward_dsv4_hc_pre).

    x [1, token, stream, S] -> [1, 1, token, S], times weights [1, 1, token, stream] or, where params[1] is set, the
    sigmoid of gates like x; params[0] is a scale.
    """
    x, weights = _wide(n.x()), _wide(n.x(1))
    weights = 1 / (1 + np.exp(-weights)) if n.ints[1] else weights[..., 0, :, :, None]
    return _narrow(float(n.floats[0]) * (x * weights).sum(axis=-2)[..., None, :, :])


@op("DSV4_HC_POST")
def hyper_connection_out(n: Op) -> Array:
    """A block's result back to the streams (arXiv:2512.24880; ggml_compute_forward_dsv4_hc_post).

    x [1, 1, token, S] times post [1, 1, token, stream], plus the residual [1, token, stream, S] mixed by comb
    [1, token, from, to], or as it is without one.
    """
    x, residual, post, mix = _wide(n.x()), _wide(n.x(1)), _wide(n.x(2)), n.optional(3)
    kept = residual if mix is None else _wide(mix).swapaxes(-1, -2) @ residual
    return _narrow(x[..., 0, :, None, :] * post[..., 0, :, :, None] + kept)


@op("SOLVE_TRI")
def solve_triangular(n: Op) -> Array:
    """X of A X = B, A's lower triangle [.., row, row], B [.., row, column] (ggml_compute_forward_solve_tri)."""
    a, b = _wide(n.x()), _wide(n.x(1))
    x = np.zeros(np.broadcast_shapes(a[..., :1].shape, b.shape))
    for i in range(b.shape[-2]):
        known = a[..., i : i + 1, :i] @ x[..., :i, :]
        x[..., i : i + 1, :] = (b[..., i : i + 1, :] - known) / a[..., i : i + 1, i : i + 1]
    return _narrow(x)


@op("SET", "ACC")
def set_region(n: Op) -> Array:
    """A copy of a with b written into it, or added to what is there (ggml_compute_forward_set, _acc).

    params: strides of b's axes 1, 2 and 3 inside a, and where it starts, in bytes; values have four.
    """
    a, b = n.x(), n.x(1)
    lead = np.broadcast_shapes(a.shape[:-4], b.shape[:-4])
    steps = [*(int(stride) // 4 for stride in n.ints[2::-1]), 1]
    places = int(n.ints[3]) // 4 + sum(
        np.arange(size).reshape(-1, *[1] * (3 - axis)) * step
        for axis, (size, step) in enumerate(zip(b.shape[-4:], steps, strict=True))
    )
    out = np.array(np.broadcast_to(a, (*lead, *a.shape[-4:])), order="C").reshape(*lead, -1)
    places, b = np.ravel(places), b.reshape(*b.shape[:-4], -1)
    out[..., places] = b if n.name == "SET" else out[..., places] + b
    return out.reshape(*lead, *n.shape)


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def _narrow(x: Array) -> Array:
    return np.asarray(x, np.float32)
