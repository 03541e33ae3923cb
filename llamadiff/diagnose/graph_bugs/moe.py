"""Routers and experts at nodes of a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from llamadiff.diagnose.graph_bugs.edit import (
    Edit,
    Site,
    at_nodes,
    instead,
    renamed,
    takes,
    through,
    with_int,
    with_source,
)
from llamadiff.ggml.op import Op


def _is_gate(site: Site) -> bool:
    """Whether an op makes probabilities of a router's scores, or of those of the chosen."""
    return site.number(1) is None and "moe" in site.node.name + site.named(0) + str(site.tap or site.case.tap.name)


@at_nodes("SOFT_MAX", of="router-other-gate")
def other_gate(site: Site) -> Iterator[Edit]:
    """A sigmoid, or nothing."""
    if _is_gate(site):
        yield Edit(renamed("SIGMOID"), "takes a sigmoid of router scores; this model takes a softmax", "sigmoid")
        yield Edit(through, "takes no softmax of router scores", "none")


@at_nodes("SIGMOID", of="router-other-gate")
def softmax_gate(site: Site) -> Iterator[Edit]:
    """A softmax for the sigmoid."""

    def softmax(n: Op) -> Op:
        return replace(n, name="SOFT_MAX", params=np.array([1.0, 0.0] + [0.0] * 14, np.float32).tobytes())

    if _is_gate(site):
        yield Edit(softmax, "takes a softmax of router scores; this model takes a sigmoid", "softmax")


@at_nodes("ARGSORT", "TOP_K", of="router-other-choice")
def other_choice(site: Site) -> Iterator[Edit]:
    """The worst experts, or by number."""
    if site.node.op == "ARGSORT":
        yield Edit(with_int(p0=1 - int(site.ints[0])), "chooses the experts with the least scores", "worst")
    numbers = np.arange(site.node.shape[-1], dtype=np.int32)
    yield Edit(
        lambda n: np.broadcast_to(numbers, n.x().shape[:-1] + numbers.shape), "chooses experts by number", "first"
    )


@at_nodes("GET_ROWS", of="router-weights-wrong")
def other_weights(site: Site) -> Iterator[Edit]:
    """Scores as they are, or with the bias that only the choice has."""
    below = site.source(0)
    if site.weight(0) or below is None or "moe" not in site.node.name:
        return
    for label, x in site.recorded(site.shape(0)):
        if "moe" in label and label != below.label:
            yield Edit(instead(0, x), f"weighs experts by {label}, not {site.named(0)}", label.rpartition("-")[0])
    ones = takes(lambda n: np.ones(site.node.shape))
    yield Edit(ones, "weighs every chosen expert by 1", "ones")


@at_nodes("DIV", of="router-not-normalised")
def not_normalised(site: Site) -> Iterator[Edit]:
    """Weights as they are, or by another softmax."""
    yield Edit(through, "does not make the chosen experts' weights sum to one", "none")

    def softmax(n: Op) -> Any:
        e = np.exp(n.x().astype(np.float64) - n.x().max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    yield Edit(takes(softmax), "takes a softmax of the chosen experts' weights", "softmax")


@at_nodes("MUL", of="mixture-wrong")
def not_weighed(site: Site) -> Iterator[Edit]:
    """Experts' results as they are."""
    if "moe" in site.node.name and site.node.shape[-1] > 1 and site.shape(1)[-1] == 1:
        yield Edit(through, "does not weigh the experts' results", "none")
        mean = with_source(1, lambda n: np.full_like(n.x(1), 1 / n.x(1).shape[-2]))
        yield Edit(mean, "takes the mean of the chosen experts' results", "mean")


@at_nodes("MUL_MAT_ID", of="experts-mixed-up")
def mixed_up(site: Site) -> Iterator[Edit]:
    """Other experts' matrices."""
    count = site.engine.w.shape(site.weight(0))[0] if site.weight(0) else 0
    if count < 2:
        return
    for says, change in {
        "multiplies by the matrices of the chosen experts in reverse": lambda n: n.x(2)[..., ::-1],
        "multiplies by the matrix of the next expert": lambda n: (n.x(2) + 1) % count,
        "multiplies by the matrices of the first experts": lambda n: np.broadcast_to(
            np.arange(n.x(2).shape[-1]), n.x(2).shape
        ),
    }.items():
        yield Edit(with_source(2, change), says, says)
