"""Norms at nodes of a graph: the op itself, and the product with its weight that follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from llamadiff.ext.explain.alter import instead, plus, renamed, takes, through, with_float, with_source, with_weight
from llamadiff.ext.explain.case import NotRecordedError
from llamadiff.ext.explain.registry import Constant, Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.solve import EPSILON
from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.op import Op

OVERFLOW = 65504.0  # float16's largest
NORMS = ("RMS_NORM", "NORM")


def _eps(site: Site) -> float:
    return float(site.floats[0])


@at_nodes(
    *NORMS,
    "L2_NORM",
    fix="read attention.layer_norm_rms_epsilon (of LayerNorm, layer_norm_epsilon) from the file",
    source="llama.cpp#2373, candle#271",
    general=True,
)
def norm_epsilon(site: Site) -> Iterator[Constant]:
    """The norm's epsilon is not the file's."""
    fix = f"add epsilon {_eps(site):.3g} to the mean square"
    yield Constant(lambda value: with_float(p0=value), EPSILON, _eps(site), fix=fix)


@at_nodes(*NORMS, fix="give the norm the file's epsilon")
def norm_epsilon_missing(site: Site) -> Iterator[Edit]:
    """The norm has no epsilon."""
    if _eps(site):
        fix = f"add epsilon {_eps(site):.3g} to the mean square"
        yield Edit(with_float(p0=0.0), f"adds no epsilon, where {_eps(site):.3g} is right", fix=fix)


@at_nodes(*NORMS, fix="keep epsilon in float32", source="sglang#27540")
def norm_epsilon_in_half(site: Site) -> Iterator[Edit]:
    """Epsilon is rounded to float16, where small ones are lost."""
    rounded = float(np.float16(_eps(site)))
    if rounded != _eps(site):
        says = f"rounds epsilon to float16 ({rounded:.4g}), where {_eps(site):.4g} is right"
        yield Edit(with_float(p0=rounded), says)


@at_nodes(*NORMS, fix="sum squares in float32", source="sglang#27540")
def norm_overflow(site: Site) -> Iterator[Edit]:
    """The squares are summed in float16, where they overflow: whole rows become zero."""
    says, size = "sums squares in float16, where they overflow to Inf", site.node.shape[-1]

    def half(square: Any, n: Op) -> Any:
        with np.errstate(over="ignore"):
            return np.sqrt(np.float16(square * size).astype(np.float64) / size + n.floats[0])

    def zero(square: Any, n: Op) -> Any:
        return np.where(square * size > OVERFLOW, np.inf, np.sqrt(square + n.floats[0]))

    for size_of, end, variant in ((zero, ": those rows come out as zero", "zero"), (half, "", "half")):
        yield Edit(_sized(_only_where_it_overflows(size_of, size)), says + end, variant)


def _only_where_it_overflows(size_of: Any, width: int) -> Any:
    """Of rows none of which overflows, nothing: a sum that is rounded is no mistake."""
    return lambda square, n: size_of(square, n) if (square * width > OVERFLOW).any() else np.full_like(square, np.nan)


@at_nodes(*NORMS, fix="add epsilon to the mean square, before the root is taken")
def norm_epsilon_outside(site: Site) -> Iterator[Edit]:
    """Epsilon is added outside the square root."""
    says = f"adds epsilon ({_eps(site):.3g}) outside the square root"
    yield Edit(_sized(lambda square, n: np.sqrt(square) + n.floats[0]), says)


@at_nodes(*NORMS, fix="take the root of the mean square")
def norm_no_root(site: Site) -> Iterator[Edit]:
    """The square root is missing: the row is divided by its mean square."""
    says = "divides by the mean square; its square root is missing"
    yield Edit(_sized(lambda square, n: square + n.floats[0]), says)


@at_nodes(*NORMS, fix="divide the sum of squares by the row's length")
def norm_sum_for_mean(site: Site) -> Iterator[Edit]:
    """The sum of squares is taken for their mean."""
    size = site.node.shape[-1]
    says, fix = f"takes the sum of {size} squares for their mean", f"divide the sum of squares by {size}"
    yield Edit(_sized(lambda square, n: np.sqrt(square * size + n.floats[0])), says, fix=fix)


@at_nodes("RMS_NORM", fix="normalise every head by itself", source="quant.cpp#82, SharpMind#39")
def qk_norm_whole_row(site: Site) -> Iterator[Edit]:
    """Q or K is normalised over all heads at once; the model does it head by head."""
    if site.node.shape[-2] > 1 and site.node.shape[-3] == len(site.case.run.tokens):
        says = f"normalises whole rows; this model normalises each {site.node.shape[-1]} values by themselves"
        yield Edit(_sized(lambda square, n: np.sqrt(square.mean(axis=-2, keepdims=True) + n.floats[0])), says)


@at_nodes("RMS_NORM", fix="compute RMSNorm: x / sqrt(mean(x^2) + eps) * weight", source="llama.cpp#173")
def norm_mean_subtracted(site: Site) -> Iterator[Edit]:
    """LayerNorm where the model has RMSNorm: the mean is subtracted."""
    yield Edit(renamed("NORM"), "subtracts the mean, as LayerNorm does; this model has RMSNorm")


@at_nodes("NORM", fix="subtract the mean before the variance is taken")
def norm_mean_kept(site: Site) -> Iterator[Edit]:
    """RMSNorm where the model has LayerNorm: the mean is not subtracted."""
    yield Edit(renamed("RMS_NORM"), "does not subtract the mean; this model has LayerNorm")


@at_nodes(*NORMS, fix="apply the norm")
def norm_missing(site: Site) -> Iterator[Edit]:
    """The norm is left out: what comes in goes out."""
    yield Edit(through, "does not normalise; the weight alone is applied", "weight")
    more = {user.number: through for user in _scaling(site)}
    if more:
        yield Edit(through, "is left out: its input comes out as it is", "all", more)


@at_nodes("L2_NORM", "RMS_NORM", fix="divide each vector by its length")
def l2_norm_missing(site: Site) -> Iterator[Edit]:
    """Keys or queries of linear attention are not normalised to length one."""
    scales = {user.number: through for user in site.users() if user.op == "SCALE" and site.own(user)}
    if site.node.op == "L2_NORM":
        yield Edit(through, "does not normalise to length one")
    elif scales:
        yield Edit(through, "does not normalise to length one", "", scales)


@at_nodes("MUL", fix="multiply by the norm's weight", source="rustorch")
def norm_weight_missing(site: Site) -> Iterator[Edit]:
    """The norm's weight is not applied."""
    if _is_weight(site):
        yield Edit(through, f"is not multiplied by {site.weight(1)}", fix=f"multiply by {site.weight(1)}")


@at_nodes("MUL", fix="multiply by the norm's weight once", source="rustorch")
def norm_weight_twice(site: Site) -> Iterator[Edit]:
    """The norm's weight is applied twice."""
    if _is_weight(site):
        name = site.weight(1)
        yield Edit(
            with_source(1, lambda n: n.x(1) ** 2), f"is multiplied by {name} twice", fix=f"multiply by {name} once"
        )


@at_nodes(
    "MUL",
    fix="multiply by the file's weight as it is: GGUF files of Gemma have the + 1 in it already",
    source="mold#1078, vllm#31464, transformers#35708",
)
def norm_weight_plus_one(site: Site) -> Iterator[Edit]:
    """One is added to the norm's weight, as Gemma's Hugging Face checkpoints need and GGUF files do not."""
    if _is_weight(site):
        says = f"multiplies by 1 + {site.weight(1)}; the file's weight is used as it is"
        yield Edit(plus(1, np.float32(1)), says)


@at_nodes("MUL", fix="use the norm's weight as it is in the file", source="mold#1078, vllm#31464, transformers#35708")
def norm_weight_minus_one(site: Site) -> Iterator[Edit]:
    """One is taken off the norm's weight."""
    if _is_weight(site):
        says = f"multiplies by {site.weight(1)} - 1; the file's weight is used as it is"
        yield Edit(plus(1, np.float32(-1)), says)


@at_nodes("MUL", fix="take the norm's own weight")
def norm_other_weight(site: Site) -> Iterator[Edit]:
    """Another norm's weight is applied."""
    if _is_weight(site):
        for name, relative in site.others(site.weight(1)):
            if "norm" in name:
                says, bias = f"uses {name} for {site.weight(1)}", name.replace(".weight", ".bias")
                fix = f"multiply by {site.weight(1)}"
                yield Edit(with_weight(site, 1, name), says, relative, fix=fix)
                sums = next((user for user in site.users() if user.op == "ADD" and site.at(user).weight(1)), None)
                if sums is not None and site.own(sums) and site.has(bias):
                    more = {sums.number: with_weight(site, 1, bias)}
                    both = f"{fix}, and add {site.at(sums).weight(1)}"
                    alter = with_weight(site, 1, name)
                    yield Edit(alter, f"{says}, and its bias", f"{relative} bias", more, fix=both)


@at_nodes(*NORMS, of="qk-norm-after-rope")
def after_rope(site: Site) -> Iterator[Edit]:
    """Q or K is rotated, and then normalised."""
    rope = _rope_behind(site)
    if rope is not None:
        turned = with_source(0, lambda n: site.computed(rope, n.x()))
        more = {rope.number: through} if site.own(rope) else {}
        yield Edit(turned, "normalises Q and K after RoPE; this model normalises before", "", more)


def _rope_behind(site: Site) -> Any:
    """The rotation that a norm's result goes into, through its weight."""
    users = [user for first in site.users() for user in (first, *site.at(first).users())]
    return next((user for user in users if user.op == "ROPE" and user.shape == site.node.shape), None)


@at_nodes("ROPE", of="qk-norm-after-rope")
def rope_first(site: Site) -> Iterator[Edit]:
    """What goes into the rotation was not normalised yet."""
    norm = site.source(0)
    while norm is not None and norm.op in ("MUL", "ADD"):
        norm = site.at(norm).source(0)
    below = site.at(norm).source(0) if norm is not None and norm.op in NORMS else None
    if below is not None and below.label is not None:
        with suppress(NotRecordedError):
            x = site.case.values(below.label).reshape(-1, *site.node.shape)
            yield Edit(instead(0, x), "normalises Q and K after RoPE; this model normalises before")


@at_nodes("ADD", fix="add the norm's bias")
def norm_bias_missing(site: Site) -> Iterator[Edit]:
    """LayerNorm's bias is not added."""
    below = site.source(0)
    if site.weight(1) and below is not None and (below.op in NORMS or _is_weight(site.at(below))):
        yield Edit(through, f"leaves out the norm's bias ({site.weight(1)})", fix=f"add {site.weight(1)}")


def _is_weight(site: Site) -> bool:
    """Whether a product is of a norm's result and its weight."""
    below = site.source(0)
    return bool(site.node.op == "MUL" and site.weight(1) and below is not None and below.op in (*NORMS, "L2_NORM"))


def _scaling(site: Site) -> list[Any]:
    """The norm's product with its weight, and the sum with its bias."""
    out: list[Any] = []
    at = site
    for op in ("MUL", "ADD"):
        user = next((user for user in at.users() if user.op == op and site.own(user) and at.at(user).weight(1)), None)
        if user is None:
            break
        out.append(user)
        at = at.at(user)
    return out


def _sized(size: Any) -> Alter:
    """x / size(mean square), of centred values for LayerNorm."""

    def value(n: Op) -> Any:
        x = n.x().astype(np.float64)
        x = x - x.mean(axis=-1, keepdims=True) if n.name == "NORM" else x
        return x / size(np.mean(x * x, axis=-1, keepdims=True), n)

    return takes(value)
