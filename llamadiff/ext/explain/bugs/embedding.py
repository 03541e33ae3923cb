"""Rows of embeddings at nodes of a graph: of tokens, or of learned positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from llamadiff.ext.explain.alter import changed, instead, takes, with_weight
from llamadiff.ext.explain.bugs.rope import wrong_positions
from llamadiff.ext.explain.registry import Constant, Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.solve import ROWS_FACTOR
from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.op import Array, Op

TOKENS = "token_embd.weight"


@at_nodes("GET_ROWS", fix="look up the row of the token's own id", source="vllm#30424")
def embedding_row_off(site: Site) -> Iterator[Edit]:
    """Embedding rows are off by a constant, or all are one row."""
    name = site.weight(0)
    if not name:
        return
    rows = site.engine.w.shape(name)[-2]
    fix = "" if name == TOKENS else f"look up the row of {name} that each token's position, or type, needs"
    for shift in (1, -1, 2, -2, 3, -3):
        says = f"reads the rows of {name} off by {shift:+d}"
        yield Edit(changed(1, partial(_off, shift, rows)), says, f"{shift:+d}", fix=fix)
    for place, whose in ((0, "first"), (-1, "last")):
        says = f"reads the {whose} token's row of {name} for every token"
        yield Edit(changed(1, partial(_at, place)), says, whose, fix=fix)
    yield Edit(changed(1, np.zeros_like), f"reads row 0 of {name} for every token", "0", fix=fix)


def _off(by: int, rows: int, ids: Array) -> Array:
    return np.asarray(np.clip(ids + by, 0, rows - 1))


def _at(place: int, ids: Array) -> Array:
    return np.full_like(ids, ids.reshape(-1)[place])


@at_nodes("GET_ROWS", fix="look up each token's own row")
def embedding_of_other_token(site: Site) -> Iterator[Edit]:
    """Each token gets the embedding of another one: of the next, or of the one before."""
    name, tokens = site.weight(0), len(site.case.run.tokens)
    if not name or tokens < 2 or site.shape(1)[-1] != tokens or np.prod(site.shape(1)) != tokens:
        return
    for by, whose in ((-1, "next token"), (1, "token before"), (-2, "token after the next"), (2, "token two before")):
        for end, says in (("edge", ""), ("wrap", ", around the ends")):
            fix = f"read each token's own row of {name}"
            yield Edit(
                changed(1, partial(_of_other, by, end)), f"reads the {whose}'s row of {name}{says}", f"{by:+d} {end}",
                fix=fix,
            )  # fmt: skip


def _of_other(by: int, end: str, ids: Array) -> Array:
    """Ids so many places further on; at the end the last one again, or those that fell out."""
    pads = [(0, 0)] * (ids.ndim - 1) + [(max(by, 0), max(-by, 0))]
    padded = np.pad(ids, pads, mode=end)  # type: ignore[call-overload]
    start = max(-by, 0)
    return np.asarray(padded[..., start : start + ids.shape[-1]])


@at_nodes("GET_ROWS", fix="look the row up in the table that the model has for it")
def embedding_from_other_table(site: Site) -> Iterator[Edit]:
    """Rows are read from another table of the file: the trunk's instead of a head's own."""
    name = site.weight(0)
    for other, _ in site.others(name) if name else ():
        if (name, other) != (TOKENS, "output.weight"):
            yield Edit(with_weight(site, 0, other), f"reads rows of {other}, not {name}", other, fix=f"read {name}")


@at_nodes("GET_ROWS", of="rope-position-restarted")
def positions_restarted(site: Site) -> Iterator[Edit]:
    """Learned positions wrong in decode steps."""
    leaf = site.leaf(1)
    if site.weight(0) and leaf is not None and leaf.name == "inp_pos":
        for says, positions in wrong_positions(site.case.run):
            yield Edit(instead(1, positions.reshape(1, *site.shape(1))), says, says)


@at_nodes("GET_ROWS", fix="read token_embd.weight")
def embedding_from_head(site: Site) -> Iterator[Edit]:
    """Rows are read from the output head instead of the embedding."""
    if site.weight(0) == TOKENS and site.has("output.weight"):
        yield Edit(with_weight(site, 0, "output.weight"), f"reads rows of output.weight, not {TOKENS}")


@at_nodes(
    "GET_ROWS",
    fix="token_embd.weight is [vocab, embd]: a token's values are neighbours",
    source="aprender#155, aprender#188",
)
def embedding_transposed(site: Site) -> Iterator[Edit]:
    """The embedding is read as if it were stored [embd, vocab]."""
    if site.weight(0) == TOKENS:
        yield Edit(takes(lambda n: _columns(site, n)), f"reads {TOKENS} transposed")


def _columns(site: Site, n: Op) -> Array:
    n_vocab, n_embd = site.engine.w.shape(TOKENS)
    return site.vector(TOKENS).reshape(n_embd, n_vocab)[:, _ids(n)].T


@at_nodes("GET_ROWS", fix="leave the rows as they are, where the model has no embedding scale", source="tensai#248")
def embedding_scaled(site: Site) -> Iterator[Edit]:
    """Embeddings are multiplied by sqrt(d), as in Gemma, or divided by it."""
    if site.weight(0) == TOKENS:
        d = site.node.shape[-1]
        for size, says in ((math.sqrt(d), "multiplies rows by"), (1 / math.sqrt(d), "divides rows by")):
            yield Edit(_rows(site, size), f"{says} sqrt({d})", says, fix=_rows_fix(site))


def _rows_fix(site: Site) -> str:
    """What rows are multiplied by: nothing, or the model's own factor that follows."""
    scale = site.user("SCALE")
    if scale is None:
        return "leave the rows as they are: this model does not scale them"
    return f"multiply the rows by {float(site.at(scale).floats[0]):.5g} alone, once"


@at_nodes(
    "GET_ROWS",
    fix="leave the rows as they are, where the model has no embedding scale",
    source="tensai#248",
    general=True,
)
def embedding_multiplied(site: Site) -> Iterator[Constant]:
    """Embeddings are multiplied by a constant."""
    if site.weight(0) == TOKENS:
        make = lambda value: _rows(site, value)  # noqa: E731
        yield Constant(make, ROWS_FACTOR, 1.0, linear=True, fix=_rows_fix(site))


def _rows(site: Site, size: float) -> Alter:
    return takes(lambda n: site.engine.w.rows(site.weight(0), _ids(n)) * np.float32(size))


def _ids(n: Op) -> Array:
    return n.x(1).reshape(-1).astype(np.int64)
