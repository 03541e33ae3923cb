"""What foreign JSON and TOML state: parsed within limits, of the types that are wanted, and quoted in messages."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from llamadiff.system.errors import UserError
from llamadiff.system.input import read_bytes, read_text

MAX_DEPTH = 16  # of objects within objects
MAX_TOML = 1 << 20  # bytes: a map of every tap has a hundredth of it
T = TypeVar("T")
# msgspec's messages: what is wrong, and the way there from the value that was given
_SAID = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<place>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_WORDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "an object", "null": "null",
}  # fmt: skip


def parse_json(text: str | bytes, whole: Any = None) -> Any:
    """A JSON value; raises ValueError for whatever is wrong with it, or cannot be computed with."""
    try:
        return json.loads(text, object_pairs_hook=_without_twins, parse_int=whole or _whole)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_json(path: Path, most: int, meant: str) -> Any:
    """The value of a JSON file of up to ``most`` bytes. Raises UserError if it cannot be read or is none."""
    try:  # others write a number beyond 64 bits for "no limit"
        return parse_json(read_bytes(path, most, meant), lambda word: int(word) if len(word) < 19 else float(word))
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


def convert(value: Any, kind: type[T], where: str, remedy: str = "") -> T:
    """A parsed value as a type. Raises UserError: ``where``, what is wrong there, and the ``remedy``."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {_misfit(value, str(error))}{remedy and f'; {remedy}'}") from None
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {brief(error.object)} has characters that no text has; write it as UTF-8") from None


def _misfit(value: Any, said: str) -> str:
    """msgspec's message in our words, with the value that it is about."""
    found = _SAID.fullmatch(said)
    assert found is not None
    place, of_entry, _ = (found["place"] or "").partition("[...]")  # of what an object has under names of its own
    what, name = found["what"], place.lstrip(".")
    if what.startswith("Object "):  # missing required field `x`, contains unknown field `x`
        action, _, key = what.removesuffix("`").partition(" field `")
        key = key if key.isidentifier() and len(key) < 40 else brief(key)
        return f"{name} has no key {key}".lstrip() if "missing" in action else f"{key} is no key of {name or 'it'}"
    for key, index in _STEP.findall(place):
        value = value[key or int(index)]
    wanted = what.removeprefix("Expected ").partition(", got ")[0]
    for kind, words in _WORDS.items():
        wanted = re.sub(rf"(?<=[` ]){kind}(?=[` ])", words, wanted)
    wanted = wanted.replace("`", "").replace(" | ", " or ")
    return f"{name} is {brief(value)}; expected {'of its entries ' * bool(of_entry)}{wanted}".lstrip()


def reason(error: BaseException) -> str:
    """What a library says of an error, on one line that is not long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."


def brief(value: Any) -> str:
    """The beginning of a value."""
    try:
        text = repr(value) if is_shallow(value, MAX_DEPTH) else "nested too deep"
    except ValueError:  # of an int that Python writes no decimal digits of
        text = "a number of thousands of digits"
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
