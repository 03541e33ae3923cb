"""A file of rules, TOML: what counts as a match, for whoever knows better than the built-in ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from llamadiff.numerics.tolerances import RULES, Rule
from llamadiff.trace.stated import convert, read_toml

MAX_RULES = 1000  # of a file


class _File(Struct, forbid_unknown_fields=True):
    rule: Annotated[tuple[Rule, ...], Meta(max_length=MAX_RULES)]


def load_rules(path: Path | None) -> tuple[Rule, ...]:
    """Rules of a TOML file, tried before the built-in ones; these alone without one.

    Each is a [[rule]] with match and any of tap, op, arithmetic and angle. Raises UserError for anything else.
    """
    if path is None:
        return RULES
    remedy = "give [[rule]] entries with match, and any of tap, op, arithmetic and angle"
    return convert(read_toml(path), _File, str(path), remedy).rule + RULES
