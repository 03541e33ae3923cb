"""Writes a GGUF file of blocks as they are: tensors of any type, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from numpy.typing import NDArray


def write_blocks(path: Path, architecture: str, tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> None:
    """``tensors``: name -> its type and its rows, [row, bytes]."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, (kind, rows) in tensors.items():
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
