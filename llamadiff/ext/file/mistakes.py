"""The mistakes that converters are known to make, as guesses of what a tensor holds instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from llamaref.known_tensors import stem_of
from numpy.typing import NDArray

from llamadiff.ext.file.explain import Guess
from llamadiff.ext.file.orders import order_in_words
from llamadiff.ext.file.pairs import Pair
from llamadiff.ext.file.transforms import Sizes, cut_qkv, pairs_order, permuted, plus
from llamadiff.ext.file.views import (
    Mapped,
    Picked,
    Shaped,
    Transposed,
    View,
    concatenated,
    cut,
    length_of,
    reordered,
    rows_of,
)
from llamadiff.numerics.metrics import nmse

Array = NDArray[Any]
PERMUTED = ("permuted by heads", "permuted by kv heads")
ROPED = {"attn_q": "heads", "attn_k": "kv_heads"}
LARGEST = 1 << 28  # values of a tensor that is turned
MOST_EXPERTS = 4096
TINY = 1e-30
SAME = 1e-10


@dataclass(frozen=True)
class Made:
    """What should be in a tensor: in words, the values, the rule, and what it was made of."""

    says: str
    view: View
    rule: str = "identity"
    parts: tuple[View, ...] = ()

    def same_as(self, other: Made) -> bool:
        """Whether two hold the same values."""
        a, b = self.view, other.view
        if a.shape != b.shape:
            return False
        some = np.arange(0, rows_of(a), max(1, rows_of(a) // 512))
        return nmse(a.take(some), b.take(some), 0) <= SAME


def guesses_of(pair: Pair, made: Mapping[str, Made], sizes: Sizes) -> Iterator[Guess]:
    """What a tensor may hold instead, the likeliest first."""
    name = pair.name
    own, (_, stem) = made[name], stem_of(name)
    yield from _permutations(stem, own, sizes)
    yield from _norms(name, stem, own)
    yield from _exponents(own)
    yield from _transposes(own)
    yield from _partners(name, stem, made)
    yield from _orders(stem, own, sizes)
    yield from of_experts(pair)
    yield from _others(name, made)
    yield Guess("negated", "every value has the other sign", Mapped(own.view, np.negative))


def _permutations(stem: str, own: Made, sizes: Sizes) -> Iterator[Guess]:
    """Q and K that are not permuted, by another number of heads, twice, or where nothing should be."""
    if stem not in ROPED or (own.rule not in (*PERMUTED, "identity", "split")):
        return
    letter, right = stem[-1].upper(), getattr(sizes, ROPED[stem])
    if own.rule in PERMUTED:
        raw, whose = own.parts[0], "Q by heads" if letter == "Q" else "K by kv heads"
        yield Guess("permutation-missing", f"is not permuted: Llama-type converters permute {whose}, {right} here", raw)
        for count in head_counts(length_of(raw), right):
            says = f"is permuted with {count} heads; the model has {right}: Llama-type converters permute {whose}"
            yield Guess("head-count", says, permuted(raw, count))
        yield Guess("permutation-twice", f"is permuted twice by {right} heads", permuted(own.view, right))
        inverse = np.argsort(pairs_order(length_of(raw), right))
        if len(raw.shape) > 1:
            yield Guess("permutation-inverse", "is permuted the other way round", Picked(raw, inverse))
    else:
        for count in (right, *head_counts(length_of(own.view), right)):
            says = f"is permuted with {count} heads; RoPE of this architecture turns halves: nothing is to be permuted"
            yield Guess("permutation-extra", says, permuted(own.view, count))


def head_counts(rows: int, right: int) -> list[int]:
    """Other numbers of heads that rows could be of."""
    return [count for count in range(1, min(rows // 4, 512) + 1) if rows % (2 * count) == 0 and count != right]


def _norms(name: str, stem: str, own: Made) -> Iterator[Guess]:
    """One added once too little, once too often, or where nothing is to be added."""
    if own.rule == "plus one":
        says = "one is not added: this architecture multiplies by weight + 1, llama.cpp by what is in the file"
        yield Guess("plus-one-missing", says, own.parts[0])
        yield Guess("plus-one-twice", "one is added twice", plus(own.view, 1.0))
    elif stem.endswith("norm") and name.endswith(".weight"):
        yield Guess("plus-one-extra", "one is added; this architecture multiplies by the weight itself",
                    plus(own.view, 1.0))  # fmt: skip
        yield Guess("minus-one", "one is subtracted", plus(own.view, -1.0))


def _exponents(own: Made) -> Iterator[Guess]:
    """A_log as it is, or half-way to -exp(A_log)."""
    if own.rule == "-exp":
        log, shape = own.parts[0], own.view.shape
        yield Guess("exp-missing", "is A_log itself; llama.cpp wants -exp(A_log)", Shaped(log, shape))
        yield Guess("exp-sign", "is exp(A_log); llama.cpp wants -exp(A_log)", Mapped(own.view, np.negative))
        yield Guess("exp-missing", "is -A_log; llama.cpp wants -exp(A_log)", Shaped(Mapped(log, np.negative), shape))


def _transposes(own: Made) -> Iterator[Guess]:
    shape = own.view.shape
    if len(shape) > 1 and int(np.prod(shape)) <= LARGEST:
        words = "is not transposed" if own.rule == "transposed" else "is transposed"
        rows = "its rows should be its columns" if shape[-1] == shape[-2] else f"its rows should be {list(shape)}"
        yield Guess("transposed", f"{words}: {rows}, [out, in]",
                    Shaped(Transposed(own.view), shape))  # fmt: skip


def _partners(name: str, stem: str, made: Mapping[str, Made]) -> Iterator[Guess]:
    """Gate for up and up for gate."""
    swapped = {"gate": "up", "up": "gate"}
    part = next((part for part in swapped if stem.startswith(f"ffn_{part}") and "inp" not in stem), None)
    if part is None:
        return
    other = name.replace(f"ffn_{part}", f"ffn_{swapped[part]}", 1)
    if other in made and made[other].view.shape == made[name].view.shape:
        yield Guess("gate-up-swapped", f"gate and up are swapped: these are the values of {other}", made[other].view)


def _orders(stem: str, own: Made, sizes: Sizes) -> Iterator[Guess]:
    """Parts of a fused matrix in another order."""
    view = own.view
    if stem == "attn_qkv":
        parts = cut_qkv(view, sizes)
        for names in list(permutations("QKV"))[1:]:
            says = f"holds {', '.join(names)} in this order; Q, K, V is right"
            yield Guess("qkv-order", says, concatenated([parts[part] for part in names]))
        if sizes.kv_heads in (0, sizes.heads):
            order = np.arange(length_of(view)).reshape(3, sizes.heads, -1).swapaxes(0, 1).reshape(-1)
            says = "holds Q, K and V head by head; all of Q, then K, then V is right"
            yield Guess("qkv-order", says, reordered(view, order))
    if stem == "ffn_up" and own.says.endswith(("gate_up_proj.weight", "gate_up_proj.bias")):
        half = length_of(view) // 2
        halves = [cut(view, half, 2 * half), cut(view, 0, half)]
        yield Guess("gate-up-swapped", "holds up before gate; gate comes first", concatenated(halves))
    if own.rule == "fused experts":
        rows = view.shape[-2] // 2
        order = np.arange(rows_of(view)).reshape(-1, 2, rows)[:, ::-1].reshape(-1)
        yield Guess("gate-up-swapped", "holds up before gate of each expert; gate comes first", Picked(view, order))


def of_experts(pair: Pair) -> Iterator[Guess]:
    """Experts in the order in which they are most like those of the checkpoint, by a few rows of each."""
    view = pair.theirs
    if len(view.shape) != 3 or not 2 <= view.shape[0] <= MOST_EXPERTS:
        return
    count, rows = view.shape[:2]
    some = (np.arange(count)[:, None] * rows + np.arange(min(rows, 4))).reshape(-1)
    ours, theirs = (side.take(some).reshape(count, -1).astype(np.float64) for side in (pair.ours, view))
    order = (ours @ theirs.T / np.maximum(np.linalg.norm(theirs, axis=1), TINY)).argmax(axis=1)
    if len(set(order.tolist())) == count and not (order == np.arange(count)).all():
        picked = (order[:, None] * rows + np.arange(rows)).reshape(-1)
        says = order_in_words(order, "expert")
        yield Guess("expert-order", says, Picked(view, picked))


def _others(name: str, made: Mapping[str, Made]) -> Iterator[Guess]:
    """Another tensor of the checkpoint, whatever it was made for."""
    own = made[name]
    for other, candidate in made.items():
        if other == name or candidate.view.shape != own.view.shape:
            continue
        if name == "output.weight" and other == "token_embd.weight":
            yield Guess("tied-head", "is the embedding; the checkpoint has a head of its own", candidate.view)
        else:
            yield Guess("another-tensor", f"these are the values of {other}: {candidate.says}", candidate.view)
