"""Where a model's layers are: on a device that is named, or on several; and what each made of its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.report.tables import Table
    from llamadiff.result.comparison import Comparison


class Devices(Slice):
    """Where a model's layers are: on a device that is named, or on several that share it."""

    placing = "llamadiff.ext.devices.placing:place"
    remote = ("llamadiff.ext.devices.partial_sums", "llamadiff.ext.devices.placing")

    def add_to(self, result: Comparison) -> Comparison:
        from llamadiff.ext.devices.parts import add_parts

        return add_parts(result)

    def tables(self, result: Comparison, full: bool) -> Sequence[Table]:
        if "devices" not in result.more:
            return ()
        from llamadiff.ext.devices.parts import parts_table

        return (parts_table(result.more["devices"]),)


slice_ = Devices()
