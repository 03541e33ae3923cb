"""What a server says of the next tokens: some of their log-probabilities, as far as they can be relied upon.

Servers name tokens by id, by bytes or by text, and nest what they say in several ways; here all are one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from llamadiff.system.errors import UserError
from llamadiff.trace.metadata import Id
from llamadiff.trace.stated import brief, convert, read_json
from llamadiff.trace.token_text import Vocabulary

SCHEMA = "llamadiff.answers/1"
SUFFIX = ".answers.json"
MAX_BYTES = 1 << 26
CERTAIN = 1e-3  # a log-probability may be so much above zero, by rounding
AGAIN = "ask the server again"
RULED_OUT = -9999.0  # what stands for the logarithm of nothing: vLLM's, and what is below it
AT_MOST = 1.06  # what probabilities may sum to, by rounding of log-probabilities to one decimal
FEW_DIGITS = 6  # decimals: values with more were not rounded to be read
BY_ID = "token_id:"  # vLLM's return_tokens_as_token_ids

Row = Mapping[int, float]  # token id -> log-probability


@dataclass(frozen=True)
class Probe:
    """One more request: ``how`` it was asked, the ids, what follows the first n, and ``before``: prompts asked before.

    Of those, and of prompts that are asked at once, a server's cache may hold something.
    """

    how: str
    tokens: tuple[int, ...]
    rows: Mapping[int, Row]
    before: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Answers:
    """What a server said about one prompt.

    ``api`` is the kind of server, ``tokens`` the ids that were asked about, of which the first ``n_prefill`` are the
    prompt's: those of the file, or those that the server chose. ``rows``: what follows the first n tokens, by n; asked
    for ``by_ids``, or by the texts of these. ``whole``: what follows the prompt, asked for as text, or as a chat.
    ``prompt_tokens`` are the ids that the server says the text has, ``prompt_count`` how many. ``about``: what it says
    of its model; ``unnamed``: the rows in which it named tokens in a way that fits none of the vocabulary, or several.
    ``text`` is the prompt as text, as the file's template wrote it where a user's ``turn`` was asked for. ``probes``:
    what it said after other requests and beside them; ``unasked``: why some of that is missing.
    """

    name: str
    api: str
    tokens: tuple[int, ...]
    n_prefill: int
    rows: Mapping[int, Row] = field(default_factory=dict)
    by_ids: bool = True
    whole: Row | None = None
    prompt_tokens: tuple[int, ...] | None = None
    prompt_count: int | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    unnamed: tuple[int, ...] = ()
    text: str | None = None
    turn: str | None = None
    probes: tuple[Probe, ...] = ()
    unasked: str = ""

    @property
    def decimals(self) -> int | None:
        """To how many decimals the server rounds; None where it does not."""
        most = max((_decimals(value) for row in (*self.rows.values(), self.whole or {}) for value in row.values()),
                   default=0)  # fmt: skip
        return most if most <= FEW_DIGITS else None

    @property
    def most(self) -> int:
        """How many tokens a row has, at most."""
        return max(map(len, (*self.rows.values(), self.whole or {})), default=0)

    def to_json(self) -> dict[str, Any]:
        def told(row: Row | None) -> list[list[float]] | None:
            return None if row is None else [[token, value] for token, value in row.items()]

        said = {**vars(self), "rows": {str(n): told(row) for n, row in self.rows.items()}, "whole": told(self.whole)}
        probes = [{**vars(each), "rows": {str(n): told(row) for n, row in each.rows.items()}} for each in self.probes]
        return {"schema": SCHEMA, **said, "probes": probes}


_Row = tuple[tuple[Id, Annotated[float, Meta(gt=RULED_OUT, le=CERTAIN)]], ...]
_Ids = tuple[Id, ...]


class _KeptProbe(Struct):
    """One probe, as a file has it."""

    how: str
    tokens: _Ids
    rows: dict[int, _Row]
    before: tuple[_Ids, ...] = ()


class _Kept(Struct):
    """Answers, as a file has them."""

    name: str
    api: str
    tokens: _Ids
    n_prefill: int
    rows: dict[int, Any]
    by_ids: bool
    whole: _Row | None
    prompt_tokens: _Ids | None
    prompt_count: int | None
    about: dict[str, str]
    unnamed: _Ids
    text: str | None
    turn: str | None
    probes: tuple[_KeptProbe, ...] = ()
    unasked: str = "they were kept by an earlier version"


def read_answers(path: Path) -> Answers:
    """What was kept of a server's answers. Raises UserError for a file that is none, or says what cannot be."""
    data = read_json(path, MAX_BYTES, "what compare --candidate http://... -o DIR/ kept of a server")
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise UserError(f"{path}: is no file of a server's answers; this version reads {SCHEMA!r}")
    kept = convert(data, _Kept, f"{path}: is damaged", AGAIN)
    rows = {n: dict(convert(row, _Row, f"{path}: is damaged: row {n}", AGAIN)) for n, row in kept.rows.items()}
    probes = tuple(Probe(p.how, p.tokens, {n: dict(row) for n, row in p.rows.items()}, p.before) for p in kept.probes)
    whole = None if kept.whole is None else dict(kept.whole)
    found = Answers(**{**structs.asdict(kept), "rows": rows, "whole": whole, "probes": probes})
    if any(not 0 < n <= len(each.tokens) for each in probes for n in each.rows):
        raise UserError(f"{path}: a probe has entries past its tokens; {AGAIN}")
    if not found.tokens or not 0 < found.n_prefill <= len(found.tokens):
        raise UserError(f"{path}: n_prefill is {found.n_prefill} of {len(found.tokens)} tokens; {AGAIN}")
    if any(not 0 < n <= len(found.tokens) for n in found.rows):
        raise UserError(f"{path}: has entries past its {len(found.tokens)} tokens; {AGAIN}")
    return found


def _decimals(value: float) -> int:
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    return max(0, -int(exponent))


# -- the ways in which servers say it ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Next:
    """What a server says of one next token: log-probabilities by id, and which it chose, where these are known.

    ``unknown`` are tokens that it named in a way that fits none, or several, of the vocabulary.
    """

    row: Row
    chosen: int | None = None
    unknown: int = 0


class Reader:
    """Reads what one server says. Raises UserError, in its name, for what no log-probability or token can be."""

    def __init__(self, name: str, vocabulary: Vocabulary, size: int) -> None:
        """``size``: how many tokens the model has."""
        self.name, self.vocabulary, self.size = name, vocabulary, size

    def all(self, logprobs: Any, most: int | None = None) -> list[Next | None]:
        """One for each token that a server speaks of, or the ``most`` that it was asked for; None where it says
        nothing, as of a first one.

        ``logprobs``: OpenAI's ``logprobs`` of completions (lists that belong together) and of chats (``content``),
        llama-server's ``completion_probabilities``, Ollama's list, vLLM's ``prompt_logprobs``.
        """
        if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
            return [self._one(entry) for entry in logprobs["content"][:most]]
        if isinstance(logprobs, dict) and isinstance(logprobs.get("top_logprobs"), list):
            chosen = logprobs.get("tokens")
            names = chosen if isinstance(chosen, list) else []
            rows = [self._named(row) for row in logprobs["top_logprobs"][:most]]
            return [
                replace(row, chosen=self._token(names[i])) if row is not None and i < len(names) else row
                for i, row in enumerate(rows)
            ]
        if isinstance(logprobs, list):
            return [self._one(entry) for entry in logprobs[:most]]
        if logprobs is None:
            return []
        raise self._fault(f"gives {brief(logprobs)} as log-probabilities; expected lists of tokens with theirs")

    def _one(self, entry: Any) -> Next | None:
        """``{"token": ..., "top_logprobs": [...]}``, or ``{"4": {"logprob": ...}}``."""
        if isinstance(entry, dict) and "top_logprobs" in entry:
            listed = entry["top_logprobs"]
            if not isinstance(listed, list):
                raise self._fault(f"gives {brief(listed)} as top_logprobs; expected a list")
            found = self._listed([*listed, *([entry] if "logprob" in entry else [])])
            return replace(found, chosen=self._token(entry))
        if isinstance(entry, dict) and isinstance(entry.get("probs"), list):  # llama-server of 2024, llamafile
            return self._listed([_as_logarithm(each) for each in entry["probs"]])
        return self._named(entry)

    def _named(self, row: Any) -> Next | None:
        """``{" the": -1.5}`` or ``{"262": {"logprob": -1.5, "decoded_token": " the"}}``."""
        if row is None:
            return None
        if not isinstance(row, dict):
            raise self._fault(f"gives {brief(row)} for a token; expected tokens with their log-probabilities")
        return self._listed(
            [{"id": _whole(name), **value} if isinstance(value, dict) else {"token": name, "logprob": value}
             for name, value in row.items()]
        )  # fmt: skip

    def _listed(self, entries: Sequence[Any]) -> Next:
        found: dict[int, float] = {}
        unknown = 0
        for token, value in self._pairs(entries):
            if token is None:
                unknown += 1
            elif found.setdefault(token, value) != value:
                raise self._fault(f"gives token {token} two log-probabilities, {found[token]:g} and {value:g}")
        total = sum(map(math.exp, found.values()))
        if total > AT_MOST:
            raise self._fault(f"gives log-probabilities of {len(found)} tokens that sum to {total:.3g}; is it logits?")
        return Next(found, None, unknown)

    def _pairs(self, entries: Sequence[Any]) -> Iterator[tuple[int | None, float]]:
        for entry in entries:
            value = entry.get("logprob") if isinstance(entry, dict) else entry
            if isinstance(entry, dict) and value is None and "logprob" in entry:
                continue  # the logarithm of nothing, where JSON has no infinity
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or value > CERTAIN:
                raise self._fault(f"gives {brief(value)} as a log-probability; expected a number, of at most 0")
            if value > RULED_OUT:
                yield self._token(entry), float(value)

    def _token(self, entry: Any) -> int | None:
        """The id of what a server names: by id, by bytes, or by a text that is one token's alone."""
        said: Mapping[str, Any] = entry if isinstance(entry, dict) else {"token": entry}
        number, data, text = said.get("id"), said.get("bytes"), said.get("token")
        if type(text) is int and number is None:  # mistral.rs has the id there, and the text in bytes
            number = text
        if number is None and isinstance(text, str) and text.startswith(BY_ID):
            number = _whole(text.removeprefix(BY_ID))
        if number is not None:
            if type(number) is not int or not 0 <= number < self.size:
                raise self._fault(f"names token {brief(number)}; the file has {self.size}, from 0 on")
            return number
        if isinstance(data, list) and data and all(type(byte) is int and 0 <= byte < 256 for byte in data):
            return self.vocabulary.by_bytes.get(bytes(data))
        if not isinstance(text, str):
            raise self._fault(f"names a token as {brief(text)}; expected its text")
        if not text or "\ufffd" in text:  # what is no UTF-8 alone, and what is not shown
            return None
        return self.vocabulary.by_bytes.get(text.encode("utf-8", "replace"))

    def _fault(self, what: str) -> UserError:
        return UserError(f"{self.name}: {what}")


def _as_logarithm(entry: Any) -> Any:
    """``{"tok_str": " a", "prob": 0.5}`` as others have it."""
    prob = entry.get("prob") if isinstance(entry, dict) else None
    if isinstance(prob, bool) or not isinstance(prob, (int, float)) or not 0 <= prob <= 1 + CERTAIN:
        return entry
    return {"token": entry.get("tok_str"), "logprob": math.log(prob) if prob else None}


def _whole(text: str) -> int | str:
    """A number, if a text is one."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else text
