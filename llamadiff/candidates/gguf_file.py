"""``other.gguf``: another file of the model. ``compare`` alone compares two files; here is what names one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from llamadiff.candidates.source import CandidateSource
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular

SUFFIX = ".gguf"
_OF_A_KIND = re.compile(r"[\w.]{2,}:")  # cmd: and the like; one letter is a drive


def is_model_file(candidate: object) -> bool:
    """Whether a candidate is another file of the model."""
    is_named = isinstance(candidate, (str, Path)) and str(candidate).endswith(SUFFIX)
    return is_named and not _OF_A_KIND.match(str(candidate))


matches = is_model_file


def files(spec: str) -> Iterable[Path]:
    """The file, if it is there."""
    path = Path(spec)
    check_regular(path, "a .gguf file")
    if not path.exists():
        raise UserError(f"{path}: no such file; give another .gguf file of the same model")
    return (path,)


def open_source(spec: str) -> CandidateSource:
    """Raises UserError: a model file is not what one computed."""
    raise UserError(f"{spec}: is a model file, not what one computed; compare MODEL PROMPT --candidate {spec} runs it")
