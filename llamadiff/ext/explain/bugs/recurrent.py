"""Convolutions, state spaces and delta nets at nodes of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from llamadiff.ext.explain.alter import changed, moved_on, swapped, takes, through, with_source
from llamadiff.ext.explain.bugs.norms import NORMS
from llamadiff.ext.explain.registry import Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.graph.op import Op, function_of
from llamadiff.ext.graph.ops.recurrent import selective_scan

DT, A, B, C = 2, 3, 4, 5  # places among SSM_SCAN's sources


@at_nodes("SSM_CONV", fix="multiply the newest value by the kernel's last weight")
def convolution_reversed(site: Site) -> Iterator[Edit]:
    """The kernel of the short convolution is reversed: the newest value meets the first weight."""
    yield Edit(with_source(1, lambda n: n.x(1)[..., ::-1]), "runs through the convolution's kernel in reverse")


@at_nodes("SSM_CONV", fix="give the convolution the values before a token and its own, no later ones")
def convolution_shifted(site: Site) -> Iterator[Edit]:
    """The short convolution is one token late, or early, or is left out."""
    for shift in (1, -1):
        says = "is one token late" if shift > 0 else "is one token early: it sees the token after"
        yield Edit(changed(0, partial(moved_on, by=shift, axis=-1)), f"runs a convolution that {says}", f"{shift:+d}")
    last = site.node.shape[-2]
    missing = takes(lambda n: n.x()[..., -last:].swapaxes(-1, -2))
    yield Edit(missing, "leaves out the convolution: values go on as they are", "missing")


@at_nodes("CONCAT", fix="put the convolution's state before the new values")
def state_behind(site: Site) -> Iterator[Edit]:
    """The convolution's state is put behind the new values instead of before them."""
    if site.user("SSM_CONV"):
        yield Edit(swapped(0, 1), "puts the convolution's state behind the new values")


@at_nodes("SSM_CONV", "SSM_SCAN", fix="keep the state for the next batch")
def state_lost(site: Site) -> Iterator[Edit]:
    """The state of a convolution or a state space is not kept: each batch after the first begins with zeros."""
    edges = site.case.run.edges
    if len(edges) > 2:
        begun = _convolved_anew if site.node.op == "SSM_CONV" else _scanned_anew
        yield Edit(takes(partial(begun, edges)), "begins each batch with a state of zeros")


def _convolved_anew(edges: Sequence[int], n: Op) -> Any:
    x, before = n.x(), n.x(1).shape[-1] - 1
    parts = []
    for a, z in pairwise(edges):
        rows = np.array(x[..., a : before + z])
        rows[..., :before] *= a == 0
        parts.append(_again(n, n.shape, {0: rows}))
    return np.concatenate(parts, axis=-2)


def _scanned_anew(edges: Sequence[int], n: Op) -> Any:
    """Batches [.., token, head, dim] scanned by themselves: what they read out, then the last one's state."""
    x, state = n.x(1), n.x()
    size, parts = int(np.prod(x.shape[-4:])) // x.shape[-3], []
    for a, z in pairwise(edges):
        shape = (*n.shape[:-1], n.shape[-1] - size * (x.shape[-3] - (z - a)))
        rows = {i: n.x(i)[..., a:z, :, :] for i in (1, B, C)}
        parts.append(_again(n, shape, {0: state * (a == 0), DT: n.x(DT)[..., a:z, :], **rows}))
    read = [part[..., : size * (z - a)] for part, (a, z) in zip(parts, pairwise(edges), strict=True)]
    return np.concatenate([*read, parts[-1][..., size * (edges[-1] - edges[-2]) :]], axis=-1)


def _again(n: Op, shape: tuple[int, ...], values: Mapping[int, Any]) -> Any:
    """The op of other values of its sources."""
    function = function_of(n.name)
    assert function is not None
    sources = tuple(
        replace(source, values=values[i]) if source is not None and i in values else source
        for i, source in enumerate(n.sources)
    )
    return function(replace(n, shape=shape, sources=sources))


@at_nodes("SSM_SCAN", fix="take softplus(dt + its bias) once for the step size")
def step_size_wrong(site: Site) -> Iterator[Edit]:
    """The step size of a state space is dt itself, or softplus is taken twice."""
    plain = takes(lambda n: selective_scan(n, n.x(DT)))
    yield Edit(plain, "takes dt for the step size; this model takes its softplus", "none")
    twice = with_source(DT, lambda n: np.logaddexp(0, n.x(DT).astype(np.float64)).astype(np.float32))
    yield Edit(twice, "takes softplus of dt twice", "twice")


@at_nodes("SSM_SCAN", fix="take A as the file has it: it is -exp(A_log) there already")
def decay_wrong(site: Site) -> Iterator[Edit]:
    """A of a state space has the wrong sign, or is taken for its logarithm."""
    name = site.named(A)
    yield Edit(with_source(A, lambda n: -n.x(A)), f"takes {name} with the other sign", "sign")
    yield Edit(with_source(A, lambda n: -np.exp(n.x(A))), f"takes -exp of {name}, which the file has already", "exp")
    yield Edit(with_source(A, lambda n: np.log(-n.x(A))), f"takes the logarithm of -{name}", "log")
    yield Edit(with_source(A, lambda n: 0 * n.x(A)), "does not let the state decay", "none")


@at_nodes("SSM_SCAN", fix="take B, then C, from the row that holds both")
def state_inputs_swapped(site: Site) -> Iterator[Edit]:
    """B and C of a state space are swapped."""
    if site.shape(B) == site.shape(C):
        yield Edit(swapped(B, C), "swaps B and C")


@at_nodes("MUL", fix="add D times the input to what the state gives")
def skip_missing(site: Site) -> Iterator[Edit]:
    """The skip connection of a state space, D times its input, is left out, or D is."""
    name = site.weight(1)
    if "ssm_d" in name and "ssm_dt" not in name:
        fix = f"add {name} times the input to what the state gives"
        yield Edit(takes(lambda n: np.zeros_like(n.x())), f"leaves out the skip connection ({name})", "all", fix=fix)
        yield Edit(through, f"adds the input itself, not {name} times it", "one", fix=fix)


@at_nodes("SWIGLU", fix="gate first, and normalise what comes of it")
def gate_after_norm(site: Site) -> Iterator[Edit]:
    """The gate of a state space is applied after the norm instead of before it."""
    norm = next((user for user in site.users() if user.op in NORMS and site.own(user)), None)
    weighted = [user for user in site.at(norm).users() if user.op == "MUL" and site.own(user)] if norm else []
    if not weighted:
        return
    seen: dict[str, Any] = {}

    def ungated(n: Op) -> Any:
        seen["gate"] = n.x().astype(np.float64)
        return n.x(1)

    def gated(n: Op) -> Any:
        z = seen["gate"].reshape(-1, *weighted[0].shape)
        return np.asarray(n.x() * n.x(1) * (z / (1 + np.exp(-z))), np.float32)

    yield Edit(ungated, "normalises first and gates afterwards", "", {weighted[0].number: gated})


@at_nodes("GATED_DELTA_NET", fix="multiply the state by exp(g), and read it with q / sqrt(d)")
def delta_net_wrong(site: Site) -> Iterator[Edit]:
    """The gate of a delta net has the wrong sign or is left out, beta is 1, queries and keys are swapped."""
    decay, beta = "multiply the state by exp(g)", "multiply what is written into the state by beta"
    query, sides = "read the state with q / sqrt(d)", "write the state with keys, and read it with queries"
    edits = {
        "lets the state grow by exp(-g)": (with_source(3, lambda n: -n.x(3)), decay),
        "does not let the state decay": (with_source(3, lambda n: 0 * n.x(3)), decay),
        "takes 1 for beta": (with_source(4, lambda n: np.ones_like(n.x(4))), beta),
        "does not scale queries by 1/sqrt(d)": (
            with_source(0, lambda n: n.x() * np.float32(np.sqrt(n.x().shape[-1]))), query
        ),
        "swaps queries and keys": (swapped(0, 1), sides),
    }  # fmt: skip
    for says, (alter, fix) in edits.items():
        yield Edit(alter, says, says, fix=fix)
