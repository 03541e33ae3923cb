"""``http://localhost:8080``: a server that answers with log-probabilities of next tokens; or what was kept of one.

A server has no taps, and of its logits it tells a few, each row up to a constant. ``#NAME`` after the address names one
of several models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from llamaref import ModelError

from llamadiff.candidates.source import CandidateSource, Context
from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.prompt.http import RefusedError, Server, is_server
from llamadiff.ext.prompt.tokenizer import Tokenizer
from llamadiff.ext.server.answers import SUFFIX, Answers, Next, Reader, Row, read_answers
from llamadiff.ext.server.apis import Api, api_of
from llamadiff.ext.server.history import probe
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.system.progress import Progress
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Array, Printed, Trace
from llamadiff.trace.taps import LOGITS

POSITIONS = 32  # of a prompt that are asked for
FOLLOWING = 12  # tokens that a server goes on with in a chat, where it takes no ids
CUTS = 512  # beginnings of a text that are tried as prompts
NEARLY = 0.01  # log-probabilities of one place, asked for twice
LEAST = 2  # log-probabilities of a row: one alone is known up to a constant, so not at all


def matches(spec: str) -> bool:
    """The address of one, or what was kept of its answers."""
    return is_server(spec) or spec.endswith(SUFFIX)


def files(spec: str) -> Iterable[Path]:
    """What was kept."""
    return [] if is_server(spec) else [Path(spec)]


def open_source(spec: str) -> CandidateSource:
    """The server, which is asked once the tokens are known; or the answers, which state them."""
    if is_server(spec):
        return CandidateSource(partial(_asked, spec))
    kept = answers_in(spec)
    return CandidateSource(partial(_kept, kept), kept.tokens)


def answers_in(spec: str) -> Answers:
    """What was kept of a server's answers. Raises UserError if it is not there, or none."""
    check_regular(Path(spec), "a server's answers")
    return read_answers(Path(spec))


def _kept(answers: Answers, context: Context) -> Trace:
    return as_trace(answers, context.model, context.baseline)


def _asked(spec: str, context: Context) -> Trace:
    text = context.baseline.info.prompt if context.baseline is not None else None
    question = Question(context.model, context.tokens, context.n_prefill or len(context.tokens), text)
    return as_trace(ask(spec, question, context.timeout, context.progress), context.model, context.baseline)


@dataclass(frozen=True)
class Question:
    """What a server is asked about: token ids, of which the first ``n_prefill`` are a prompt; and its text, if known.

    ``turn``: what a user says in a chat, where the prompt is that chat's.
    """

    model: ModelFile
    tokens: tuple[int, ...]
    n_prefill: int
    text: str | None = None
    turn: str | None = None


def ask(spec: str, question: Question, patience: float, progress: Progress) -> Answers:
    """What a server says of the tokens after a prompt and its beginnings. Raises UserError where it says nothing."""
    address, _, model = spec.partition("#")
    with Server(address, patience, progress) as server:
        size = question.model.weights.shape("token_embd.weight")[0]
        api = api_of(server, model, Reader(server.name, question.model.vocabulary, size))
        found = _Interview(server.name, api, question, progress).held()

        @contextmanager
        def another() -> Iterator[Api]:
            with Server(address, patience, progress) as own:
                yield api_of(own, model, Reader(own.name, question.model.vocabulary, size))

        why = "" if found.by_ids else "it takes texts alone, and no token ids"
        probes, unasked = probe(api, another, question.tokens[: question.n_prefill], progress) if not why else ((), why)
        found = replace(found, probes=probes, unasked=unasked)
    if not any(len(row) >= LEAST for row in found.rows.values()):
        raise UserError(
            f"{server.name}: gives no log-probabilities of next tokens, which is all that a server can be judged by; "
            f"is it a {api.kind} that has them?"
        )
    return found


@dataclass
class _Interview:
    """The questions to one server, one after another."""

    name: str
    api: Api
    question: Question
    progress: Progress

    def held(self) -> Answers:
        question, api = self.question, self.api
        n, generated = question.n_prefill, len(question.tokens) - question.n_prefill
        by_ids = api.takes_ids and self._takes_ids()
        following: list[Next] = []
        count = None
        if question.text is not None or question.turn is not None:
            more = FOLLOWING if question.turn is not None else 1
            following, count = self._whole(1 if by_ids else max(more, generated))
        elif not by_ids:
            raise UserError(f"{self.name}: takes texts alone, and no token ids; give the prompt as text")
        tokens, rows = question.tokens, dict[int, Next]()
        if by_ids:
            rows = self._at_once(tokens, tokens, None)
            for size in self._in_turn(chosen(range(1, len(tokens) + 1))) if not rows else ():
                rows[size] = self._one(tokens[:size])
        else:
            tokens = (*tokens[:n], *_ids_chosen(following[:-1])) if following else tokens[:n]
            rows = {n + j: each for j, each in enumerate(following) if n + j <= len(tokens)}
            texts = {} if question.text is None or question.turn is not None else beginnings(question)
            at_once = (
                self._at_once(question.text or "", question.tokens[:n], following[0]) if texts and following else {}
            )
            rows = {**at_once, **rows}
            for size in self._in_turn(chosen([size for size in sorted(texts) if size not in rows])):
                rows[size] = self._one(texts[size])
        return Answers(
            self.name, api.kind, tokens, n, {size: rows[size].row for size in sorted(rows)}, by_ids,
            following[0].row if following else None, self._tokens(), count, api.about,
            tuple(size for size in sorted(rows) if rows[size].unknown), question.text, question.turn,
        )  # fmt: skip

    def _takes_ids(self) -> bool:
        """Whether ids do for a prompt: not every server with OpenAI's API takes them."""
        try:
            return self.api.after(self.question.tokens[:1])[0] != []
        except RefusedError:
            return False

    def _whole(self, count: int) -> tuple[list[Next], int | None]:
        """What follows the whole prompt, as text, or as a chat."""
        question = self.question
        self.progress(f"asking the server ({self.api.kind})")
        if question.turn is not None:
            rows, tokens = self.api.chat(question.turn, count)
        else:
            rows, tokens = self.api.after(question.text or "", count)
        return [row for row in rows if row is not None], tokens

    def _at_once(self, prompt: str | Sequence[int], tokens: Sequence[int], whole: Next | None) -> dict[int, Next]:
        """What follows each beginning of a prompt, by one request, where a server has that; else nothing.

        Servers begin with the first token, or with the second after BOS. That it is told of the prompt's own tokens is
        seen from their number, and from what follows the ``whole``, which was asked before.
        """
        found = self.api.through(prompt)
        begins = len(tokens) + 1 - len(found)
        last = found[-1] if found else None
        if begins not in (0, 1) or last is None or found[0] is not None:
            return {}
        if whole is not None and not same_rows(last.row, whole.row):
            return {}
        rows = {begins + i: row for i, row in enumerate(found) if row is not None}
        return {size: row for size, row in rows.items() if 0 < size <= len(tokens)}

    def _one(self, prompt: str | Sequence[int]) -> Next:
        rows, _ = self.api.after(prompt)
        return next((row for row in rows if row is not None), Next({}))

    def _in_turn(self, sizes: Sequence[int]) -> Iterator[int]:
        for number, size in enumerate(sizes):
            self.progress("asking the server", number, len(sizes))
            yield size

    def _tokens(self) -> tuple[int, ...] | None:
        """The ids that the server says the prompt has."""
        text = self.question.turn if self.question.turn is not None else self.question.text
        try:
            return None if text is None else self.api.tokens_of(text, self.question.turn is not None)
        except RefusedError:
            return None


def same_rows(one: Row, other: Row) -> bool:
    """Whether two rows have nearly the same log-probabilities."""
    both = one.keys() & other.keys()
    return len(both) >= LEAST and all(abs(one[token] - other[token]) < NEARLY for token in both)


def _ids_chosen(following: Iterable[Next]) -> Iterator[int]:
    """The ids that a server went on with, up to one that is not known."""
    for each in following:
        if each.chosen is None:
            return
        yield each.chosen


def chosen(sizes: Sequence[int]) -> list[int]:
    """Some of many, evenly, with the last."""
    if len(sizes) <= POSITIONS:
        return list(sizes)
    return [sizes[round(i * (len(sizes) - 1) / (POSITIONS - 1))] for i in range(POSITIONS)]


def beginnings(question: Question) -> dict[int, str]:
    """Beginnings of the text of which the tokens are the first ones of the whole, by how many these are."""
    text = question.text or ""
    try:
        tokenizer = Tokenizer(question.model.weights.fields)
        cuts = sorted(
            {round(i * len(text) / CUTS) for i in range(1, CUTS)} if len(text) > CUTS else range(1, len(text))
        )
        found = {}
        for cut in cuts:
            ids = tuple(tokenizer.encode(text[:cut]))
            if ids and ids == question.tokens[: len(ids)]:
                found[len(ids)] = text[:cut]
    except ModelError:
        return {}
    return found


# -- as a trace --------------------------------------------------------------------------------------------------------


def as_trace(answers: Answers, model: ModelFile, baseline: Trace | None) -> Trace:
    """What a server said as a trace of partial logits, each row set to where the ``baseline``'s is."""
    right = baseline[LOGITS].reshape(len(baseline.info.tokens), -1) if baseline and LOGITS in baseline else None
    shape = (len(answers.tokens), model.weights.shape("token_embd.weight")[0] if right is None else right.shape[1])
    values, known = np.zeros(shape, np.float32), np.zeros(shape, bool)
    for size, row in answers.rows.items():
        if len(row) >= LEAST:
            own = right[size - 1] if right is not None and size <= len(right) else None
            values[size - 1], known[size - 1] = _row(row, own, shape[1])
    unit = answers.decimals
    slack = {} if unit is None else {LOGITS: np.where(known, 0.5 * 10.0**-unit, 0.0)}
    note = (
        f"the server tells {answers.most} log-probabilities of a token: logits up to a constant, here set to where "
        "the baseline's are"
    )
    printed = Printed(slack, relative=frozenset({LOGITS}), notes=(note,))
    producer = {"name": "the server", "url": answers.name, "api": answers.api, **answers.about}
    info = Info(answers.tokens, tuple(range(len(answers.tokens))), len(answers.tokens), None, producer, {})
    return Trace(info, {LOGITS: values}, {LOGITS: "F32"}, None, {LOGITS: known}, {}, printed)


def _row(row: Row, right: Array | None, size: int) -> tuple[Array, Array]:
    """One row's logits, and which of them are known."""
    ids = np.fromiter(row.keys(), int)
    said = np.fromiter(row.values(), np.float64)
    values, known = np.zeros(size), np.zeros(size, bool)
    constant = float(np.mean(right[ids].astype(np.float64) - said)) if right is not None else 0.0
    values[ids], known[ids] = said + constant, True
    return values.astype(np.float32), known
