"""Nodes whose kernels round otherwise than ggml's on most CPUs, as a device's do: the nodes show how.

What a kernel rounds before it adds can be followed exactly, and so can sums in float16 whose order is known: such a
node is held to the limit that every node has. An order that is not known leaves a loss whose size follows from the
partial sums; it is granted where the results themselves are float16 numbers, and most nodes of the kind show the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from llamaref.sums import Matrix

from llamadiff.ext.cpus.half_sums import OF_CPUS, OF_DEVICES, Order, kept_in_half, lost, order_of, outputs_to_follow
from llamadiff.ext.graph import op
from llamadiff.ext.graph.check import NodeCheck, Recomputed, distance, replay
from llamadiff.ext.graph.op import Array, Op, Operand
from llamadiff.ext.graph.ops.attention import lost_in_half
from llamadiff.ext.graph.ops.products import PRODUCTS, matrices
from llamadiff.ext.graph.ops.rope import turned_as
from llamadiff.numerics.arithmetic import round_blocks
from llamadiff.numerics.cpu import PLAIN
from llamadiff.numerics.eight_bits import round_q8_0
from llamadiff.numerics.halves import round_bf16, round_f16

Decoder = Callable[[str], Callable[[Array], Array]]
Compute = Callable[[Op], Array]
ON_CPU = "F16, sums in F16"
BEYOND = 10  # times a loss from which on a node is WRONG
ANGLE, LEAST = 2.0**-20, 2.0**-22  # how far off float32 leaves an angle: of itself, and in radians


def _as_is(x: Array) -> Array:
    return x


def round_tf32(x: Array) -> Array:
    """Through TF32, which keeps ten bits of a float32's 23: to the nearest, halves away from zero."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.asarray(((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32))


def cut_tf32(x: Array) -> Array:
    """Through TF32, cut off."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.asarray((bits & np.uint32(0xFFFFE000)).view(np.float32))


@dataclass(frozen=True)
class Rounds:
    """What a kernel makes of a product's operands before it multiplies them, in float32."""

    weights: Callable[[Array], Array]
    activations: Callable[[Array], Array]
    block: int = 1  # values that activations are rounded by


# In ggml's sources: ggml-vulkan's matmul (F16, BF16), cuBLAS (F16, BF16, TF32), and the kernels of both that multiply
# whole numbers (activations in blocks of 32, their scale in float16 or in float32).
ROUNDS: Mapping[str, Rounds] = {
    "F16 by F16": Rounds(round_f16, round_f16),
    "BF16 by BF16": Rounds(round_bf16, round_bf16),
    "activations in F16": Rounds(_as_is, round_f16),
    "activations in BF16": Rounds(_as_is, round_bf16),
    "activations in Q8_0": Rounds(_as_is, lambda x: round_q8_0(x, PLAIN), 32),
    "activations in Q8_0, scales in F32": Rounds(_as_is, lambda x: round_blocks(x, 32), 32),
    "TF32 by TF32": Rounds(round_tf32, round_tf32),
    "TF32 by TF32, cut off": Rounds(cut_tf32, cut_tf32),
}
HALF = "F16 by F16, sums in F16"


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


class DeviceArithmetics:
    """What its nodes have shown so far: an arithmetic that fitted a kind of node is tried first at the next."""

    def __init__(self, compute: Compute, decoder: Decoder | None = None) -> None:
        """``compute``: what an op gives; ``decoder``: what makes floats of a weight of the file, by its name."""
        self.compute, self.decoder = compute, decoder
        self.shown: dict[tuple[str, str], str] = {}
        self.order: Order | None = None

    def explained(self, n: Op, found: Array, enough: float) -> Recomputed | None:
        """The arithmetic of devices that gives what was found, to ``enough``; None if none does."""
        with np.errstate(all="ignore"):
            if n.name == "ROPE":
                return fits(n, found, enough, "angles in F32", turned_as(replace(n, exact=True), found, ANGLE, LEAST))
            if n.name == "FLASH_ATTN_EXT":
                return self._attention(n, found)
            return self._product(n, found, enough) if n.name in PRODUCTS else None

    def _attention(self, n: Op, found: Array) -> Recomputed | None:
        """Q, K and V in float16, and sums of weighted values kept in it, in an order of the kernel's own."""
        q, k, v = (replace(s, values=round_f16(s.values)) for s in n.sources[:3] if s is not None)
        m = replace(n, exact=True, sources=(q, k, v, *n.sources[3:]))
        best = nearly(n, found, lost_in_half(m), self.compute(m), HALF)
        return None if best is None else replace(best, estimated=True)

    def _product(self, n: Op, found: Array, enough: float) -> Recomputed | None:
        if kept_in_half(found):
            return self._in_half(n, found, enough)
        kind = n.name, n.source_kind()
        for name in self._likely_first(kind):
            best = self._with(n, found, enough, name)
            if best is not None:
                self.shown[kind] = name
                return best
        return None

    def _likely_first(self, kind: tuple[str, str]) -> Iterator[str]:
        likely = self.shown.get(kind)
        yield from (name for name in ROUNDS if name == likely)
        yield from (name for name in ROUNDS if name != likely)

    def _with(self, n: Op, found: Array, enough: float, name: str) -> Recomputed | None:
        rounds = ROUNDS[name]
        if n.x(1).shape[-1] % rounds.block:
            return None
        return fits(n, found, enough, name, self.compute(self._rounded(n, rounds)))

    def _rounded(self, n: Op, rounds: Rounds) -> Op:
        """The op on operands that are rounded already, to be computed exactly."""
        weights, activations, *others = n.sources
        assert weights is not None
        assert activations is not None
        x = np.asarray(rounds.activations(activations.values), np.float32)
        return replace(n, exact=True, sources=(self._weights(weights, rounds), replace(activations, values=x), *others))

    def _weights(self, weights: Operand, rounds: Rounds) -> Operand:
        """Rounded as they are decoded, where they are the file's."""
        if not self._is_of_file(weights):
            return replace(weights, values=rounds.weights(weights.values))
        assert self.decoder is not None
        decode = self.decoder(weights.name)
        return replace(weights, decode=lambda stored: rounds.weights(decode(stored)))

    def _is_of_file(self, weights: Operand) -> bool:
        return self.decoder is not None and weights.values.ndim < 4

    def _in_half(self, n: Op, found: Array, enough: float) -> Recomputed | None:
        """Sums in float16: followed where their order is known; where it is not, with what such sums lose."""
        node = InHalf(self._rounded(n, ROUNDS["F16 by F16"]), found)
        self.order = order = node.order(OF_DEVICES, self.order)
        if order is not None:
            return node.recomputed(order, enough, self.compute, HALF)
        best = nearly(n, found, lost(node.products, OF_DEVICES[-2]), self.compute(node.n), HALF)
        return None if best is None else replace(best, estimated=True)


def replayed(
    n: Op, found: Array, compute: Compute | None, enough: float, device: DeviceArithmetics | None
) -> Recomputed | None:
    """``replay`` in ggml's arithmetics on the CPU; where none fits, as CPUs add in float16, or as a ``device`` does."""
    best = replay(n, found, compute, enough)
    if best is None or best.nmse <= enough + best.rounding:
        return best
    if device is None:
        return on_cpu(n, found, enough, compute or op.compute) or best
    return device.explained(n, found, enough) or best


def settled(checks: Sequence[NodeCheck]) -> list[NodeCheck]:
    """A loss that was only estimated is granted where most of the kind (an op by one weight of each layer) show it.

    Where the others of its kind were followed exactly, a node that was not is wrong.
    """
    kinds = [(check.op, re.sub(r"\d+", "", check.weight or check.name)) for check in checks]
    every = Counter(kinds)
    estimated = Counter(kind for kind, check in zip(kinds, checks, strict=True) if check.estimated)
    out = []
    for kind, check in zip(kinds, checks, strict=True):
        granted = not check.estimated or 2 * estimated[kind] > every[kind]
        out.append(check if granted else replace(check, rounding=0.0))
    return out


class DeviceNodes:
    """Nodes in every arithmetic that is known, those of a device where they ran on one."""

    def __init__(self, compute: Compute, decoder: Decoder, on_device: bool) -> None:
        self.compute, self.device = compute, DeviceArithmetics(compute, decoder) if on_device else None

    def replayed(self, n: Op, found: Array, enough: float) -> Recomputed | None:
        """The first that is within ``enough`` of what was found, or the best; None for an unknown op."""
        return replayed(n, found, self.compute, enough, self.device)

    def settled(self, checks: Sequence[NodeCheck]) -> list[NodeCheck]:
        """What could only be estimated, by what all nodes of a run show."""
        return settled(checks)
