"""A GGUF file as this engine reads it: metadata under short names, and every tensor in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from proof.strangers.model import decoded

Array = Any


@dataclass(frozen=True)
class File:
    """One model: metadata without the architecture's prefix, tensors by name, matrices [out, in]."""

    arch: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Array]

    def get(self, key: str, default: Any = 0) -> Any:
        return self.fields.get(f"{self.arch}.{key}", default)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name]


def read(path: Path) -> File:
    """Everything of a file, dequantized by gguf-py."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return File(fields["general.architecture"], fields, {tensor.name: decoded(tensor) for tensor in reader.tensors})
