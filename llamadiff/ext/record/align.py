"""A program's memory as a trace: the engine says what each tap would be, and what is there is what the program had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import chain, islice, product
from typing import Any

import numpy as np
from llamaref import Tap as EngineTap
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from llamadiff.engines.model_file import Runnable
from llamadiff.ext.record.ids import ids_taken
from llamadiff.ext.record.orders import Order, back, orders_of
from llamadiff.ext.record.places import Hypothesis, hypotheses
from llamadiff.ext.record.rows import Rows
from llamadiff.ext.record.search import Found, Search
from llamadiff.trace.taps import Tap

Array = NDArray[Any]
Placed = Mapping[str, Mapping[int, Found]]
EXACT = 1e-12  # NMSE of a row that is there as it was sought
PLAIN = 1e-9  # NMSE below which rounding is float32's: a coarser one hides what a place shows
PAIRS = 6  # hypotheses of each of two taps
NEAR = 4  # taps between two that are tried together
ROUNDING = {"f32": 1e-11, "f64": 1e-11, "f16": 1e-6, "bf16": 1e-4}  # NMSE that a dtype leaves of a row, and more
MORE = 1e3  # than others' a right row's NMSE may be, where most rows were found


class _EnoughError(Exception):
    """All that was asked for has been computed."""


class Aligner(EngineTap):
    """A llamaref.Tap that seeks every op's result in a program's memory, and goes on with what it finds there.

    So the next op is computed from what the program itself had, as in teacher-forced replay: a program that rounds
    otherwise, or is wrong, is followed. ``placed``: values of rows that are wrong, by tap, taken for the program's own.
    """

    def __init__(self, model: Runnable, search: Search, limit: float, placed: Placed, last: str = "") -> None:
        """``limit``: the NMSE of a row that is gone on with.

        ``last``: the tap after which no more is computed: a try, for which rows are sought where others were found.
        """
        self._search, self._limit, self._placed, self._last = search, limit, placed, last
        self._find = search.find_close if last else search.find
        self._model, self._taps = model, {tap.name: tap for tap in model.taps}
        self.rows: dict[str, Rows] = {}

    def __call__(self, name: str, x: Array) -> Array:
        tap = self._taps.get(name)
        # scores are rows of many lengths; a cache's rows are a copy, which shows nothing of what was copied
        if tap is not None and not tap.causal and not tap.kind.optional and tap.kind.op != "ARGSORT":
            rows = self.rows[name] = self._seek(tap, x[0])
            x = rows.values[None].astype(x.dtype, copy=False)
        if name == self._last:
            raise _EnoughError
        return x

    def _seek(self, tap: Tap, x: Array) -> Rows:
        flat = np.array(x.reshape(len(x), -1))
        placed = self._placed.get(tap.name, {})
        order, found = self._found_in_order(tap, flat)
        found |= placed
        places = {row: each for row, each in found.items() if row in placed or each.nmse <= self._limit}
        for row, each in places.items():
            flat[row] = each.values
        return Rows(tap, flat.reshape(x.shape), places, {r: e for r, e in found.items() if r not in places}, order)

    def _found_in_order(self, tap: Tap, flat: Array) -> tuple[Order | None, dict[int, Found]]:
        """The order in which most rows are found, and what is found."""
        orders = [*orders_of(tap, self._model, flat.shape[1])]
        usual = self._search.order if len(orders) > 1 else 0
        best: tuple[Order | None, dict[int, Found]] = orders[usual], {}
        for number in sorted(range(len(orders)), key=lambda number: number != usual):
            found = self._found_rows(flat, orders[number])
            if len(found) > len(best[1]):
                best = orders[number], found
                self._search.order = number if len(orders) > 1 else self._search.order
            if len(found) == len(flat):
                break
        return best

    def _found_rows(self, flat: Array, order: Order | None) -> dict[int, Found]:
        """What is found of rows in an order; the same values are those of the row alone that is most like them."""
        rows = flat if order is None else flat[:, order]
        found = {row: each for row, sought in enumerate(rows) if (each := self._find(sought)) is not None}
        least = dict[bytes, float]()
        for each in found.values():
            values = each.values.tobytes()
            least[values] = min(each.nmse, least.get(values, each.nmse))
        return {
            row: each if order is None else replace(each, values=back(each.values, order))
            for row, each in found.items()
            if each.nmse <= 10 * least[each.values.tobytes()] + EXACT
        }


@dataclass(frozen=True)
class Alignment:
    """What was found of each tap.

    ``nowhere``: the first, and its first row, that is not there, though nothing that is there answers for it. ``ids``:
    where that is made of its embedding alone, those that the program took (ids.py). ``is_wrong``: some was found by its
    place, and not by its values.
    """

    rows: Mapping[str, Rows]
    nowhere: tuple[str, int] | None = None
    ids: Sequence[int] = ()
    is_wrong: bool = False


def align(model: Runnable, search: Search, tokens: Sequence[int]) -> Alignment:
    """Run the engine over the tokens, and find in memory what it gives; what is wrong there, by its place."""
    alignment = _Alignment(model, search, tokens)
    with threadpool_limits(1, "blas"), np.errstate(all="ignore"):
        alignment.run()
    rows = alignment.without_copies()
    name, lacking = next(iter(alignment.dark().items()), ("", []))
    if not name:
        return Alignment(rows)
    is_first = name == "embd" or [*model.inputs(rows[name].tap)] == ["embd"]
    taken = ids_taken(model, search, alignment.limit) if is_first else ()
    return Alignment(rows, (name, lacking[0]), taken, alignment.has_placed)


class _Alignment:
    """One alignment: parts of the engine are run again until what follows from what was found is found itself."""

    def __init__(self, model: Runnable, search: Search, tokens: Sequence[int]) -> None:
        self._model, self._search, self._tokens = model, search, list(tokens)
        self._placed: dict[str, Mapping[int, Found]] = {}
        self._parts = model.parts(tokens)
        self._inputs = {tap.name: [*model.inputs(tap)] for tap in model.taps}
        self._consumers: dict[str, list[str]] = {tap.name: [] for tap in model.taps}
        for name, inputs in self._inputs.items():
            for each in inputs:
                self._consumers[each].append(name)
        mixing = [number for number, tap in enumerate(model.taps) if tap.causal]
        self._tail = {tap.name for tap in model.taps[mixing[-1] if mixing else -1 :]}
        self._rows: dict[str, Rows] = {}
        self._starts: list[tuple[int, Any, Any]] = []  # of each part: the taps before it, its input, and the cache
        self._together = set[str]()  # words of taps that were wrong together
        self._passed = set[str]()  # and of those stored nowhere, behind which something was placed
        self.limit = np.inf

    def run(self) -> None:
        """Find what is there, and then, one after another, what is wrong.

        What comes behind a wrong row is known only when that has its place: no part is run but the one that follows.
        """
        end = len(self._parts) - 1
        self._go_on(0, end)
        self.limit = self._rounding()
        if self.limit > PLAIN:
            self._go_on(0, end)
            return
        reached, unplaced = min(1, end), set[str]()
        self._go_on(0, reached)
        while True:
            unplaced |= {name for name in self._rows if self._word(name) in self._passed}
            dark = next(
                (name for name in self.dark() if name not in unplaced and self._is_followed(name, reached)), None
            )
            if dark is None and reached == end:
                return
            if dark is None:
                reached += 1
                self._go_on(reached, reached)
                continue
            two = self._word(dark) in self._together
            placed = self._place_two(dark, unplaced) if two else None
            placed = placed or self._place(dark) or self._place_two(dark, unplaced)
            if placed is None:
                unplaced.add(dark)
                continue
            self._passed |= {self._word(name) for name in unplaced & self._nowhere()}
            for name, some in placed.items():
                self._placed[name] = {**self._placed.get(name, {}), **some}
            part = self._part_of(dark)
            reached = min(part + 1, end)
            self._go_on(part, reached)
            words = {self._word(name) for name in placed}  # in other layers it may be known now
            self._together |= words if len(words) > 1 else set()
            unplaced = {name for name in unplaced if self._word(name) not in words}

    def _word(self, name: str) -> str:
        return self._rows[name].tap.kind.word

    def _is_followed(self, name: str, reached: int) -> bool:
        """Whether the part has been run that follows a tap's: what it gives may answer for it."""
        return reached == len(self._parts) - 1 or self._part_of(name) < reached

    def _go_on(self, part: int, last: int) -> None:
        """The run of these parts, as it is placed so far."""
        del self._starts[part + 1 :]
        count, x, cache = self._starts[part] if part else (0, None, None)
        self._rows = dict(list(self._rows.items())[:count])
        aligner = Aligner(self._model, self._search, self.limit, self._placed)
        step = self._step(aligner, cache)
        if not part:
            self._starts = [(0, None, _copied(step.cache))]
        for number in range(part, last + 1):
            x = self._parts[number].run(x, step)
            self._starts.append((count + len(aligner.rows), x, _copied(step.cache)))
        self._rows |= aligner.rows

    def _rounding(self) -> float:
        """The NMSE of a right row, by what most have; where few were found, they may be like others by chance."""
        found = [each.nmse for rows in self._rows.values() for each in rows.places.values()]
        usual = ROUNDING[self._search.dtypes[0]]
        if 2 * len(found) < sum(len(rows.values) for rows in self._rows.values()):
            return usual
        return max(usual, MORE * float(np.median([nmse for nmse in found if nmse > 0] or [0.0])))

    def _step(self, aligner: Aligner, cache: Any) -> Any:
        step = self._model.engine.step(self._tokens, tap=aligner)
        return step if cache is None else replace(step, cache=_copied(cache))

    def _part_of(self, name: str) -> int:
        place = list(self._rows).index(name)
        return max(number for number, (count, _, _) in enumerate(self._starts) if count <= place)

    def dark(self) -> dict[str, list[int]]:
        """Taps, and their rows that are not there or not right, where nothing computed from them says that they are."""
        shown, dark = self._shown(), dict[str, list[int]]()
        for name, rows in self._rows.items():
            answered = set[int]().union(*(shown[each] for each in self._consumers[name]))
            lacking = self._needed(name) - rows.close(self.limit) - answered - self._placed.get(name, {}).keys()
            if lacking:
                dark[name] = sorted(lacking)
        return dark

    def _shown(self) -> dict[str, set[int]]:
        """The rows of each tap that are right by what is there.

        What was never stored is answered for by what follows, and so is a copy of what it is made of, which is there
        whatever the program computes; what is there and is not right answers for nothing.
        """
        shown = dict[str, set[int]]()
        for name in reversed(self._consumers):
            shown[name] = set[int]().union(*(shown[each] for each in self._consumers[name]))
            if (rows := self._rows.get(name)) is not None:
                close, answered = rows.close(self.limit), shown[name]
                shown[name] = {row for row in close if row in answered or not self._is_copy(name, row)}
                shown[name] |= answered.difference(rows.places)
        return shown

    def _is_copy(self, name: str, row: int) -> bool:
        """Whether attention gives a row the values of one that it is made of, as it does of the first token's V."""
        return self._made_of(name)[1] and self._repeats(name, row)

    def _repeats(self, name: str, row: int) -> bool:
        """Whether a row has the values of one that it is made of."""
        values = self._rows[name].values[row]
        return any(bool(np.isin(values, self._rows[each].values[row]).all()) for each in self._made_of(name)[0])

    def _made_of(self, name: str) -> tuple[list[str], bool]:
        """What is sought of what a tap is computed from; and whether it is so by scores, from rows of other tokens."""
        direct = self._inputs[name]
        found, waiting = dict[str, None](), [*direct]
        for each in waiting:
            if each in self._rows:
                found[each] = None
            else:
                waiting += [more for more in self._inputs[each] if more not in waiting]
        return [*found], not {*direct} <= {*found}

    def _stored(self, name: str, nowhere: Collection[str]) -> tuple[list[str], bool]:
        """As ``_made_of``, where what is ``nowhere`` is one with what reads it, and what it is made of counts."""
        found, waiting, mixes = dict[str, None](), [name], False
        for each in waiting:
            inputs, scored = self._made_of(each)
            mixes |= scored
            found |= dict.fromkeys(one for one in inputs if one not in nowhere)
            waiting += [one for one in inputs if one in nowhere and one not in waiting]
        return [*found], mixes

    def _nowhere(self) -> set[str]:
        """Taps that are computed as they should be, and stored nowhere.

        Of their kind no row was found but where another tap has the same values; and one of their own is so there that
        says they are right: it is not that of an input. So RoPE leaves the first token's Q and K as they are, which is
        there whatever it does with others. An embedding is made of nothing: each must be there.
        """
        places = {
            name: {each.place for each in (*rows.places.values(), *rows.near.values())}
            for name, rows in self._rows.items()
        }
        taps = Counter(chain.from_iterable(places.values()))
        stored = {self._word(name) for name in places if any(taps[each] == 1 for each in places[name])}
        return {
            name for name, rows in self._rows.items() if self._word(name) not in stored and self._made_of(name)[0]
            and any(not self._repeats(name, row) for row in rows.close(self.limit))
        }  # fmt: skip

    @property
    def has_placed(self) -> bool:
        """Whether any row was taken by its place."""
        return bool(self._placed)

    def without_copies(self) -> dict[str, Rows]:
        """The rows, but for those that may lie in memory though the program has others."""
        shown = self._shown()
        found = dict(self._rows)
        for name, rows in self._rows.items():
            doubtful = {row for row in rows.close(self.limit) - shown[name] if self._is_copy(name, row)}
            found[name] = replace(rows, places={row: each for row, each in rows.places.items() if row not in doubtful})
        return found

    def _to_place(self, name: str, nowhere: Collection[str]) -> list[int]:
        """Rows of a tap that may be wrong: nothing says that they are right, and of all they are computed from it does.

        What is computed from rows that are not known would follow from the rows of other tokens too.
        """
        known = {each: rows | self._placed.get(each, {}).keys() for each, rows in self._shown().items()}
        inputs, mixes = self._stored(name, nowhere)
        given = [known[each] for each in inputs]
        return [
            row for row in range(len(self._tokens))
            if row not in known[name] and all({*range(0 if mixes else row, row + 1)} <= rows for rows in given)
        ]  # fmt: skip

    def _needed(self, name: str) -> set[int]:
        """The rows that a program must have: behind the last attention those of the last token alone are read."""
        last = len(self._tokens) - 1
        return {last} if name in self._tail else {*range(last + 1)}

    def _place(self, name: str) -> Placed | None:
        """What can be taken for the values of a tap that is wrong: what is computed from them is there."""
        return self._best({name: each} for each in self._likely(name))

    def _place_two(self, name: str, unplaced: set[str]) -> Placed | None:
        """The same of two taps that are both wrong, such as Q and K."""
        follows = self._following(name)
        other = next((each for each in self.dark() if each != name and each not in unplaced | follows), None)
        if other is None or list(self._rows).index(other) - list(self._rows).index(name) > NEAR:
            return None
        one, two = (list(islice(self._likely(each), PAIRS)) for each in (name, other))
        return self._best({name: first, other: second} for first, second in product(one, two))

    def _likely(self, name: str) -> Iterator[Hypothesis]:
        nowhere = self._nowhere()
        rows = self._to_place(name, nowhere)
        if not rows:
            return iter(())
        inputs = {each: self._stored(each, nowhere)[0] for each in self._rows}
        return hypotheses(name, rows, self._rows, inputs, self._search, self._model.n_layer)

    def _following(self, name: str) -> set[str]:
        """All taps that are computed from one."""
        found, waiting = set[str](), [name]
        while waiting:
            new = set(self._consumers[waiting.pop()]) - found
            found |= new
            waiting += new
        return found

    def _best(self, tries: Iterable[Placed]) -> Placed | None:
        """The first of which all follows, else the one of which most does: its rows from which something does."""
        best, most = None, set[int]()
        for placed in tries:
            gained = self._gained(placed)
            if len(gained) > len(most):
                best, most = placed, gained
                if most.issuperset(set().union(*placed.values())):
                    break
        own = {name: {row: each for row, each in rows.items() if row in most} for name, rows in (best or {}).items()}
        return own if any(own.values()) else None

    def _gained(self, placed: Placed) -> set[int]:
        """The rows that are there if it is so, and else are not, of the next sum that these go into.

        A sum with the residual shows which token's row it is: what comes before would follow from another one's too.
        Two kinds say nothing: a copy, as what is rotated to the first position is; and what was found as another tap's
        row, as Q's rotation, which would follow from Q in the place of K.
        """
        names = list(self._rows)
        last = max(placed, key=names.index)
        following = self._following(last)
        follow = [name for name in names[names.index(last) + 1 :] if name in following]
        if not follow:
            return set()
        shows = next((name for name in follow if self._rows[name].tap.kind.op == "ADD"), follow[-1])
        tried = {name: {**self._placed.get(name, {}), **rows} for name, rows in placed.items()}
        aligner = Aligner(self._model, self._search, self.limit, {**self._placed, **tried}, shows)
        part = min(self._part_of(name) for name in placed)
        _, x, cache = self._starts[part]
        step = self._step(aligner, cache)
        with suppress(_EnoughError):
            for each in self._parts[part:]:
                x = each.run(x, step)
        others: dict[int, list[range]] = {}
        for found in (found for rows in self._rows.values() for found in rows.places.values()):
            others.setdefault(found.place.stop, []).append(found.extent)
        gained, rows = set[int](), aligner.rows[shows]
        for row in rows.close(self.limit) - self._rows[shows].close(self.limit):
            found = rows.places[row]
            copied = any(np.array_equal(found.values, each[row].values) for each in placed.values() if row in each)
            if not copied and not any(found.place.address in extent for extent in others.get(found.place.stop, ())):
                gained.add(row)
        return gained


def _copied(cache: Any) -> Any:
    """A cache whose rows are added to apart from the other's; the rows themselves are never written."""
    return replace(cache, **{each.name: dict(value) if isinstance(value := getattr(cache, each.name), dict) else value
                             for each in fields(cache)})  # fmt: skip
