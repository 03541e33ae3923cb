"""A file of rules, TOML: what counts as a match, for whoever knows better than the built-in ones."""

from __future__ import annotations

from pathlib import Path

from llamadiff.numerics.tolerances import RULES, Rule
from llamadiff.system.errors import UserError
from llamadiff.trace.stated import brief, read_toml

LARGEST = 1e9  # limit of a rule
MAX_RULES = 1000  # of a file


def load_rules(path: Path | None) -> tuple[Rule, ...]:
    """Rules of a TOML file, tried before the built-in ones; these alone without one.

    Each is a [[rule]] with match and any of tap, op, arithmetic and angle. Raises UserError for anything else.
    """
    if path is None:
        return RULES
    data = read_toml(path)
    entries = data.get("rule")
    if not isinstance(entries, list) or set(data) != {"rule"}:
        raise UserError(f"{path}: expected [[rule]] entries and nothing else")
    if len(entries) > MAX_RULES:
        raise UserError(f"{path}: {len(entries)} rules; give no more than {MAX_RULES}")
    return tuple(_rule(path, number, entry) for number, entry in enumerate(entries, 1)) + RULES


def _rule(path: Path, number: int, entry: object) -> Rule:
    kinds = {"match": (int, float), "angle": (int, float), "tap": (str,), "op": (str,), "arithmetic": (str,)}
    if not isinstance(entry, dict) or "match" not in entry:
        raise UserError(f"{path}: rule {number} has no match = NMSE")
    for key, value in entry.items():
        stated = f"{path}: rule {number}: {key[:40]} = {brief(value)}"
        if key not in kinds or not isinstance(value, kinds[key]) or isinstance(value, bool):
            raise UserError(f"{stated} is not one of {', '.join(kinds)} of the right type")
        if isinstance(value, (int, float)) and not 0 <= value <= LARGEST:
            raise UserError(f"{stated} is not between 0 and {LARGEST:g}")
    return Rule(**entry)
