"""A server of a reranker, judged by the scores that it gives to documents: prompt, pooling, classifier, scale.

The right scores are made of llama.cpp's last rows by the file's own classifier. Where the server's are others, other
prompts are tried, each with other heads and scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from llamadiff.candidates.opening import CandidateSpec
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How, Run
from llamadiff.engines.select import in_engine
from llamadiff.ext.file.classifiers import gives_probability, is_gelu, pooled_row
from llamadiff.ext.prompt.http import RefusedError, Server, is_server
from llamadiff.ext.server.embeddings import POOLINGS
from llamadiff.ext.server.last_rows import EXACT, ROOM, WAYS, LastRows, answered
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request
from llamadiff.numerics import metrics
from llamadiff.result.comparison import Comparison
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Array
from llamadiff.trace.stated import brief

RANK = 4  # llama.cpp's pooling_type
MEAN, FIRST, LAST = POOLINGS
LEAST, MOST = 3, 64  # documents
ERRAND = "llamadiff.ext.server.errands:texts_for_ranking"
TEMPLATE = "tokenizer.chat_template.rerank"
SLOTS = ("{query}", "{document}")
PLACES = "bos", "query", "eos between", "sep", "document", "eos"  # of what is put together
WITHOUT: Mapping[str, tuple[str, ...]] = {  # what a server does that leaves some out
    "puts nothing between query and document": ("eos between", "sep"),
    "puts no beginning-of-text token": ("bos",),
    "puts no separating token": ("sep",),
    "puts no end-of-text token after the document": ("eos",),
    "puts no end-of-text tokens": ("eos between", "eos"),
    "leaves out the query": ("query", "eos between", "sep"),
    "leaves out the document": ("eos between", "sep", "document"),
}
NEXT = "look at how the server puts query and document together, which row its classifier reads, and what follows it"
AFTER = "if documents still come in a wrong order, look at the instruction in the query, and at documents that are cut"
Ids = tuple[int, ...]


def ranks(file: ModelFile) -> bool:
    """Whether a file's model gives a score to a query and a document."""
    return bool(file.hyper_parameter("pooling_type") == RANK)


def compare_scores(
    model: str | Path, candidate: CandidateSpec | None, run: Run, how: How, folder: Path, child: Child
) -> Comparison:
    """Judge a server by the scores of documents: the prompt's first line is the query, each other one a document.

    Raises UserError for whatever a user can mend.
    """
    spec = str(candidate)
    if not is_server(spec):
        raise UserError(f"{spec}: keeps log-probabilities; of a reranker give the server's address")
    query, documents = parts_of(run.prompt)
    file = ModelFile(model, how.precision, run.settings)
    engine, used = in_engine(file, how)
    prompts = Prompts.of(file, query, documents, run, how, child)
    llama = LastRows(file, engine, run, how, child)
    first = replace(run, prompt=None, chat=False, n_predict=0, tokens=prompts.right(0))
    opened, baseline = llama.baseline(first, folder)
    found, about = _asked(spec, query, documents, how)
    said = _Case(file, prompts, found, how, llama.of).judged()
    return replace(answered(opened, baseline, about, "scores", said, (NEXT, AFTER)), engine=used)


def parts_of(prompt: str | None) -> tuple[str, tuple[str, ...]]:
    """The query and the documents in a prompt; parts of the documents are asked too where there are few.

    Raises UserError where there are none.
    """
    query, *documents = [line.strip() for line in (prompt or "").splitlines() if line.strip()] or [""]
    if not documents or len(documents) > MOST:
        raise UserError(
            f"this model ranks documents: the prompt has {len(documents)} of them, where 1 to {MOST} are asked for; "
            "give the query as its first line, and each document as a line after it (@FILE reads a file)"
        )
    halves = [part for document in documents for part in _halves(document.split())]
    return query, tuple(dict.fromkeys([*documents, *halves]))[: max(LEAST, len(documents))]


def _halves(words: Sequence[str]) -> Iterator[str]:
    middle = (len(words) + 1) // 2
    yield from filter(None, (" ".join(words[:middle]), " ".join(words[middle:])))


@dataclass(frozen=True)
class Prompts:
    """Token ids of the query, of each document, and of the file's template of both, where it has one (else empty).

    ``special``: the ids of bos, eos and sep; ``adds``: which of them the vocabulary puts around texts.
    """

    query: Ids
    documents: tuple[Ids, ...]
    templates: tuple[Ids, ...]
    exchanged: tuple[Ids, ...]
    joined: tuple[Ids, ...]
    special: Mapping[str, int]
    adds: Mapping[str, bool]

    @classmethod
    def of(cls, file: ModelFile, query: str, documents: Sequence[str], run: Run, how: How, child: Child) -> Prompts:
        """By llama.cpp's vocabulary of the file. Raises UserError for a file without a tokenizer."""
        template = file.weights.fields.get(TEMPLATE)
        pairs = [(query, each) for each in documents]
        filled = [_filled(template, *pair) for pair in pairs] if isinstance(template, str) else []
        turned = [_filled(template, each, query) for each in documents] if isinstance(template, str) else []
        texts = [*filled, *turned, query, *documents, *(f"{query} {each}" for each in documents)]
        request = Request(
            str(file.path), tuple(map(str, file.weights.files)), errand=ERRAND, texts=tuple(texts),
            n_prefill=2 * len(filled), settings=run.settings.place,
        )  # fmt: skip
        said = child.ask(request, how.progress)
        if said["ids"] is None:
            raise UserError(f"{file.path}: the file has no tokenizer; give one that has")
        ids, many, some = [tuple(each) for each in said["ids"]], len(documents), len(filled)
        own = ids[2 * some :]
        return cls(own[0], tuple(own[1 : 1 + many]), tuple(ids[:some]), tuple(ids[some : 2 * some]),
                   tuple(own[1 + many :]), said["special"], said["adds"])  # fmt: skip

    def right(self, number: int) -> Ids:
        """As llama.cpp's server puts them together: format_prompt_rerank (tools/server/server-common.cpp)."""
        return self.templates[number] if self.templates else self.plain(number)

    def plain(self, number: int, without: Sequence[str] = (), exchanged: bool = False) -> Ids:
        """[BOS] query [EOS] [SEP] document [EOS], those that the vocabulary adds, ``without`` some of PLACES."""
        first, second = (self.query, self.documents[number])[:: -1 if exchanged else 1]
        bos, eos, sep = map(self._one, ("bos", "eos", "sep"))
        parts = zip(PLACES, (bos, first, eos, sep, second, eos), strict=True)
        return tuple(chain.from_iterable(ids for name, ids in parts if name not in without))

    def otherwise(self) -> Iterator[tuple[str, Callable[[int], Ids]]]:
        """What a server may do instead, where that gives other ids."""
        ways: dict[str, Callable[[int], Ids]] = {}
        if self.templates:
            ways["puts query and document together without the file's template"] = self.plain
            ways["exchanges query and document"] = lambda number: self.exchanged[number]
        else:
            ways["exchanges query and document"] = partial(self.plain, exchanged=True)
            ways["puts a space between query and document, and no token"] = self._joined
            ways |= {says: partial(self.plain, without=without) for says, without in WITHOUT.items()}
        everywhere = range(len(self.documents))
        for says, ids in ways.items():
            if any(ids(number) != self.right(number) for number in everywhere) and all(map(ids, everywhere)):
                yield says, ids

    def _joined(self, number: int) -> Ids:
        return (*self._one("bos"), *self.joined[number], *self._one("eos"))

    def _one(self, name: str) -> Ids:
        """A special token, where the vocabulary adds it; sep's stands for an eos that there is not."""
        number = self.special.get(name, -1)
        number = self.special.get("sep", -1) if name == "eos" and number < 0 else number
        return (number,) if self.adds.get(name) and number >= 0 else ()


def _filled(template: str, query: str, document: str) -> str:
    return template.replace(SLOTS[0], query).replace(SLOTS[1], document)


def _asked(spec: str, query: str, documents: Sequence[str], how: How) -> tuple[Array, dict[str, str]]:
    """The score that a server gives to each document, and who it is. Raises UserError for what is no answer."""
    address, _, name = spec.partition("#")
    named = {"model": name} if name else {}
    with Server(address, how.timeout, how.progress) as server:
        how.progress("asking the server for scores")
        prefix = "" if server.name.endswith("/v1") else "/v1"
        about = {"name": "the server", "url": server.name}
        asked = {"query": query, "documents": [*documents], "top_n": len(documents), **named}
        try:
            return _scores(server.name, server.ask(f"{prefix}/rerank", asked), len(documents)), about
        except RefusedError as refused:
            with suppress(RefusedError):  # Text Embeddings Inference
                said = server.ask("/rerank", {"query": query, "texts": [*documents], **named})
                return _scores(server.name, said, len(documents)), about
            raise refused from None


def _scores(name: str, said: Any, count: int) -> Array:
    """Those of an answer, by the documents' numbers. Raises UserError where one has none."""
    listed = said.get("results", said.get("data")) if isinstance(said, dict) else said
    found = dict[int, float]()
    for each in listed if isinstance(listed, list) else ():
        one: Any = each if isinstance(each, dict) else {}
        number, score = one.get("index"), one.get("relevance_score", one.get("score"))
        if type(number) is int and isinstance(score, (int, float)) and math.isfinite(score):
            found[number] = float(score)
    if sorted(found) != [*range(count)]:
        raise UserError(
            f"{name}: answers /rerank with {brief(said)}; expected results, each with an index from 0 to {count - 1} "
            "and a relevance_score"
        )
    return np.array([found[number] for number in range(count)])


class Classifier:
    """What makes a score of a prompt's last rows: llm_graph_context::build_pooling (src/llama-graph.cpp)."""

    def __init__(self, file: ModelFile) -> None:
        self.file, weights = file, file.weights
        names = ("cls.weight", "cls.bias", "cls.norm.weight", "cls.output.weight", "cls.output.bias")
        whole = {name: weights.whole(name).astype(np.float64) for name in names if name in weights}
        self.dense, self.dense_bias, self.norm, self.out, self.out_bias = map(whole.get, names)
        self.kind = pooled_row(file)
        self.labels = file.hyper_parameter("classifier.output_labels")
        self.gives_probability = gives_probability(file)

    @property
    def is_there(self) -> bool:
        return self.dense is not None or self.out is not None

    def outputs(self, rows: Array, kind: int = 0, activated: bool = True) -> Array:
        """One value a label, of the row that is pooled."""
        x = POOLINGS[kind or self.kind][1](rows)
        if self.dense is not None:
            x = np.atleast_2d(self.dense) @ x + (0 if self.dense_bias is None else self.dense_bias)
            if activated:
                x = _gelu(x) if is_gelu(self.file) else np.tanh(x)
            if self.norm is not None:
                eps = float(self.file.hyper_parameter("attention.layer_norm_epsilon") or 0)
                x = (x - x.mean()) / np.sqrt(x.var() + eps) * self.norm
        if self.out is not None:
            x = np.atleast_2d(self.out) @ x + (0 if self.out_bias is None else self.out_bias)
        return np.asarray(x)

    def score(self, rows: Array, kind: int = 0) -> float:
        """llama.cpp's: the first label's, of some architectures its probability."""
        found = self.outputs(rows, kind)
        return float(_softmax(found)[0] if self.gives_probability else found[0])

    def otherwise(self) -> Iterator[tuple[str, Callable[[Array], float]]]:
        """What a server may make of the rows instead."""
        yield "", self.score
        if self.gives_probability:
            yield "leaves out the softmax over the labels", lambda rows: float(self.outputs(rows)[0])
        for number, label in enumerate(self._labels()):
            if number:
                says = f"gives the score of label {number} ({brief(label)}), where label 0 is the score"
                yield says, partial(self._label, number)
        own = POOLINGS[self.kind][0]
        for kind, (word, _) in POOLINGS.items():
            if kind != self.kind:
                yield f"reads {word}, where this classifier reads {own}", partial(self.score, kind=kind)
        if self.dense is not None:
            yield (
                "leaves out the activation of the classifier",
                lambda rows: float(self.outputs(rows, activated=False)[0]),
            )
        if self.is_there:
            pool = POOLINGS[self.kind][1]
            yield (
                "leaves out the classifier, and gives the first value of the row that it reads",
                lambda rows: float(pool(rows)[0]),
            )

    def _labels(self) -> Sequence[Any]:
        count = len(np.atleast_2d(self.out)) if self.out is not None else 1
        return self.labels if isinstance(self.labels, list) and len(self.labels) == count else range(count)

    def _label(self, number: int, rows: Array) -> float:
        found = self.outputs(rows)
        return float(_softmax(found)[number] if self.gives_probability else found[number])


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _softmax(x: Array) -> Array:
    raised = np.exp(x - x.max())
    return np.asarray(raised / raised.sum())


@np.errstate(all="ignore")  # a score that is no probability has no logarithm
def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


SCALES: Mapping[str, Callable[[Array], Array]] = {  # which keep the order of documents
    "": lambda x: x,
    "their sigmoid": _sigmoid,
    "their softmax over the documents": _softmax,
    "their logarithm": lambda x: np.log(np.where(x > 0, x, np.nan)),
}


class _Case:
    """The scores of a server, and what they are tried for. ``run`` gives llama.cpp's last rows of ids."""

    def __init__(self, file: ModelFile, prompts: Prompts, found: Array, how: How, run: Callable[..., Array]) -> None:
        self.classifier, self.prompts, self.found, self.how = Classifier(file), prompts, found, how
        self.run = cache(run)

    def judged(self) -> tuple[str, tuple[str, ...], bool]:
        """The finding, what stands under it, and whether it is a mistake."""
        right = self._scored(self._rows(self.prompts.right), self.classifier.score)
        asked = f"scores of {len(right)} documents: {_listed(self.found)}; {_listed(right)} are right"
        for what, rows in self._prompts():
            for head, score in self.classifier.otherwise():
                scores = self._scored(rows, score)
                for scale, made in SCALES.items():
                    off, allowed = self._off(made(scores)), self._allowed(score, made)
                    if off <= allowed:
                        proof = f"so its scores are off by an NMSE of {off:.1e}, where {allowed:.1e} is rounding"
                        return self._said([each for each in (what, head) if each], scale, (proof, asked))
        moved = sorted(self.found.tolist()), sorted(right.tolist())
        if metrics.ratio(float(np.square(np.subtract(*moved)).sum()), float(np.square(right).sum())) <= EXACT:
            return "the server gives each document the score of another: by rank, not by index", (asked,), True
        return "the server's scores are off; no known prompt, row or classifier explains it", (asked,), True

    def _said(self, whats: Sequence[str], scale: str, proof: tuple[str, ...]) -> tuple[str, tuple[str, ...], bool]:
        """``whats`` are the mistakes."""
        of = f" (it gives {scale})" if scale else ""
        if whats:
            return f"the server {' and '.join(whats)}{of}", proof, True
        return f"the server's scores are right up to rounding{of}", proof, False

    def _prompts(self) -> Iterator[tuple[str, list[Array]]]:
        """Rows of the right prompts first, then of others."""
        yield "", self._rows(self.prompts.right)
        for what, ids in self.prompts.otherwise():
            self.how.progress(f"trying other scores: {what}")
            yield what, self._rows(ids)

    def _rows(self, ids: Callable[[int], Ids], spec: str = "") -> list[Array]:
        return [self.run(ids(number), spec) for number in range(len(self.found))]

    def _scored(self, rows: Sequence[Array], score: Callable[[Array], float]) -> Array:
        return np.array([score(each) for each in rows])

    @cached_property
    def _rounded(self) -> list[list[Array]]:
        """The right prompts' rows with other settings of llama.cpp, those that it takes."""
        found = list[list[Array]]()
        for spec in WAYS:
            with suppress(UserError):
                found.append(self._rows(self.prompts.right, spec))
        return found

    def _allowed(self, score: Callable[[Array], float], made: Callable[[Array], Array]) -> float:
        """The NMSE that rounding may leave of scores that are made so."""
        right = made(self._scored(self._rows(self.prompts.right), score))
        others = [made(self._scored(rows, score)) for rows in self._rounded]
        moved = [metrics.ratio(float(np.square(each - right).sum()), float(np.square(right).sum())) for each in others]
        return max(ROOM * max((each for each in moved if math.isfinite(each)), default=0.0), EXACT)

    def _off(self, scores: Array) -> float:
        off = metrics.ratio(float(np.square(self.found - scores).sum()), float(np.square(scores).sum()))
        return off if math.isfinite(off) else math.inf


def _listed(scores: Array) -> str:
    some = ", ".join(f"{score:.5g}" for score in scores[:LEAST])
    return f"{some}, ..." if len(scores) > LEAST else some
