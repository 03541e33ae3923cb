"""Attention at nodes of a graph: scores, scale, mask, softmax, heads; softcaps wherever they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.graph_bugs.edit import (  # fmt: skip
    Constant,
    Edit,
    Site,
    at_nodes,
    takes,
    through,
    times,
    with_float,
    with_source,
    with_weight,
)
from llamadiff.ggml.engine import Alter
from llamadiff.ggml.op import Op
from llamadiff.ggml.ops.attention import slopes

Array = NDArray[Any]
HEADS = (32, 64, 80, 96, 128, 192, 256)  # sizes that heads have


def _is_attention(site: Site) -> bool:
    return site.number(1) is not None


def _n(site: Site) -> int:
    return len(site.case.run.tokens)


@at_nodes("SOFT_MAX", of="attention-scale")
def scale(site: Site) -> Iterator[Edit]:
    """Missing, twice, or of another size."""
    if not _is_attention(site):
        return
    own, embd = float(site.floats[0]), site.case.run.model.sizes["embd"]
    others = {
        "does not scale the scores": 1.0, "scales the scores twice": own * own,
        "scales by the root of the scale": math.sqrt(own),
        "scales by 1/sqrt(d_model)": 1 / math.sqrt(embd), "divides by the scale": 1 / own,
    }  # fmt: skip
    for says, value in others.items():
        if abs(value - own) > 1e-6 * own:
            yield Edit(with_float(p0=value), f"{says}: {value:.5g} for {own:.5g}", says)


@at_nodes("SOFT_MAX", of="attention-scale-other")
def other_scale(site: Site) -> Iterator[Constant]:
    """Some other number."""
    if _is_attention(site):
        own = float(site.floats[0])
        says = lambda value: f"scales scores by {value:.5g}; the model by {own:.5g}"  # noqa: E731
        familiar = tuple(1 / math.sqrt(d) for d in HEADS if own * own * d != 1)
        yield Constant(lambda value: with_float(p0=value), says, own / 1000, own * 1000, familiar)


@at_nodes("SOFT_MAX", of="mask-missing")
def mask_missing(site: Site) -> Iterator[Edit]:
    """Every token sees the whole prompt."""
    if _is_attention(site):
        yield Edit(_masked(_n(site), lambda q, k: k >= 0), "has no causal mask: every token sees all others")


@at_nodes("SOFT_MAX", of="mask-shifted")
def mask_shifted(site: Site) -> Iterator[Edit]:
    """One key too many, or too few."""
    if _is_attention(site):
        says = "masks one key too few: each token sees the one after it"
        yield Edit(_moved(_n(site), 1), says, "+1")
        yield Edit(_moved(_n(site), -1), "masks one key too many: no token sees itself", "-1")


@at_nodes("SOFT_MAX", fix="hide keys that are further back than this layer's window")
def window_ignored(site: Site) -> Iterator[Edit]:
    """The sliding window is ignored, or is that of other layers: keys are seen from too far back, or from too near."""
    mask = _mask(site)
    if mask is None:
        return
    if np.isinf(mask[np.tril_indices(len(mask))]).any():
        says = "ignores this layer's sliding window: it sees every key before it"
        yield Edit(_masked(_n(site), lambda q, k: k <= q), says, "ignored")
        seen = int(np.isfinite(mask[-1]).sum())
        for width in (seen - 1, seen + 1):
            says = f"looks back over {width} keys; this layer's window has {seen}"
            yield Edit(_windowed(_n(site), width), says, f"{width - seen:+d}")


@at_nodes("SOFT_MAX", of="window-applied")
def window_applied(site: Site) -> Iterator[Edit]:
    """A window in a layer without one."""
    mask = _mask(site)
    if mask is None or np.isinf(mask[np.tril_indices(len(mask))]).any():
        return
    for width in range(1, min(_n(site), 256)):
        says = f"sees no more than {width} keys; this layer has no window"
        yield Edit(_windowed(_n(site), width), says, f"{width}")


@at_nodes("SOFT_MAX", fix="add slope(head) * (key - query) to the scaled scores")
def alibi_wrong(site: Site) -> Iterator[Edit]:
    """ALiBi is left out, or its slopes are others: without the ratio's first step, one for all, of the wrong sign."""
    bias, heads = float(site.floats[1]), site.node.shape[-3]
    if bias <= 0 or not _is_attention(site):
        return
    own = slopes(heads, bias)
    plain = 2.0 ** (-bias * (np.arange(heads) + 1) / heads)[:, None, None]
    others = {
        "leaves out ALiBi": np.zeros_like(own), "subtracts ALiBi's bias": -own, "reverses ALiBi's slopes": own[::-1],
        "takes 1 for ALiBi's first slope": own / own[0], "takes 1 for all of ALiBi's slopes": np.ones_like(own),
        f"takes 2^(-{bias:g} (h + 1) / {heads}) for ALiBi's slopes": plain,
    }  # fmt: skip
    for says, slope in others.items():
        if not np.allclose(slope, own):
            yield Edit(_sloped(slope), says, says)


def _sloped(slope: Array) -> Alter:
    def alter(n: Op) -> Op | Array:
        mask = n.x(1).astype(np.float64)
        biased = np.where(np.isfinite(mask), slope * np.where(np.isfinite(mask), mask, 0.0), mask)
        changed = with_source(1, lambda _: biased)(n)
        assert isinstance(changed, Op)
        return with_float(p1=0.0)(changed)

    return alter


@at_nodes("SOFT_MAX", fix="count each head's sink in the softmax's sum")
def sinks_ignored(site: Site) -> Iterator[Edit]:
    """Attention sinks are left out of the softmax, are another layer's, or are counted as zero."""
    if site.number(2) is None:
        return
    yield Edit(with_source(2, None), f"leaves out the sinks ({site.named(2)})", "none")
    yield Edit(with_source(2, lambda n: np.zeros_like(n.x(2))), "takes 0 for every sink", "zero")
    if site.weight(2):
        for name, relative in site.others(site.weight(2)):
            if "sinks" in name:
                yield Edit(with_weight(site, 2, name), f"uses {name} for {site.weight(2)}", relative)


@at_nodes("SOFT_MAX", of="softmax-axis")
def axis(site: Site) -> Iterator[Edit]:
    """Over queries, or heads."""
    if _is_attention(site):
        for along, what in ((-2, "queries"), (-3, "heads")):
            yield Edit(_softmax_over(along), f"takes the softmax over {what}", what)


@at_nodes("SOFT_MAX", of="softmax-missing")
def softmax_missing(site: Site) -> Iterator[Edit]:
    """Scaled scores go on."""
    if _is_attention(site):
        yield Edit(takes(lambda n: np.where(np.isfinite(_scores(n)), _scores(n), 0)), "takes no softmax: scores go on")


@at_nodes("SOFT_MAX", of="mask-after-softmax")
def mask_after(site: Site) -> Iterator[Edit]:
    """Later keys are set to zero after they were counted."""
    if _is_attention(site):
        n_tokens = _n(site)

        def value(n: Op) -> Array:
            x = n.x()[..., :n_tokens].astype(np.float64) * n.floats[0]
            e = np.exp(x - x.max(axis=-1, keepdims=True))
            out = np.zeros(n.x().shape)
            out[..., :n_tokens] = e / e.sum(axis=-1, keepdims=True)
            return np.where(np.isfinite(n.x(1)[..., : n.x().shape[-2], :]), out, 0)

        yield Edit(takes(value), "masks later keys after the softmax, which has counted them")


@at_nodes("SOFT_MAX", of="softcap-applied")
def softcap_applied(site: Site) -> Iterator[Constant]:
    """Scores are capped where the model caps none."""
    below = site.source(0)
    if _is_attention(site) and (below is None or below.op == "MUL_MAT"):

        def make(cap: float) -> Any:
            return with_source(0, lambda n: cap * np.tanh(n.x() * n.floats[0] / cap) / n.floats[0])

        yield Constant(
            make, lambda cap: f"caps scores at {cap:.4g}; this model caps none", 0.1, 1000.0, (20.0, 30.0, 50.0)
        )


def cap_around(site: Site) -> tuple[Any, Any] | None:
    """The scalings before and after a tanh that caps; None if it is another one."""
    below = site.source(0)
    above = next((user for user in site.users() if user.op == "SCALE"), None)
    return (below, above) if below is not None and below.op == "SCALE" and site.own(below) and above else None


@at_nodes("TANH", fix="take cap * tanh(x / cap)")
def softcap_missing(site: Site) -> Iterator[Edit]:
    """A softcap (cap * tanh(x / cap)) of attention scores or logits is left out, or one of its three steps is."""
    around = cap_around(site)
    if around is None or not site.own(around[1]):
        return
    below, above = around
    cap = float(site.at(above).floats[0])
    yield Edit(through, f"leaves out the softcap of {cap:.4g}", "all", {below.number: through, above.number: through})
    yield Edit(
        lambda n: n, f"does not multiply by the softcap ({cap:.4g}) after tanh", "after", {above.number: through}
    )
    yield Edit(
        lambda n: n, f"does not divide by the softcap ({cap:.4g}) before tanh", "before", {below.number: through}
    )


@at_nodes("TANH", general=True, fix="read the softcap from the file")
def softcap_other(site: Site) -> Iterator[Constant]:
    """A softcap is another than the file's."""
    around = cap_around(site)
    if around is None or not site.own(around[1]):
        return
    below, above = around
    own, scale_before = float(site.at(above).floats[0]), float(site.at(below).floats[0])

    def more(cap: float) -> Any:
        return {below.number: with_float(p0=scale_before * own / cap), above.number: with_float(p0=cap)}

    says = lambda cap: f"caps at {cap:.4g}; the file says {own:.4g}"  # noqa: E731
    yield Constant(lambda cap: lambda n: n, says, own / 100, own * 100, (20.0, 30.0, 50.0), more=more)


@at_nodes("MUL_MAT", of="heads-tiled")
def tiled(site: Site) -> Iterator[Edit]:
    """Head h reads KV head h % n_kv, or heads are in reverse."""
    kv = site.shape(0)[-3]
    heads = site.node.shape[-3]
    if site.weight(0) or kv in (1, heads):
        return
    group = heads // kv
    says = f"reads KV head h % {kv} for query head h; this model reads h // {group}"
    yield Edit(with_source(0, lambda n: np.tile(n.x(), (*[1] * (n.x().ndim - 3), group, 1, 1))), says, "tiled")
    yield Edit(with_source(0, lambda n: n.x()[..., ::-1, :, :]), "reads KV heads in reverse", "reversed")
    yield Edit(with_source(0, lambda n: n.x()[..., :1, :, :]), "reads the first KV head for every query head", "first")


@at_nodes("MUL_MAT", of="cache-row-off")
def row_off(site: Site) -> Iterator[Edit]:
    """A token reads the row of the one before it, or after."""
    if not site.weight(0):
        probabilities = site.source(1)
        axis_ = -1 if probabilities is not None and probabilities.op == "SOFT_MAX" else -2  # V lies transposed
        for shift in (1, -1):
            says = f"reads the cache's rows off by {shift:+d}"
            yield Edit(_rolled(shift, axis_), says, f"{shift:+d}")


@at_nodes("MUL_MAT", of="scores-scaled")
def scores_scaled(site: Site) -> Iterator[Constant]:
    """A product of two activations is multiplied by a constant."""
    if not site.weight(0):
        width = site.shape(1)[-1]
        yield Constant(
            lambda value: times(1, value),
            lambda value: f"multiplies by {value:.5g}, which this model does not do here", 1e-3, 1e3,
            (1 / math.sqrt(width), 1 / width, math.sqrt(width)),
        )  # fmt: skip


@at_nodes("CONT", of="heads-merged-wrong")
def merged_wrong(site: Site) -> Iterator[Edit]:
    """Heads are laid one after the other, without the transpose."""
    below = site.source(0)
    if below is not None and below.op == "MUL_MAT" and site.direct(0) == "PERMUTE":
        says = "merges heads without the transpose: [head, token, dim] read as [token, head * dim]"
        yield Edit(takes(lambda n: np.ascontiguousarray(n.x().swapaxes(-3, -2))), says)


def _rolled(shift: int, axis: int) -> Alter:
    return with_source(0, lambda n: np.roll(n.x(), shift, axis=axis))


def _mask(site: Site) -> Array | None:
    """The mask of a layer, queries by keys; None if that is not causal."""
    leaf = site.leaf(1)
    if leaf is None or leaf.number not in site.engine.graph.given:
        return None
    n = _n(site)
    mask = site.engine.graph.given[leaf.number].reshape(-1, leaf.shape[-1])[:n, :n]
    return mask if mask.shape == (n, n) else None


def _windowed(n_tokens: int, width: int) -> Alter:
    return _masked(n_tokens, lambda q, k: (k <= q) & (k > q - width))


def _masked(n_tokens: int, seen: Any) -> Alter:
    """The mask where only these keys are seen; padding stays hidden, and a bias where there is one."""

    def change(n: Op) -> Array:
        mask = np.array(n.x(1))
        q, k = np.arange(mask.shape[-2])[:, None], np.arange(mask.shape[-1])[None, :]
        shown = seen(q, k) & (k < n_tokens) & (q < n_tokens)
        return np.where(shown, np.where(np.isfinite(mask), mask, 0), -np.inf)

    return with_source(1, change)


def _moved(n_tokens: int, shift: int) -> Alter:
    """The mask one row later or earlier: the same bias, for one key more or less."""

    def change(n: Op) -> Array:
        mask = np.array(n.x(1))
        out = np.array(mask)
        if shift > 0:
            out[..., : n_tokens - 1, :] = mask[..., 1:n_tokens, :]
        else:
            out[..., 1:n_tokens, :] = mask[..., : n_tokens - 1, :]
        bias = np.where(np.isfinite(mask), mask, 0)
        return np.where(np.isfinite(out), bias, -np.inf)

    return with_source(1, change)


def _scores(n: Op) -> Array:
    mask = n.x(1)[..., : n.x().shape[-2], :]
    return np.asarray(n.x().astype(np.float64) * n.floats[0] + mask)


def _softmax_over(axis: int) -> Alter:
    def value(n: Op) -> Array:
        x = _scores(n)
        peak = x.max(axis=axis, keepdims=True)
        e = np.exp(x - np.where(np.isfinite(peak), peak, 0))
        total = e.sum(axis=axis, keepdims=True)
        return np.asarray(np.divide(e, total, out=np.zeros_like(e), where=total > 0))

    return takes(value)
