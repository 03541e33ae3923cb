"""Models split into several files: ``NAME-00001-of-00003.gguf`` and so on, as llama.cpp splits them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamaref.errors import ModelError

SPLIT = NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
_LAYER = re.compile(r"blk\.([0-9]+)\.(.+)")
_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


def parts_of(path: Path, fields: Mapping[str, Any]) -> list[Path]:
    """The files of a model, in order, from the metadata of the one that was given.

    Raises ModelError if that is not the first one, if its name does not lead to the others, or if one is missing.
    """
    count, number = fields.get(COUNT, 0), fields.get(NUMBER, 0)
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


def check_parts(files: Sequence[Path], fields: Sequence[Mapping[str, Any]], tensors: Sequence[Sequence[str]]) -> None:
    """Raise ModelError for parts that are not those of one split, or do not hold all its tensors.

    ``fields`` and ``tensors``: those of each part; the first states how many tensors there are in all.
    """
    stated, own = fields[0].get(TENSORS), [part.get(NUMBER) for part in fields]
    for number, (file, says) in enumerate(zip(files, fields, strict=True)):
        if own[number] != number:
            raise ModelError(f"{file}: states that it is part {_number(own[number])}; give each part its name back")
        for key, word in ((COUNT, "parts"), (TENSORS, "tensors in all")):
            if says.get(key) != fields[0].get(key):
                theirs, first = says.get(key), fields[0].get(key)
                raise ModelError(
                    f"{file}: states {theirs} {word}, {files[0].name} {first}; they are of two models: split one again"
                )
    names = [name for part in tensors for name in part]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        holders = [file.name for file, part in zip(files, tensors, strict=True) if twice in part]
        raise ModelError(
            f"{files[0]}: {twice} is in {' and in '.join(holders)}; they are of two models: split one again"
        )
    if isinstance(stated, int) and stated != len(names):
        held = ", ".join(map(str, map(len, tensors)))
        raise ModelError(
            f"{files[0]}: its parts hold {len(names)} tensors ({held}) where it states {stated}{_gap(names)}; "
            "copy the part again, or split the model again (llama-gguf-split)"
        )


def _number(stated: Any) -> str:
    return str(stated + 1) if isinstance(stated, int) else "none"


def _gap(names: Sequence[str]) -> str:
    """The first tensor that most layers have, and one has not."""
    layers: dict[str, set[str]] = {}
    for match in filter(None, map(_LAYER.fullmatch, names)):
        layers.setdefault(match[1], set()).add(match[2])
    counts = Counter(stem for stems in layers.values() for stem in stems)
    lacking = (
        f"blk.{layer}.{stem}"
        for layer, stems in layers.items()
        for stem, count in counts.items()
        if stem not in stems and 2 * count >= len(layers)
    )
    first = next(lacking, None)
    return f": {first} is in none" if first is not None else ""
