"""Any op read back by its inputs: which of them it read in another way, or what it read in the place of one.

Each guess is a change of one input, after which the op itself is computed again; what then gives the values is said. So
it holds for every op that llama.cpp's graph has, and for those that nothing else reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from llamadiff.ext.explain.alter import changed, instead, moved_on
from llamadiff.ext.explain.budget import Budget
from llamadiff.ext.explain.case import Case
from llamadiff.ext.explain.read_back.observed import LEFT, Array, Facts
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.solve import Sought, solve
from llamadiff.ext.explain.subgraph import Subgraph, subgraph_of
from llamadiff.ext.explain.together import errors
from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.graph import LOOKS
from llamadiff.judge.fact import Fact

Guess = tuple[str, Alter]
WORK = 5e8  # multiply-adds
MOST = 1 << 22  # values of an input that is changed
FEWER = 1 << 18  # the same, and of results, where a constant is solved for
OTHERS = 24  # recorded taps that may have been read in an input's place
SOUGHT = Sought(1e-4, 1e3, lambda value, own: "", steps=8)
FAMILIAR = (0.01, 0.1, 1.0, 10.0)
SHARES = (0.01, 0.1, 0.3, 0.6, 0.8, 0.9, 0.97, 0.99, 0.999)  # of an input's values, beyond which a limit is tried first
LIMITS: Mapping[str, Callable[..., Any]] = {"{0} as at most {1}": np.minimum, "{0} as at least {1}": np.maximum}
OF_SINKS: Mapping[str, Callable[..., Any]] = {"{0} plus {1}": np.add}
SPARED = 0.02  # of an input's values, that a limit must leave as they are
SINKS = 2  # their place among a softmax's sources
POINTWISE = frozenset({
    "MUL", "ADD", "SUB", "DIV", "SILU", "GELU", "GELU_QUICK", "GELU_ERF", "SIGMOID", "SOFTPLUS", "TANH", "EXP", "RELU",
    "SWIGLU", "GEGLU", "REGLU", "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU_OAI", "SCALE", "SQR", "SQRT",
})  # fmt: skip


def by_inputs(case: Case) -> Facts:
    """What an op of llama.cpp's graph did with one of its inputs: in all rows, or in those that are wrong."""
    case = replace(case, budget=Budget(WORK))
    base = subgraph_of(case)
    right = base.compute(case)
    part = case.part_of(right)
    for some, words in ((case, ""), *([(replace(case, part=part), f", {part.words}")] if part is not None else [])):
        leaves = LEFT * some.nmse(right)
        if not np.isfinite(leaves):  # where nothing is right but zeros, all that is not zero is as far from it
            continue
        sites = [Site(node, base, some) for node in base.nodes if base.computes(node) and node.op not in LOOKS]
        guesses = [(says, site, alter) for site in sites for says, alter in _guesses(site)]
        subs = [replace(base, altered={site.node.number: alter}) for _, site, alter in guesses]
        left = list(errors(some, subs))
        best = min(range(len(left)), key=left.__getitem__, default=None)
        if best is not None and left[best] <= leaves:
            yield Fact("input", f"{guesses[best][0]}{words}", ())
            return
        for site in sites:
            found = next(_constants(site, some, base, leaves), None)
            if found is not None:
                yield Fact("input constant", f"{found}{words}", ())
                return


def _guesses(site: Site) -> Iterator[Guess]:
    """What may have been read otherwise, of each input that is computed."""
    tokens = len(site.case.run.tokens)
    for place, number in enumerate(site.node.sources):
        if number is None or site.weight(place) or np.prod(site.shape(place)) > MOST or site.direct(place) == "":
            continue
        name, shape = site.named(place), site.shape(place)
        for says, change in _changes(shape, tokens):
            yield f"it reads {says.format(name)}", changed(place, change)
        for other, x in _others(site, place, name):
            yield f"it reads {other} in the place of {name}", instead(place, x)


def _changes(shape: tuple[int, ...], tokens: int) -> Iterator[tuple[str, Callable[[Array], Any]]]:
    """Changes of an input's values [.., ne3, ne2, ne1, ne0]: rows of tokens, the order of heads, signs."""
    for axis in [axis for axis in (-2, -3) if shape[axis] == tokens > 1][:1]:
        yield "{} of the token before", partial(moved_on, by=1, axis=axis)
        yield "{} of the token after", partial(moved_on, by=-1, axis=axis)
        yield "the first token's {}", partial(_row, place=0, axis=axis)
        yield "the last token's {}", partial(_row, place=-1, axis=axis)
        heads = -3 if axis == -2 else -2
        for says, order in _orders(shape[heads]):
            yield f"the heads of {{}} {says}", partial(np.take, indices=order, axis=heads)
    yield "{} with the other sign", np.negative
    yield "the size of {}, without its sign", np.abs


def _row(x: Array, place: int, axis: int) -> Array:
    return np.broadcast_to(np.take(x, [place], axis=axis), x.shape)


def _orders(heads: int) -> Iterator[tuple[str, Array]]:
    """Orders of heads that are not their own."""
    every = np.arange(heads)
    if heads > 1:
        yield "one further on", np.roll(every, -1)
        yield "one further back", np.roll(every, 1)
    if heads > 2:
        yield "in reverse", every[::-1]
    for group in (size for size in range(2, heads // 2 + 1) if heads % size == 0):
        yield f"in turns of {group}", every.reshape(-1, group).T.ravel()


def _others(site: Site, place: int, name: str) -> Iterator[tuple[str, Array]]:
    """Recorded taps of the same size that may have been read in an input's place."""
    for number, (other, x) in enumerate(site.recorded(site.shape(place))):
        if number == OTHERS:
            return
        if other not in (name, site.case.tap.name):
            yield other, x


def _constants(site: Site, case: Case, base: Subgraph, leaves: float) -> Iterator[str]:
    """An input of an op of single values that is kept within a bound, or sinks that a constant is added to."""
    for place, number in enumerate(site.node.sources):
        are_sinks = site.node.op == "SOFT_MAX" and place == SINKS
        if number is None or not (are_sinks or (site.node.op in POINTWISE and not site.weight(place))):
            continue
        if max(np.prod(site.shape(place)), np.prod(site.node.shape)) > FEWER:
            continue
        for words, change in (OF_SINKS if are_sinks else LIMITS).items():
            for sign in (1.0, -1.0):
                build = partial(_with_constant, base, site.node.number, place, change, sign)
                x = base.right_values(case).get(number, np.zeros(1))
                tried = (*FAMILIAR, *_shares(sign * x))
                for value in solve(replace(case, limit=leaves, hint=None), build, SOUGHT, tried):
                    is_all = not are_sinks and float(np.mean(change(x, sign * value) == x)) < SPARED
                    if not is_all and next(errors(case, [build(value)])) <= leaves:
                        yield f"it takes {words.format(site.named(place), f'{sign * value:.4g}')}"


def _shares(x: Array) -> list[float]:
    """What so many of its positive values are below."""
    positive = x[(x > 0) & np.isfinite(x)]
    return [float(value) for value in np.quantile(positive, SHARES)] if positive.size else []


def _with_constant(
    base: Subgraph, node: int, place: int, change: Callable[..., Any], sign: float, value: float
) -> Subgraph:
    constant = np.float32(sign * value)
    return replace(base, altered={node: changed(place, lambda x: change(x, constant))})
