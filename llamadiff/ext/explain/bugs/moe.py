"""Routers and experts at nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from llamadiff.ext.explain.alter import gives, instead, renamed, takes, through, with_int, with_source
from llamadiff.ext.explain.case import NotRecordedError
from llamadiff.ext.explain.registry import Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.op import Op


def _is_gate(site: Site) -> bool:
    """Whether an op makes probabilities of a router's scores, or of those of the chosen."""
    return site.number(1) is None and "moe" in site.node.name + site.named(0) + str(site.tap or site.case.tap.name)


@at_nodes(
    "SOFT_MAX",
    fix="take the router's function as the model has it: a sigmoid, or a softmax over all experts or over the chosen",
    source="transformers#41151",
)
def router_other_gate(site: Site) -> Iterator[Edit]:
    """Router scores go through another function than the model's: a sigmoid, none, or a softmax of other experts."""
    if not _is_gate(site):
        return
    below, used = site.source(0), site.case.run.model.hyper_parameter("expert_used_count") or 1
    of_chosen = below is not None and below.op == "GET_ROWS"
    over = f"the {used} chosen experts" if of_chosen else f"all {site.node.shape[-1]} experts"
    fix = f"take a softmax of router scores over {over}"
    yield Edit(renamed("SIGMOID"), "takes a sigmoid of router scores; this model takes a softmax", "sigmoid", fix=fix)
    yield Edit(through, "takes no softmax of router scores", "none", fix=fix)
    if of_chosen:
        yield from _over_all(site, fix)
    else:
        says = f"takes a softmax over the chosen experts; this model over {over}"
        yield Edit(with_source(0, partial(_chosen_alone, used)), says, "chosen", fix=fix)


def _over_all(site: Site, fix: str) -> Iterator[Edit]:
    """The shares that the chosen experts have in a softmax over all, where the model takes one of the chosen."""
    below = site.source(0)
    assert below is not None
    with suppress(NotRecordedError):
        scores = site.case.values(site.at(below).named(0)).astype(np.float64)
        peak = scores.max(axis=-1, keepdims=True)
        total = np.exp(scores - peak).sum(axis=-1, keepdims=True)

        def shares(n: Op) -> Any:
            rows = (*n.x().shape[:-1], 1)
            return np.exp(n.x() - peak.reshape(-1, *rows[1:])) / total.reshape(-1, *rows[1:])

        yield Edit(takes(shares), "takes a softmax over all experts; this model over the chosen ones", "all", fix=fix)


def _chosen_alone(used: int, n: Op) -> Any:
    best = np.sort(n.x(), axis=-1)[..., -used:][..., :1]
    return np.where(n.x() < best, -np.inf, n.x())


@at_nodes("SIGMOID", of="router-other-gate")
def softmax_gate(site: Site) -> Iterator[Edit]:
    """A softmax for the sigmoid."""

    def softmax(n: Op) -> Op:
        return replace(n, name="SOFT_MAX", params=np.array([1.0, 0.0] + [0.0] * 14, np.float32).tobytes())

    if _is_gate(site):
        fix = "take a sigmoid of router scores"
        yield Edit(softmax, "takes a softmax of router scores; this model takes a sigmoid", "softmax", fix=fix)


@at_nodes(
    "ARGSORT", "TOP_K", fix="choose the experts of the largest probabilities, best first", source="transformers#41151"
)
def router_other_choice(site: Site) -> Iterator[Edit]:
    """The wrong experts are chosen: the worst, or by number."""
    if site.node.op == "ARGSORT":
        yield Edit(with_int(p0=1 - int(site.ints[0])), "chooses the experts with the least scores", "worst")
    numbers = np.arange(site.node.shape[-1], dtype=np.int32)
    used = site.case.run.model.hyper_parameter("expert_used_count") or 1
    orders = {"first": numbers, "last": np.roll(numbers, used), "last reversed": numbers[::-1]}
    for variant, order in orders.items():
        says = f"chooses the {variant.split()[0]} experts for every token"
        yield Edit(partial(_numbered, order), says, variant)
    yield Edit(
        gives(lambda x: np.broadcast_to(x[..., :1, :], x.shape)), "chooses the first token's experts for all", "token"
    )


def _numbered(order: Any, n: Op) -> Any:
    return np.broadcast_to(order, n.x().shape[:-1] + order.shape)


@at_nodes("SUM_ROWS", "FILL", fix="rank groups of experts by the sum of their two best, and choose in the best groups")
def expert_groups_wrong(site: Site) -> Iterator[Edit]:
    """Groups of experts are ranked by their best expert alone, or experts are chosen in all groups."""
    if not site.shown.startswith(("ffn_moe_group_topk", "ffn_moe_probs_masked")):
        return
    if site.node.op == "SUM_ROWS":
        best = takes(lambda n: n.x().max(axis=-1, keepdims=True))
        yield Edit(best, "ranks groups by their best expert; this model by the sum of the two best", "best")
    else:
        yield Edit(through, "chooses among the experts of all groups", "all")


@at_nodes("ARGSORT", fix="nothing, if weights follow the same order", harmless=True)
def router_other_order(site: Site) -> Iterator[Edit]:
    """The right experts are chosen, in another order."""
    used = site.case.run.model.hyper_parameter("expert_used_count") or 1

    def ordered(change: Callable[[Any], Any]) -> Alter:
        return gives(lambda x: np.concatenate([change(x[..., :used]), x[..., used:]], axis=-1))

    by_number = ordered(lambda chosen: np.sort(chosen, axis=-1))
    yield Edit(by_number, "chooses the right experts, in the order of their numbers", "sorted")
    yield Edit(ordered(lambda chosen: chosen[..., ::-1]), "chooses the right experts, worst first", "reversed")


@at_nodes("GET_ROWS", fix="weigh each expert by its own probability, or score", source="transformers#41151")
def router_weights_wrong(site: Site) -> Iterator[Edit]:
    """The chosen experts' weights are not their probabilities."""
    below = site.source(0)
    if site.weight(0) or below is None or "moe" not in site.node.name:
        return
    fix = f"weigh each chosen expert by its own {site.named(0)}"
    for label, x in site.recorded(site.shape(0)):
        if "moe" in label and label != below.label:
            says = f"weighs experts by {label}, not {site.named(0)}"
            yield Edit(instead(0, x), says, label.rpartition("-")[0], fix=fix)
    used = site.node.shape[-2]
    yield Edit(takes(lambda n: np.ones(site.node.shape)), "weighs every chosen expert by 1", "ones", fix=fix)
    yield Edit(takes(lambda n: np.full(site.node.shape, 1 / used)), "weighs all chosen experts alike", "mean", fix=fix)
    yield Edit(gives(lambda x: x[..., ::-1, :]), "weighs the experts in reverse order", "reversed", fix=fix)
    yield Edit(takes(lambda n: n.x()[..., :used, :]), "takes the first experts' probabilities", "first", fix=fix)


@at_nodes("DIV", fix="divide the chosen experts' weights by their sum", source="transformers#41151")
def router_not_normalised(site: Site) -> Iterator[Edit]:
    """The chosen experts' weights are not made to sum to one, or by another softmax."""
    yield Edit(through, "does not make the chosen experts' weights sum to one", "none")

    def softmax(n: Op) -> Any:
        e = np.exp(n.x().astype(np.float64) - n.x().max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    yield Edit(takes(softmax), "takes a softmax of the chosen experts' weights", "softmax")


@at_nodes("MUL", fix="sum the experts' outputs, each times its normalised weight", source="transformers#41151")
def mixture_wrong(site: Site) -> Iterator[Edit]:
    """The experts' outputs are not weighed, or with weights that were not normalised."""
    is_scale = site.named(1).endswith(".scale")  # of the experts' weights, and none of theirs in the sum
    if "moe" in site.node.name and site.node.shape[-1] > 1 and site.shape(1)[-1] == 1 and not is_scale:
        fix = f"sum the experts' outputs, each times its {site.named(1)}"
        yield Edit(through, "does not weigh the experts' results", "none", fix=fix)
        mean = with_source(1, lambda n: np.full_like(n.x(1), 1 / n.x(1).shape[-2]))
        yield Edit(mean, "takes the mean of the chosen experts' results", "mean", fix=fix)
        reverse = with_source(1, lambda n: n.x(1)[..., ::-1, :])
        yield Edit(reverse, "weighs the experts in reverse order", "reversed", fix=fix)
        best = with_source(1, lambda n: np.where(np.arange(n.x(1).shape[-2])[:, None] > 0, 0, n.x(1)))
        yield Edit(best, "takes the best expert alone", "best", fix=fix)
        for label, x in site.recorded(site.shape(1)):
            if label.startswith("ffn_moe_weights") and label != site.named(1):
                says = f"weighs experts by {label}, not {site.named(1)}"
                yield Edit(instead(1, x), says, label.rpartition("-")[0], fix=fix)


Chosen = Callable[[Op], Any]  # an op whose third source says which experts, to those that are taken instead


def _other_experts(count: int) -> dict[str, Chosen]:
    """Whose tensors are taken, in words, and which experts those are."""
    return {
        "of the chosen experts in reverse": lambda n: n.x(2)[..., ::-1],
        "of the next expert": lambda n: (n.x(2) + 1) % count,
        "of the first experts": lambda n: np.broadcast_to(np.arange(n.x(2).shape[-1]), n.x(2).shape),
        "of the expert before": lambda n: (n.x(2) - 1) % count,
        "of experts counted from the last": lambda n: count - 1 - n.x(2),
        "of the first token's experts": lambda n: np.broadcast_to(n.x(2)[..., :1, :], n.x(2).shape),
        "of the experts of the token before": lambda n: np.concatenate(
            [n.x(2)[..., :1, :], n.x(2)[..., :-1, :]], axis=-2
        ),
    }


@at_nodes("MUL_MAT_ID", fix="multiply by the chosen experts' own matrices", source="transformers#41151")
def experts_mixed_up(site: Site) -> Iterator[Edit]:
    """Tokens are multiplied by other experts' matrices, with their biases or without."""
    count = site.engine.w.shape(site.weight(0))[0] if site.weight(0) else 0
    biases = [user.number for user in site.users() if user.op == "ADD_ID" and site.own(user)]
    for whose, change in _other_experts(count).items() if count > 1 else ():
        alter, says = with_source(2, change), f"multiplies by the matrices {whose}"
        if biases:
            yield Edit(alter, f"{says}, and adds their biases", f"{whose} bias", dict.fromkeys(biases, alter))
        yield Edit(alter, says, whose)


@at_nodes("ADD_ID", of="bias-wrong")
def other_bias(site: Site) -> Iterator[Edit]:
    """Other experts' biases."""
    count = site.engine.w.shape(site.weight(1))[0] if site.weight(1) else 0
    for whose, change in _other_experts(count).items() if count > 1 else ():
        yield Edit(with_source(2, change), f"adds the biases {whose}", whose, fix="add the chosen experts' own biases")
