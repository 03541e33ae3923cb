"""A small model in several files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import gguf

from models import small
from models.options import OPTIONS


def split_model(folder: Path, name: str = "llama", kind: str = "Q8_0") -> Path:
    """A small model in parts of ten tensors: the first one's path."""
    with mock.patch.object(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=10)):
        small.write_model(folder / "m.gguf", kind=kind, **OPTIONS[name])
    return sorted(folder.glob("m-00001-of-*.gguf"))[0]
