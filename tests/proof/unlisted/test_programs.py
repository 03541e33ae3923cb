"""Mistakes in engines of other languages, that were written apart: found at their op, and what is read back is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llamadiff.result.comparison import Comparison
from llamadiff.verbs.verbs import diff
from proof.strangers import programs, recording
from proof.strangers.arithmetic import BY_NAME
from proof.strangers.crossing import TOKENS, baseline, model_file, opened
from proof.strangers.engine import Engine
from proof.strangers.programs import PROGRAMS, Program
from proof.unlisted.runs import INSIDE
from proof.unlisted.true import Op, is_true

MISTAKES = [
    pytest.param(program, name, id=f"{program.name}-{name}", marks=program.mark)
    for program in PROGRAMS
    if program.asked
    for name in program.mistakes
]
SAID = {  # what the report's headline says of them
    "memcpy": "channels 64 to 255 are all zero",
    "unroll": "each row is divided by another size than its own, from 0.9707 to 0.9932 times the right one",
    "sizeof": "in channels 2 to 23, 26 to 47, .* each token's output is added to those of all tokens before it",
    "alias": "the second value of each pair is made of the other one's new value",
    "lane": "in place of K's rows 0, 5, 9, 10 it reads rows 3, 9, 7, 11; the scores of keys 1 to 3, 6 to 8 and 11 are "
            "zero",
    "carry": "each block of 5 keys is scaled by its own largest score, and not by the row's",
    "stride": "rows of V are read from 3 rows before in V's head 1, zeros where there are none",
    "static": "channels 504 to 511 take the gate of channels 480 to 487",
    "threads": "the channels are rolled: each is 128 places later",
    "overlap": "in channels 220 to 251 it is 2 ffn_out-0 \\+ ffn_inp-0, .*",
    "byte-offset": "the row of id i begins at value 64 \\* i of the table, where 256 \\* i is right",
    "wrong-stride": "each row is divided by another size than its own, from 0.9012 to 1.184 times the right one",
    "end-inclusive": "its sums leave out input 255",
    "sorted-as-text": "the rows are rotated by the positions 0 to 1, then 10 to 11, then 2 to 9",
    "shared-sums": "each head's values are added to those of all heads before it",
    "clamped-bytes": "its values are multiples of 1/255",
    "int16-wraps": "its values are multiples of 1/16384, and begin anew beyond -2 and 2",
    "truncated-index": r"silu\(ffn_gate-0\) is another function, off by up to 0.029",
    "negative-modulo": "output 0 sums its first 512 inputs, and each output 1 fewer than the one before",
    "skip-after-step": "each row is divided by another size than its own, from 0.9924 to 1.078 times the right one",
    "chunks-exact": "tokens 8 to 11 are all zero",
    "zip-shorter": "the rows of heads 2 and 3 are not rotated",
    "reversed-keys": "K's rows are read in reverse, the last one for the first key",
    "fold-start": "its sum is 1 too large, where the largest term is 1",
    "exclusive-range": "the value of each query's own key is not added",
    "split-at": "tokens 0 to 5 are all zero",
    "skip-one": "it is embd \\+ attn_out-0\\[t\\+1 or 0\\], where attn_out-0 \\+ embd is right",
    "saturating-cast": r"where ffn_gate-0 >= 0.0006264, silu\(ffn_gate-0\) is another function, off by up to 2.2",
    "not-cleared": "each token's output is added to those of all tokens before it",
    "view-not-copy": "token 0 has the values of token 11, token 1 has the values of token 11, .*",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def _judged(program: Program, name: str, folder: Path, shown: tuple[str, ...]) -> tuple[Comparison, list[str]]:
    """What is said of a run with a mistake, and what of that is false."""
    path = model_file(folder, "llama", "F32")
    taps = programs.run(program, name, opened(path), TOKENS, folder)
    trace = recording.save(folder / "trace.safetensors", recording.only(taps, shown), TOKENS)
    result = diff(baseline(path, TOKENS, len(TOKENS)), trace, path)
    right = Engine(opened(path), BY_NAME["float32"]).run(TOKENS, given=taps)
    read = [(tap, fact) for d in result.diagnosis for tap, facts in d.read.items() for fact in facts]
    own = [(tap, fact) for tap, fact in read if not INSIDE.fullmatch(fact.says)]
    ops = [Op(opened(path), tap, taps[tap], right[tap], taps, fact) for tap, fact in own]
    return result, [op.fact.says for op in ops if not is_true(op, tuple(TOKENS))]


@pytest.mark.parametrize(("program", "name"), MISTAKES)
def test_a_mistake_of_another_language_is_read_back(program: Program, name: str, folder: Path):
    result, false = _judged(program, name, folder, ("",))
    assert {row.tap.rsplit("-", 1)[0] for row in result.wrong} == {program.mistakes[name]}
    assert not [cause for d in result.diagnosis for cause in d.causes]
    assert false == []
    assert re.search(f": {SAID[name]}$", result.headline), result.headline


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(recording.SPARSE, id="layer outputs", marks=pytest.mark.slow),
        pytest.param(recording.LOGITS, id="logits"),
    ],
)
@pytest.mark.parametrize(("program", "name"), MISTAKES)
def test_no_mistake_of_another_language_is_noise(program: Program, name: str, shown, folder: Path):
    result, _ = _judged(program, name, folder, shown)
    assert result.verdict in ("wrong", "unchecked")
