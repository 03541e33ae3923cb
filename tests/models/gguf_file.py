"""GGUF files of any metadata and tensors; what a file holds, to be changed and written again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_gguf(
    path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Any] | None = None, arch: str = "llama"
) -> Path:
    """A field is a plain value, or one with its types; a tensor its values, or bytes with their type."""
    writer = gguf.GGUFWriter(path, arch)
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for key, value in fields.items():
        writer.add_key_value(key, *value) if isinstance(value, tuple) else add[type(value)](key, value)
    for name, values in (tensors or {}).items():
        data, kind = values if isinstance(values, tuple) else (values, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that it was given."""
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors, as ``write_gguf`` takes them."""
    reader = gguf.GGUFReader(path)
    fields = {
        name: (each.contents(), each.types[0], each.types[-1] if len(each.types) > 1 else None)
        for name, each in reader.fields.items() if not name.startswith("GGUF.") and name != "general.architecture"
    }  # fmt: skip
    return fields, {each.name: (np.array(each.data), each.tensor_type) for each in reader.tensors}
