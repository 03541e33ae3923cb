"""Nodes whose sums are kept in float16: their outputs, or some, are added in the order in which a kernel does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from llamaref.sums import Matrix

from llamadiff.ggml.check import Recomputed, distance
from llamadiff.ggml.op import Array, Op
from llamadiff.ggml.ops.products import matrices
from llamadiff.numerics.half_sums import OF_CPUS, Order, lost, order_of, outputs_to_follow
from llamadiff.numerics.halves import round_f16

Compute = Callable[[Op], Array]
PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")
ON_CPU = "F16, sums in F16"
BEYOND = 10  # times a loss from which on a node is WRONG


@dataclass(frozen=True)
class InHalf:
    """A product whose operands are float16's numbers, and what a kernel ``found``."""

    n: Op
    found: Array

    @cached_property
    def outputs(self) -> Array:
        """Those that are followed."""
        return outputs_to_follow(self.found.shape, self.n.x(1).shape[-1])

    @cached_property
    def products(self) -> Sequence[Matrix]:
        """Each with these outputs alone."""
        weights = self.n.sources[0]
        assert weights is not None
        stored = weights.values[..., self.outputs, :]
        w = np.asarray(stored if weights.decode is None else weights.decode(stored), np.float32)
        return list(matrices(self.n, w.reshape(*[1] * (4 - w.ndim), *w.shape), self.n.x(1)))

    def order(self, orders: Sequence[Order], likely: Order | None = None) -> Order | None:
        """The one that gives what was found."""
        return order_of(self.products, self.found[..., self.outputs], orders, likely)

    def recomputed(self, order: Order, enough: float, compute: Compute, name: str) -> Recomputed | None:
        """What that order gives, if it is what was found; of outputs that are not followed, up to what they lose."""
        found = self.found[..., self.outputs]
        values = np.zeros(found.shape, np.float32)
        for product in self.products:
            values[product.place] = order.added(product.w, product.x)
        exact = fits(self.n, found, enough, name, values)
        if exact is None or len(self.outputs) == self.found.shape[-1]:
            return exact
        whole = compute(self.n).reshape(self.found.shape)
        whole[..., self.outputs] = values
        return nearly(self.n, self.found, lost(self.products, order), whole, name)


def on_cpu(n: Op, found: Array, enough: float, compute: Compute) -> Recomputed | None:
    """A product by float16's numbers as CPUs add it that multiply them as such; None if it is none."""
    if n.name not in PRODUCTS or n.source_kind() != "f16":
        return None
    weights, activations, *others = n.sources
    assert activations is not None
    x = replace(activations, values=round_f16(activations.values))
    node = InHalf(replace(n, exact=True, sources=(weights, x, *others)), found)
    with np.errstate(all="ignore"):
        order = node.order(OF_CPUS)
        return None if order is None else node.recomputed(order, enough, compute, ON_CPU)


def fits(n: Op, found: Array, enough: float, name: str, values: Array) -> Recomputed | None:
    """Values, if they are what was found."""
    nmse = distance(n, values, found)
    return Recomputed(nmse, name, values) if nmse <= enough else None


def nearly(n: Op, found: Array, loss: float, values: Array, name: str) -> Recomputed | None:
    """The same of sums that were not followed, with what they may lose."""
    best = fits(n, found, BEYOND * loss, name, values)
    return None if best is None else replace(best, rounding=loss)
