"""A server's scores of documents: right ones are right, and prompt, row, classifier and scale are named."""

from __future__ import annotations

from pathlib import Path

import llama_server
import numpy as np
import pytest
from ext.prompt.answering import answering
from ext.server.ranking import write_reranker
from llamaref import Engine, Weights
from models.gguf_file import write_gguf
from waiting import HANG

from llamadiff import UserError
from llamadiff.candidates.reference import record
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.file.opening import judge_weights
from llamadiff.ext.prompt.tokenizer import Tokenizer
from llamadiff.ext.server.rerank import Classifier, Prompts, _Case, _scores, parts_of
from llamadiff.verbs.verbs import compare

QUERY, DOCUMENTS, BOS, EOS = (7, 8), ((3, 4), (5, 6, 9), (11,)), 1, 2
PROMPT = "who went up the hill?\nThe little girl went up the hill.\nA cat sat in the sun all day."
PROMPTS = Prompts(
    QUERY, DOCUMENTS, (), (), tuple((*QUERY, 10, *each) for each in DOCUMENTS), {"bos": BOS, "eos": EOS, "sep": -1},
    {"bos": True, "eos": True, "sep": False},
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_reranker(tmp_path_factory.mktemp("m") / "m.gguf")


def rows_of(ids) -> np.ndarray:
    """Rows that depend on all ids before."""
    return np.array([np.random.default_rng([*ids[: n + 1]]).normal(size=256) for n in range(len(ids))])


def right(number: int) -> tuple[int, ...]:
    return (BOS, *QUERY, EOS, *DOCUMENTS[number], EOS)


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def server(matrix, ids=right, row=-1, label=0, last=softmax):
    """The scores of one that does it by hand: the row that the classifier reads, and what follows it."""
    return np.array([last(matrix @ rows_of(ids(number))[row])[label] for number in range(3)])


def plain(x):
    return x


MADE = {
    "right": (server, "the server's scores are right up to rounding"),
    "sigmoid": (lambda w: sigmoid(server(w)), "are right up to rounding (it gives their sigmoid)"),
    "over documents": (
        lambda w: softmax(server(w)),
        "up to rounding (it gives their softmax over the documents)",
    ),
    "logits": (lambda w: server(w, last=plain), "the server leaves out the softmax over the labels"),
    "logits, sigmoid": (
        lambda w: sigmoid(server(w, last=plain)),
        "the server leaves out the softmax over the labels (it gives their sigmoid)",
    ),
    "another label": (lambda w: server(w, label=1), "gives the score of label 1 ('no'), where label 0 is the score"),
    "the first row": (lambda w: server(w, row=0, ids=lambda n: (n + 3, *right(n))), "no known prompt, row or"),
    "the first token": (
        lambda w: server(w, row=0),
        "reads the first token, where this classifier reads the last",
    ),
    "no classifier": (
        lambda w: np.array([rows_of(right(number))[-1][0] for number in range(3)]),
        "leaves out the classifier, and gives the first value of the row that it reads",
    ),
    "exchanged": (
        lambda w: server(w, lambda number: (BOS, *DOCUMENTS[number], EOS, *QUERY, EOS)),
        "exchanges query and document",
    ),
    "nothing between": (
        lambda w: server(w, lambda number: (BOS, *QUERY, *DOCUMENTS[number], EOS)),
        "puts nothing between query and document",
    ),
    "a space between": (
        lambda w: server(w, lambda number: (BOS, *QUERY, 10, *DOCUMENTS[number], EOS)),
        "puts a space between query and document, and no token",
    ),
    "no end": (lambda w: server(w, lambda number: right(number)[:-1]), "puts no end-of-text token after the document"),
    "no start": (lambda w: server(w, lambda number: right(number)[1:]), "puts no beginning-of-text token"),
    "no query": (lambda w: server(w, lambda number: (BOS, *DOCUMENTS[number], EOS)), "leaves out the query"),
    "two": (
        lambda w: server(w, lambda number: (BOS, *DOCUMENTS[number], EOS, *QUERY, EOS), last=plain),
        "exchanges query and document and leaves out the softmax over the labels",
    ),
    "by rank": (lambda w: np.sort(server(w))[::-1], "gives each document the score of another: by rank, not by index"),
    "anything": (lambda w: np.array([0.3, 0.2, 0.1]), "no known prompt, row or classifier explains it"),
}


@pytest.mark.parametrize("what", MADE)
def test_scores_are_judged_and_named(what, model):
    made, says = MADE[what]
    weights = Weights(model).whole("cls.output.weight").astype(np.float64)
    run = lambda ids, spec="": rows_of(ids) * (1 + 1e-6 * len(spec))  # noqa: E731
    headline, proof, is_mistake = _Case(ModelFile(model), PROMPTS, made(weights), How(), run).judged()
    assert says in headline
    assert is_mistake == ("up to rounding" not in says)
    assert proof[-1].startswith("scores of 3 documents: ")


def by_hand(model: Path, ask: str, last=softmax):
    """A server in the reference engine: [BOS] query [EOS] document [EOS], the last row, two labels."""
    weights = Weights(model)
    matrix, tokenizer = weights.whole("cls.output.weight").astype(np.float64), Tokenizer(weights.fields)

    def score(query, document):
        ids = [BOS, *tokenizer.encode(query)[1:-1], EOS, *tokenizer.encode(document)[1:-1], EOS]
        return float(last(matrix @ record(Engine(weights), ids, "it")["result_norm"][-1])[0])

    def answer(path, asked):
        if path != ask:
            return 404, {}
        name, key = ("documents", "relevance_score") if ask == "/v1/rerank" else ("texts", "score")
        found = [{"index": number, key: score(asked["query"], each)} for number, each in enumerate(asked[name])]
        found.sort(key=lambda each: -each[key])
        return 200, {"results": found} if ask == "/v1/rerank" else found

    return answer


@pytest.mark.parametrize(
    ("ask", "last", "says"),
    [
        ("/v1/rerank", softmax, "the server's scores are right up to rounding"),
        ("/rerank", lambda x: sigmoid(softmax(x)), "are right up to rounding (it gives their sigmoid)"),
        ("/v1/rerank", plain, "the server leaves out the softmax over the labels"),
    ],
)
def test_a_server_of_scores(ask, last, says, model):
    with answering(by_hand(model, ask, last)) as address:
        result = compare(model, Run(prompt=PROMPT), address, How(timeout=HANG))
    assert says in result.headline
    assert result.verdict == ("match" if "right" in says else "wrong")


@pytest.mark.parametrize(
    "said",
    [{"results": []}, {"results": [{"index": 0, "relevance_score": 1}]}, [{"index": 0, "score": "1"}] * 3, 7,
     {"results": [{"index": number, "relevance_score": 1e999} for number in range(3)]}],
)  # fmt: skip
def test_what_is_no_answer_is_one_line(said):
    with pytest.raises(UserError, match=r"it: answers /rerank with .*; expected results, each with an index"):
        _scores("it", said, 3)


def test_a_prompt_is_a_query_and_documents():
    assert parts_of("a b\n\nc d e\n") == ("a b", ("c d e", "c d", "e"))
    assert parts_of("q\na\nb\nc\nd") == ("q", ("a", "b", "c", "d"))
    with pytest.raises(UserError, match=r"the prompt has 0 of them, .* each document as a line after it"):
        parts_of("one line")


def test_the_files_template_is_the_prompt(model):
    """Of which the plain form is another one."""
    both = Prompts(QUERY, DOCUMENTS, tuple((9, *each) for each in DOCUMENTS), tuple((8, *each) for each in DOCUMENTS),
                   (), PROMPTS.special, PROMPTS.adds)  # fmt: skip
    run = lambda ids, spec="": rows_of(ids)  # noqa: E731
    weights = Weights(model).whole("cls.output.weight").astype(np.float64)
    for ids, says in ((both.right, "right up to"), (both.plain, "without the file's template")):
        assert says in _Case(ModelFile(model), both, server(weights, ids), How(), run).judged()[0]


def test_a_classifier_of_an_encoder(tmp_path):
    """BERT's: the first row, a dense layer with tanh, and one value."""
    rng = np.random.default_rng(1)
    dense, bias, out = rng.normal(size=(24, 24)) / 5, rng.normal(size=24), rng.normal(size=(1, 24))
    tensors = {"cls.weight": dense, "cls.bias": bias, "cls.output.weight": out, "cls.output.bias": np.ones(1)}
    fields = {"bert.attention.causal": False, "bert.pooling_type": 4}
    file = ModelFile(write_gguf(
        tmp_path / "b.gguf", fields, {name: each.astype(np.float32) for name, each in tensors.items()}, "bert"
    ))  # fmt: skip
    rows = rng.normal(size=(5, 24))
    wanted = float((out @ np.tanh(dense @ rows[0] + bias))[0] + 1)
    assert Classifier(file).score(rows) == pytest.approx(wanted, rel=1e-5)
    others = dict(Classifier(file).otherwise())
    assert others["leaves out the activation of the classifier"](rows) == pytest.approx(
        float((out @ (dense @ rows[0] + bias))[0] + 1), rel=1e-5
    )


def test_a_right_file_of_a_reranker_is_not_odd(model):
    assert judge_weights(model).oddities == ()


def test_a_real_server_is_right(model):
    with llama_server.started(model, "--reranking", program=llama_server.prebuilt()) as address:
        result = compare(model, Run(prompt=PROMPT), address, How(timeout=HANG))
    assert (result.verdict, result.headline) == ("match", "the server's scores are right up to rounding")
