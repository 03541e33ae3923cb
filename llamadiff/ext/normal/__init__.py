"""Is it normal? How the layers' outputs grow, drift and stand out: the model's own, or the code's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.result.comparison import Comparison
    from llamadiff.result.normal import Normal


class IsItNormal(Slice):
    """Is it normal? How the layers' outputs grow, drift and stand out: the model's own, or the code's."""

    def normal(self, result: Comparison) -> Normal | None:
        from llamadiff.ext.normal.normal import normal_of

        return normal_of(result)


slice_ = IsItNormal()
