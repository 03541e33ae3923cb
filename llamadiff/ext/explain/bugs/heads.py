"""What is joined at nodes of a graph: two halves of a row, or rows that were computed elsewhere, as heads take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from llamadiff.ext.explain.alter import changed, gives, instead, swapped, with_source
from llamadiff.ext.explain.bugs.norms import NORMS
from llamadiff.ext.explain.conventions.reading import eight_bit_ways
from llamadiff.ext.explain.registry import Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.graph import GraphNode
from llamadiff.ext.graph.op import Array, Op

CACHES = ("cache_k", "cache_v")
HEAD, TAKEN, HIDDEN, LOGITS = "mtp_eh_proj", "mtp_h_input", "h_nextn", "result_output"  # a head's nodes
FEW = 64  # tokens behind which a draft may have been refused
MOST = 12  # recorded taps that are tried in the place of what is joined
ROWS = "token before"  # the leaf that says which rows a head takes (ext/heads/head_reader.py)
WHOSE = {1: "the token itself", 2: "the next token", -1: "the token two before", -2: "the token three before"}


def _is_in_halves(site: Site) -> bool:
    """Whether two tensors of one width become the halves of each row."""
    return int(site.ints[0]) == 0 and site.shape(0) == site.shape(1)


def _is_taken(site: Site) -> bool:
    """Whether hidden states are put behind a row of zeros, for a head to take some."""
    readers = (node for node in site.engine.graph.nodes if site.node.number in node.sources)
    leaves = (site.at(reader).leaf(1) for reader in readers)
    return any(leaf is not None and leaf.name == ROWS for leaf in leaves)


@at_nodes("CONCAT", fix="join them in the order of the columns that multiply them")
def halves_in_other_order(site: Site) -> Iterator[Edit]:
    """Two halves of a row are joined in the other order, or one of them twice, or zeros instead of one."""
    if not _is_in_halves(site):
        return
    names = [site.named(place) for place in (0, 1)]
    fix = f"join {names[0]}, then {names[1]}"
    yield Edit(swapped(0, 1), f"joins {names[1]} before {names[0]}", fix=fix)
    for place, name in enumerate(names):
        yield Edit(with_source(1 - place, partial(Op.x, place=place)), f"joins {name} twice", str(place), fix=fix)
        yield Edit(changed(place, np.zeros_like), f"joins zeros in the place of {name}", f"zeros {place}", fix=fix)


@at_nodes("CONCAT", fix="join what the op before gives")
def joined_elsewhere(site: Site) -> Iterator[Edit]:
    """Another tensor is joined: before its norm, or of another layer."""
    for place in (0, 1) if _is_in_halves(site) else (1,) if _is_taken(site) else ():
        own, norm = site.named(place), _norm_behind(site, place)
        normed = site.at(norm).named(0) if norm is not None else ""
        for label, x in _recorded(site, place, normed or own):
            if label in (own, normed):  # a norm that is left out is that norm's own mistake
                continue
            yield Edit(instead(place, x), f"takes {label}, not {own}", f"{place} {label}", fix=f"take {own}")
            if norm is not None:
                more: dict[int, Alter] = {norm.number: instead(0, x)}
                says = f"takes {label}, normalised, not {own}"
                yield Edit(_as_it_is, says, f"{place} {label} normalised", more, f"normalise {normed}")


def _recorded(site: Site, place: int, own: str) -> list[tuple[str, Array]]:
    """Recorded taps of the size of what is joined, the same one of other layers first, then the nearest."""
    word = own.rpartition("-")[0]
    found = list(site.recorded(site.shape(place)))
    return sorted(found, key=lambda each: each[0].rpartition("-")[0] != word)[:MOST]


def _norm_behind(site: Site, place: int) -> GraphNode | None:
    """The norm that makes what is joined at a place, where it is computed here."""
    node = site.source(place)
    if node is not None and node.op == "MUL" and site.own(node):
        node = site.at(node).source(0)
    return node if node is not None and node.op in NORMS and site.own(node) else None


def _as_it_is(n: Op) -> Op:
    return n


@at_nodes("CONCAT", fix="hand over the hidden state as the trunk gives it")
def joined_after_a_norm(site: Site) -> Iterator[Edit]:
    """A hidden state is normalised once more before a head takes it."""
    if not _is_taken(site):
        return
    own, width = site.named(1), site.node.shape[-1]
    norm = site.nearest(NORMS[0])
    epsilon = site.at(norm).floats[0] if norm is not None else np.float32(1e-6)
    for name in ("", *(name for name in site.case.run.model.tensors if _is_norm(site, name, width))):
        weight = site.vector(name) if name else np.float32(1)
        says = f"normalises {own} once more, {f'by {name}' if name else 'without a weight'}"
        normed = partial(_normed, weight=weight, epsilon=epsilon)
        yield Edit(changed(1, normed), says, name, fix=f"take {own} as it is")


def _is_norm(site: Site, name: str, width: int) -> bool:
    return "norm" in name and name.endswith(".weight") and site.engine.w.shape(name) == (width,)


def _normed(x: Array, weight: Any, epsilon: Any) -> Array:
    return np.asarray(x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + epsilon) * weight)


@at_nodes("GET_ROWS", fix="pair each token with the hidden state of the token before it, the first one with zeros")
def hidden_state_of_other_token(site: Site) -> Iterator[Edit]:
    """A head takes the hidden state of another token than the one before."""
    if not _takes(site):
        return
    last = site.shape(0)[-2] - 1
    for by, whose in WHOSE.items():
        says = f"takes the hidden state of {whose}, not of the token before"
        yield Edit(changed(1, partial(_moved, by=by, last=last)), says, f"{by:+d}")
    says = "takes the hidden state of the last token for every token"
    yield Edit(changed(1, partial(np.full_like, fill_value=last)), says, "last")
    for row, whose in ((1, "its own hidden state"), (last, "the last token's hidden state")):
        yield Edit(changed(1, partial(_first, row=row)), f"gives the first token {whose}, not zeros", whose)


def _takes(site: Site) -> bool:
    """Whether a head takes rows here."""
    leaf = site.leaf(1)
    return leaf is not None and leaf.name == ROWS


def _moved(rows: Array, by: int, last: int) -> Array:
    return np.asarray(np.clip(rows + by, 0, last))


def _first(rows: Array, row: int) -> Array:
    out = np.array(rows)
    out[..., 0] = row
    return out


@at_nodes("GET_ROWS", fix="hand over hidden states as they are")
def hidden_state_rounded(site: Site) -> Iterator[Edit]:
    """The hidden states that a head takes are rounded to 8 bits on the way."""
    if _takes(site):
        for name, to in eight_bit_ways(site.node.shape[-1]).items():
            yield Edit(gives(to), f"rounds hidden states to {name}", name)


@at_nodes("SOFT_MAX", fix="take refused drafts out of the head's cache before the next tokens go in")
def refused_draft_kept(site: Site) -> Iterator[Edit]:
    """The key of a draft that was refused stays in a head's cache, where later tokens see it."""
    n, stores = len(site.case.run.tokens), _stores(site)
    if not stores or site.shape(1)[-1] < 2 * n or n < 2:
        return
    made = _of_drafts(site, stores)
    rows = {cache: site.case.carrier.store(cache, x[None]) for cache, x in made.rows.items()}
    ids = np.asarray(site.case.run.tokens)
    refused = [int(row) for row in np.flatnonzero(made.ids[:-1] != ids[1:])][-FEW:]
    alone = [([row], f"the key of a refused draft: of the one behind token {row}") for row in refused]
    since = [(refused[at:], f"the keys of all refused drafts before them, from that behind token {row} on")
             for at, row in enumerate(refused[:-1])]  # fmt: skip
    for some, says in (*since, *alone):
        more: dict[int, Alter] = {
            store.number: gives(partial(_with_cells, rows=rows[cache][:, some], first=n))
            for cache, store in stores.items()
        }
        shown = changed(1, partial(_seen_by_later, some=some, first=n))
        yield Edit(shown, f"lets tokens see {says}", f"{some[0]} {len(some)}", more)


def _stores(site: Site) -> dict[str, GraphNode]:
    """What writes the cache that a head's softmax is about, where that is computed here; none of another softmax."""
    graph, found = site.engine.graph, dict[str, GraphNode]()
    if not any(node.name == f"{HEAD}-{site.layer}" for node in graph.nodes):
        return {}
    for node in graph.nodes:
        leaf = graph.leaves.get(node.view[0]) if node.op == "SET_ROWS" and node.view else None
        for cache in CACHES:
            if leaf is not None and leaf.name == f"{cache}_l{site.layer}" and site.own(node):
                found[cache] = node
    return found


@dataclass(frozen=True)
class _Drafts:
    """What a head drafts behind each token, and the row of each cache that this makes."""

    ids: Array
    rows: Mapping[str, Array]


def _of_drafts(site: Site, stores: Mapping[str, GraphNode]) -> _Drafts:
    """The head's own choice behind each token goes in with the head's own hidden state, one position on.

    Raises NotRecordedError without these.
    """
    graph, engine, n = site.engine.graph, site.engine, len(site.case.run.tokens)
    taken, hidden, logits = (
        graph.labelled.get(word) or graph.labelled[f"{word}-{site.layer}"] for word in (TAKEN, HIDDEN, LOGITS)
    )
    given = {taken.number: site.case.values(str(hidden.label)).reshape(1, *taken.shape)}
    drafts = site.case.values(str(logits.label))[0].argmax(axis=-1)
    makers = {cache: site.at(store).source(0, whole=True) for cache, store in stores.items()}
    values = engine.leaves()
    for node in _behind([maker for maker in makers.values() if maker is not None], site, given):
        values[node.number] = given[node.number] if node.number in given else engine.computed(
            _drafted(node, site, values, drafts), values, site.case.carrier.first
        )  # fmt: skip
    rows = {cache: values[maker.number].reshape(n, -1) for cache, maker in makers.items() if maker is not None}
    return _Drafts(drafts, rows)


def _behind(ends: list[GraphNode], site: Site, given: Mapping[int, Array]) -> list[GraphNode]:
    """The nodes that some are made of, up to those that are given."""
    graph, found, waiting = site.engine.graph, set[int](), [node.number for node in ends]
    while waiting:
        number = waiting.pop()
        if number not in found and number in graph.by_number:
            found.add(number)
            waiting += () if number in given else graph.reads(graph.by_number[number])
    return [node for node in graph.nodes if node.number in found]


def _drafted(node: GraphNode, site: Site, values: dict[int, Array], drafts: Array) -> GraphNode:
    """A node, whose ids or positions among the values are from now on those of drafts."""
    leaf = node.sources[1] if len(node.sources) > 1 else None
    if leaf is not None and leaf in site.engine.graph.given:
        own = site.engine.graph.given[leaf][None]
        if node.op == "GET_ROWS" and site.at(node).weight(0):
            values[leaf] = drafts.reshape(own.shape).astype(own.dtype)
        elif node.op == "ROPE":
            sections = own.reshape(-1, len(drafts))
            moved = np.where((sections == np.arange(len(drafts))).all(axis=1, keepdims=True), sections + 1, sections)
            values[leaf] = moved.reshape(own.shape)
    return node


def _with_cells(x: Array, rows: Array, first: int) -> Array:
    """A cache [b, 1, 1, cell, width], or transposed [b, 1, 1, width * cell, 1], with more rows from a cell on."""
    out, count = np.array(x), rows.shape[1]
    if x.shape[-1] > 1:
        out[..., 0, 0, first : first + count, :] = rows
    else:
        out.reshape(len(out), rows.shape[-1], -1)[..., first : first + count] = rows.swapaxes(1, 2)
    return out


def _seen_by_later(mask: Array, some: list[int], first: int) -> Array:
    """A mask that shows each of the cells behind the tokens' own to the tokens behind the one that it is of."""
    out = np.array(mask)
    queries = np.arange(out.shape[-2])
    for cell, row in enumerate(some, first):
        out[..., cell] = np.where(queries > row, 0, -np.inf)
    return out
