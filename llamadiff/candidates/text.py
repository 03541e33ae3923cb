"""Text dumps, as people print them: ``[12] = 0.581001``, ``12: 0.58``, or one number a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.errors import UserError

Array = NDArray[Any]

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf|infinity))"
_INDEXED = re.compile(rf"\[?\s*(\d+)\s*\]?\s*[:=]\s*{_NUMBER}\s*,?", re.IGNORECASE)
_PLAIN = re.compile(rf"{_NUMBER}\s*,?", re.IGNORECASE)
MAX_BYTES = 1 << 30


def read_values(path: Path) -> tuple[Array, Array]:
    """Indices and values of a text dump. Lines that are empty or begin with # are left out.

    Raises UserError naming the first line that is no value.
    """
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path}: {path.stat().st_size >> 20} MiB of text; write .npy or a trace instead")
    indices, values = [], []
    with path.open(errors="replace") as file:
        for number, line in enumerate(file, 1):
            stripped = line.strip()
            if not stripped or stripped.startswith("#"):
                continue
            indexed, plain = _INDEXED.fullmatch(stripped), _PLAIN.fullmatch(stripped)
            if indexed:
                indices.append(int(indexed[1]))
                values.append(float(indexed[2]))
            elif plain:
                indices.append(len(values))
                values.append(float(plain[1]))
            else:
                raise UserError(f"{path}:{number}: {stripped[:40]!r} is no value; expected lines such as [12] = 0.581")
    return np.array(indices, np.int64), np.array(values, np.float32)
