"""What is said of a command that ends before its time: one line on standard error."""

from __future__ import annotations

import os
import sys


def complain(reason: str) -> None:
    """Say it, on one line, whatever is in it."""
    from llamadiff.report.terminal.escape import escape_line

    sys.stderr.write(f"llamadiff: {escape_line(reason, 4000, plain=os.sep)}\n")
