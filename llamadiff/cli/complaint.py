"""What is said of a command that ends before its time: one line on standard error."""

from __future__ import annotations

import os
import sys


def complain(reason: str) -> None:
    """Say it, on one line, whatever is in it."""
    from llamadiff.report.terminal.escape import shown

    sys.stderr.write(f"llamadiff: {shown(reason, 4000, plain=os.sep)}\n")
