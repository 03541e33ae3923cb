"""The memory that a run took."""

from __future__ import annotations

import resource
import sys


def peak_rss_mb() -> float:
    """The larger peak of this process and its children, in MiB (memory-mapped model pages count)."""
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(peaks) / unit
