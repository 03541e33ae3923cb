"""How other CPUs, GPUs and machines compute: sums in float16, kernels of devices, runners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.judge.measuring import Judge
    from llamadiff.judge.replay import ShownSums
    from llamadiff.judge.study import Look
    from llamadiff.numerics.summing import SumsInHalf
    from llamadiff.plugins import StartElsewhere


class Cpus(Slice):
    """How other CPUs, GPUs and machines compute: sums in float16, kernels of devices, runners."""

    needs = ("graph",)
    node_arithmetics = "llamadiff.ext.cpus.device:DeviceNodes"

    def half_sums(self) -> SumsInHalf:
        from llamadiff.ext.cpus.shown import HalfSums

        return HalfSums()

    def sum_order_probe(self, judge: Judge) -> ShownSums:
        from llamadiff.ext.cpus.shown import ShownSums

        return ShownSums(judge)

    def looks(self) -> Sequence[Look]:
        from llamadiff.ext.cpus.shown import sums

        return (sums,)

    def runner(self) -> StartElsewhere:
        from llamadiff.ext.cpus.remote_bootstrap import start_there

        return start_there


slice_ = Cpus()
