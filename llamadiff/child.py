"""Child processes: another Python that imports what this one imports, whatever lies in the working directory."""

from __future__ import annotations

import sys


def command(module: str) -> list[str]:
    """The command line that runs ``main()`` of a module of this package."""
    code = f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"
    return [sys.executable, "-c", code, *sys.path]
