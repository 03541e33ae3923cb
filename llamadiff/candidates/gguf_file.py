"""``other.gguf``: another file of the model. ``compare`` alone compares two files; here is what names one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llamadiff.candidates.source import Opened, register
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular

SUFFIX = ".gguf"


def is_model_file(candidate: object) -> bool:
    """Whether a candidate is another file of the model."""
    return isinstance(candidate, (str, Path)) and str(candidate).endswith(SUFFIX) and ":" not in str(candidate)


@register
class OtherGguf:
    """Another GGUF file of the same model."""

    def matches(self, spec: str) -> bool:
        return is_model_file(spec)

    def files(self, spec: str) -> Iterable[Path]:
        path = Path(spec)
        check_regular(path, "a .gguf file")
        if not path.exists():
            raise UserError(f"{path}: no such file; give another .gguf file of the same model")
        return (path,)

    def open(self, spec: str) -> Opened:
        raise UserError(
            f"{spec}: is a model file, not what one computed; compare MODEL PROMPT --candidate {spec} runs it"
        )
