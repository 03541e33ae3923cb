"""Places of a projector's graph where the file's tensors are to blame: exchanged, lost, or with other values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from llamadiff.ext.port.alignment import reached
from llamadiff.ext.port.faults import nearest
from llamadiff.ext.port.lineup import Departed, LiningUp
from llamadiff.ext.port.places import Apart
from llamadiff.ext.port.sides import FILE
from llamadiff.ext.port.tensors import Tensors, read_by_nodes

THE_FILES = "the file's "
STORED = ("norm-weight-plus-one", "norm-weight-minus-one")  # known bugs that are the converter's


def with_tensors(
    places: Iterable[Apart], lining: LiningUp, departed: Sequence[Departed], tensors: Tensors
) -> list[Apart]:
    """Places with what of the file's tensors shows there: where nothing else was found of the file."""
    exchanged = _Exchanged(tensors)
    lost = {name for name, x in lining.parameters.items() if x.size > 1 and not tensors.is_kept(x)}
    found = []
    for place in places:
        own = [each for each in departed if _is_of(each, place)] if place.fault is None else []
        says = next((says for each in own if (says := exchanged.at(each, lining)) is not None), None)
        gone = next((name for each in own for name in _read(each, lining) if name in lost), None)
        if says is None and gone is not None:
            says = f"no tensor has the values of {gone}"
        is_stored = place.cause is not None and place.cause.name in STORED
        found.append(replace(place, fault=says or place.fault, side=FILE if says or is_stored else place.side))
    return found


class _Exchanged:
    """Parameters that lie under another tensor's name than converters give them."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self._known: dict[int | None, dict[str, str]] = {}

    def at(self, each: Departed, lining: LiningUp) -> str | None:
        """What is said of a tensor that a place's nodes read."""
        layer = each.departure.layer
        if layer not in self._known:
            said = self.tensors.misplaced(layer)
            self._known[layer] = {says.split(" ", 3)[2]: says for says in said}
        known = {*self.tensors.weights}
        read = [*read_by_nodes(each.place.nodes, lining.graph), *nearest(each.departure.node, lining.graph, known)]
        found = next((self._known[layer][name] for name in read if name in self._known[layer]), None)
        return None if found is None else found.removeprefix(THE_FILES)


def _is_of(each: Departed, place: Apart) -> bool:
    numbers = {node.number for node in place.nodes}
    return bool(numbers & {each.departure.node.number, *(node.number for node in each.place.nodes)})


def _read(each: Departed, lining: LiningUp) -> list[str]:
    """The parameters that the model reads on the way to what stands at a place; next, if nothing is known to."""
    if each.op is None:
        return list(next((op.weights for op in each.departure.ops if op.weights), ()))
    ops = lining.model_run.ops
    before = reached([each.op.number], lambda number: ops[number].inputs)
    return [name for op in each.departure.ops if op.number in before for name in op.weights]
