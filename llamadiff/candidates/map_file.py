"""Name maps as people write them: TOML, checked."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from llamadiff.candidates.name_map import AUTO, DONE, Entry, Map, concerns, factor_of, identity_map
from llamadiff.system.errors import UserError
from llamadiff.system.stated import brief, read_toml
from llamadiff.trace import taps


def load_map(spec: str) -> Map:
    """A built-in map by its name, or a TOML file; taps that it says nothing of have their own names. AUTO for "auto".

    Raises UserError for an unknown tap, axis or treatment.
    """
    if spec == "auto":
        return AUTO
    from llamadiff.candidates.builtin_maps import BUILT_IN

    stated = BUILT_IN[spec] if spec in BUILT_IN else _read_map(spec, list(BUILT_IN))
    return {**stated, **{word: entry for word, entry in identity_map().items() if word not in stated}}


def _read_map(spec: str, built_in: Sequence[str]) -> Map:
    path = Path(spec)
    if not path.exists():
        raise UserError(f"--map {spec}: no such file, and no built-in map ({', '.join(built_in)})")
    return {word: _entry(path, word, table) for word, table in read_toml(path).items()}


def _entry(path: Path, word: str, table: Any) -> Entry:
    where = f"{path}: [{word[:40]}]"
    if word not in taps.BY_WORD:
        near = get_close_matches(word, list(taps.BY_WORD), 1)
        raise UserError(f"{where} is no tap{f'; did you mean [{near[0]}]?' if near else ''}")
    own = identity_map()[word].name
    if not isinstance(table, dict) or set(table) - {"name", "axes", "done"}:
        raise UserError(f'{where} may have name = "...", axes = "..." and done = [...]; nothing else')
    name, axes = table.get("name", own), table.get("axes")
    if not isinstance(name, str) or not name:
        raise UserError(f"{where} name = {brief(name)} is no name; left out, it is {own!r}")
    if taps.BY_WORD[word].layered and "{i}" not in name and "{i+1}" not in name:
        raise UserError(f"{where} name = {brief(name)} has no {{i}} for the layer's number")
    done = _done(where, word, table.get("done", []))
    return Entry(word, name, None if axes is None else _axes(where, word, axes), done)


def _axes(where: str, word: str, text: Any) -> tuple[str, ...]:
    axes = tuple(text.split()) if isinstance(text, str) else ()
    batches = [axis for axis in axes if "batch" in axis.split("*")]
    own = {part for axis in taps.BY_WORD[word].axes for part in axis.split("*")}
    stated = [part for axis in axes for part in axis.split("*") if part != "batch"]
    renamed = {"head" if part == "kv_head" else part for part in own}
    if sorted(stated) not in (sorted(own), sorted(renamed)) or batches not in ([], ["batch"]):
        known = " ".join(taps.BY_WORD[word].axes)
        raise UserError(f"{where} axes = {brief(text)}: a {word} has the axes {known} (and perhaps batch)")
    return axes


def _done(where: str, word: str, value: Any) -> tuple[str, ...]:
    treatments = value if isinstance(value, list) else [value]
    for treatment in treatments:
        if not isinstance(treatment, str) or (treatment not in DONE and not factor_of(treatment)):
            raise UserError(f"{where} done = {brief(treatment)}: known are {', '.join(DONE)}")
        if not concerns(treatment, taps.BY_WORD[word]):
            raise UserError(f"{where} done = {brief(treatment)} is not for a {word}: {DONE[treatment]}")
    return tuple(treatments)
