"""A key of the tokenizer that a file lacks: what llama.cpp takes there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from llamaref import ModelError

from llamadiff.ext.prompt.tokenizer import Rules, rules_of

KEYS = "tokenizer.ggml."
FIELDS = {  # of the rules, by the keys that they are read from
    "pre": "pre", "add_bos_token": "add_bos", "add_eos_token": "add_eos", "add_space_prefix": "add_space_prefix",
    "remove_extra_whitespaces": "remove_extra_whitespaces", "bos_token_id": "bos", "eos_token_id": "eos",
    "seperator_token_id": "eos", "unknown_token_id": "unknown", "normalizer.lowercase": "lowercase",
}  # fmt: skip
REFUSED = "llama.cpp does not load it"
TABLES = {
    "model": REFUSED, "tokens": REFUSED, "merges": REFUSED, "scores": "llama.cpp takes 0 for each token",
    "token_type": "llama.cpp takes each token for a normal one",
}  # fmt: skip
READ_BY = {"merges": ("bpe",), "scores": ("spm", "ugm")}


def lacking(fields: Mapping[str, Any], key: str, value: Any) -> tuple[bool | None, str]:
    """Of a key that the ``fields`` of a file lack, where another tokenizer of the model has a ``value``: whether it
    decides ids or where a text ends, None where that is not known; and what llama.cpp takes, in words.
    """
    own = key.removeprefix(KEYS)
    with suppress(ModelError):
        if own in TABLES:
            kinds = READ_BY.get(own)
            return kinds is None or rules_of({**fields, key: value}).kind in kinds, TABLES[own]
        if own in FIELDS:
            return _by_rules(rules_of(fields), rules_of({**fields, key: value}), FIELDS[own])
    return None, ""


def _by_rules(without: Rules, with_it: Rules, field: str) -> tuple[bool | None, str]:
    if without == with_it:
        return False, ""
    if field == "bos" and not without.add_bos:  # it is put nowhere
        return None, ""
    return True, f"llama.cpp takes {getattr(without, field)!r}"
