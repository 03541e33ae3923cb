"""Mistakes that no known bug describes, read back from layer outputs alone: what every sentence says is true."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from models.options import OPTIONS
from models.small import EMBD, VOCAB

from llamadiff.verbs.verbs import diff
from proof.strangers import recording
from proof.strangers.arithmetic import ARITHMETICS, BY_NAME
from proof.strangers.crossing import model_file, opened
from proof.strangers.engine import Engine
from proof.unlisted.bugs import TOKENS
from proof.unlisted.more import UNLISTED
from proof.unlisted.runs import INSIDE, _baseline, is_said, judged

QUICK = {"one in the sum", "key 3 unseen", "heads of V mixed up", "up and a half", "a third term", "tiles transposed"}
FOUND = [
    *sorted(QUICK), "a temperature for each head", "own key not in the sum", "small powers cut", "four slots more",
]  # fmt: skip
# A later op that gives the same is told: its inputs in another order for its input's heads, sums for what they sum.
ELSEWHERE = {"heads swapped", "a share twice", "outputs add up"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where models are written whose embeddings are as large as what layers add to them, as trained ones are."""
    rows = np.random.default_rng(5).standard_normal((VOCAB, EMBD)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        for model in ("llama", "qwen3", "moe"):
            patch.setitem(OPTIONS, model, {**OPTIONS[model], "tensors": {"token_embd.weight": rows}})
        yield tmp_path_factory.mktemp("inside")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FOUND]
)
def test_a_mistake_inside_a_layer_is_read_back_from_its_output(name: str, folder: Path):
    mistake = UNLISTED[name]
    found = judged(mistake, folder, shown=recording.SPARSE)
    assert found.tap == "l_out-0"
    assert found.comparison.verdict == "wrong"
    read = [fact.says for d in found.comparison.diagnosis for facts in d.read.values() for fact in facts]
    told = [match for sentence in read if (match := INSIDE.fullmatch(sentence))]
    assert {_word(match[1]) for match in told} == {_word(mistake.tap)}, read
    assert is_said(mistake.sentence, [match[2] for match in told]), read
    assert found.false == []
    assert any(sentence in found.comparison.summary for sentence in read)


def _word(tap: str) -> str:
    return tap.rsplit("-", 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in UNLISTED if name not in {*FOUND, *ELSEWHERE}])
def test_nothing_false_is_read_back_from_layer_outputs(name: str, folder: Path):
    found = judged(UNLISTED[name], folder, shown=recording.SPARSE)
    assert found.false == []


@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=lambda arithmetic: arithmetic.name)
@pytest.mark.parametrize("kind", ["F32", pytest.param("Q8_0", marks=pytest.mark.slow)])
def test_nothing_is_read_back_of_right_layer_outputs(arithmetic, kind: str, folder: Path):
    path = model_file(folder, "llama", kind)
    taps = Engine(opened(path), BY_NAME[arithmetic.name]).run(TOKENS)
    trace = recording.save(folder / "right.safetensors", recording.only(taps, recording.SPARSE), TOKENS)
    found = diff(_baseline(path), trace, path)
    assert found.verdict != "wrong"
    assert not [facts for d in found.diagnosis for facts in d.read.values() if facts]
