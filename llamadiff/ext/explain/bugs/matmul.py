"""Products with weights at nodes of a graph: which weight, which input, bias and scale; which logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, permutations

import numpy as np

from llamadiff.ext.explain.alter import gives, instead, moved_on, only, takes, through, times, with_source, with_weight
from llamadiff.ext.explain.bugs.norms import NORMS
from llamadiff.ext.explain.registry import Constant, Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.solve import FACTOR, LOGIT_CAP
from llamadiff.ext.graph.graph import GraphNode
from llamadiff.ext.graph.op import Array, Op, Operand

PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")
SWAPPED = {"ffn_gate": "ffn_up", "ffn_up": "ffn_gate", "ffn_gate_exps": "ffn_up_exps", "ffn_up_exps": "ffn_gate_exps"}
MOST_ORDERS = 120  # of the parts of a fused product
MOST_INPUTS = 12  # recorded taps that are tried in an input's place


def _stem(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


@at_nodes(*PRODUCTS, fix="take this layer's own weight")
def weight_of_other_layer(site: Site) -> Iterator[Edit]:
    """Another layer's weight is used."""
    name = site.weight(0)
    for other, relative in site.others(name) if name else ():
        if _stem(other) == _stem(name) and other.split(".")[0] == "blk":
            yield from _instead_of(site, name, other, relative.partition(".")[0])


def _instead_of(site: Site, name: str, other: str, relative: str) -> Iterator[Edit]:
    """Another weight: with the bias that belongs to it, and with the right one."""
    says, bias, fix = f"multiplies by {other}, not {name}", other.replace(".weight", ".bias"), f"multiply by {name}"
    sums = next((user for user in site.users() if user.op in ("ADD", "ADD_ID") and is_bias(site.at(user))), None)
    if sums is None:
        yield Edit(with_weight(site, 0, other), says, relative, fix=fix)
        return
    own = site.at(sums).weight(1)
    if site.own(sums) and site.has(bias) and site.engine.w.shape(bias) == site.engine.w.shape(own):
        more = {sums.number: with_weight(site, 1, bias)}
        yield Edit(with_weight(site, 0, other), f"{says}, with its bias", relative, more, f"{fix}, and add {own}")
    yield Edit(with_weight(site, 0, other), f"{says}, but adds its own bias", f"{relative} own bias", fix=fix)


@at_nodes(
    *PRODUCTS, fix="ffn_gate goes through the activation, ffn_up multiplies it", source="nntrainer#4194, mlx-lm#767"
)
def gate_up_swapped(site: Site) -> Iterator[Edit]:
    """Gate and up are swapped, or taken by turns from a matrix that has one after the other."""
    name = site.weight(0)
    other = name.replace(_stem(name), SWAPPED.get(_stem(name), "")) if name else ""
    if _stem(name) in SWAPPED and site.has(other) and site.engine.w.shape(other) == site.engine.w.shape(name):
        yield from _instead_of(site, name, other, "")


@at_nodes("VIEW", of="gate-up-swapped")
def halves_swapped(site: Site) -> Iterator[Edit]:
    """The other half of a matrix of experts that holds both."""
    base, views = site.source_of_view(), _parts(site, "MUL_MAT_ID")
    if base is not None and len(views) == 2 and site.node.view is not None:
        offset = int(np.frombuffer(site.node.view[1], np.int64)[0])
        start, name = next(other for other in views if other != offset), site.at(base).weight(0)
        says = f"takes the other half of {name}: up for gate, or gate for up"
        yield Edit(takes(partial(_part_taken, partial(_from, start, views[offset]))), says, "half")


@at_nodes(*PRODUCTS, fix="multiply by the tensor of this name")
def weight_of_other_tensor(site: Site) -> Iterator[Edit]:
    """Another tensor of the same layer and shape is used."""
    name = site.weight(0)
    for other, relative in site.others(name) if name else ():
        if relative.startswith("+0.") and _stem(other) != SWAPPED.get(_stem(name)):
            yield from _instead_of(site, name, other, relative)


@at_nodes("MUL_MAT", fix="multiply by output.weight where the file has it", source="1bit-MONSTER#319")
def head_tied(site: Site) -> Iterator[Edit]:
    """The head is taken from the embedding although the file has one of its own."""
    if site.weight(0) == "output.weight" and site.has("token_embd.weight"):
        yield Edit(with_weight(site, 0, "token_embd.weight"), "multiplies by token_embd.weight, not output.weight")


@at_nodes("MUL_MAT", fix="multiply by the matrix that makes these logits")
def head_other(site: Site) -> Iterator[Edit]:
    """Logits are made by another matrix of the file: the trunk's instead of a head's own."""
    name = site.weight(0)
    if name and site.engine.w.shape(name)[0] == site.case.run.model.sizes["vocab"] and not site.users():
        for other, _ in site.others(name):
            if (name, other) != ("output.weight", "token_embd.weight"):
                yield from _instead_of(site, name, other, other)


@at_nodes(
    "MUL_MAT",
    fix="weights are [out, in], in neighbours: multiply by the transpose",
    source="aprender#155, aprender#188",
)
def weight_transposed(site: Site) -> Iterator[Edit]:
    """The weight is read as if it were stored [in, out]."""
    name = site.weight(0)
    shape = site.engine.w.shape(name) if name else ()
    if len(shape) < 2:
        return
    kind = site.engine.w.type(name).lower()

    def alter(n: Op) -> Op:
        w = np.ascontiguousarray(site.vector(name).reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2))
        operand = Operand(w.reshape(1, *[1] * (4 - w.ndim), *w.shape), kind, name)
        return replace(n, sources=(operand, *n.sources[1:]))

    variant = "transposed" if shape[-1] == shape[-2] else "reshaped"
    yield Edit(alter, f"reads {name} as if it were stored [in, out]", variant)


@at_nodes("MUL_MAT", fix="multiply by the weight")
def product_missing(site: Site) -> Iterator[Edit]:
    """The product is left out: its input goes on."""
    if site.weight(0) and site.node.shape == site.shape(1):
        yield Edit(only(1), f"is not multiplied by {site.weight(0)}", fix=f"multiply by {site.weight(0)}")


@at_nodes(*PRODUCTS, fix="give the product as it is, without a factor", general=True)
def product_multiplied(site: Site) -> Iterator[Constant]:
    """The result is multiplied by a constant."""
    if site.weight(0):
        d = site.shape(1)[-1]
        familiar = (*FACTOR.familiar, math.sqrt(d), 1 / math.sqrt(d))
        yield Constant(lambda value: times(1, value), FACTOR, 1.0, familiar, linear=True)


@at_nodes("ADD", "ADD_ID", of="product-multiplied")
def multiplied_with_bias(site: Site) -> Iterator[Constant]:
    """The result is multiplied by a constant, its bias too."""
    if is_bias(site):
        make = lambda value: gives(lambda x: x * np.float32(value))  # noqa: E731
        yield Constant(make, FACTOR, 1.0, linear=True)


@at_nodes("MUL_MAT", fix="multiply the op's own input, what comes out of the op before it")
def input_elsewhere(site: Site) -> Iterator[Edit]:
    """The product is taken of another tensor: of the residual instead of its norm, for one."""
    if site.weight(0):
        own = site.node_at(1)
        for label, x in islice(site.recorded(site.shape(1)), MOST_INPUTS):
            if own is None or label != own.label:
                word = label.rpartition("-")[0] or label
                says, fix = f"multiplies {label}, not {site.named(1)}", f"multiply {site.named(1)} by {site.weight(0)}"
                yield Edit(instead(1, x), says, f"{word} {_ago(label, site)}", fix=fix)


def _ago(label: str, site: Site) -> int:
    """How many layers before the judged tap another one is."""
    number, layer = label.rpartition("-")[2], site.case.tap.layer
    return layer - int(number) if number.isdecimal() and layer is not None else 0


def is_bias(site: Site) -> bool:
    """Whether a sum is of a product and its bias."""
    below = site.source(0)
    if not site.weight(1) or below is None or below.op in NORMS:
        return False
    above_norm = site.at(below).source(0) if below.op == "MUL" and site.at(below).weight(1) else None
    return above_norm is None or above_norm.op not in NORMS


@at_nodes("ADD", "ADD_ID", fix="add the bias", source="ANEForge#253, candle-vllm#167")
def bias_missing(site: Site) -> Iterator[Edit]:
    """The bias is left out."""
    if is_bias(site):
        yield Edit(through, f"leaves out {site.weight(1)}", fix=f"add {site.weight(1)}")


@at_nodes("ADD", "ADD_ID", fix="add the bias once, this product's own")
def bias_wrong(site: Site) -> Iterator[Edit]:
    """The bias is added twice, subtracted, or another one."""
    if not is_bias(site):
        return
    name = site.weight(1)
    fix = f"add {name}, once"
    yield Edit(times(1, 2), f"adds {name} twice", "twice", fix=fix)
    yield Edit(times(1, -1), f"subtracts {name}", "minus", fix=fix)
    for other, relative in site.others(name):
        if other.endswith(".bias"):
            yield Edit(with_weight(site, 1, other), f"adds {other}, not {name}", relative, fix=fix)


@at_nodes("MUL", fix="multiply by the tensor's .scale where the file has one")
def weight_scale_ignored(site: Site) -> Iterator[Edit]:
    """The weight's own scale (a tensor of its name with .scale) is ignored."""
    if site.weight(1).endswith(".scale"):
        yield Edit(through, f"ignores {site.weight(1)}", fix=f"multiply by {site.weight(1)}")


@at_nodes(
    "VIEW",
    fix="split a row of the fused product into its parts as the file has them, such as Q, K, V",
    source="mlxcel#928, transformers#31844",
)
def qkv_split(site: Site) -> Iterator[Edit]:
    """The fused QKV matrix is split in the wrong order, or head by head."""
    views = _parts(site)
    offset = int(np.frombuffer(site.node.view[1], np.int64)[0]) if site.node.view is not None else -1
    if offset not in views:
        return
    size, sums, dim, step = views[offset], site.source_of_view(), site.node.shape[-1], _step(site.node)
    if dim < step and site.node.shape[-2] > 1:
        yield from _side_by_side(sorted(views), offset, step, site.node.shape)
        return
    fix = f"take the values {offset} to {offset + size - 1} of each row"
    for variant, (says, part) in _splits(views, offset, dim).items():
        yield Edit(takes(partial(_part_taken, part)), says, variant, fix=fix)
        if sums is not None and sums.op == "ADD" and site.own(sums) and site.at(sums).shape(1)[-2] == 1:
            own = with_source(0, partial(_part_put, part, offset, size))
            yield Edit(lambda n: n, f"{says}; its bias is right", f"{variant} own bias", {sums.number: own}, fix)


def _side_by_side(offsets: list[int], offset: int, step: int, shape: tuple[int, ...]) -> Iterator[Edit]:
    """Where people take a part from that has its values in each head beside the other parts' (Q and its gate)."""
    heads, dim, place = shape[-2], shape[-1], offsets.index(offset)
    fix = f"take the values {offset} to {offset + dim - 1} of every {step}: each head has its parts side by side"
    start = place * heads * dim
    says = f"takes the values from {start} on, in a row; this model has each head's parts side by side"
    yield Edit(takes(partial(_part_taken, partial(_from, start, heads * dim))), says, f"in a row {place}", fix=fix)
    for other in offsets:
        if other != offset and other + dim <= step:
            says = f"takes the values from {other} on of each head's {step}; this model has its part from {offset} on"
            taken = takes(partial(_part_taken, partial(_of_each_head, other, dim, step)))
            yield Edit(taken, says, f"of each head {other - offset:+d}", fix=fix)


def _of_each_head(start: int, dim: int, step: int, rows: Array) -> Array:
    return rows.reshape(*rows.shape[:-1], -1, step)[..., start : start + dim]


def _step(node: GraphNode) -> int:
    """How many values lie between two heads of a view."""
    return int(np.frombuffer(node.view[1], np.int64)[3]) if node.view is not None else 0


Part = Callable[[Array], Array]  # rows [..., values] of a fused product -> those that are taken for a part


def _splits(views: dict[int, int], offset: int, dim: int) -> dict[str, tuple[str, Part]]:
    """Where people take a part from: what is said of it, and how."""
    size, whole = views[offset], sum(views.values())
    orders = islice(permutations(views), MOST_ORDERS)
    starts = {sum(views[other] for other in order[: order.index(offset)]) for order in orders} | set(views)
    ways: dict[str, tuple[str, Part]] = {}
    for start in sorted(starts - {offset}):
        if start + size <= whole:
            says = f"takes the values from {start} on; this model has its part from {offset} on"
            ways[f"part {start - offset:+d}"] = says, partial(_from, start, size)
    groups = min(views.values()) // dim
    if len(views) > 1 and groups and all(other % (groups * dim) == 0 for other in views.values()):
        says = "splits the row head by head: each head's parts lie together"
        ways["head by head"] = says, partial(_by_head, list(views.values()), list(views).index(offset), groups)
    return ways


def _from(start: int, size: int, rows: Array) -> Array:
    return rows[..., start : start + size]


def _by_head(sizes: list[int], part: int, groups: int, rows: Array) -> Array:
    """A part of rows whose groups of heads have their own parts side by side."""
    widths = [size // groups for size in sizes]
    start = sum(widths[:part])
    grouped = rows.reshape(*rows.shape[:-1], groups, sum(widths))
    return grouped[..., start : start + widths[part]].reshape(*rows.shape[:-1], -1)


def _part_taken(part: Part, n: Op) -> Array:
    return part(n.x()).reshape(-1, *n.shape)


def _part_put(part: Part, offset: int, size: int, n: Op) -> Array:
    """A product in whose rows another part lies in the place of the right one."""
    rows = np.array(n.x())
    rows[..., offset : offset + size] = part(n.x())
    return rows


FUSED = ("MUL_MAT", "MUL", "ADD", "SILU", "RESHAPE")  # what the parts of a row are taken from


def _parts(site: Site, *ops: str) -> dict[int, int]:
    """Where the parts of a fused product begin -> how many values of a row they take; none, if it is not one."""
    node = site.node
    assert node.view is not None
    base = site.engine.graph.by_number.get(node.view[0])
    if base is None or base.op not in (ops or FUSED):
        return {}
    found = {}
    for other in site.engine.graph.nodes:
        if other.op == "VIEW" and other.view and other.view[0] == base.number:
            if "weighted" in other.name:  # experts' results are not parts
                return {}
            offset, _, _, step, _ = (int(number) for number in np.frombuffer(other.view[1], np.int64))
            found[offset] = other.shape[-1] * (other.shape[-2] if step != base.shape[-1] else 1)
    return dict(sorted(found.items()))


# logits


@at_nodes(
    "MUL_MAT", fix="give each token its own row's logits; a prompt goes on after its last row", source="llama.cpp#2700"
)
def logits_of_other_row(site: Site) -> Iterator[Edit]:
    """Logits are another token's: the first's, or the one's before."""
    n = len(site.case.run.tokens)
    if not _makes_logits(site) or n < 2:
        return
    for whose, order in other_rows(n).items():
        yield Edit(gives(partial(np.take, indices=order, axis=-2)), f"gives the logits of {whose}", whose)
    late = gives(partial(moved_on, by=1, axis=-2))
    yield Edit(late, "gives the logits of the token before, and none for the first", "late")


@at_nodes(
    "MUL_MAT", "SCALE", fix="leave the logits as they are: this model has no softcap", source="vllm#30427", general=True
)
def logits_capped(site: Site) -> Iterator[Constant]:
    """Logits are softly capped in a model without a softcap."""
    if site.node.label == "result_output" and site.direct(0) != "TANH":
        make = lambda cap: gives(lambda x: np.asarray(cap * np.tanh(x / cap), x.dtype))  # noqa: E731
        yield Constant(make, LOGIT_CAP)


def _makes_logits(site: Site) -> bool:
    """Whether a product is the head's; a factor may follow."""
    return bool(site.weight(0)) and site.shown == "result_output"


def other_rows(n: int) -> dict[str, Array]:
    """Whose logits people give instead of each of n tokens' -> those tokens."""
    return {
        "the token before": np.maximum(np.arange(n) - 1, 0), "the token after": np.minimum(np.arange(n) + 1, n - 1),
        "the first token": np.zeros(n, int), "the last token but one": np.append(np.arange(n - 1), n - 2),
    }  # fmt: skip
