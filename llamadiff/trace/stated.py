"""What foreign JSON and TOML state: parsed within limits, and quoted in messages."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from llamadiff.system.errors import UserError
from llamadiff.system.input import read_bytes, read_text

MAX_DEPTH = 16  # of objects within objects
MAX_TOML = 1 << 20  # bytes: a map of every tap has a hundredth of it


def parse_json(text: str | bytes) -> Any:
    """A JSON value; raises ValueError for whatever is wrong with it, or cannot be computed with."""
    try:
        return json.loads(text, object_pairs_hook=_without_twins, parse_int=_whole)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_json(path: Path, most: int, meant: str) -> Any:
    """The value of a JSON file of up to ``most`` bytes. Raises UserError if it cannot be read or is none."""
    try:
        return parse_json(read_bytes(path, most, meant))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({reason(error)}); give {meant}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's tables. Raises UserError if it cannot be read or is none."""
    text = read_text(path, MAX_TOML, "a TOML file")
    try:
        data: dict[str, Any] = _toml_reader().loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not TOML ({reason(error)})") from None
    return data


def reason(error: BaseException) -> str:
    """What a library says of an error, on one line that is not long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."


def brief(value: Any) -> str:
    """The beginning of a value."""
    text = repr(value) if is_shallow(value, MAX_DEPTH) else "nested too deep"
    return text if len(text) <= 80 else text[:77] + "..."


def is_shallow(value: Any, levels: int) -> bool:
    """Whether objects within objects end after so many."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(is_shallow(item, levels - 1) for item in inner)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; two entries of one name are two answers to one question."""
    twins = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twins:
        raise ValueError(f"two entries are called {twins[0]}")
    return dict(pairs)


def _whole(digits: str) -> int:
    """An integer of JSON; one that no machine word holds would fail wherever it is computed with."""
    if len(digits) > 20 or not -(1 << 63) <= int(digits) < 1 << 64:
        raise ValueError(f"{digits[:24]} does not fit into 64 bits")
    return int(digits)


def _toml_reader() -> Any:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef,import-not-found]
    return tomllib
