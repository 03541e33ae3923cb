"""The ways to misread blocks that engines are known to have, as they are tried."""

from __future__ import annotations

from llamadiff.ext.file.blocks import quants, scales

KNOWN = (
    quants.nibbles_interleaved, quants.nibbles_swapped, quants.quants_offset, quants.high_bits_ignored,
    quants.high_bits_misplaced, quants.quants_linear, quants.quants_order, scales.minima_wrong, scales.scales_misread,
    scales.scale_missing, scales.block_size_wrong,
)  # fmt: skip
