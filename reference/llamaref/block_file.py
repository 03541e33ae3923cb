"""Writes a GGUF file of blocks as they are: tensors of any type, without a model; or with the metadata of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from numpy.typing import NDArray


def write_blocks(
    path: Path,
    architecture: str,
    tensors: Mapping[str, tuple[str, NDArray[Any]]],
    fields: Mapping[str, Any] | None = None,
) -> None:
    """``tensors``: name -> its type and its rows, [row, bytes]; ``fields``: metadata, of plain values and lists."""
    writer = gguf.GGUFWriter(path, architecture)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}  # fmt: skip
    for key, value in (fields or {}).items():
        add[type(value)](key, value)
    for name, (kind, rows) in tensors.items():
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
