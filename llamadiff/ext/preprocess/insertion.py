"""Where a picture's or a sound's rows lie among the text's, at which positions, and what they see: is it so as the
checkpoint has it, and what was done otherwise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import pairwise, permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.file.orders import order_in_words
from llamadiff.ext.preprocess.search import Cause
from llamadiff.ext.preprocess.text_inputs import GivenInputs, RightInputs

Array = NDArray[Any]
LIKE = 0.2  # of a row's squared size, that may be left where it is another row times a factor
SURER = 1.5  # times the nearest one's distance, within which the row that belongs there is taken for it
USUAL = 3.0  # times what the rows are off in the middle, besides: an encoder's rounding, or another way to resize
FACTOR = 0.1  # that a row's size may be off
NAMED = 0.01  # that a factor may be off one that has a name
SURE = 1e-3  # of its squared size, that a row may be off and is surely that one
CLOSE = 1e-6  # the NMSE of rows that are the same, rounded to half precision or not
SLAB = 256  # rows that are compared at once
TINY = 1e-30
FEW = 4  # rows that are named one by one
Label = tuple[str, int]


@dataclass(frozen=True)
class Aligned:
    """Which row of the right inputs each given row is (-1: none), by its label. ``factors``: given over right."""

    right: Array
    factors: Array
    labels: Sequence[Label]
    distance: Array


@dataclass(frozen=True)
class Judged:
    """What is wrong with a text model's inputs, what could not be looked at, and how many rows were looked at."""

    causes: Sequence[Cause]
    notes: Sequence[str]
    rows: int


def judge_insertion(right: RightInputs, given: GivenInputs) -> Judged:
    """Hold what an engine gave its text model against what the checkpoint's code gives it."""
    causes, notes = list[Cause](), list[str]()
    other_rows = _by_own_encoder(right, given)
    if other_rows is not None:
        right, cause = other_rows
        causes.append(cause)
    aligned = align(right, given)
    if given.goes_on and (aligned.right >= 0).any():
        given = given.cut(int(np.flatnonzero(aligned.right >= 0)[-1]) + 1)
        aligned = align(right, given)
    if given.embeds is not None and not np.isfinite(given.embeds[_known(given)]).all():
        causes.append(Cause("rows", "values of the embeddings are NaN or Inf"))
    other = _other_size(right, aligned)
    if other is not None:
        return Judged((*causes, other, *_tokens_apart(right, given, aligned)), (), given.count)
    causes += [*_order_faults(right, given, aligned), *_scale_faults(right, given, aligned)]
    if given.features is not None:
        causes += _feature_faults(right, given)
    pairs = _pairs(right, aligned)
    if given.positions is not None:
        causes += _position_faults(right, given.positions, pairs, notes)
    else:
        notes.append("position_ids were not given, and not looked at")
    if given.mask is not None:
        causes += _mask_faults(right, given.mask, pairs)
    else:
        notes.append("no mask [row, row] was given, and none looked at")
    notes += _far(right, aligned) if not causes else ()
    return Judged(tuple(causes), tuple(notes), given.count)


def _by_own_encoder(right: RightInputs, given: GivenInputs) -> tuple[RightInputs, Cause] | None:
    """With an encoder that gives other rows than the checkpoint's: those, whose places are judged all the same."""
    own, rows = given.features, right.embeds[right.is_media]
    if own is None or own.shape != rows.shape:
        return None
    products = np.einsum("rv,rv->r", own.astype(np.float64), rows)
    sizes = np.square(own, dtype=np.float64).sum(axis=1) * np.square(rows, dtype=np.float64).sum(axis=1)
    off = float(np.median(1 - np.maximum(products, 0) ** 2 / np.maximum(sizes, TINY)))
    if off <= LIKE:
        return None
    embeds = np.array(right.embeds)
    embeds[right.is_media] = own
    says = f"its encoder's rows are not the checkpoint's: {off:.2f} of their squared size is other"
    return replace(right, embeds=embeds), Cause("rows", f"{says}; llamadiff preprocess, port and watch look for why")


def _other_size(right: RightInputs, aligned: Aligned) -> Cause | None:
    """That the encoder gave another number of rows, and most are none of the checkpoint's."""
    own = [i for i, label in enumerate(aligned.labels) if label[0] in ("row", "none")]
    same = sum(aligned.labels[i][0] == "row" and aligned.distance[i] < SURE for i in own)
    wanted = int(right.is_media.sum())
    if not own or len(own) == wanted or 2 * same > min(len(own), wanted):
        return None
    says = f"{len(own)} rows are inserted, the checkpoint's encoder gives {wanted}, and most are others"
    why = f"the {_what(right)} has another size, or other tiles; llamadiff preprocess without --prompt judges that"
    return Cause("rows", f"{says}: {why}")


def align(right: RightInputs, given: GivenInputs) -> Aligned:
    """Each given row beside the right one that it is, whatever was inserted, lost or moved."""
    labels = _right_labels(right)
    own, factors, distance = _labelled(right, given, labels)
    matched = np.full(given.count, -1, np.int64)
    for kind, a, b, c, d in SequenceMatcher(None, labels, own, autojunk=False).get_opcodes():
        if kind == "equal":
            matched[c:d] = np.arange(a, b)
    return Aligned(matched, factors, own, distance)


def _right_labels(right: RightInputs) -> list[Label]:
    """Token or row of a picture; equal rows have one label."""
    labels, seen, number = list[Label](), dict[bytes, int](), 0
    for i in range(right.count):
        if right.is_media[i]:
            first = seen.setdefault(right.embeds[i].tobytes(), number)
            labels.append(("row", first))
            number += 1
        else:
            labels.append(("token", int(right.ids[i])))
    return labels


def _known(given: GivenInputs) -> Array:
    """The rows whose values are given."""
    if given.embeds is None:
        return np.zeros(given.count, bool)
    return np.asarray(~np.isnan(given.embeds).all(axis=1))


def _labelled(right: RightInputs, given: GivenInputs, labels: Sequence[Label]) -> tuple[list[Label], Array, Array]:
    """What each given row is, by its token or by the right row that it is most like, times a factor."""
    count = given.count
    own, factors, left = [("none", i) for i in range(count)], np.ones(count), np.full(count, np.nan)
    if given.ids is not None:
        own = [("token", int(token)) if token >= 0 else one for token, one in zip(given.ids, own, strict=True)]
    known = np.flatnonzero(_known(given))
    if given.embeds is None or not len(known):
        return own, factors, left
    theirs = np.concatenate([right.embeds, right.placeholder[None]]).astype(np.float64)
    names = [*labels, ("placeholder", 0)]
    if given.embeds.shape[1] != theirs.shape[1]:
        return own, factors, left
    nearest, distances = _nearest(given.embeds[known].astype(np.float64), theirs)
    steps = Counter((nearest - known)[distances.min(axis=1) <= LIKE].tolist())
    step = steps.most_common(1)[0][0] if steps else 0
    of_media = right.is_media[np.minimum(nearest, right.count - 1)] & (nearest < right.count)
    usual = float(np.median(distances.min(axis=1)[of_media])) if of_media.any() else 0.0
    for row, i, all_left in zip(known, nearest, distances, strict=True):
        places = [int(j) for j in (row, row + step) if 0 <= j < len(labels)]
        limit = SURER * all_left[i] + USUAL * usual + CLOSE
        expected = next((j for j in places if all_left[j] <= limit), int(i))
        left[row] = all_left[expected]
        if all_left[expected] <= LIKE:
            own[row] = names[expected]
            size = float(theirs[expected] @ theirs[expected])
            factors[row] = float(given.embeds[row].astype(np.float64) @ theirs[expected]) / max(size, TINY)
    return own, factors, left


def _nearest(ours: Array, theirs: Array) -> tuple[Array, Array]:
    """The right row that each is most like, and what is left of each beside every right row, of its squared size."""
    sizes = np.maximum(np.square(ours).sum(axis=1), TINY)
    others = np.maximum(np.square(theirs).sum(axis=1), TINY)
    left = np.empty((len(ours), len(theirs)))
    for start in range(0, len(ours), SLAB):
        part = slice(start, start + SLAB)
        products = ours[part] @ theirs.T
        alike = np.where(products > 0, products, 0.0) ** 2 / (sizes[part, None] * others)
        left[part] = np.maximum(1 - alike, 0.0)
    return left.argmin(axis=1), left


def _pairs(right: RightInputs, aligned: Aligned) -> tuple[Array, Array]:
    """Rows given and the right ones whose positions they should have: those in their places, if none is lost."""
    if len(aligned.right) == right.count:
        return np.arange(right.count), np.arange(right.count)
    given = np.flatnonzero(aligned.right >= 0)
    return given, aligned.right[given]


def _order_faults(right: RightInputs, given: GivenInputs, aligned: Aligned) -> Iterator[Cause]:
    """Rows that are missing, moved, too many, or none of the checkpoint's; tokens that are missing or too many."""
    wanted = [label[1] for label in _right_labels(right) if label[0] == "row"]
    found = [label[1] for label in aligned.labels if label[0] == "row"]
    what = _what(right)
    strange = [i for i, label in enumerate(aligned.labels) if label[0] == "none"]
    left = [i for i, label in enumerate(aligned.labels) if label[0] == "placeholder"]
    if strange:
        verb = "is" if len(strange) == 1 else "are"
        says = f"{_some(strange, 'row')} of {given.count} {verb} neither the prompt's tokens nor what the encoder gives"
        yield Cause("rows", says)
    if _is_one(right, given, aligned):
        yield Cause("rows", f"all {len(wanted)} rows of the {what} are one and the same")
        return
    if found != wanted and not (strange and not found):
        yield from _rows_apart(right, wanted, found, what)
    yield from _places(right, given, aligned, left)
    yield from _tokens_apart(right, given, aligned)


def _is_one(right: RightInputs, given: GivenInputs, aligned: Aligned) -> bool:
    """Whether all rows that were inserted are equal, and the right ones are not."""
    own = [i for i, label in enumerate(aligned.labels) if label[0] in ("row", "none")]
    theirs = right.embeds[right.is_media]
    if given.embeds is None or len(own) < 2 or not np.ptp(theirs, axis=0).any():
        return False
    return not np.ptp(given.embeds[own], axis=0).any()


def _what(right: RightInputs) -> str:
    return "sound" if "audio" in right.word.lower() else "picture"


def _rows_apart(right: RightInputs, wanted: Sequence[int], found: Sequence[int], what: str) -> Iterator[Cause]:
    """How the rows that were inserted are not the encoder's, in their order."""
    if sorted(wanted) == sorted(found):
        order = np.empty(len(wanted), np.int64)
        free = {label: [i for i, each in enumerate(wanted) if each == label] for label in set(wanted)}
        for i, label in enumerate(found):
            order[i] = free[label].pop(0)
        yield Cause("order", f"of the {what}'s {len(wanted)} rows, {_order(right, order)}")
        return
    lacking = [*(Counter(wanted) - Counter(found)).elements()]
    twice = [*(Counter(found) - Counter(wanted))]
    if lacking:
        says = f"{len(lacking)} of the {what}'s {len(wanted)} rows {'is' if len(lacking) == 1 else 'are'} missing"
        yield Cause("rows", f"{says}: {_some(sorted(lacking), 'row')}")
    if twice:
        yield Cause("rows", f"{_some(sorted(twice), 'row')} of the {what} {'is' if len(twice) == 1 else 'are'} there "
                            "more than once")  # fmt: skip
    kept = [each for each in found if each not in twice]
    if kept != sorted(kept):
        yield Cause("order", f"the {what}'s rows are in another order: {_first_fall(kept)}")


def _order(right: RightInputs, order: Array) -> str:
    """An order in words; rows and columns exchanged where the positions say how many there are."""
    grid = _grid(right)
    if grid is not None and grid[0] * grid[1] == len(order):
        turned = np.arange(len(order)).reshape(grid).T.reshape(-1)
        if min(grid) > 1 and (order == turned).all():
            return f"they lie column by column; the grid of {grid[0]} x {grid[1]} lies row by row"
    return order_in_words(order, "row")


def _grid(right: RightInputs) -> tuple[int, int] | None:
    """The rows and columns of one picture, by its positions; None where they do not say, or of several pictures."""
    runs = _runs(right)
    if right.positions is None or len(right.positions) < 3 or len(runs) != 1:
        return None
    part = right.positions[:3, runs[0][0] : runs[0][1]]
    return int(np.ptp(part[1])) + 1, int(np.ptp(part[2])) + 1


def _runs(right: RightInputs) -> list[tuple[int, int]]:
    """The first and behind the last row of each picture, or tile."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], right.is_media.astype(int), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _first_fall(rows: Sequence[int]) -> str:
    i = next(i for i, (a, b) in enumerate(pairwise(rows)) if b < a)
    return f"row {rows[i + 1]} follows row {rows[i]}"


def _places(right: RightInputs, given: GivenInputs, aligned: Aligned, left: Sequence[int]) -> Iterator[Cause]:
    """Rows that do not lie where the placeholders are, and placeholders that are left."""
    own = [i for i, label in enumerate(aligned.labels) if label[0] == "row"]
    wanted = np.flatnonzero(right.is_media)
    if own and len(left) and given.count == right.count and own[0] != wanted[0]:
        step = own[0] - int(wanted[0])
        word = "late" if step > 0 else "early"
        rows = [j for j, label in enumerate(aligned.labels) if label[0] == "row" and not right.is_media[j]]
        lost = [right.texts[j] for j in rows]
        over = f", over {', '.join(map(repr, lost[:FEW]))}" if lost else ""
        yield Cause("place", f"the rows begin {abs(step)} place{'s' if abs(step) > 1 else ''} too {word}{over}: at "
                             f"{own[0]}, where the placeholders begin at {wanted[0]}")  # fmt: skip
    if left:
        says = f"{_some(left, 'place')} still {'has' if len(left) == 1 else 'have'} the embedding of"
        yield Cause("rows", f"{says} {right.word} itself: nothing was put there")


def _tokens_apart(right: RightInputs, given: GivenInputs, aligned: Aligned) -> Iterator[Cause]:
    """Tokens of the prompt that are missing, and ones too many."""
    labels = _right_labels(right)
    wanted = [(i, label) for i, label in enumerate(labels) if label[0] == "token"]
    own = [(i, label) for i, label in enumerate(aligned.labels) if label[0] == "token"]
    matcher = SequenceMatcher(None, [each[1] for each in wanted], [each[1] for each in own], autojunk=False)
    overwritten = {
        i for i, label in enumerate(aligned.labels) if label[0] in ("row", "none", "placeholder")
    }  # fmt: skip
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            continue
        lost = [i for i, _ in wanted[a:b] if not (given.count == right.count and i in overwritten)]
        if lost and kind != "replace":
            words = ", ".join(f"{right.texts[i]!r} ({int(right.ids[i])})" for i in lost[:FEW])
            yield Cause("tokens", f"missing: {words}{' and more' if len(lost) > FEW else ''}, {_beside(right, lost)}")
        elif kind == "replace" and lost:
            words = ", ".join(f"{right.texts[i]!r} ({int(right.ids[i])})" for i in lost[:FEW])
            others = ", ".join(str(label[1]) for _, label in own[c:d][:FEW])
            yield Cause("tokens", f"from {own[c][0]} on {others}, where the checkpoint has {words}")
        if kind == "insert":
            says = ", ".join(f"{label[1]} at {i}" for i, label in own[c:d][:FEW])
            yield Cause("tokens", f"too many: {says}")


def _beside(right: RightInputs, lost: Sequence[int]) -> str:
    """Where tokens are missing, in words."""
    what, runs = _what(right), _runs(right)
    if lost[0] == 0:
        return "at the beginning"
    for first, behind in runs:
        if lost[-1] == first - 1:
            return f"before the {what}"
        if lost[0] == behind:
            return f"behind the {what}"
    return f"at {lost[0]}"


def _scale_faults(right: RightInputs, given: GivenInputs, aligned: Aligned) -> Iterator[Cause]:
    """Rows that were multiplied: the picture's by the text's scale, or the text's by none."""
    if given.embeds is None:
        return
    known = _known(given)
    yield from _added(right, given, aligned)
    for kind, what in (("row", f"the {_what(right)}'s rows"), ("token", "the text's embeddings")):
        some = [i for i, label in enumerate(aligned.labels) if label[0] == kind and known[i]]
        if not some or (kind == "row" and _is_one(right, given, aligned)):
            continue
        factor = float(np.median(aligned.factors[some]))
        lengths, own = (np.linalg.norm(rows[some], axis=1) for rows in (given.embeds, right.embeds[aligned.right]))
        if len(some) > 1 and np.ptp(lengths) < SURE * lengths.mean() and np.ptp(own) > FACTOR / 2 * own.mean():
            yield Cause("scale", f"{what} are scaled to the length {lengths.mean():.4g} each")
            continue
        if abs(factor - 1) <= FACTOR:
            odd = [i for i in some if abs(aligned.factors[i] - 1) > 3 * FACTOR and aligned.distance[i] < LIKE / 4]
            if odd:
                yield Cause("scale", f"{_some(odd, 'row')} of {what} are multiplied, the first by "
                                     f"{aligned.factors[odd[0]]:.4g}")  # fmt: skip
            continue
        yield Cause("scale", f"{what} are multiplied by {factor:.4g}{_scale_name(right, factor, kind)}")


def _added(right: RightInputs, given: GivenInputs, aligned: Aligned) -> Iterator[Cause]:
    """That rows were added to the placeholder's embedding, and do not stand in its place."""
    rows = [i for i, label in enumerate(aligned.labels) if label[0] == "row" and aligned.right[i] >= 0]
    if given.embeds is None or not rows:
        return
    place = right.placeholder.astype(np.float64)
    left = given.embeds[rows] - right.embeds[aligned.right[rows]].astype(np.float64)
    rest = left - place
    if np.square(rest).sum() < FACTOR * np.square(left).sum():
        says = f"the {_what(right)}'s rows are added to the embedding of {right.word}, which they should replace"
        yield Cause("rows", says)


def _scale_name(right: RightInputs, factor: float, kind: str) -> str:
    """What a factor is, where it is the text's own scale."""
    own, usual = (right.scale, "this model's scale of text embeddings"), (right.embeds.shape[1] ** 0.5, "sqrt(n_embd)")
    for value, name in (own, usual):
        if value != 1 and abs(factor / value - 1) < NAMED:
            tail = ", which is for text alone" if kind == "row" else ", once more than it should be"
            return f", {name}{tail if value == right.scale else ''}"
        if value != 1 and abs(factor * value - 1) < NAMED:
            tail = ": it was left out" if kind == "token" and value == right.scale else ""
            return f", 1 / {value:.4g}, {name}{tail}"
    return ""


def _feature_faults(right: RightInputs, given: GivenInputs) -> Iterator[Cause]:
    """Whether the engine inserted what its own encoder gave."""
    assert given.features is not None
    if given.embeds is None or given.features.shape[1] != given.embeds.shape[1]:
        return
    own, rows = np.asarray(given.embeds, np.float64), np.asarray(given.features, np.float64)
    known = _known(given)
    nearest, left = _nearest(rows, np.where(known[:, None], own, 0.0))
    apart = np.square(own[nearest] - rows).sum(axis=1) / np.maximum(np.square(rows).sum(axis=1), TINY)
    lost = np.flatnonzero(apart > 1e-4)
    wanted = int(np.sum(right.is_media))
    if len(rows) != wanted:
        yield Cause("rows", f"its encoder gave {len(rows)} rows, the checkpoint's gives {wanted}")
    elif len(lost) and left[lost].max() <= LIKE:
        yield Cause("rows", f"{len(lost)} rows that its encoder gave were changed before they were inserted")
    elif len(lost):
        yield Cause("rows", f"{len(lost)} of {len(rows)} rows that its encoder gave were not inserted: "
                            f"{_some(lost.tolist(), 'row')}")  # fmt: skip


def _far(right: RightInputs, aligned: Aligned) -> Iterator[str]:
    """That the rows are the encoder's, and not to the last bit."""
    some = [float(aligned.distance[i]) for i, label in enumerate(aligned.labels) if label[0] == "row"]
    worst = max(some, default=0.0)
    if worst > SURE:
        yield (
            f"the {_what(right)}'s rows are the encoder's to within {worst:.1g} of their squared size: llamadiff port "
            "and watch judge what it computes"
        )


def _some(numbers: Sequence[int], word: str) -> str:
    """Numbers in words: a run, or the first few."""
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{word}s {numbers[0]} to {numbers[-1]}"
    told = ", ".join(map(str, numbers[:FEW])) + (", ..." if len(numbers) > FEW else "")
    return f"{len(numbers)} {word}s ({told})"


SECTIONS = ("temporal", "height", "width")


def _position_faults(right: RightInputs, own: Array, pairs: tuple[Array, Array], notes: list[str]) -> Iterator[Cause]:
    """Positions by segments: within each run of text or picture, and where the next one begins."""
    wanted = np.asarray(right.positions, np.float64)
    given, rows = pairs
    own, wanted = _as_many(own[:, given], wanted[:, rows])
    if not len(rows):
        return
    if not np.ptp(own) and np.ptp(wanted):
        yield Cause("positions", f"all positions are {own[0, 0]:.0f}")
        return
    if np.allclose(own - own[:, :1], wanted - wanted[:, :1]):
        if not np.allclose(own, wanted):
            notes.append(f"all positions are {_step(own[0, 0] - wanted[0, 0])}; RoPE turns by differences alone")
        return
    names = SECTIONS if len(wanted) == 3 else ("position",)
    edges = [each for run in _runs(right) for each in run]
    which = np.searchsorted(edges, rows, side="right")  # odd: a picture
    ends: tuple[Array, Array] | None = None
    for number in sorted(set(which.tolist())):
        here = np.flatnonzero(which == number)
        a, b = own[:, here], wanted[:, here]
        inside, is_media = [*_inside(a, b, names, number % 2 == 1, right, rows[here])], number % 2 == 1
        yield from inside
        if ends is not None and rows[here[0]] - rows[here[0] - 1] == 1:
            yield from _jump(a, b, ends, names, is_media, right)
        if not is_media or ends is None:
            ends = (a[:, -1:], b[:, -1:]) if not is_media else (np.c_[a[:, :1] - 1, a], np.c_[b[:, :1] - 1, b])
        else:
            ends = np.concatenate([ends[0], a], 1), np.concatenate([ends[1], b], 1)


def _as_many(own: Array, wanted: Array) -> tuple[Array, Array]:
    """Both with as many sections: where all have the same position, one stands for all."""
    if len(own) == len(wanted):
        return own, wanted
    if len(own) == 1:
        return np.repeat(own, len(wanted), 0), wanted
    if len(wanted) == 1:
        return own, np.repeat(wanted, len(own), 0)
    return own[: len(wanted)], wanted[: len(own)]


def _step(by: float) -> str:
    return f"{abs(by):.0f} {'more' if by > 0 else 'less'}"


def _inside(
    own: Array, wanted: Array, names: Sequence[str], is_media: bool, right: RightInputs, rows: Array
) -> Iterator[Cause]:
    """How positions within a run are not the checkpoint's."""
    a, b = own - own[:, :1], wanted - wanted[:, :1]
    if np.allclose(a, b):
        return
    what = f"within the {_what(right)} at {rows[0]}" if is_media else f"within the text at {rows[0]}"
    counted = np.asarray(rows - rows[0], np.float64)
    if all(np.allclose(each, counted) for each in b) and all(np.allclose(each, np.arange(len(rows))) for each in a):
        return  # of a run that lost a row
    if is_media and len(names) == 3:
        if np.allclose(a[0], b[0]) and np.allclose(a[1], b[2]) and np.allclose(a[2], b[1]):
            yield Cause("positions", f"{what}, height and width are exchanged")
            return
        turned = next((order for order in permutations(range(3)) if np.allclose(a[[*order]], b)), None)
        if turned is not None:
            lie = ", ".join(names[turned.index(n)] for n in range(3))
            yield Cause("positions", f"{what}, the sections lie in another order: {lie}")
            return
        if all(np.allclose(each, counted) for each in a):
            size = f"{int(np.ptp(b[1])) + 1} x {int(np.ptp(b[2])) + 1}"
            says = f"every row has the next position, as text has; its grid of {size} is right"
            yield Cause("positions", f"{what}, {says}")
            return
    if is_media and not a.any():
        yield Cause("positions", f"{what}, all rows have one position")
        return
    laws = defaultdict[str, list[str]](list)
    for section, name in enumerate(names):
        if not np.allclose(a[section], b[section]):
            laws[_law(a[section], b[section], counted)].append(name)
    for law, some in laws.items():
        yield Cause("positions", f"{what}, {' and '.join(some)}: {law}")


def _law(a: Array, b: Array, counted: Array) -> str:
    """What one section's positions are, where the right ones are others."""
    if np.allclose(a, counted):
        return "counting on with every row" + ("; it is one number for all of them" if not b.any() else "")
    if not a.any():
        return "one number for all rows"
    if b.any():
        factor = float(a @ b / (b @ b))
        if np.allclose(a, factor * b):
            return f"in steps of {factor:.4g}; 1 is right"
        if np.allclose(a, -b):
            return "counting backwards"
    i = int(np.argmax(~np.isclose(a, b)))
    return f"{a[i]:.0f} beyond the first at its row {i}; {b[i]:.0f} is right"


def _jump(
    own: Array, wanted: Array, ends: tuple[Array, Array], names: Sequence[str], is_media: bool, right: RightInputs
) -> Iterator[Cause]:
    """Where a run begins, after the one before it: one beyond the largest position."""
    a, b = own[:, 0] - ends[0].max(), wanted[:, 0] - ends[1].max()
    if np.allclose(a, b):
        return
    what = _what(right)
    if is_media:
        bad = [n for n in range(len(names)) if not np.isclose(a[n], b[n])]
        which = " and ".join(names[n] for n in bad)
        if np.allclose(own[bad, 0], 0):
            one = "begins" if len(bad) == 1 else "begin"
            yield Cause("positions", f"{which} of the {what} {one} at 0, not behind the text before it")
        else:
            by = _step(float((a - b)[bad[0]]))
            yield Cause("positions", f"the {what} begins at {by} than is right, in {which}")
        return
    first = ends[0][:, 1:2].min(), ends[1][:, 1:2].min()  # of the picture
    beyond, right_one, count = float(own[0, 0] - first[0]), float(wanted[0, 0] - first[1]), ends[0].shape[1] - 1
    if np.isclose(beyond, right_one) or np.isclose(own[0, 0] - ends[0][0, 0], wanted[0, 0] - ends[1][0, 0]):
        return  # beside the picture, or beside the text before it: what is between is wrong, and said
    if np.isclose(beyond, count):
        how = f"by its number of rows, {count}"
    elif np.isclose(beyond, right_one - 1):
        how = "at its largest position itself"
    elif np.isclose(beyond, 1):
        how = "one behind its first position"
    else:
        how = f"{beyond:.0f} behind its first position"
    says = f"{right_one:.0f} behind its first, one beyond its largest position, is right"
    yield Cause("positions", f"the text behind the {what} goes on {how}; {says}")


def _mask_faults(right: RightInputs, own: Array, pairs: tuple[Array, Array]) -> Iterator[Cause]:
    """What each row sees, against the kind of layer that it is nearest to."""
    given, rows = pairs
    if not right.masks or not len(rows) or own.shape[0] < given[-1] + 1:
        return
    part = own[np.ix_(given, given)]
    options = [mask[np.ix_(rows, rows)] for mask in right.masks.values()]
    wanted = min(options, key=lambda mask: int((mask != part).sum()))
    if (part == wanted).all():
        return
    what = _what(right)
    if part.all():
        yield Cause("mask", "every row sees every row, later ones too: there is no mask")
        return
    back = np.subtract.outer(np.arange(len(rows)), np.arange(len(rows)))
    window = int(back[part].max(initial=0)) + 1
    if window < len(rows) and (part == (wanted & (back < window))).all():
        yield Cause("mask", f"each row sees {window} rows alone, its own and those before it; all before it is right")
        return
    unseen = np.flatnonzero(~part.any(axis=0))
    if len(unseen):
        yield Cause("mask", f"no row sees {_some(rows[unseen].tolist(), 'row')}")
        kept = part.any(axis=0)
        part, wanted = part[np.ix_(kept, kept)], wanted[np.ix_(kept, kept)]
        rows = rows[kept]
    run_of = np.searchsorted([each for run in _runs(right) for each in run], rows, side="right")
    same = (run_of[:, None] == run_of) & (run_of[:, None] % 2 == 1)
    later = rows[None] > rows[:, None]
    apart = part != wanted
    for block, says in (
        (same & later & wanted & ~part, f"causal within the {what}; its rows see each other both ways"),
        (same & later & ~wanted & part, f"both ways within the {what}; its rows see those before them alone"),
        (~same & later & ~wanted & part, "rows see later ones"),
        (
            ~same & wanted & ~part & (run_of[None] % 2 == 1) & ~later,
            f"the text behind the {what} does not see all of it",
        ),
        (~same & wanted & ~part & (run_of[:, None] % 2 == 1), f"the {what} does not see the text before it"),
    ):
        if (block & apart).any():
            yield Cause("mask", f"{says} ({int((block & apart).sum())} pairs)")
            apart &= ~block
    if apart.any():
        i, j = (int(each[0]) for each in np.nonzero(apart))
        word = "sees" if part[i, j] else "does not see"
        yield Cause("mask", f"row {rows[i]} {word} row {rows[j]}, and so in {int(apart.sum())} pairs")
