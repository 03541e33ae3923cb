"""What a PyTorch model computes, recorded: ``llamadiff.torch.record(model, ids)``.

Raises ImportError where the slice that records is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from llamadiff import plugins

if TYPE_CHECKING:
    from llamadiff.trace.reader import Trace

__all__ = ["record"]

_recorder = plugins.ask_first(lambda each: each.recorder)
if _recorder is None:
    raise ImportError("llamadiff.torch: the slice that records PyTorch models is missing; llamadiff doctor says why")
record: Callable[..., Trace] = resolve_name(_recorder)
