"""Sums, gates and constant factors at nodes of a graph: residuals, branches, multipliers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from llamadiff.ext.explain.alter import changed, instead, only, takes, through, times, with_float
from llamadiff.ext.explain.bugs.norms import NORMS
from llamadiff.ext.explain.case import Array, NotRecordedError
from llamadiff.ext.explain.registry import Constant, Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.solve import FACTOR, Sought
from llamadiff.ext.graph.graph import GraphNode
from llamadiff.ext.graph.op import Op

MOST = 40  # recorded taps that are tried in a residual's place


def _sides(site: Site) -> Iterator[tuple[int, int]]:
    """Which operand of a sum is the residual (the older one), and which the branch.

    Nothing where one is a weight, or a part of another node: an expert's share in the sum of all.
    """
    if not _is_of_nodes(site) or site.shape(0) != site.shape(1) or site.adapter:
        return
    if any(node is not None and node.op == "VIEW" for node in (site.source(place, whole=True) for place in (0, 1))):
        return
    older = [site.source(place) for place in (0, 1)]
    numbers = [node.number if node is not None else 0 for node in older]
    yield (0, 1) if numbers[0] < numbers[1] else (1, 0)


def _is_of_nodes(site: Site) -> bool:
    """Whether an op is of two nodes' results, and of no weight."""
    return site.node_at(0) is not None and site.node_at(1) is not None


@at_nodes("ADD", fix="add the residual")
def residual_missing(site: Site) -> Iterator[Edit]:
    """The residual is not added: the branch goes on alone."""
    for residual, branch in _sides(site):
        left, alone = site.named(residual), site.named(branch)
        yield Edit(only(branch), f"leaves out {left}: {alone} goes on alone", fix=f"add {left}, the residual")


@at_nodes("ADD", fix="add the branch")
def branch_missing(site: Site) -> Iterator[Edit]:
    """The branch is not added: the residual goes on alone."""
    for residual, branch in _sides(site):
        if not _is_shared(site, branch):
            says = f"leaves out {site.named(branch)}: {site.named(residual)} goes on alone"
            yield Edit(only(residual), says, fix=f"add {site.named(branch)}")


@at_nodes("ADD", fix="add the shared expert's result")
def shared_expert_missing(site: Site) -> Iterator[Edit]:
    """The shared expert's result is not added to that of the chosen ones."""
    for place in chain.from_iterable(_sides(site)):
        if _is_shared(site, place):
            fix = f"add {site.named(place)}, the shared expert's result"
            yield Edit(only(1 - place), f"leaves out the shared expert ({site.named(place)})", fix=fix)


def _is_shared(site: Site, place: int) -> bool:
    """Whether an operand is made by a shared expert."""
    node = site.source(place)
    for _ in range(3):
        if node is None:
            return False
        if "shexp" in site.at(node).weight(0):
            return True
        node = site.at(node).source(0)
    return False


@at_nodes("ADD", fix="add branch and residual once each")
def residual_doubled(site: Site) -> Iterator[Edit]:
    """The residual or the branch is added twice, or subtracted."""
    for role, place in _by_role(site):
        name = site.named(place)
        yield Edit(times(place, 2), f"adds {name} twice", role, fix=f"add {name} once")
        yield Edit(times(place, -1), f"subtracts {name}", f"minus {role}", fix=f"add {name}")


@at_nodes("ADD", fix="add s B (A x) to W x, with s = scale * alpha / rank")
def adapter_missing(site: Site) -> Iterator[Edit]:
    """The LoRA adapter is not applied: W x goes on alone."""
    if site.adapter:
        yield Edit(only(0), f"leaves out the adapter: the product with {site.adapter} goes on alone", fix=_added(site))


@at_nodes("ADD", fix="add s B (A x) to W x once, with s = scale * alpha / rank")
def adapter_scaled(site: Site) -> Iterator[Edit]:
    """The LoRA adapter is applied twice, or with the scale that another reading of alpha and rank gives."""
    if not site.adapter:
        return
    own, rank = _scale_and_rank(site)
    yield Edit(times(1, 2), f"applies the adapter twice ({own:.5g} B A, once, is right)", "twice", fix=_added(site))
    ways = {
        "without alpha / rank": 1.0, "by alpha, not alpha / rank": own * rank, "by 1 / rank": 1 / rank,
        "by rank / alpha, not alpha / rank": 1 / own, "by alpha / sqrt(rank), as rsLoRA": own * rank**0.5,
        "with the sign changed": -own,
    }  # fmt: skip
    for how, other in ways.items():
        if abs(other - own) > 1e-6 * abs(own):
            says = f"scales the adapter {how}: by {other:.5g}, where {own:.5g} is right"
            yield Edit(times(1, other / own), says, how, fix=_added(site))


@at_nodes("ADD", fix="add s B (A x) to W x once, with s = scale * alpha / rank", general=True)
def adapter_scale_other(site: Site) -> Iterator[Constant]:
    """The LoRA adapter is applied with another scale."""
    if site.adapter:
        own, _ = _scale_and_rank(site)
        sought = replace(
            FACTOR, says=lambda value, _: f"scales the adapter by {value * own:.5g}, where {own:.5g} is right"
        )
        yield Constant(lambda value: times(1, value), sought, 1.0, linear=True, fix=_added(site))


def _scale_and_rank(site: Site) -> tuple[float, int]:
    """s = scale * alpha / rank of what an adapter adds, and the rank."""
    scale = site.node_at(1)
    product = site.at(scale).node_at(0) if scale is not None and scale.op == "SCALE" else scale
    assert product is not None
    own = float(site.at(scale).floats[0]) if scale is not None and scale.op == "SCALE" else 1.0
    return own, site.at(product).shape(0)[-1]


def _added(site: Site) -> str:
    own, rank = _scale_and_rank(site)
    return f"add {own:.5g} B (A x) to the product with {site.adapter}: s = scale * alpha / rank, of rank {rank}"


@at_nodes("ADD", fix="carry the residual from one addition to the next")
def residual_elsewhere(site: Site) -> Iterator[Edit]:
    """The residual is taken from another place: the layer's input, its predecessor's, the embedding."""
    for place in chain.from_iterable(_sides(site)):
        for label, x in islice(site.recorded(site.shape(place)), MOST):
            if label == site.named(place):
                continue
            says = f"adds {label}, not {site.named(place)}"
            variant = f"{place} {_relative(label, site.case.tap.layer)}"
            yield Edit(instead(place, x), says, variant, fix=f"add {site.named(place)}")


def _relative(label: str, layer: int | None) -> str:
    word, _, number = label.rpartition("-")
    return f"{word} {int(number) - layer:+d}" if word and number.isdecimal() and layer is not None else label


@at_nodes("ADD", fix="add what came in before the norm")
def residual_normed(site: Site) -> Iterator[Edit]:
    """The residual is taken after the norm: post-norm where the model is pre-norm."""
    for residual, _ in _sides(site):
        norm = _norm_of(site, residual)
        if norm is not None and norm.label:
            with suppress(NotRecordedError):
                x = site.case.values(norm.label).reshape(1, *site.shape(residual))
                fix = f"add {site.named(residual)}, from before the norm"
                yield Edit(instead(residual, x), f"adds {norm.label}, the residual after its norm", fix=fix)


def _norm_of(site: Site, place: int) -> GraphNode | None:
    """The named end of the norm that is taken of an operand: the product with its weight, or the sum with its bias."""
    below = site.source(place)
    users = site.at(below).users() if below is not None else []
    found = next((user for user in users if user.op in NORMS and user.number < site.node.number), None)
    while found is not None:
        more = next((user for user in site.at(found).users() if user.op in ("MUL", "ADD")), None)
        if more is None or not site.at(more).weight(1):
            return found
        found = more
    return None


@at_nodes("ADD", fix="add branch and residual as they are, and normalise neither of them nor their sum here")
def branch_normed(site: Site) -> Iterator[Edit]:
    """The sum is normalised: post-norm where the model is pre-norm."""
    eps = next((float(np.frombuffer(n.params, np.float32)[0]) for n in site.engine.graph.nodes if n.op in NORMS), 1e-5)

    def norm(x: Array, weight: Any = 1) -> Array:
        wide = x.astype(np.float64)
        rows = np.asarray(wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps), np.float32)
        return np.asarray(rows * weight)

    def normed_sum(weight: Any, n: Op) -> Array:
        return norm(n.x() + n.x(1), weight)

    for residual, branch in _sides(site):
        fix = f"add {site.named(residual)} and {site.named(branch)}, without a norm"
        yield Edit(takes(partial(normed_sum, 1)), "normalises the sum, without a weight", "bare", fix=fix)
        weighted = _norm_of(site, residual)
        name = site.at(weighted).weight(1) if weighted is not None and weighted.op == "MUL" else ""
        if name:
            weight = site.vector(name)
            yield Edit(takes(partial(normed_sum, weight)), f"normalises the sum by {name}", "sum", fix=fix)
            says = f"normalises {site.named(branch)} by {name} before it is added"
            yield Edit(changed(branch, partial(norm, weight=weight)), says, "weighted branch", fix=fix)
        says = f"normalises {site.named(branch)} before it is added, without a weight"
        yield Edit(changed(branch, norm), says, "branch", fix=fix)


@at_nodes("ADD", fix="add branch and residual as they are, once each", general=True)
def residual_multiplied(site: Site) -> Iterator[Constant]:
    """Branch or residual is multiplied by a constant."""
    for role, place in _by_role(site):
        yield _factor(site, place, role)


def _factor(site: Site, place: int, role: str) -> Constant:
    name = site.named(place)
    sought = replace(FACTOR, says=lambda value, own: f"adds {value:.5g} times {name}")
    make = lambda value: times(place, value)  # noqa: E731
    return Constant(make, sought, 1.0, variant=role, linear=True, fix=f"add {name} as it is, once")


def _by_role(site: Site) -> Iterator[tuple[str, int]]:
    for residual, branch in _sides(site):
        yield from (("residual", residual), ("branch", branch))


@at_nodes("MUL", fix="multiply both")
def gate_missing(site: Site) -> Iterator[Edit]:
    """Of two tensors that the model multiplies, one goes on alone: a gate is left out."""
    if not _is_of_nodes(site):
        return
    fix = f"multiply {site.named(0)} by {site.named(1)}"
    yield Edit(through, f"leaves out the factor {site.named(1)}", "second", fix=fix)
    if site.shape(1) == site.node.shape:
        yield Edit(only(1), f"leaves out the factor {site.named(0)}", "first", fix=fix)
        yield Edit(takes(lambda n: n.x() + n.x(1)), f"adds {site.named(0)} and {site.named(1)}", "sum", fix=fix)


@at_nodes("SCALE", fix="multiply by the model's constant once")
def multiplier_missing(site: Site) -> Iterator[Edit]:
    """A constant factor of the model is left out, or applied wrongly: of embeddings, queries, residuals, logits."""
    own = float(site.floats[0])
    if own in (0.0, 1.0) or site.adapter:
        return
    fix = f"multiply by {own:.5g}, once"
    yield Edit(with_float(p0=1.0), f"does not multiply by {own:.5g}", "missing", fix=fix)
    yield Edit(with_float(p0=1 / own), f"divides by {own:.5g}; the model multiplies by it", "inverse", fix=fix)
    yield Edit(with_float(p0=own * own), f"multiplies by {own:.5g} twice", "twice", fix=fix)
    if own > 0:
        yield Edit(with_float(p0=own**0.5), f"multiplies by the root of {own:.5g}", "root", fix=fix)


@at_nodes("SCALE", general=True, fix="read the constant from the file")
def multiplier_other(site: Site) -> Iterator[Constant]:
    """A constant factor is another than the model's."""
    own = float(site.floats[0])
    if own > 0 and not site.adapter:
        says = lambda value, own: f"multiplies by {value:.5g}; the model by {own:.5g}"  # noqa: E731
        sought = Sought(own / 1000, own * 1000, says, (0.5, 2.0))
        yield Constant(lambda value: with_float(p0=value), sought, own, fix=f"multiply by {own:.5g}, once")
