"""What engines print, dump and call otherwise: debug logs, ranks and steps, names found by values, misplaced taps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice, slices

if TYPE_CHECKING:
    from llamadiff.candidates.name_map import Map
    from llamadiff.candidates.pieces import Piece, Unread
    from llamadiff.engines.model_file import Runnable
    from llamadiff.judge.study import Bench, Look, Study
    from llamadiff.result.diagnosis import Diagnosis


class Dumps(Slice):
    """What engines print, dump and call otherwise: debug logs, ranks, steps, names found by values, misplaced taps."""

    def sources(self) -> Sequence[str]:
        return ("llamadiff.ext.dumps.saved", "llamadiff.ext.dumps.log")

    def map_by_values(
        self, pieces: Sequence[Piece | Unread], model: Runnable, tokens: tuple[int, ...]
    ) -> tuple[Map, list[str]]:
        from llamadiff.ext.dumps.by_value import map_by_values

        return map_by_values(pieces, model, tokens)

    def causes(self, bench: Bench, study: Study) -> tuple[Diagnosis, ...] | None:
        from llamadiff.ext.dumps.rank_causes import ranks_at_fault, with_ranks

        said = ranks_at_fault(bench, study)
        others = [each for each in slices().values() if each is not self] if said else []
        found = next((causes for each in others if (causes := each.causes(bench, study)) is not None), ())
        return with_ranks(found, said, study) if said else None

    def looks(self) -> Sequence[Look]:
        from llamadiff.ext.dumps.misplaced import find_misplaced

        return (find_misplaced,)


slice_ = Dumps()
