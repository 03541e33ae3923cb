"""Nodes that a device computed: its kernels round otherwise than ggml's on the CPU, and their nodes show how.

What a kernel rounds before it adds can be followed exactly, and so can sums in float16 whose order is known: such a
node is held to the limit that every node has. An order that is not known leaves a loss whose size follows from the
partial sums; it is granted where the results themselves are float16 numbers, and most nodes of the kind show the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamadiff.ggml import half_sums
from llamadiff.ggml.check import NodeCheck, Recomputed, distance, replay
from llamadiff.ggml.op import Array, Op, Operand
from llamadiff.ggml.ops.attention import lost_in_half
from llamadiff.ggml.ops.rope import turned_as
from llamadiff.numerics.arithmetic import round_blocks
from llamadiff.numerics.eight_bits import PLAIN, round_q8_0
from llamadiff.numerics.halves import round_bf16, round_f16

Compute = Callable[[Op], Array]
Decoder = Callable[[str], Callable[[Array], Array]]
PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")
ANGLE, LEAST = 2.0**-20, 2.0**-22  # how far off float32 leaves an angle: of itself, and in radians
BEYOND = 10  # times a limit from which on a node is WRONG


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


class DeviceArithmetics:
    """What its nodes have shown so far: an arithmetic that fitted a kind of node is tried first at the next."""

    def __init__(self, compute: Compute, decoder: Decoder | None = None) -> None:
        """``compute``: what an op gives; ``decoder``: what makes floats of a weight of the file, by its name."""
        self.compute, self.decoder = compute, decoder
        self.shown: dict[tuple[str, str], str] = {}
        self.order: half_sums.Order | None = None

    def explained(self, n: Op, found: Array, enough: float) -> Recomputed | None:
        """The arithmetic of devices that gives what was found, to ``enough``; None if none does."""
        with np.errstate(all="ignore"):
            if n.name == "ROPE":
                return _fits(n, found, enough, "angles in F32", turned_as(replace(n, exact=True), found, ANGLE, LEAST))
            if n.name == "FLASH_ATTN_EXT":
                return self._attention(n, found)
            return self._product(n, found, enough) if n.name in PRODUCTS else None

    def _attention(self, n: Op, found: Array) -> Recomputed | None:
        """Q, K and V in float16, and sums of weighted values kept in it, in an order of the kernel's own."""
        q, k, v = (replace(s, values=round_f16(s.values)) for s in n.sources[:3] if s is not None)
        m = replace(n, exact=True, sources=(q, k, v, *n.sources[3:]))
        best = _nearly(n, found, lost_in_half(m), self.compute(m))
        return None if best is None else replace(best, estimated=True)

    def _product(self, n: Op, found: Array, enough: float) -> Recomputed | None:
        if half_sums.kept_in_half(found):
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
        return _fits(n, found, enough, name, self.compute(self._rounded(n, rounds)))

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
        """Sums in float16: followed where their order is known, for as many outputs as time allows.

        Where the order is not known, and for the other outputs, with what such sums lose.
        """
        rounded = self._rounded(n, ROUNDS["F16 by F16"])
        weights, width = rounded.sources[0], found.shape[-1]
        assert weights is not None
        followed = half_sums.MOST // max(1, found.size // width * n.x(1).shape[-1])
        outputs = half_sums.some(width, max(half_sums.LEAST, followed))
        stored = weights.values[..., outputs, :]
        w = np.asarray(stored if weights.decode is None else weights.decode(stored), np.float32)
        products = list(half_sums.matrices(rounded, w.reshape(*[1] * (4 - w.ndim), *w.shape), rounded.x(1)))
        self.order = order = half_sums.order_of(products, found[..., outputs], self.order)
        if order is None:
            best = _nearly(n, found, half_sums.lost(products), self.compute(rounded))
            return None if best is None else replace(best, estimated=True)
        values = np.zeros((*found.shape[:-1], len(outputs)), np.float32)
        for product in products:
            values[product.place] = half_sums.added(product, order)
        exact = _fits(n, found[..., outputs], enough, HALF, values)
        if exact is None or len(outputs) == width:
            return exact
        whole = self.compute(rounded).reshape(found.shape)
        whole[..., outputs] = values
        return _nearly(n, found, half_sums.lost(products), whole)


def replayed(
    n: Op, found: Array, compute: Compute | None, enough: float, device: DeviceArithmetics | None
) -> Recomputed | None:
    """``replay`` in ggml's arithmetics on the CPU; where none fits, in those of a ``device``."""
    best = replay(n, found, compute, enough)
    if best is None or device is None or best.nmse <= enough + best.rounding:
        return best
    return device.explained(n, found, enough) or best


def _fits(n: Op, found: Array, enough: float, name: str, values: Array) -> Recomputed | None:
    nmse = distance(n, values, found)
    return Recomputed(nmse, name, values) if nmse <= enough else None


def _nearly(n: Op, found: Array, loss: float, values: Array) -> Recomputed | None:
    """Sums in float16, with what they may lose."""
    best = _fits(n, found, BEYOND * loss, HALF, values)
    return None if best is None else replace(best, rounding=loss)


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
