"""Products of many tokens are verified by sketch, and computed only where they are not clearly right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.judge.measuring import Judge
    from llamadiff.judge.replay import Sketches


class Verify(Slice):
    """Products of many tokens are verified by sketch, and computed only where they are not clearly right."""

    def sketches(self, judge: Judge, products: Mapping[str, str]) -> Sketches:
        from llamadiff.ext.verify.sketches import Sketches

        return Sketches(judge, products)


slice_ = Verify()
