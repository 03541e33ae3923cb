"""A server's vector of a text: a right one is right, and pooling, length, tokens, a prefix are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ext.prompt.answering import answering
from models.gguf_file import read_gguf, write_gguf
from waiting import HANG

from llamadiff import UserError
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.prompt.tokenizer import Tokenizer
from llamadiff.ext.server.embeddings import _Case
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import compare

TEXT, LAST = "Once upon a time there was", 3


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """An embedding model that pools by its last token."""
    fields, tensors = read_gguf(shipped_model())
    return write_gguf(tmp_path_factory.mktemp("m") / "m.gguf", fields | {"llama.pooling_type": LAST}, tensors)


def unit(vector):
    return vector / np.linalg.norm(vector)


def rows_of(ids) -> np.ndarray:
    """Rows that depend on all ids before."""
    return np.array([np.random.default_rng([*ids[: n + 1]]).normal(size=24) + 0.3 for n in range(len(ids))])


def case(model: Path, vector) -> _Case:
    """One vector, of an engine whose rows are made up."""
    file = ModelFile(model)
    ids = tuple(Tokenizer(file.weights.fields).encode(TEXT))
    run = lambda ids, spec="": rows_of(ids) * (1 + 1e-6 * len(spec))  # noqa: E731
    return _Case(file, Info(ids, prompt=TEXT), rows_of(ids), np.array(vector(ids, file)), How(), run)


def prefixed(prefix):
    return lambda ids, file: unit(rows_of(Tokenizer(file.weights.fields).encode(prefix + TEXT))[-1])


MADE = [
    (lambda ids, _: unit(rows_of(ids)[-1]), "the server's vector is right up to rounding"),
    (
        lambda ids, _: unit(rows_of(ids).mean(axis=0)),
        "takes the mean of all tokens, where the file says the last token",
    ),
    (lambda ids, _: unit(rows_of(ids)[0]), "takes the first token, where the file says the last token"),
    (lambda ids, _: rows_of(ids)[-1], "does not give it the length 1"),
    (lambda ids, _: 3 * unit(rows_of(ids)[-1]), "but 3: no known one"),
    (lambda ids, _: unit(rows_of(ids[:-1])[-1]), "the server leaves out the last token"),
    (lambda ids, _: unit(rows_of(ids[1:])[-1]), "the server puts no beginning-of-text token"),
    (lambda ids, _: unit(rows_of((*ids, 2))[-1]), "the server puts an end-of-text token, which this model does not"),
    (lambda ids, _: unit(rows_of(ids[:-1]).mean(axis=0)), "leaves out the last token and takes the mean of all tokens"),
    (prefixed("query: "), "the server puts 'query: ' before the text"),
    (lambda ids, _: unit(rows_of(ids)[-1])[:16], "cuts the vector to its first 16 values of 24"),
    (lambda ids, _: np.ones(30), "has 30 values; the file's model makes 24"),
    (lambda ids, _: unit(rows_of(ids[::-1])[-1]), "no known pooling, prefix or token explains it"),
]


@pytest.mark.parametrize(("vector", "says"), MADE, ids=[says for _, says in MADE])
def test_a_vector_is_judged_and_named(model, vector, says):
    headline, proof, is_mistake = case(model, vector).judged()
    assert says in headline
    assert is_mistake == ("right up to rounding" not in says)
    assert proof


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_server_of_vectors(model, pooling, tmp_path):
    compare(model, TEXT, save=tmp_path)
    rows = np.array(Trace.open(tmp_path / "baseline.safetensors")["result_norm"], np.float64)
    vector = unit(rows[-1] if pooling == "last" else rows.mean(axis=0))

    def answer(path, asked):
        if path != "/v1/embeddings":
            return 404, {}
        assert asked["input"] == TEXT
        return 200, {"data": [{"embedding": [*vector]}]}

    with answering(answer) as address:
        result = compare(model, Run(prompt=TEXT), address, How(timeout=HANG))
    assert result.verdict == ("match" if pooling == "last" else "wrong")
    assert result.headline.startswith("the server")


@pytest.mark.parametrize(
    "said", [{"data": []}, {"data": [{"embedding": ["1"]}]}, {"data": [{"embedding": [1e999]}]}, 7]
)
def test_what_is_no_vector_is_one_line(model, said):
    with answering(lambda *_: (200, said)) as address, pytest.raises(UserError, match=r"expected a list of numbers"):
        compare(model, Run(prompt=TEXT), address, How(timeout=HANG))
