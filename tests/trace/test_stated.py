"""Foreign values as types: what does not fit is one line, with where, the value, what is expected, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
from msgspec import Meta, Struct

from llamadiff.system.errors import UserError
from llamadiff.trace.stated import convert, read_json

COUNT = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Entry(Struct, forbid_unknown_fields=True):
    size: COUNT | None = None
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    flag: bool = False


@dataclass(frozen=True)
class Row:
    ids: tuple[COUNT, ...]


class File(Struct, forbid_unknown_fields=True):
    rule: Annotated[list[Entry], Meta(max_length=2)] = []
    words: dict[str, str | bool | int] = {}
    row: Row | None = None
    pair: tuple[int, int] = (0, 0)


MISFITS: dict[str, object] = {
    "is []; expected an object": [],
    "rule is 3; expected a list": {"rule": 3},
    "rule[1].size is 'x'; expected a whole number or null": {"rule": [{}, {"size": "x"}]},
    "rule[0].size is True; expected a whole number or null": {"rule": [{"size": True}]},
    "rule[0].size is -1; expected a whole number >= 0": {"rule": [{"size": -1}]},
    "rule[0].size is 1318": {"rule": [{"size": 1 << 4000}]},
    "rule[0].size is a number of thousands of digits; expected": {"rule": [{"size": 1 << 40_000}]},
    "rule[0].share is nan; expected a number >= 0.0": {"rule": [{"share": float("nan")}]},
    "rule[0].share is 1000": {"rule": [{"share": 10**400}]},
    "rule[0].flag is 1; expected true or false": {"rule": [{"flag": 1}]},
    "rule is [{}, {}, {}]; expected a list of length <= 2": {"rule": [{}, {}, {}]},
    "colour is no key of rule[0]": {"rule": [{"colour": 1}]},
    "colour is no key of it": {"colour": 1},
    "'a\\nb' is no key of it": {"a\nb": 1},
    "xxx": {"x" * 999: 1},
    "x is no key of rule": {"x` - at `$.rule": 1},
    "'\\ud800' has characters that no text has": {"\ud800": 1},
    "row has no key ids": {"row": {}},
    "row.ids[1] is 2.5; expected a whole number": {"row": {"ids": [1, 2.5]}},
    "pair is [1]; expected a list of length 2": {"pair": [1]},
    "words is {'a': 1.5}; expected of its entries true or false or a whole number or text": {"words": {"a": 1.5}},
}


@pytest.mark.parametrize("says", MISFITS)
def test_what_does_not_fit_is_one_line(says: str) -> None:
    with pytest.raises(UserError) as caught:
        convert(MISFITS[says], File, "f.toml", "give another")
    text = str(caught.value)
    assert text.startswith("f.toml: ")
    assert says in text
    assert text.endswith(("; give another", "; write it as UTF-8"))
    assert len(text.splitlines()) == 1
    assert len(text) < 200


def test_what_fits_is_of_the_type() -> None:
    found = convert({"rule": [{"size": 3, "share": 1}], "row": {"ids": [1, 2], "unheard": 1}}, File, "f.toml")
    assert found == File([Entry(3, 1.0)], {}, Row((1, 2)))
    assert isinstance(found.rule[0].share, float)


def test_a_number_beyond_64_bits_stands_for_no_limit_in_a_file_of_others(tmp_path):
    """As transformers writes the length of a tokenizer that has none."""
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"model_max_length": 1000000000000000019884624838656, "id": 7}', encoding="utf-8")
    assert read_json(path, 1 << 10, "a tokenizer as JSON") == {"model_max_length": 1e30, "id": 7}
