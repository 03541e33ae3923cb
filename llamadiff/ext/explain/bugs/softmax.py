"""Attention's softmax at nodes of a graph: scale, mask, windows, ALiBi, sinks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from llamadiff.ext.explain.alter import after, takes, with_float, with_source, with_weight
from llamadiff.ext.explain.case import Array, NotRecordedError
from llamadiff.ext.explain.registry import Constant, Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.solve import SCORE_CAP, SCORE_SCALE
from llamadiff.ext.explain.subgraph import subgraph_of
from llamadiff.ext.graph.engine import Alter, Then
from llamadiff.ext.graph.op import Op
from llamadiff.ext.graph.ops.attention import slopes


def _is_attention(site: Site) -> bool:
    return site.number(1) is not None


def _is_scaled(site: Site) -> bool:
    """An encoder's attention has no mask: its scale tells it from a router's softmax."""
    return _is_attention(site) or float(site.floats[0]) != 1.0


def _n(site: Site) -> int:
    return len(site.case.run.tokens)


@at_nodes(
    "SOFT_MAX", fix="scale scores by the model's factor, mostly 1/sqrt(head size), once", source="llama.cpp#13951"
)
def attention_scale(site: Site) -> Iterator[Edit]:
    """The attention scale is missing, applied twice, or of the wrong size: d_model, or d_model / kv heads."""
    if not _is_scaled(site):
        return
    own, embd = float(site.floats[0]), site.case.run.model.sizes["embd"]
    kv = site.case.run.model.sizes["kv_head"]
    others = {
        "does not scale the scores": 1.0, "scales the scores twice": own * own,
        "scales by the root of the scale": math.sqrt(own),
        "scales by 1/sqrt(d_model)": 1 / math.sqrt(embd), "divides by the scale": 1 / own,
        "scales by 1/sqrt(d_model / kv heads)": 1 / math.sqrt(embd / kv),
    }  # fmt: skip
    for says, value in others.items():
        if abs(value - own) > 1e-6 * own:
            yield Edit(with_float(p0=value), f"{says}: {value:.5g} for {own:.5g}", says, fix=_scale_fix(own))


def _scale_fix(own: float) -> str:
    return f"scale scores by {own:.5g}, once"


@at_nodes(
    "SOFT_MAX",
    fix="scale scores by the model's factor, mostly 1/sqrt(head size), once",
    source="llama.cpp#13951",
    general=True,
)
def attention_scale_other(site: Site) -> Iterator[Constant]:
    """The attention scale is some other number."""
    if _is_scaled(site):
        own = float(site.floats[0])
        familiar = tuple(value for value in SCORE_SCALE.familiar if not math.isclose(value, own, rel_tol=1e-6))
        yield Constant(lambda value: with_float(p0=value), SCORE_SCALE, own, familiar, fix=_scale_fix(own))


@at_nodes("SOFT_MAX", fix="hide keys at later positions than the query's")
def mask_missing(site: Site) -> Iterator[Edit]:
    """There is no causal mask: every token sees the whole prompt."""
    if not _is_attention(site):
        return
    n, says = site.case.run.n_prefill, "has no causal mask: every token sees all others"
    in_prompt = lambda q, k: (k <= q) | ((q < n) & (k < n))  # noqa: E731
    for variant, seen in (("all", lambda q, k: k >= 0), ("prompt", in_prompt)):
        for scores, alter in _with_hidden_scores(site, _masked(_n(site), seen)):
            yield Edit(alter, says, f"{variant}{scores}")


def _with_hidden_scores(site: Site, alter: Alter) -> Iterator[tuple[str, Alter]]:
    """An edit that shows hidden scores, with those that were recorded, and with those that Q and K give."""
    yield "", alter
    below = site.source(0)
    if below is None or below.label is None or below.number not in site.sub.given:
        return
    try:
        whole = subgraph_of(site.case.of(below.label))
    except NotRecordedError:
        return

    def full(n: Op) -> Array:
        mask, x = n.x(1)[..., : n.x().shape[-2], :], n.x()
        made = whole.compute(site.case.of(str(below.label)))  # [b, head, token, key]
        padded = np.zeros((len(made), *x.shape[1:]), x.dtype)
        padded[:, 0, ..., : made.shape[-1]] = made
        return np.where(np.isfinite(mask), x, padded)

    yield " computed", after(with_source(0, full), alter)


@at_nodes("SOFT_MAX", fix="a query sees keys up to and including its own position")
def mask_shifted(site: Site) -> Iterator[Edit]:
    """The causal mask is off by one."""
    if _is_attention(site):
        says = "masks one key too few: each token sees the one after it"
        for scores, alter in _with_hidden_scores(site, _moved(_n(site), 1)):
            yield Edit(alter, says, f"+1{scores}")
        says = "masks one key too many: no token sees itself"
        yield Edit(Then(_without_any_key, _masked(_n(site), lambda q, k: k < q)), says, "-1")
        lost = with_source(0, lambda n: np.tril(n.x(), -1))  # in float32, 1e9 less is all that is left of a score
        yield Edit(after(lost, _masked(_n(site), lambda q, k: k < q, -1e9)), says, "-1 finite")
        yield Edit(_moved(_n(site), -1), f"{says}, but the first", "-1 first")


@at_nodes("SOFT_MAX", fix="let every later token see the first one's key")
def first_key_unseen(site: Site) -> Iterator[Edit]:
    """The first token's key is hidden from all later ones, or was never kept."""
    if _is_attention(site):
        says = "hides the first token's key from all later ones"
        yield Edit(_masked(_n(site), lambda q, k: (k <= q) & ((k > 0) | (q == 0))), says)


@at_nodes("SOFT_MAX", fix="hide keys that are further back than this layer's window")
def window_ignored(site: Site) -> Iterator[Edit]:
    """The sliding window is ignored, or is that of other layers: keys are seen from too far back, or from too near."""
    seen = _window(site)
    if seen:
        says, fix = "ignores this layer's sliding window: it sees every key before it", _window_fix(seen)
        yield Edit(_masked(_n(site), lambda q, k: k <= q), says, "ignored", fix=fix)
        for width in (seen - 1, seen + 1):
            says = f"looks back over {width} keys; this layer's window has {seen}"
            yield Edit(_windowed(_n(site), width), says, f"{width - seen:+d}", fix=fix)


def _window_fix(seen: int | None) -> str:
    return (
        f"let a query see the last {seen} keys" if seen else "let a query see every key up to its own: no window here"
    )


@at_nodes(
    "SOFT_MAX",
    fix="attend to all earlier tokens, or to those in the window of this layer",
    source="sglang#4823, mlx-vlm#669",
    general=True,
)
def window_applied(site: Site) -> Iterator[Edit]:
    """A sliding window hides early keys, in a model without one, or with a window of another width."""
    seen = _window(site)
    own = f"this layer's window has {seen}" if seen else "this layer has no window"
    for width in range(1, min(_n(site), 256)) if seen is not None else ():
        says = f"sees no more than {width} keys; {own}"
        if not seen or abs(width - seen) > 1:  # window_ignored has those
            yield Edit(_windowed(_n(site), width), says, f"{width}", fix=_window_fix(seen))


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
                fix = f"count {site.weight(2)} in the softmax's sum"
                yield Edit(with_weight(site, 2, name), f"uses {name} for {site.weight(2)}", relative, fix=fix)


@at_nodes("SOFT_MAX", fix="take the softmax over keys, the last axis")
def softmax_axis(site: Site) -> Iterator[Edit]:
    """The softmax is taken over the wrong axis: queries, or heads, instead of keys."""
    if _is_attention(site):
        for along, what in ((-2, "queries"), (-3, "heads")):
            yield Edit(_softmax_over(along), f"takes the softmax over {what}", what)
            says = f"takes the softmax over {what}, also where all are hidden"
            yield Edit(_softmax_over(along, hidden=np.nan), says, f"{what} NaN")


@at_nodes("SOFT_MAX", fix="apply the softmax")
def softmax_missing(site: Site) -> Iterator[Edit]:
    """There is no softmax: scaled scores go on."""
    if _is_attention(site):
        yield Edit(takes(lambda n: np.where(np.isfinite(_scores(n)), _scores(n), 0)), "takes no softmax: scores go on")


@at_nodes("SOFT_MAX", fix="subtract each row's maximum before exp")
def softmax_overflow(site: Site) -> Iterator[Edit]:
    """The maximum is not subtracted: exp overflows for large scores."""

    def value(n: Op) -> Array:
        e = np.exp(_scores(n).astype(np.float32))
        return np.asarray(e / (e.sum(axis=-1, keepdims=True) + _sinks(n)))

    if _is_attention(site):
        yield Edit(takes(value), "does not subtract the maximum, and overflows")


@at_nodes("SOFT_MAX", fix="set hidden scores to -inf before the softmax")
def mask_after_softmax(site: Site) -> Iterator[Edit]:
    """Later keys are set to zero after the softmax, which has counted them."""
    if _is_attention(site):
        n_tokens = _n(site)

        def value(n: Op) -> Array:
            x = (n.x().astype(np.float64) * n.floats[0] + _slopes(n) * _unmasked(n))[..., :n_tokens]
            peak = x.max(axis=-1, keepdims=True)
            e, out = np.exp(x - peak), np.zeros(n.x().shape)
            out[..., :n_tokens] = e / (e.sum(axis=-1, keepdims=True) + _sinks(n) * np.exp(-peak))
            return np.where(np.isfinite(n.x(1)[..., : n.x().shape[-2], :]), out, 0)

        for scores, alter in _with_hidden_scores(site, takes(value)):
            yield Edit(alter, "masks later keys after the softmax, which has counted them", scores.strip())


@at_nodes("SOFT_MAX", fix="leave the scores as they are: this model has no softcap", source="vllm#30427", general=True)
def softcap_applied(site: Site) -> Iterator[Constant]:
    """Scores are capped (cap * tanh(x / cap)) in a model without a softcap."""
    below = site.source(0)
    if _is_attention(site) and (below is None or below.op == "MUL_MAT"):

        def make(cap: float) -> Any:
            return with_source(0, lambda n: cap * np.tanh(n.x() * n.floats[0] / cap) / n.floats[0])

        yield Constant(make, SCORE_CAP)


def _window(site: Site) -> int | None:
    """How many keys the last query sees of a mask with a window; 0 where there is none; None of what is no mask."""
    leaf = site.leaf(1)
    if leaf is None or leaf.number not in site.engine.graph.given:
        return None
    n = _n(site)
    mask = site.engine.graph.given[leaf.number].reshape(-1, leaf.shape[-1])[:n, :n]
    if mask.shape != (n, n):
        return None
    return int(np.isfinite(mask[-1]).sum()) if np.isinf(mask[np.tril_indices(n)]).any() else 0


def _windowed(n_tokens: int, width: int) -> Alter:
    return _masked(n_tokens, lambda q, k: (k <= q) & (k > q - width))


def _without_any_key(x: Array) -> Array:
    """Probabilities: a row that sees nothing is 0 / 0."""
    return np.where(x.sum(axis=-1, keepdims=True) > 0, x, np.float32(np.nan))


def _masked(n_tokens: int, seen: Any, hides: float = -np.inf) -> Alter:
    """The mask where only these keys are seen, others set to ``hides``; padding stays hidden, a bias where it is."""

    def change(n: Op) -> Array:
        q, k = _places(n.x(1))
        there = (k < n_tokens) & (q < n_tokens)
        return np.where(seen(q, k) & there, _unmasked(n, every_row=True), np.where(there, hides, -np.inf))

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
        return np.where(np.isfinite(out), _unmasked(n, every_row=True), -np.inf)

    return with_source(1, change)


def _places(mask: Array) -> tuple[Array, Array]:
    """Queries [query, 1] and keys [1, key] of a mask."""
    return np.arange(mask.shape[-2])[:, None], np.arange(mask.shape[-1])[None, :]


def _unmasked(n: Op, every_row: bool = False) -> Array:
    """The mask with nothing hidden: zeros; of ALiBi, how far the key is, later ones with the other sign."""
    mask = np.array(n.x(1), np.float64)
    q, k = _places(mask)
    shown = np.where(np.isfinite(mask), mask, k - q if n.floats[1] > 0 else 0)
    return shown if every_row else np.asarray(shown[..., : n.x().shape[-2], :])


def _slopes(n: Op) -> Array:
    """What the mask is multiplied by, for each head: ALiBi's slopes, or ones."""
    return slopes(n.x().shape[-3], float(n.floats[1]))


def _sinks(n: Op) -> Array:
    """What each head's sink adds to the sum of exp(score); 0 where there are none."""
    sinks = n.optional(2)
    return np.zeros(1) if sinks is None else np.exp(sinks.astype(np.float64)).reshape(*sinks.shape[:-4], -1, 1, 1)


def _scores(n: Op) -> Array:
    mask = n.x(1)[..., : n.x().shape[-2], :]
    return np.asarray(n.x().astype(np.float64) * n.floats[0] + _slopes(n) * mask)


def _softmax_over(axis: int, hidden: float = 0.0) -> Alter:
    """The softmax over another axis; ``hidden`` is what comes of nothing but hidden scores."""

    def value(n: Op) -> Array:
        x = _scores(n)
        peak = x.max(axis=axis, keepdims=True)
        e = np.exp(x - np.where(np.isfinite(peak), peak, 0))
        total = e.sum(axis=axis, keepdims=True)
        return np.asarray(np.divide(e, total, out=np.full_like(e, hidden), where=total > 0))

    return takes(value)
