"""The tensors that llama.cpp knows of an architecture, by gguf-py's tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import gguf

_LAYER = re.compile(r"(?:[va]\.)?blk\.([0-9]+)\.(.+)")  # of a projector file: v.blk of its eye, a.blk of its ear
_SUFFIX = re.compile(r"\.(weight|bias|scale|input_scale)$")


def stem_of(name: str) -> tuple[int | None, str]:
    """A tensor's layer, and its name without layer and suffix: blk.3.attn_q.weight -> (3, attn_q)."""
    plain = _SUFFIX.sub("", name)
    match = _LAYER.fullmatch(plain)
    return (int(match[1]), match[2]) if match else (None, plain)


def architectures() -> list[str]:
    """The names of all architectures that gguf-py knows."""
    return [*gguf.MODEL_ARCH_NAMES.values()]


def known_stems(architecture: str) -> frozenset[str] | None:
    """The stems that files of an architecture may have; None of an architecture that gguf-py does not know."""
    number = _number_of(architecture)
    if number is None:
        return None
    return frozenset(gguf.TENSOR_NAMES[tensor].removeprefix("blk.{bid}.") for tensor in gguf.MODEL_TENSORS[number])


def usual_names(architecture: str, layers: int) -> Callable[[str], str | None]:
    """What llama.cpp's converters call a parameter of a checkpoint; None for one, or an architecture, not known."""
    number = _number_of(architecture)
    if number is None:
        return lambda parameter: None
    names = gguf.get_tensor_name_map(number, layers)

    def usual(parameter: str) -> str | None:
        plain = parameter.replace("language_model.", "")
        spelled = (parameter, plain, f"model.{plain}", plain.partition(".")[2])
        found = (names.get_name(each, (".weight", ".bias")) for each in spelled)
        return next(filter(None, found), None)

    return usual


def projector_stems(layers: int) -> Iterator[tuple[str, str]]:
    """Modules of encoders and projectors, and what llama.cpp's converters call them in an mmproj file."""
    for parameter, (_, stem) in gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, layers).mapping.items():
        yield parameter, stem


def _number_of(architecture: str) -> gguf.MODEL_ARCH | None:
    return next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
