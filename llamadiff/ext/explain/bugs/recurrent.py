"""Convolutions, state spaces and delta nets at nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from llamadiff.ext.explain.alter import after, changed, moved_on, swapped, takes, through, with_source
from llamadiff.ext.explain.bugs.norms import NORMS
from llamadiff.ext.explain.registry import Constant, Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.solve import Sought
from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.op import Op, function_of
from llamadiff.ext.graph.ops.recurrent import selective_scan
from llamadiff.ext.graph.ops.unary import softplus

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


@dataclass(frozen=True)
class _Recurrence:
    """An op that carries a state from token to token: where it is, and what each token gives.

    ``state``: its place among the sources; ``rows``: places of what has a row a token -> name; ``writes``: the places
    without which a token writes nothing into the state; ``keeps``: a place, and its value with which the state does not
    decay.
    """

    state: int
    rows: Mapping[int, str]
    writes: tuple[int, ...]
    keeps: tuple[int, float]

    def part(self, n: Op, a: int, z: int) -> dict[int, Any]:
        """What tokens from a to z give: [seq, token, head, dim], of dt [1, seq, token, head]."""
        axes = {place: -2 if name == "dt" else -3 for place, name in self.rows.items()}
        return {place: np.take(n.x(place), range(a, z), axis=axis) for place, axis in axes.items()}


RECURRENCES = {
    "SSM_SCAN": _Recurrence(0, {1: "x", DT: "dt", B: "B", C: "C"}, (1,), (A, 0.0)),
    "GATED_DELTA_NET": _Recurrence(5, {0: "q", 1: "k", 2: "v", 3: "g", 4: "beta"}, (4,), (3, 0.0)),
    "GATED_LINEAR_ATTN": _Recurrence(4, {0: "k", 1: "v", 2: "q", 3: "g"}, (0,), (3, 1.0)),
    "RWKV_WKV6": _Recurrence(5, {0: "k", 1: "v", 2: "r", 4: "w"}, (0,), (4, 1.0)),
    "RWKV_WKV7": _Recurrence(6, {0: "r", 1: "w", 2: "k", 3: "v", 4: "a", 5: "b"}, (2, 4), (1, 1.0)),
}
NOTHING: Mapping[int, Any] = {}
EDGES = 3  # batches that are each tried alone
STEPS = 0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0  # limits of step sizes that are tried first


class _Scan:
    """One recurrence, token by token or in batches: ``run`` gives what is read out, and the state behind."""

    def __init__(self, n: Op) -> None:
        self.n, self.how = n, RECURRENCES[n.name]
        first, self.state = next(iter(self.how.rows)), n.x(self.how.state)
        self.tokens = n.x(first).shape[-2 if self.how.rows[first] == "dt" else -3]
        kept = max(1, int(n.ints[0])) if n.name in ("SSM_SCAN", "GATED_DELTA_NET") else 1
        self.shape, self.kept = self.state.shape[-4:], kept * int(np.prod(self.state.shape[-4:]))
        self.width = (int(np.prod(n.shape)) - self.kept) // self.tokens

    def run(
        self,
        a: int,
        z: int,
        state: Any,
        writes: bool = True,
        decays: bool = True,
        also: Mapping[int, Any] = NOTHING,
    ) -> tuple[Any, Any]:
        """Tokens from a to z, which go on from a state [.., token * width], and the newest states.

        ``also``: what they give in the place of their own.
        """
        rows = self.how.part(self.n, a, z)
        silent = {} if writes else {place: 0 * rows[place] for place in self.how.writes}
        place, value = self.how.keeps
        kept = {} if decays else {place: np.full_like(rows.get(place, self.n.x(place)), value)}
        total = (z - a) * self.width
        given = {**rows, **silent, **kept, **also, self.how.state: state}
        out = _again(self.n, (1, 1, 1, total + self.kept), given)
        flat = out.reshape(*out.shape[:-4], -1)
        return flat[..., :total], flat[..., total:]

    def newest(self, states: Any) -> Any:
        """The first of the states that were given, in its own shape."""
        return states[..., : int(np.prod(self.shape))].reshape(*states.shape[:-1], *self.shape)

    def joined(self, reads: Sequence[Any], states: Any) -> Any:
        """As the op gives both."""
        return np.concatenate([*reads, states], axis=-1).reshape(*states.shape[:-1], *self.n.shape)


@at_nodes("SSM_CONV", *RECURRENCES, fix="keep the state for the next batch")
def state_lost(site: Site) -> Iterator[Edit]:
    """The state of a convolution or a recurrence is lost between batches, is an older one, or went on too far."""
    edges, is_conv = site.case.run.edges, site.node.op == "SSM_CONV"
    says = {"zeros": "a state of zeros", "older": "a state that is one batch old"}
    if not is_conv:
        says |= {"decayed": "a state that has decayed once more", "twice": "a state that has its first token already"}
    batches = list(range(1, len(edges) - 1))
    places = [("each batch", batches)] if batches else []
    places += [(f"the batch at token {edges[i]}", [i]) for i in batches[:EDGES] if len(batches) > 1]
    for kind, words in says.items():
        for where, which in places:
            if kind == "older" and which == [1]:  # that of the first is zeros
                continue
            begun = partial(_convolved if is_conv else _scanned, edges, kind, which)
            yield Edit(takes(begun), f"begins {where} with {words}", f"{kind} {where}")


def _convolved(edges: Sequence[int], kind: str, which: Sequence[int], n: Op) -> Any:
    """Batches of a convolution, some of which begin with other values before them."""
    x, before = n.x(), n.x(1).shape[-1] - 1
    begun, parts = [x[..., :before]], []
    for number, (a, z) in enumerate(pairwise(edges)):
        state = begun[-1] if number not in which else 0 * begun[-1] if kind == "zeros" else begun[-2]
        rows = np.concatenate([state, x[..., before + a : before + z]], axis=-1)
        parts.append(_again(n, (*n.shape[:-2], z - a, n.shape[-1]), {0: rows}))
        begun.append(rows[..., rows.shape[-1] - before :])
    return np.concatenate(parts, axis=-2)


def _scanned(edges: Sequence[int], kind: str, which: Sequence[int], n: Op) -> Any:
    """Batches of a recurrence, some of which begin with another state."""
    scan, reads = _Scan(n), []
    begun = [scan.state]
    for number, (a, z) in enumerate(pairwise(edges)):
        state = begun[-1]
        if number in which:
            again = kind in ("decayed", "twice")
            other = scan.newest(scan.run(a, a + 1, state, writes=kind == "twice")[1]) if again else begun[-2]
            state = 0 * state if kind == "zeros" else other
        read, states = scan.run(a, z, state)
        reads.append(read)
        begun.append(scan.newest(states))
    return scan.joined(reads, states)


@at_nodes(*RECURRENCES, fix="let what a token wrote decay with each token after it, within a batch too")
def decay_missing_in_batch(site: Site) -> Iterator[Edit]:
    """What tokens of a batch wrote into the state is read without its decay: a mask is causal, and does not decay."""
    if any(z - a > 1 for a, z in pairwise(site.case.run.edges)):
        yield Edit(
            takes(partial(_undecayed, site.case.run.edges)), "reads what its batch has written without its decay"
        )


def _undecayed(edges: Sequence[int], n: Op) -> Any:
    scan, reads = _Scan(n), []
    state = scan.state
    for a, z in pairwise(edges):
        old, new = state, 0 * state
        for token in range(a, z):
            faded = scan.newest(scan.run(token, token + 1, state, writes=False)[1])
            states = scan.run(token, token + 1, state)[1]
            state = scan.newest(states)
            old, new = scan.newest(scan.run(token, token + 1, old, writes=False)[1]), new + state - faded
            reads.append(scan.run(token, token + 1, old + new, writes=False, decays=False)[0])
    return scan.joined(reads, states)


@at_nodes("SSM_SCAN", "GATED_DELTA_NET", fix="give each head the group that llama.cpp gives it")
def recurrence_group_wrong(site: Site) -> Iterator[Edit]:
    """Heads of a recurrence share the groups of B and C, or of queries and keys, in the other order."""
    is_scan = site.node.op == "SSM_SCAN"
    places = (B, C) if is_scan else (0, 1)
    heads, groups = site.shape(1 if is_scan else 2)[-2], site.shape(places[0])[-2]
    if 1 < groups < heads:
        spread: Callable[[Any], Any] = partial(_tiled if is_scan else _repeated, heads // groups)
        first, second = (changed(place, spread) for place in places)
        what, right, wrong = ("B and C", f"h // {heads // groups}", f"h % {groups}")
        if not is_scan:
            what, right, wrong = ("queries and keys", f"h % {groups}", f"h // {heads // groups}")
        says = f"reads group {wrong} of {what} for head h; this model reads {right}"
        yield Edit(after(first, second), says, fix=f"read group {right} of {what} for head h")


def _tiled(times: int, x: Any) -> Any:
    return np.concatenate([x] * times, axis=-2)


def _repeated(times: int, x: Any) -> Any:
    return np.repeat(x, times, axis=-2)


@at_nodes(*RECURRENCES, fix="give each token of the recurrence its own row of every input")
def recurrence_input_misplaced(site: Site) -> Iterator[Edit]:
    """A recurrence reads one of its inputs a token late or early, or reads zeros for it."""
    for place, name in RECURRENCES[site.node.op].rows.items():
        for by, which in ((1, "before"), (-1, "after")):
            moved = changed(place, partial(moved_on, by=by, axis=-2 if name == "dt" else -3))
            yield Edit(moved, f"takes {name} of the token {which}", f"{name} {by:+d}")
        if name != "g":
            yield Edit(changed(place, np.zeros_like), f"takes zeros for {name}", f"{name} zeros")


@at_nodes("SSM_SCAN", fix="take the step size as softplus gives it", general=True)
def step_size_limited(site: Site) -> Iterator[Constant]:
    """The step size of a state space is limited to a range that the model does not have."""
    for variant, words, limit in (("above", "at most", np.minimum), ("below", "at least", np.maximum)):
        says = partial("limits the step size to {} {:.4g}; the model does not".format, words)
        sought = Sought(1e-4, 1e3, lambda value, own, says=says: says(value), STEPS)  # type: ignore[misc]
        yield Constant(partial(_limited, limit), sought, variant=variant)


def _limited(limit: Callable[[Any, float], Any], value: float) -> Alter:
    return takes(lambda n: selective_scan(n, limit(softplus(n.x(DT).astype(np.float64)), value)))


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


def _uncorrected(n: Op) -> Any:
    """Gated linear attention: to each value is added first what the net will take off it."""
    scan, reads = _Scan(n), []
    state, heads = scan.state, n.x(2).shape[-2]
    for token in range(scan.tokens):
        faded = scan.newest(scan.run(token, token + 1, state, writes=False)[1])
        rows = scan.how.part(n, token, token + 1)
        keys = np.take(rows[1], np.arange(heads) % rows[1].shape[-2], axis=-2)
        told = np.einsum("...shij,...sthj->...sthi", faded, keys)
        read, states = scan.run(token, token + 1, state, also={2: rows[2] + told})
        reads.append(read)
        state = scan.newest(states)
    return scan.joined(reads, states)


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
        "writes values as they are": (takes(_uncorrected), "take off a value what the state already says of its key"),
    }  # fmt: skip
    for says, (alter, fix) in edits.items():
        yield Edit(alter, says, says, fix=fix)
