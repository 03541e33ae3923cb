"""A server's vector of a text: a right one is right, and pooling, length, tokens, a prefix are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ext.prompt.answering import answering
from models.gguf_file import read_gguf, write_gguf
from traces import save
from waiting import HANG

from llamadiff import UserError
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.prompt.tokenizer import Tokenizer
from llamadiff.ext.server.embeddings import VectorCase, _vector, _within
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


def case(model: Path, vector) -> VectorCase:
    """One vector, of an engine whose rows are made up."""
    file = ModelFile(model)
    ids = tuple(Tokenizer(file.weights.fields).encode(TEXT))
    run = lambda ids, spec="": rows_of(ids) * (1 + 1e-6 * len(spec))  # noqa: E731
    return VectorCase(file, Info(ids, prompt=TEXT), rows_of(ids), np.array(vector(ids, file)), How(), run)


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


def pooled(ids, rows, *names: str) -> Trace:
    """A candidate that recorded the vector alone."""
    arrays = {name: np.array(rows, np.float32) for name in ("result_embd_pooled", *names)}
    info = Info(tuple(ids), tuple(range(len(ids))), len(ids))
    return Trace(info, arrays, dict.fromkeys(arrays, "F32"))


ALONE = {
    "right": (lambda rows: rows[-1], "the candidate's vector is right up to rounding"),
    "normalised": (lambda rows: unit(rows[-1])[None], "right up to rounding (it is normalised)"),
    "the mean": (lambda rows: rows.mean(axis=0), "takes the mean of all tokens, where the file says the last token"),
    "the token before": (lambda rows: rows[-2], "the candidate leaves out the last token"),
    "of another length": (lambda rows: 3 * rows[-1], " is right, or 1 where it is normalised"),
    "every row": (lambda rows: rows, "the candidate does not pool: result_embd_pooled has 4 rows, one for each token"),
}


@pytest.fixture(scope="module")
def rows(model, tmp_path_factory) -> np.ndarray:
    """llama.cpp's last rows of four ids."""
    folder = tmp_path_factory.mktemp("kept")
    compare(model, Run(tokens=(1, 5, 6, 7)), save=folder)
    return np.array(Trace.open(folder / "baseline.safetensors")["result_norm"], np.float64)


@pytest.mark.parametrize("what", ALONE)
def test_a_pooled_vector_alone_is_judged(what, model, rows, tmp_path):
    made, says = ALONE[what]
    save(pooled((1, 5, 6, 7), made(rows)), tmp_path / "t.safetensors")
    result = compare(model, None, tmp_path / "t.safetensors")
    assert says in result.headline
    assert result.verdict == ("match" if "up to rounding" in says else "wrong")


def test_a_pooled_vector_of_other_tokens_or_of_no_embedding_model_is_refused(model, rows):
    with pytest.raises(UserError, match="ran other tokens: from token 3 on it has"):
        compare(model, Run(tokens=(1, 5, 6, 8)), pooled((1, 5, 6, 7), rows[-1]))
    with pytest.raises(UserError, match=r"makes no one vector of a text \(pooling_type None\); give the embedding"):
        compare(shipped_model(), None, pooled((1, 5, 6, 7), rows[-1]))


@pytest.mark.parametrize(
    "said", [{"data": []}, {"data": [{"embedding": ["1"]}]}, {"data": [{"embedding": [1e999]}]}, 7]
)
def test_what_is_no_vector_is_one_line(said):
    with pytest.raises(UserError, match=r"it: gives .* as a vector; expected a list of numbers"):
        _vector("it", _within(said, "data", "embedding"))
