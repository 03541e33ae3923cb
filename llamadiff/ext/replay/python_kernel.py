"""Calls a user's Python function with saved ops, one after the other; in a process of its own.

The function is given a ``KernelInputs`` and returns the op's result as an array.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.graph.op import Op
from llamadiff.ext.graph.repro import load_inputs, named_parameters
from llamadiff.ext.replay.kernel_run import OP, OUT

Array = NDArray[Any]


@dataclass(frozen=True)
class KernelInputs:
    """What an op's file says: ggml's name of the ``op``, its ``sources`` [ne3, ne2, ne1, ne0] (None where one is
    missing; blocks as bytes) and their ``types``, ``parameters`` by name, all of them as bytes in ``params``, and the
    ``shape`` and ``type`` of the result.
    """

    op: str
    sources: Sequence[Array | None]
    types: Sequence[str | None]
    parameters: Mapping[str, Any]
    params: bytes
    shape: tuple[int, ...]
    type: str


def main(file: str, name: str, *folders: str) -> None:
    """Call the function with the op in each folder, and write what it gives there."""
    function = load_function(Path(file), name)
    for folder in map(Path, folders):
        try:
            _call(function, folder)
        except Exception as error:  # whatever the function raises: its file and line are what its author looks for
            last = traceback.extract_tb(error.__traceback__)[-1]
            sys.exit(f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})")


def inputs_for(n: Op) -> KernelInputs:
    """What the function is given of an op that was loaded."""
    sources = [None if s is None else s.values.reshape(*[1] * (4 - s.values.ndim), *s.values.shape) for s in n.sources]
    types = [None if s is None else s.kind for s in n.sources]
    return KernelInputs(n.name, sources, types, named_parameters(n), n.params, n.shape, n.kind)


def _call(function: Callable[[KernelInputs], Any], folder: Path) -> None:
    packed = BytesIO()
    result = function(inputs_for(load_inputs(folder / OP).op))
    np.save(packed, np.ascontiguousarray(result), allow_pickle=False)
    part = folder / f"{OUT}.part"  # whoever waits for a result finds it whole
    part.write_bytes(packed.getvalue())
    part.replace(folder / OUT)


def load_function(file: Path, name: str) -> Callable[[KernelInputs], Any]:
    """The function of that name in a file of Python."""
    sys.path.insert(0, str(file.resolve().parent))  # as for a program of its own
    sys.dont_write_bytecode = True  # nothing is left beside the user's file
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        sys.exit(f"{file}: no Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    function: Callable[[KernelInputs], Any] | None = getattr(module, name, None)
    if function is None:
        sys.exit(f"{file}: has no function {name}")
    return function
