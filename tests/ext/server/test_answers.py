"""What servers say of next tokens: each shape read alike, what cannot be is one line, and answers are kept whole."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from llamadiff import UserError
from llamadiff.ext.server.answers import Answers, Next, Reader, read_answers
from llamadiff.trace.token_text import Vocabulary

# Ids 5 and 6 have one text; 7 to 9 spell bytes, of which one, "b", is a token of its own, too.
TOKENS = ["<unk>", "<s>", "\u2581the", "\u2581cat", "b", "twin", "twin", "<0xC3>", "<0xA9>", "<0x62>", ",", "é"]
FIELDS = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.token_type": [1] * 12}
THE, CAT, COMMA = 2, 3, 10
ROW = {THE: -0.5, CAT: -1.5, COMMA: -3.0}
LEAST_FLOAT = -3.4028234663852886e38  # llama-server's logarithm of nothing


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(FIELDS)


@pytest.fixture
def reader(vocabulary: Vocabulary) -> Reader:
    return Reader("http://here", vocabulary, len(TOKENS))


def text_of(token: int) -> str:
    return TOKENS[token].replace("\u2581", " ")


def named(token: int, value: float, *names: str) -> dict[str, Any]:
    """An object that names a token in these ways."""
    ways = {"id": token, "token": text_of(token), "bytes": list(text_of(token).encode())}
    return {**{name: ways[name] for name in names}, "logprob": value}


def listed(row: Mapping[int, float], *names: str) -> list[dict[str, Any]]:
    return [named(token, value, *names) for token, value in row.items()]


def of_one(top: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**top[0], "top_logprobs": top}]


MISTRAL_RS = [{"token": token, "logprob": value, "bytes": text_of(token)} for token, value in ROW.items()]
BY_TEXT = {text_of(token): value for token, value in ROW.items()}
BY_TOKEN_ID = {f"token_id:{token}": value for token, value in ROW.items()}
CHAT = of_one(listed(ROW, "token", "bytes"))
SHAPES: dict[str, tuple[Any, int | None]] = {
    "llama-server": (of_one(listed(ROW, "id", "token", "bytes")), THE),
    "llama-server of 2024": (
        [{"content": " the", "probs": [{"tok_str": text_of(t), "prob": math.exp(v)} for t, v in ROW.items()]}], None,
    ),
    "OpenAI, completions": (
        {"tokens": [" the"], "token_logprobs": [-0.5], "top_logprobs": [BY_TEXT], "text_offset": [0]}, THE,
    ),
    "OpenAI, chat": ({"content": CHAT}, THE),
    "OpenAI, chat without bytes": (
        {"content": of_one([{**each, "bytes": None} for each in listed(ROW, "token")]), "refusal": None}, THE,
    ),
    "llama-server, chat": ({"content": of_one(listed(ROW, "id", "token", "bytes"))}, THE),
    "vLLM, token_id:": ({"tokens": ["token_id:2"], "token_logprobs": [-0.5], "top_logprobs": [BY_TOKEN_ID]}, THE),
    "vLLM, prompt_logprobs": (
        [{str(t): {"logprob": v, "rank": 1, "decoded_token": text_of(t)} for t, v in ROW.items()}], None,
    ),
    "mistral.rs": (
        {"content": [{"token": " the", "logprob": -0.5, "bytes": list(b" the"), "top_logprobs": MISTRAL_RS}]}, THE,
    ),
    "Ollama": (CHAT, THE),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_is_one(shape, reader):
    said, chosen = SHAPES[shape]
    (found,) = reader.all(said)
    assert dict(found.row) == pytest.approx(ROW)
    assert (found.chosen, found.unknown) == (chosen, 0)


def test_several_tokens_and_none(reader):
    """A first one has nothing before it; nothing is said at all where a server leaves it out."""
    first, second = reader.all([None, {"2": {"logprob": -0.25}}])
    assert (first, second) == (None, Next({THE: -0.25}))
    said = {"tokens": ["<s>", " the"], "top_logprobs": [None, {" cat": -1.0}]}
    assert reader.all(said) == [None, Next({CAT: -1.0}, THE)]
    assert reader.all(None) == []
    assert reader.all([]) == []


def test_lists_of_different_lengths(reader):
    said = {"tokens": [" the"], "top_logprobs": [{" cat": -1.0}, {" the": -2.0}]}
    assert [each.chosen for each in reader.all(said)] == [THE, None]


@pytest.mark.parametrize(
    ("said", "token"),
    [
        ({"id": 9, "token": "another", "bytes": [1]}, 9),  # the surest first
        ({"token": 4}, 4), ({"token": "token_id:11"}, 11),
        ({"token": "", "bytes": [0xC3]}, 7), ({"token": "?", "bytes": [98]}, 4), ({"token": "é", "bytes": []}, 11),
        ({"token": " the"}, THE), ({"token": "b"}, 4),
        ({"token": "twin"}, None), ({"token": "twin", "bytes": list(b"twin")}, None),
        ({"token": "nowhere"}, None), ({"token": "the"}, None), ({"token": ""}, None), ({"token": "\ufffd"}, None),
        ({"token": "", "bytes": []}, None), ({"token": "", "bytes": [300]}, None),
    ],
)  # fmt: skip
def test_how_a_token_is_named(said, token, reader):
    (found,) = reader.all(of_one([{**said, "logprob": -1.0}]))
    assert (dict(found.row), found.chosen) == ({} if token is None else {token: -1.0}, token)
    assert (found.unknown > 0) is (token is None)


@pytest.mark.parametrize("value", [None, -9999.0, -9999.5, LEAST_FLOAT, -math.inf, -1e300])
def test_the_logarithm_of_nothing_is_left_out(value, reader):
    (found,) = reader.all(of_one([{"id": THE, "logprob": -0.5}, {"id": CAT, "logprob": value}]))
    assert found == Next({THE: -0.5}, THE)


def test_a_probability_of_nothing_is_left_out(reader):
    said = [{"content": "", "probs": [{"tok_str": " the", "prob": 1.0}, {"tok_str": " cat", "prob": 0}]}]
    assert reader.all(said) == [Next({THE: 0.0})]


def test_a_little_more_than_all(reader):
    """Sums of float32 may be so far from 1."""
    assert reader.all([{"2": {"logprob": 2.6e-6}}]) == [Next({THE: 2.6e-6})]


NUMBER = "as a log-probability; expected a number, of at most 0"
FAULTS: dict[str, tuple[Any, str]] = {
    "NaN": ([{"2": {"logprob": math.nan}}], NUMBER), "infinity": ([{"2": {"logprob": math.inf}}], NUMBER),
    "positive": ([{"2": {"logprob": 0.5}}], f"gives 0.5 {NUMBER}"), "text": ([{"2": {"logprob": "-1"}}], NUMBER),
    "boolean": ([{"2": {"logprob": True}}], NUMBER), "no log-probability": ([{"2": {"rank": 1}}], NUMBER),
    "a list for one": ([{" the": [-1.0]}], NUMBER), "probability above 1": ([{"probs": [{"prob": 1.5}]}], NUMBER),
    "id too large": (of_one([{"id": 12, "logprob": -1}]), "names token 12; the file has 12, from 0 on"),
    "id below 0": (of_one([{"id": -1, "logprob": -1}]), "names token -1"),
    "id is a fraction": (of_one([{"id": 1.5, "logprob": -1}]), "names token 1.5"),
    "id is a text": (of_one([{"id": "two", "logprob": -1}]), "names token 'two'"),
    "id is a boolean": (of_one([{"id": True, "logprob": -1}]), "names token True"),
    "id of vLLM too large": ({"tokens": [], "top_logprobs": [{"token_id:12": -1}]}, "names token 12"),
    "id of vLLM is none": ({"tokens": [], "top_logprobs": [{"token_id:x": -1}]}, "names token 'x'"),
    "id of many digits": ([{"9" * 5000: {"logprob": -1}}], "names token '999"),
    "key is no id": ([{" the": {"logprob": -1}}], "names token ' the'"),
    "token is a list": (of_one([{"token": [], "logprob": -1}]), "names a token as []; expected its text"),
    "token is not there": (of_one([{"logprob": -1}]), "names a token as None"),
    "two values": (of_one([{"id": 2, "logprob": -1}, {"id": 2, "logprob": -2}]), "token 2 two log-probabilities, -1"),
    "two values by two names": (of_one([{"id": 2, "logprob": -1}, {"token": " the", "logprob": -2}]), "token 2 two"),
    "all is a number": (3, "gives 3 as log-probabilities; expected lists"),
    "all is an object": ({"a": 1}, "as log-probabilities; expected lists"),
    "content is no list": ({"content": 3}, "as log-probabilities; expected lists"),
    "an entry is a number": ([3], "gives 3 for a token"), "an entry is a text": ({"content": ["a"]}, "for a token"),
    "top is a number": ([{"top_logprobs": 3}], "gives 3 as top_logprobs; expected a list"),
    "a top one is a list": ([{"top_logprobs": [[1]]}], NUMBER),
    "escapes": (of_one([{"id": "\x1b[2J\n", "logprob": -1}]), "names token '"),
    "a long text": (of_one([{"id": "x" * 999_999, "logprob": -1}]), "names token 'xxx"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_is_one_line(fault, reader):
    said, wanted = FAULTS[fault]
    with pytest.raises(UserError) as error:
        reader.all(said)
    text = str(error.value)
    assert text.startswith("http://here: ")
    assert wanted in text
    assert text.isprintable()
    assert len(text) < 200


def test_the_same_twice_is_no_fault(reader):
    """The token that was chosen stands among the likeliest, too."""
    assert dict(reader.all(of_one(listed(ROW, "id")))[0].row) == ROW


# -- the vocabulary ------------------------------------------------------------------------------------------


def test_bytes_of_a_byte_level_vocabulary():
    v = Vocabulary({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["\u0120the", "\u00c3", "<|end|>"]})
    assert [v.bytes_of(token) for token in (-1, 0, 1, 2, 3)] == [None, b" the", b"\xc3", b"<|end|>", None]
    assert v.by_bytes == {b" the": 0, b"\xc3": 1, b"<|end|>": 2}


def test_a_text_of_two_tokens_is_neither(vocabulary):
    assert b"twin" not in vocabulary.by_bytes
    assert vocabulary.by_bytes[b"b"] == 4  # not the token that spells it
    assert vocabulary.by_bytes[b"\xc3"] == 7


# -- kept ----------------------------------------------------------------------------------------------------

ANSWERS = Answers(
    "http://here", "llama-server", (1, 2, 3), 2, {1: {2: -0.5, 3: -1.25}, 3: {10: -1e-5, 2: -17.25}}, True,
    {2: -0.5, 4: -2.0}, (1, 1, 2), 3, {"model": "tiny"}, (3,), "a chat", "a turn",
)  # fmt: skip


@pytest.fixture
def kept(tmp_path):
    def keep(data: Any) -> Any:
        path = tmp_path / "server.answers.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
        return path

    return keep


@pytest.mark.parametrize(
    "answers",
    [ANSWERS, Answers("n", "Ollama", (5,), 1, by_ids=False), replace(ANSWERS, whole=None, prompt_tokens=None)],
)
def test_kept_whole(answers, kept):
    assert read_answers(kept(answers.to_json())) == answers


@pytest.mark.parametrize(
    ("values", "decimals"),
    [((-0.5, -1.25), 2), ((-0.1234, -3.0), 4), ((-7.033595466054976e-05, -1.0), None), ((-2.0,), 0), ((-1e-5,), 5)],
)
def test_how_many_decimals(values, decimals):
    assert replace(ANSWERS, rows={1: dict(enumerate(values))}, whole=None).decimals == decimals


def test_most():
    assert replace(ANSWERS, whole={1: -1.0, 2: -2.0, 3: -3.0}).most == 3
    assert Answers("n", "a", (1,), 1).most == 0


DAMAGED: dict[str, tuple[Any, str]] = {
    "rows": ([], "is damaged"), "rows of texts": ({"1": [["a", -1]]}, "is damaged"),
    "a row of one": ({"1": [2, 3]}, "is damaged"), "a row that is none": ({"1": 5}, "is damaged"),
    "number of a row": ({"one": []}, "is damaged"), "a row after the end": ({"4": [[1, -1]]}, "has entries past"),
    "a row before the start": ({"0": [[1, -1]]}, "has entries past"),
    "positive": ({"1": [[2, 0.5]]}, "row 1: [0][1] is"),
    "NaN": ({"1": [[2, math.nan]]}, "row 1: [0][1] is nan"), "nothing": ({"1": [[2, -math.inf]]}, "[0][1] is -inf"),
    "token below 0": ({"1": [[-2, -1.0]]}, "[0][0] is -2"), "token too large": ({"1": [[1 << 40, -1.0]]}, "[0][0] is"),
    "infinite token": ({"1": [[math.inf, -1.0]]}, "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_rows_are_one_line(what, kept):
    rows, wanted = DAMAGED[what]
    said = {**ANSWERS.to_json(), "rows": rows}
    assert wanted in one_line(kept(said))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", [-1]), ("tokens", "abc"), ("tokens", [1.5]), ("tokens", [True]), ("tokens", []), ("tokens", None),
        ("prompt_tokens", [1 << 40]), ("prompt_tokens", {}), ("n_prefill", 0), ("n_prefill", 4), ("n_prefill", "a"),
        ("n_prefill", math.inf), ("whole", 3), ("whole", [[1, 1.0]]), ("prompt_count", "many"), ("about", [1]),
        ("unnamed", "1"), ("rows", None),
    ],
)  # fmt: skip
def test_damaged_fields_are_one_line(key, value, kept):
    assert "ask the server again" in one_line(kept({**ANSWERS.to_json(), key: value}))


@pytest.mark.parametrize("key", sorted(ANSWERS.to_json()))
def test_a_missing_field_is_one_line(key, kept):
    one_line(kept({name: value for name, value in ANSWERS.to_json().items() if name != key}))


@pytest.mark.parametrize(
    "data", ["", "[", "[]", "3", "{}", '{"schema": "llamadiff.answers/2"}', "\ufeff{}", "[" * 9999]
)
def test_what_is_no_file_of_answers_is_one_line(data, kept):
    one_line(kept(data))


def one_line(path: Any) -> str:
    with pytest.raises(UserError) as error:
        read_answers(path)
    text = str(error.value)
    assert text.startswith(str(path))
    assert text.splitlines() == [text]
    assert len(text) < len(str(path)) + 250
    return text
