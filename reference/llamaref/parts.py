"""Models split into several files: ``NAME-00001-of-00003.gguf`` and so on, as llama.cpp splits them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamaref.errors import ModelError

_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


def parts_of(path: Path, fields: Mapping[str, Any]) -> list[Path]:
    """The files of a model, in order, from the metadata of the one that was given.

    Raises ModelError if that is not the first one, if its name does not lead to the others, or if one is missing.
    """
    count, number = fields.get("split.count", 0), fields.get("split.no", 0)
    if not isinstance(count, int) or count <= 1:
        return [path]
    match = _NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelError(
            f"{path}: is one of {count} parts, whose names must end in -00001-of-{count:05}.gguf and so on; "
            "give each its name back"
        )
    parts = [path.with_name(f"{match[1]}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    if number != 0 or int(match[2]) != 1:
        raise ModelError(f"{path}: is part {int(match[2])} of {count}; give the first one, {parts[0].name}")
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(f"{path}: {len(missing)} of its {count} parts are not beside it, the first is {missing[0]}")
    return parts


def check_count(path: Path, fields: Mapping[str, Any], found: int) -> None:
    """Raise ModelError if the parts do not hold as many tensors as the first one says."""
    stated = fields.get("split.tensors.count")
    if isinstance(stated, int) and stated != found:
        raise ModelError(f"{path}: its parts hold {found} tensors where it states {stated}; they are of two models")
