"""llamadiff: says which operation of an LLM inference engine is wrong, since which layer, and why.

import llamadiff
comparison = llamadiff.compare("model.gguf", "Once upon a time")
print(comparison.summary)
comparison.frame()  # a pandas DataFrame, one row a tap
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own is not worth its import: the sooner the command is ready for Ctrl-C, the better
if TYPE_CHECKING:
    from typing import Any

    from llamadiff.engines.run_spec import How, Run
    from llamadiff.result.comparison import Comparison
    from llamadiff.system.errors import UserError
    from llamadiff.trace.reader import Trace
    from llamadiff.trace.writer import TraceWriter
    from llamadiff.verbs.verbs import check, compare, diff

__version__ = "0.1.0"
__all__ = ["Comparison", "How", "Run", "Trace", "TraceWriter", "UserError", "check", "compare", "diff"]

_HOMES = {
    "Comparison": "result.comparison", "UserError": "system.errors", "Trace": "trace.reader",
    "TraceWriter": "trace.writer", "How": "engines.run_spec", "Run": "engines.run_spec",
    "check": "verbs.verbs", "compare": "verbs.verbs", "diff": "verbs.verbs",
}  # fmt: skip


def __dir__() -> list[str]:
    """What is public."""
    return sorted((*__all__, "__version__", "torch"))


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``llamadiff --help`` waits for nothing."""
    from importlib import import_module

    if name == "torch":
        return import_module(f"{__name__}.torch")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
