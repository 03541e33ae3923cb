"""A span read back: from its recorded end, one op after another, to what an inner op must have given.

Each op after a wrong one is right, so that what it read follows from what it gave: a sum less its other term, a
product solved for its input, weights of V's rows. What is uncovered like that is read as if it had been recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from llamadiff.ext.explain.alter import takes
from llamadiff.ext.explain.case import Array, Case, NotRecordedError
from llamadiff.ext.explain.read_back.activation import RIGHT
from llamadiff.ext.explain.read_back.attention import rows_of_v
from llamadiff.ext.explain.read_back.reading import read_back
from llamadiff.ext.explain.subgraph import Subgraph, as_node, subgraph_of
from llamadiff.ext.graph.graph import tap_shape
from llamadiff.judge.fact import Fact

Uncovered = Iterator[tuple[str, Array]]
SOLVED = 1e-3  # of an error, that an op may leave which is solved for its input
MOST = 0.5  # of the tokens, that are solved for the values that they had
KNOTS, FITTED = 160, 1 << 17  # of a curve, and values of gate that it is fitted to
LARGEST, MOST_WEIGHTS = 1 << 22, 1 << 25  # values of a weight that is solved, and of one that is looked at
STEPS, DIRECTIONS = 10, 30  # of Newton; of a Krylov space
LEFT = 0.1  # of a step of Newton's, that a system may leave: the next one sees to it
STEP = 1e-3  # of a row's size, along which a derivative is taken
SETTLED = 1e-6  # of the wanted rows' size, that may be left
SHARES = (1.0, 0.5, 0.2, 0.05)  # of a step, of which each row takes the one that leaves least


def read_inside(case: Case, in_graph: Case) -> tuple[Fact, ...]:
    """What an op of a span did, the last one whose reading explains all that its end shows; nothing if none does.

    ``in_graph``: the same case in llama.cpp's graph, which is computed again until its time is over.
    """
    with suppress(NotRecordedError, np.linalg.LinAlgError), np.errstate(all="ignore"):
        span = Span.of(case, in_graph)
        for name, values in span.uncovered():
            facts = span.read(name, values)
            if facts:
                return tuple(replace(fact, says=f"in {name} {fact.says}") for fact in facts)
    return ()


@dataclass(frozen=True)
class Span:
    """A span and the right values of its taps, by name."""

    case: Case
    in_graph: Case
    sub: Subgraph
    right: Mapping[str, Array]

    @classmethod
    def of(cls, case: Case, in_graph: Case) -> Span:
        """Raises NotRecordedError where the graph does not give the span's end."""
        in_graph = replace(in_graph, run=replace(in_graph.run, carrier=in_graph.run.carrier.first))
        run, sub = in_graph.run, subgraph_of(in_graph)
        values, shapes = sub.right_values(in_graph), run.shapes
        n, right = len(case.run.tokens), dict[str, Array]()
        for node in sub.nodes:
            if node.label is not None and node.label in shapes and sub.computes(node):
                x = values[node.number]
                x = x[0].reshape(tap_shape(node, n))
                x = x[..., :n] if x.size != np.prod(shapes[node.label]) else x
                if x.size != np.prod(shapes[node.label]):  # some tokens of a prompt, whose keys are all of it
                    raise NotRecordedError(node.label)
                right[node.label] = np.asarray(x, np.float64).reshape(shapes[node.label])
        if case.tap.name not in right:
            raise NotRecordedError(case.tap.name)
        return cls(case, in_graph, sub, right)

    def values(self, name: str) -> Array:
        """A tap's recorded values, or those that it has where all before it is right: [1, ...]."""
        try:
            return self.case.values(name)
        except NotRecordedError:
            if name not in self.right:
                raise
            return self.right[name][None]

    def read(self, name: str, values: Array) -> tuple[Fact, ...]:
        """What the op of a tap did that gave these values."""
        tap = self.case.of(name).tap
        case, in_graph = (replace(c, tap=tap, recorded=values, values=self.values) for c in (self.case, self.in_graph))
        return read_back(case, in_graph, None if name == self.case.tap.name else partial(self._left, name))

    def _left(self, name: str, values: Array) -> float:
        """What of the error at the span's end is left if a tap has these values."""
        end = np.asarray(self.case.recorded, np.float64)
        left, error = end - self._end_with(name, values), end - self.right[self.case.tap.name]
        return float(np.square(left).sum() / np.square(error).sum())

    def uncovered(self) -> Uncovered:
        """The end of a span, and taps before it with the values that they must have had, if all after them is right."""
        assert self.case.recorded is not None
        end = np.asarray(self.case.recorded, np.float64)
        yield self.case.tap.name, end
        yield from self._before(self.case.tap.name, end)

    def _before(self, name: str, given: Array) -> Uncovered:
        for below, values in self._inputs(name, given):
            if np.isfinite(values).all():
                yield below, values
                yield from self._before(below, values)

    def _inputs(self, name: str, given: Array) -> Uncovered:
        """An op's inputs that were not recorded, each as it must have been if the op and its other inputs are right."""
        tap = self.case.of(name).tap
        inputs, op = self.case.run.model.inputs(tap), tap.kind.op
        if op == "ADD" and len(inputs) == 2:
            for inner, other in (inputs, inputs[::-1]):
                if inner in self.right:
                    depends = inner in self._behind(other)
                    yield inner, self._residual(inner, given) if depends else given - self._at(other)
        elif tap.kind.word == "kqv_out" and len(inputs) == 2 and inputs[0] in self.right:
            yield from self._weights(inputs, given)
        elif op == "MUL_MAT" and len(inputs) == 1 and inputs[0] in self.right and name in self._matrices:
            yield from self._factor(name, inputs[0], given)

    @property
    def _matrices(self) -> Mapping[str, str]:
        return self.case.run.model.weight_names

    def _at(self, name: str) -> Array:
        return np.asarray(self.values(name)[0], np.float64).reshape(self.case.run.shape(name))

    def _behind(self, name: str) -> set[str]:
        """All taps of the span that a tap is computed from."""
        if name not in self.right:
            return set()
        tap = self.case.of(name).tap
        inputs = self.case.run.model.inputs(tap)
        return set(inputs).union(*(self._behind(each) for each in inputs))

    def _residual(self, name: str, wanted: Array) -> Array:
        """A tap x with x + f(x) = wanted, where f is what the graph makes of it before it is added; else NaN.

        Of several such rows, one near the right one; of a few that are not found, the right ones.
        """
        right = self.right[name]
        found = solved_by_rows(lambda x: self._end_with(name, x), wanted, right)
        if not np.isfinite(found).all():
            start = right + (wanted - self.right[self.case.tap.name])
            again = solved_by_rows(lambda x: self._end_with(name, x), wanted, start)
            found = np.where(np.isfinite(found), found, again)
        solved = np.isfinite(found).all(axis=-1, keepdims=True)
        return np.where(solved, found, right) if solved.mean() > MOST else found

    def _end_with(self, name: str, x: Array) -> Array:
        """The span's end, if a tap has other values."""
        node = self.sub.engine.graph.labelled[name]
        values = as_node(x[None], node, len(self.case.run.tokens))
        altered = {node.number: takes(lambda op: values)}
        given = replace(self.sub, altered=altered).compute(self.in_graph)[0]
        return np.asarray(given, np.float64).reshape(self.case.run.shape(self.case.tap.name))

    def _factor(self, name: str, inner: str, given: Array) -> Uncovered:
        """What a matrix was multiplied by: of as many outputs as inputs, solved; else as a curve of the activation."""
        weights = self.case.engine.w
        if np.prod(weights.shape(self._matrices[name])) > MOST_WEIGHTS:
            return
        w = np.asarray(weights.whole(self._matrices[name]), np.float64)
        right = self._at(inner)
        error = (given - self._at(name)).reshape(-1, len(w))
        if w.shape[0] >= w.shape[1] and w.size <= LARGEST:
            yield from self._solved(w, error, inner, right)
        else:
            yield from self._activated(w, error, inner, right)

    def _solved(self, w: Array, error: Array, inner: str, right: Array) -> Uncovered:
        x = np.linalg.lstsq(w, error.T, rcond=None)[0].T
        if np.square(x @ w.T - error).sum() <= SOLVED * np.square(error).sum():
            yield inner, right + x.reshape(right.shape)

    def _activated(self, w: Array, error: Array, inner: str, right: Array) -> Uncovered:
        """An activation that is another function of gate, times up; or that times another function of up."""
        tap = next(tap for tap in self.case.run.model.taps if tap.name == inner)
        inputs = self.case.run.model.inputs(tap)
        if tap.kind.op not in RIGHT or len(inputs) != 2:
            return
        gate, up = (self._at(each).reshape(len(error), -1) for each in inputs)
        for of, times in ((gate, up), (up, RIGHT[tap.kind.op][1](gate))):
            change = _curve(w, error, of, times)
            if change is not None:
                yield inner, right + change.reshape(right.shape)

    def _weights(self, inputs: Sequence[str], given: Array) -> Uncovered:
        """The weights of V's rows that give a token's sums, head by head; the right ones where none do.

        Such a token was solved for other values than it had: another root of what follows.
        """
        p, heads, tokens = self.right[inputs[0]], len(self.right[inputs[0]]), len(given)
        out = given.reshape(tokens, heads, -1)
        v = rows_of_v(self.values, self.case.layer).reshape(tokens, -1, out.shape[-1])
        if tokens > out.shape[-1]:
            return
        found, left = p.copy(), np.zeros(tokens)
        for h in range(heads):
            rows = v[:, h // max(1, heads // v.shape[1])]
            for t in range(tokens):
                seen, root = rows[: t + 1].T, np.sqrt(p[h, t, : t + 1])  # so that equal rows change by equal shares
                change = out[t, h] - seen @ p[h, t, : t + 1]
                found[h, t, : t + 1] += root * np.linalg.lstsq(seen * root, change, rcond=1e-7)[0]
                left[t] += float(np.square(seen @ found[h, t, : t + 1] - out[t, h]).sum())
        size = np.square(given).reshape(tokens, -1).sum(axis=-1)
        solved = left <= SOLVED**2 * size
        if solved.mean() > MOST:
            yield inputs[0], np.where(solved[:, None], found, p)


def _curve(w: Array, error: Array, of: Array, times: Array) -> Array | None:
    """The change c(of) * times, c piecewise linear, of what a matrix is multiplied by, that explains an error."""
    knots = np.unique(np.quantile(of, np.linspace(0, 1, KNOTS)))
    some = slice(0, max(2, FITTED // of.shape[1]))  # tokens that it is fitted to
    hats = (np.interp(of[some], knots, hat) * times[some] for hat in np.eye(len(knots)))
    terms = np.stack([(hat @ w.T).ravel() for hat in hats], axis=1)
    if len(terms) < 2 * len(knots):
        return None
    heights = np.linalg.lstsq(terms, error[some].ravel(), rcond=1e-9)[0]
    change = np.interp(of, knots, heights) * times
    return change if np.square(change @ w.T - error).sum() <= SOLVED * np.square(error).sum() else None


def solved_by_rows(f: Callable[[Array], Array], wanted: Array, x: Array) -> Array:
    """Rows x [row, n] with f(x) = wanted, from some near them; NaN where none is found. f's rows are independent.

    By Newton's method, each row with a system of its own (Knoll and Keyes, Jacobian-free Newton-Krylov methods, 2004):
    a row's derivative is only asked what it makes of a direction.
    """
    size = _sizes(wanted)
    gap = wanted - f(x)
    for _ in range(STEPS):
        if not np.isfinite(gap).all() or (_sizes(gap) <= SETTLED * size).all():
            break
        step = _krylov(f, x, wanted - gap, gap)
        tried = [x + share * step for share in SHARES]
        gaps = [wanted - f(each) for each in tried]
        best = np.argmin([np.nan_to_num(_sizes(each), nan=np.inf) for each in gaps], axis=0)[..., 0]
        rows = np.arange(len(x))
        after = np.stack(gaps)[best, rows]
        if (_sizes(after) >= 0.99 * _sizes(gap)).all():
            break
        x, gap = np.stack(tried)[best, rows], after
    return np.asarray(np.where(_sizes(gap) <= 100 * SETTLED * size, x, np.nan))


def _krylov(f: Callable[[Array], Array], x: Array, at: Array, gap: Array) -> Array:
    """The step that f's derivative at x, where f is ``at``, turns into most of the gap: by GMRES, in each row."""
    length = np.maximum(_sizes(gap), 1e-300)
    along = STEP * np.maximum(_sizes(x), 1e-300)
    basis = [gap / length]
    made = np.zeros((len(x), DIRECTIONS + 1, DIRECTIONS))  # what each direction is turned into, in the basis
    shares: Array = np.zeros((len(x), 1))
    for k in range(min(DIRECTIONS, x.shape[-1])):
        new = (f(x + along * basis[k]) - at) / along
        for _ in range(2):  # a second time for what rounding left
            for i, each in enumerate(basis):
                part = (new * each).sum(axis=-1)
                new, made[:, i, k] = new - part[:, None] * each, made[:, i, k] + part
        made[:, k + 1, k] = _sizes(new)[:, 0]
        system = made[:, : k + 2, : k + 1]
        if not np.isfinite(system).all():
            break
        shares = np.linalg.pinv(system, rcond=1e-8)[..., 0]
        left = (system @ shares[..., None])[..., 0] - np.eye(1, k + 2)
        if (_sizes(left) <= LEFT).all():
            break
        basis.append(new / np.maximum(_sizes(new), 1e-300))
    step: Array = length * np.einsum("rk,krn->rn", shares, np.stack(basis[: shares.shape[1]]))
    return step


def _sizes(x: Array) -> Array:
    return np.asarray(np.sqrt(np.square(x).sum(axis=-1, keepdims=True)))
