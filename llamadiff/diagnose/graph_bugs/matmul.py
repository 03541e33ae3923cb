"""Products with weights at nodes of a graph: which weight, which input, bias and scale; and rows of embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from llamadiff.diagnose.graph_bugs.edit import (  # fmt: skip
    Constant,
    Edit,
    Site,
    at_nodes,
    instead,
    only,
    takes,
    through,
    times,
    with_source,
    with_weight,
)
from llamadiff.diagnose.graph_bugs.norms import NORMS
from llamadiff.ggml.engine import Alter
from llamadiff.ggml.op import Op, Operand

PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")
SWAPPED = {"ffn_gate": "ffn_up", "ffn_up": "ffn_gate", "ffn_gate_exps": "ffn_up_exps", "ffn_up_exps": "ffn_gate_exps"}
MOST_INPUTS = 12  # recorded taps that are tried in an input's place


def _stem(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


@at_nodes(*PRODUCTS, of="weight-of-other-layer")
def other_layer(site: Site) -> Iterator[Edit]:
    """The same weight of another layer."""
    name = site.weight(0)
    for other, relative in site.others(name) if name else ():
        if _stem(other) == _stem(name) and other.split(".")[0] == "blk":
            yield Edit(with_weight(site, 0, other), f"multiplies by {other}, not {name}", relative)


@at_nodes(*PRODUCTS, of="gate-up-swapped")
def gate_up_swapped(site: Site) -> Iterator[Edit]:
    """Up for gate, and gate for up."""
    name = site.weight(0)
    other = name.replace(_stem(name), SWAPPED.get(_stem(name), "")) if name else ""
    if _stem(name) in SWAPPED and site.has(other):
        yield Edit(with_weight(site, 0, other), f"multiplies by {other}, not {name}")


@at_nodes(*PRODUCTS, of="weight-of-other-tensor")
def other_tensor(site: Site) -> Iterator[Edit]:
    """Another tensor of the same layer and shape."""
    name = site.weight(0)
    for other, relative in site.others(name) if name else ():
        if relative.startswith("+0.") and _stem(other) != SWAPPED.get(_stem(name)):
            yield Edit(with_weight(site, 0, other), f"multiplies by {other}, not {name}", relative)


@at_nodes("MUL_MAT", of="head-tied")
def head_tied(site: Site) -> Iterator[Edit]:
    """The embedding for the head."""
    if site.weight(0) == "output.weight" and site.has("token_embd.weight"):
        yield Edit(with_weight(site, 0, "token_embd.weight"), "multiplies by token_embd.weight, not output.weight")


@at_nodes("MUL_MAT", of="weight-transposed")
def transposed(site: Site) -> Iterator[Edit]:
    """W for its transpose, where it is square; or read as if it were stored [in, out]."""
    name = site.weight(0)
    shape = site.engine.w.shape(name) if name else ()
    if len(shape) < 2:
        return
    kind = site.engine.w.type(name).lower()

    def with_values(change: str) -> Edit:
        def alter(n: Op) -> Op:
            w = site.vector(name)
            w = (
                w.swapaxes(-1, -2)
                if change == "transposed"
                else w.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
            )
            w = np.ascontiguousarray(w)
            operand = Operand(w.reshape(1, *[1] * (4 - w.ndim), *w.shape), kind, name)
            return replace(n, sources=(operand, *n.sources[1:]))

        return Edit(alter, f"reads {name} as if it were stored [in, out]", change)

    yield with_values("transposed" if shape[-1] == shape[-2] else "reshaped")


@at_nodes("MUL_MAT", of="product-missing")
def missing(site: Site) -> Iterator[Edit]:
    """The input goes on."""
    if site.weight(0) and site.node.shape == site.shape(1):
        yield Edit(only(1), f"is not multiplied by {site.weight(0)}")


@at_nodes("MUL_MAT", of="product-multiplied")
def multiplied(site: Site) -> Iterator[Constant]:
    """The result is multiplied by a constant."""
    if site.weight(0):
        d = site.shape(1)[-1]
        yield Constant(
            lambda value: times(1, value),
            lambda value: f"multiplies its result by {value:.5g}", 1e-3, 1e3,
            (0.5, 2.0, math.sqrt(d), 1 / math.sqrt(d), 0.125, 8.0),
        )  # fmt: skip


@at_nodes("MUL_MAT", of="input-elsewhere")
def input_elsewhere(site: Site) -> Iterator[Edit]:
    """Another recorded tap is multiplied: of this layer, or not far before it."""
    if site.weight(0):
        own = site.engine.graph.by_number.get(site.number(1) or -1)
        for label, x in islice(site.recorded(site.shape(1)), MOST_INPUTS):
            if own is None or label != own.label:
                word = label.rpartition("-")[0] or label
                yield Edit(instead(1, x), f"multiplies {label}, not {site.named(1)}", f"{word} {_ago(label, site)}")


def _ago(label: str, site: Site) -> int:
    """How many layers before the judged tap another one is."""
    number, layer = label.rpartition("-")[2], site.case.tap.layer
    return layer - int(number) if number.isdecimal() and layer is not None else 0


def _is_bias(site: Site) -> bool:
    """Whether a sum is of a product and its bias."""
    below = site.source(0)
    if not site.weight(1) or below is None or below.op in NORMS:
        return False
    above_norm = site.at(below).source(0) if below.op == "MUL" and site.at(below).weight(1) else None
    return above_norm is None or above_norm.op not in NORMS


@at_nodes("ADD", "ADD_ID", of="bias-missing")
def bias_missing(site: Site) -> Iterator[Edit]:
    """The bias is not added."""
    if _is_bias(site):
        yield Edit(through, f"leaves out {site.weight(1)}")


@at_nodes("ADD", "ADD_ID", of="bias-wrong")
def bias_wrong(site: Site) -> Iterator[Edit]:
    """Twice, subtracted, or another one."""
    if not _is_bias(site):
        return
    name = site.weight(1)
    yield Edit(times(1, 2), f"adds {name} twice", "twice")
    yield Edit(times(1, -1), f"subtracts {name}", "minus")
    for other, relative in site.others(name):
        if other.endswith(".bias"):
            yield Edit(with_weight(site, 1, other), f"adds {other}, not {name}", relative)


@at_nodes("MUL", of="weight-scale-ignored")
def scale_ignored(site: Site) -> Iterator[Edit]:
    """The weight's own scale is not applied."""
    if site.weight(1).endswith(".scale"):
        yield Edit(through, f"ignores {site.weight(1)}")


@at_nodes("VIEW", of="qkv-split")
def split(site: Site) -> Iterator[Edit]:
    """A part is taken from where another part of the same shape lies, or head by head."""
    node = site.node
    assert node.view is not None
    base = site.engine.graph.by_number.get(node.view[0])
    if base is None or base.op not in ("MUL_MAT", "MUL", "ADD", "SILU", "RESHAPE"):
        return
    offset, *steps = (int(step) for step in np.frombuffer(node.view[1], np.int64))
    others = [
        other for other in site.engine.graph.nodes if other.op == "VIEW" and other.view and other.view[0] == base.number
    ]
    if any("weighted" in other.name for other in others):  # experts' results are not parts
        return
    starts = sorted({int(np.frombuffer(other.view[1], np.int64)[0]) for other in others if other.view})
    row = base.shape[-1]
    for number, start in enumerate(starts):
        if start != offset and start + node.shape[-1] * (node.shape[-2] if steps[2] != row else 1) <= row:
            says = f"takes the values from {start} on; this model has its part from {offset} on"
            yield Edit(_viewing(start, *steps), says, f"part {number - starts.index(offset)}")
    heads, dim = node.shape[-2], node.shape[-1]
    if steps[2] == dim and len(starts) > 1 and row == len(starts) * heads * dim:
        says = "splits the row head by head: each head's parts lie together"
        yield Edit(_viewing(starts.index(offset) * dim, *steps[:2], len(starts) * dim, steps[3]), says, "by head")


def _viewing(*place: int) -> Alter:
    def alter(n: Op) -> Op:
        return replace(n, params=np.array(place, np.int64).tobytes())

    return alter


# rows of an embedding


@at_nodes("GET_ROWS", of="embedding-row-off")
def row_off(site: Site) -> Iterator[Edit]:
    """Rows off by a constant: of tokens, or of learned positions."""
    name = site.weight(0)
    if not name:
        return
    rows = site.engine.w.shape(name)[-2]
    for shift in (1, -1, 2, -2):
        says = f"reads the rows of {name} off by {shift:+d}"
        yield Edit(_rows_off(shift, rows), says, f"{shift:+d}")


def _rows_off(by: int, rows: int) -> Alter:
    return with_source(1, lambda n: np.clip(n.x(1) + by, 0, rows - 1))


@at_nodes("GET_ROWS", of="embedding-from-head")
def from_head(site: Site) -> Iterator[Edit]:
    """Rows of the head."""
    name = site.weight(0)
    if name == "token_embd.weight" and site.has("output.weight"):
        yield Edit(with_weight(site, 0, "output.weight"), "reads rows of output.weight, not token_embd.weight")


@at_nodes("GET_ROWS", of="embedding-scaled")
def scaled(site: Site) -> Iterator[Edit]:
    """Multiplied by sqrt(d), or divided by it."""
    if site.weight(0) == "token_embd.weight":
        d = site.node.shape[-1]
        for size, says in ((math.sqrt(d), "multiplies rows by"), (1 / math.sqrt(d), "divides rows by")):
            yield Edit(_rows(site, size), f"{says} sqrt({d})", says)


@at_nodes("GET_ROWS", of="embedding-multiplied")
def embedding_multiplied(site: Site) -> Iterator[Constant]:
    """Multiplied by a constant."""
    if site.weight(0) == "token_embd.weight":
        yield Constant(
            lambda value: _rows(site, value), lambda value: f"multiplies rows by {value:.5g}", 1e-3, 1e3, (0.5, 2.0)
        )


def _rows(site: Site, size: float) -> Alter:
    return takes(lambda n: site.engine.w.rows(site.weight(0), n.x(1).reshape(-1).astype(np.int64)) * np.float32(size))
