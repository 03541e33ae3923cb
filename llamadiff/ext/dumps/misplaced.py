"""Taps that hold what another tap is: shifted layers or tokens, swapped names, one buffer written twice, zeros.

Before an op is accused, what was recorded is sought among llama.cpp's values of all layers, tokens and names. Where
most of the error goes when each tap is taken for what it holds, it is the recording that is wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.engines.model_file import Runnable
from llamadiff.judge.preflight.checks import tokens_apart
from llamadiff.judge.study import Bench, Study
from llamadiff.judge.verdict import WRONG, is_right
from llamadiff.result.rows import stem
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import LOGITS, layer_of, parse
from llamadiff.words.diagnosis_text import ranges

Array = NDArray[Any]

CHANNELS, TOKENS = 32, 24  # of a tap, by which it is known again
STEPS = (0, 1, -1, 2, -2)  # tokens that rows may be shifted by
OFF = 1e-3  # distance of a tap from its own right values, from which on it may hold others
NEARER = 0.25  # of a tap's distance from its own right values: where it is nearer to others, it may hold these
LIKE = 0.5  # the largest distance from what it may hold: behind a bug there is some
LEFT = 0.25  # of the errors, that taking taps for what they hold may leave
EXACT = 1e-3  # distance of an embedding from a row of the table that it is, whatever type the row is stored in
BLOCK = 4096  # rows of the table that are decoded at once
FEW = 3


@dataclass(frozen=True)
class _Place:
    """What a tap holds: another one, or its own rows of other tokens; of zeros, no tap."""

    tap: str | None
    step: int = 0


def find_misplaced(bench: Bench, study: Study) -> Study | None:
    """A study of the candidate with each tap taken for what it holds, where that leaves little of its errors.

    Raises UserError for a trace of zeros, or of other tokens than it states.
    """
    trace = study.assumed.trace
    wrong = study.passes.wrong("candidate")
    if trace is None or study.assumed.slips or not wrong:
        return None
    names = [tap.name for tap in bench.model.taps if tap.name in trace]
    if names and not any(np.any(trace[name]) for name in names):  # ends at the first that is not
        raise UserError(
            f"every value of the {len(names)} taps that were recorded is 0: write each tap after it is computed, "
            "and copy it from the device first"
        )
    _refuse_other_run(bench.model, trace, study)
    places = _places_of(bench.model, bench.baseline, trace)
    if not places:
        return None
    moved = _put_right(trace, places, bench.baseline)
    if not any(parse(name) for name in moved):
        return None
    better = bench.run(replace(study.assumed, trace=moved, slips=(*_sentences(places, trace),)))
    return better if _is_better(study, better, places) else None


def _is_better(before: Study, after: Study, places: Mapping[str, _Place]) -> bool:
    """Whether little of the errors is left, and what shows that was computed from what was moved."""
    if _errors(after) > LEFT * _errors(before):
        return False
    right = {f.tap.name for f in after.passes.findings if (own := f.local.get("candidate")) and is_right(own.verdict)}
    return (
        LOGITS in right
        or len(right & {place.tap for place in places.values()}) > 1
        or any(place.step for place in places.values())
    )


def _errors(study: Study) -> float:
    """The errors of all WRONG taps, none counted as more than its size."""
    found = (finding.local.get("candidate") for finding in study.passes.findings)
    wrong = [local.nmse for local in found if local is not None and local.verdict == WRONG]
    return sum(min(error, 1.0) if math.isfinite(error) else 1.0 for error in wrong)


# -- what each tap holds ----------------------------------------------------------------------------------------------


def _places_of(model: Runnable, baseline: Trace, trace: Trace) -> dict[str, _Place]:
    """Every tap that is far from its own right values, and what it holds."""
    by_shape: dict[tuple[int, ...], dict[str, Array]] = {}
    for name in baseline:
        rows = _rows(baseline, name)
        if rows is not None:
            by_shape.setdefault(rows.shape, {})[name] = rows
    unasked = {tap.kind.word for tap in model.taps} - {stem(name) for name in baseline}  # nothing tells of these
    found = {}
    for name in trace:
        own = None if stem(name) in unasked else _rows(trace, name)
        if own is None or not np.isfinite(own).all():
            continue
        place = _place_of(name, own, by_shape.get(own.shape, {}), trace)
        if place is not None:
            found[name] = place
    if LOGITS in found and sum(place.step == found[LOGITS].step for place in found.values()) == 1:
        del found[LOGITS]  # nothing is computed from them that could show how they were meant
    return _with_followers(found, trace, unasked)


def _with_followers(places: dict[str, _Place], trace: Trace, words: Collection[str]) -> dict[str, _Place]:
    """The places, and those of taps that nothing tells of, where most others are a layer or some tokens off."""
    strays = [name for name in trace if stem(name) in words]
    late = [name for name, place in places.items() if layer_of(name) and _is_counted_from_1(name, place)]
    if len(late) * 2 > len(places):
        return places | {name: _Place(f"{stem(name)}-{layer - 1}") for name in strays if (layer := layer_of(name))}
    step, count = Counter(place.step for place in places.values()).most_common(1)[0] if places else (0, 0)
    if step and count * 2 > len(places):
        return places | {name: _Place(name, step) for name in strays if (tap := parse(name)) and not tap.row_axis}
    return places


def _place_of(name: str, own: Array, others: Mapping[str, Array], trace: Trace) -> _Place | None:
    """What one tap holds; None where that is its own, or nothing that is known."""
    if not others:
        return None
    names, right = list(others), np.stack([*others.values()])
    if name in others and _distances(own, others[name][None], 0)[0] < OFF:
        return None
    distances = {step: dict(zip(names, _distances(own, right, step), strict=True)) for step in STEPS}
    mine = distances[0].get(name, math.inf)
    if name != LOGITS and not own.any() and not np.any(trace[name]) and mine >= 1:
        return _Place(None)
    layer = layer_of(name) or 0
    likeliest = [
        (distance, index, stem(other) != stem(name), abs((layer_of(other) or 0) - layer), _Place(other, step))
        for index, (step, each) in enumerate(distances.items())
        for other, distance in each.items()
    ]
    nearest = min(distance for distance, *_ in likeliest)
    near = [entry for entry in likeliest if entry[0] <= max(2 * nearest, nearest + 1e-12)]
    place = min(near, key=lambda entry: entry[1:4])[4]
    return place if nearest < min(LIKE, NEARER * mine) and place != _Place(name) else None


def _rows(trace: Trace, name: str) -> Array | None:
    """Some channels of a tap's rows, always the same ones; None of what has none of its own for each token."""
    tap = parse(name)
    if tap is None or name in trace.known:
        return None
    values = np.moveaxis(trace[name], tap.row_axis, 0)
    if len(values) != len(trace.info.tokens) or values.dtype.kind != "f":
        return None
    values = values[:TOKENS] * (np.tri(len(values))[:TOKENS, None] if tap.causal else 1)
    flat = values.reshape(len(values), -1)
    columns = np.random.default_rng(flat.shape[1]).permutation(flat.shape[1])[:CHANNELS]
    return np.asarray(flat[:, np.sort(columns)], np.float64)


def _distances(own: Array, right: Array, step: int) -> Array:
    """How far rows are from those of each right tap, ``step`` tokens later: medians of relative squares."""
    n = own.shape[0]
    if abs(step) >= n - 1:
        return np.full(len(right), math.inf)
    mine, theirs = own[max(0, -step) : n - max(0, step)], right[:, max(0, step) : n - max(0, -step)]
    sizes = np.square(theirs).sum(axis=-1)
    off = np.square(theirs - mine).sum(axis=-1)
    return np.median(np.where(sizes > 0, off / np.where(sizes > 0, sizes, 1), math.inf), axis=1)


# -- a trace with everything in its place -----------------------------------------------------------------------------


def _put_right(trace: Trace, places: Mapping[str, _Place], baseline: Trace) -> Trace:
    """The trace with each tap under the name and in the shape of what it holds; of several that hold one, the first."""
    arrays = {name: trace[name] for name in trace if name not in places}
    known = {name: mask for name, mask in trace.known.items() if name in arrays}
    dtypes = {name: kind for name, kind in trace.dtypes.items() if name in arrays}
    for name, place in places.items():
        if place.tap is None or place.tap in arrays:
            continue
        values = trace[name].reshape(baseline.shape(place.tap))
        if place.step:
            values, known[place.tap] = _shifted(values, place.step)
        arrays[place.tap], dtypes[place.tap] = values, "F32"
    return Trace(trace.info, arrays, dtypes, trace.path, known, printed=trace.printed)


def _shifted(values: Array, step: int) -> tuple[Array, Array]:
    """Rows where they belong, and which are known."""
    moved, known = np.zeros_like(values), np.zeros(values.shape, bool)
    to, since = slice(max(0, step), len(values) + min(0, step)), slice(max(0, -step), len(values) - max(0, step))
    moved[to], known[to] = values[since], True
    return moved, known


# -- in words ---------------------------------------------------------------------------------------------------------


def _sentences(places: Mapping[str, _Place], trace: Trace) -> list[str]:
    """What is wrong with the recording, what is most first."""
    said = [*_of_rows(places), *_of_names({name: place for name, place in places.items() if not place.step}, trace)]
    return [text for _, text in sorted(said, key=lambda each: -each[0])]


def _of_rows(places: Mapping[str, _Place]) -> Iterator[tuple[int, str]]:
    """Of how many taps rows belong to other tokens."""
    for step in dict.fromkeys(place.step for place in places.values() if place.step):
        names = [name for name, place in places.items() if place.step == step]
        far, first = f"{abs(step)} token{'s' * (abs(step) > 1)}", max(0, -step)
        way = "late" if step < 0 else "early"
        yield len(names), f"rows are {far} {way}: row {first} of {_named(names)} is token {first + step}'s"


def _of_names(places: Mapping[str, _Place], trace: Trace) -> Iterator[tuple[int, str]]:
    """Of how many taps the values are another one's, or nobody's."""
    counted = {name: place for name, place in places.items() if _is_counted_from_1(name, place)}
    if counted:
        yield len(counted), f"layers are counted from 1: {_hold(counted)}; name them from 0"
    rest = {name: place for name, place in places.items() if place.tap is not None and name not in counted}
    for tap in dict.fromkeys(place.tap for place in rest.values()):
        names = [name for name, place in rest.items() if place.tap == tap]
        if len(names) > 1 or (tap in trace and tap not in places):
            yield len(names), f"{_named(names)} {_verb(names)} the values of {tap}: one buffer, written twice"
            rest = {name: place for name, place in rest.items() if name not in names}
    if rest:
        yield len(rest), f"names are mixed up: {_hold(rest)}"
    empty = [name for name, place in places.items() if place.tap is None]
    if empty:
        yield len(empty), f"{_named(empty)} {'is' if len(empty) == 1 else 'are'} all 0: nothing was written there"


def _is_counted_from_1(name: str, place: _Place) -> bool:
    """Whether a tap is the one of the layer before; the layer's input, of the first."""
    layer, other = layer_of(name), layer_of(place.tap or "")
    if layer == 0:
        return stem(name) == "l_out" and place.tap in ("embd", "inpL")
    return stem(name) == stem(place.tap or "") and layer is not None and other == layer - 1


def _hold(places: Mapping[str, _Place]) -> str:
    """``l_out-1 to l_out-4 hold the values of l_out-0 to l_out-3``, of the first words."""
    by_word: dict[str, list[str]] = {}
    for name in places:
        by_word.setdefault(stem(name), []).append(name)
    said = []
    for names in list(by_word.values())[: 1 if len(by_word) > FEW else FEW]:
        held = [str(places[name].tap) for name in names]
        said.append(f"{_named(names)} {_verb(names)} the values of {_named(held)}")
    return ", ".join(said) + (f", and so do {len(by_word) - 1} more kinds of taps" if len(by_word) > FEW else "")


def _verb(names: Sequence[str]) -> str:
    return "holds" if len(names) == 1 else "hold"


def _named(names: Sequence[str]) -> str:
    """``l_out-0 to l_out-4``, ``embd, l_out-0 and 3 more taps``."""
    words = dict.fromkeys(map(stem, names))
    if len(words) == 1 and len(names) > 2 and None not in (layers := [layer_of(name) for name in names]):
        numbers = sorted(layer for layer in layers if layer is not None)
        if numbers == [*range(numbers[0], numbers[-1] + 1)]:
            return f"{stem(names[0])}-{numbers[0]} to {stem(names[0])}-{numbers[-1]}"
        return f"{stem(names[0])} in layers {ranges(numbers)}"
    more = f" and {len(names) - FEW} more taps" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + more


# -- another run ------------------------------------------------------------------------------------------------------


def _refuse_other_run(model: Runnable, trace: Trace, study: Study) -> None:
    """Raise UserError for a run whose embeddings alone are wrong, and those of other tokens that no mistake makes."""
    wrong, tokens = study.passes.wrong("candidate"), trace.info.tokens
    rows = None if [*wrong] != ["embd"] else _rows(trace, "embd")
    if rows is None or len(rows) < len(tokens) or len(study.passes.findings) < FEW:
        return
    ids = _ids_of(model, np.asarray(trace["embd"], np.float64).reshape(len(tokens), -1))
    if ids is None or {*ids} <= {*tokens} or len({*ids}) == 1:  # one of these, whichever, is a mistake of lookup
        return
    if 2 * sum(found != token for token, found in zip(tokens, ids, strict=True)) <= len(tokens):
        return  # some tokens alone
    rows_of: dict[int, set[int]] = {}
    for token, found in zip(tokens, ids, strict=True):
        rows_of.setdefault(token, set()).add(found)
    is_lookup = all(len(each) == 1 for each in rows_of.values()) and (
        len(rows_of) < len(tokens)
        or len({found - token for token, found in zip(tokens, ids, strict=True) if found}) == 1  # 0: where it ends
    )
    if not is_lookup:
        raise UserError(
            f"{tokens_apart(model, tokens, ids)}; its embd shows that, and every other op is right on it: "
            "the dump is of another run"
        )


def _ids_of(model: Runnable, rows: Array) -> tuple[int, ...] | None:
    """The tokens that embeddings are of; None where one is of none."""
    w, name = model.engine.w, "token_embd.weight"
    if name not in model.weights:
        return None
    n_vocab = w.shape(name)[0]
    best, ids = np.full(len(rows), math.inf), np.zeros(len(rows), int)
    for start in range(0, n_vocab, BLOCK):
        numbers = np.arange(start, min(start + BLOCK, n_vocab))
        table = np.asarray(w.decode_rows(name, w.read_raw(name, numbers)), np.float64)
        along = rows @ table.T
        sizes, own = np.square(table).sum(axis=1), np.square(rows).sum(axis=1)
        # the part of a row that no multiple of the table's row explains: models scale their embeddings
        apart = 1 - np.square(along) / np.maximum(sizes[None] * own[:, None], 1e-300)
        apart[along <= 0] = math.inf
        nearest = apart.argmin(axis=1)
        better = apart.min(axis=1) < best
        best, ids = np.where(better, apart.min(axis=1), best), np.where(better, numbers[nearest], ids)
    return tuple(map(int, ids)) if (best < EXACT).all() else None
