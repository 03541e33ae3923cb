"""A server with a mistake: that something is wrong is noticed, and what it is is named."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from between import between
from optional import needs
from servers import mistakes
from waiting import HANG

from llamadiff.engines.run_spec import How, Run
from llamadiff.judge.verdict import RIGHT
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.result.comparison import Comparison
from llamadiff.verbs.verbs import compare

pytestmark = needs("node")

TEXT = "Once upon a time there was a little girl named Lily.</s>\nShe"
TURN = "Tell me a story.\nAbout a dog."
WRONG, UNCHECKED = ("wrong",), ("wrong", "unchecked")
OFF = "no known mistake, setting or file explains them"
RIGHT_SAID = "the server's log-probabilities are right up to rounding"


@dataclass(frozen=True)
class Mistake:
    """What is to be found of a mistake: a part of the headline (OFF: it is noticed, and not named), and the verdict."""

    says: str
    verdicts: tuple[str, ...] = WRONG
    chat: bool = False


TOKENS = {
    "bos-twice": Mistake("the server puts the beginning-of-text token twice"),
    "bos-missing": Mistake("the server puts no beginning-of-text token before a text"),
    "special-as-text": Mistake("the server takes special tokens in a text for plain text"),
    "no-space-prefix": Mistake("the server puts no space before a text"),
    "eos-appended": Mistake("the server puts an end-of-text token after a text, which this model does not"),
    "template-left-out": Mistake("the server leaves the chat template out", chat=True),
    "system-added": Mistake("adds a system turn that nobody asked for (\"You are a helpful assistant.\")", chat=True),
    "newline-eaten": Mistake("the server eats the line breaks around a turn", chat=True),
}  # fmt: skip
CONTEXT = "the server drops 10 of the prompt's tokens after the first one and runs the last 10 of 21"
SETTINGS = {
    "context-shift": Mistake(CONTEXT),
    "cache-q4_0": Mistake(f"{RIGHT_SAID}, with a coarse cache", RIGHT),
    "rope-base": Mistake("the server uses RoPE's base 500000; the file says 10000"),
    "rope-scaling": Mistake("the server multiplies positions by 0.5 for RoPE; the file by 1"),
    "window-8": Mistake("of the server's engine sees no more than 8 keys"),
    "requantized-q4_0": Mistake(
        "the server does not run this file: its log-probabilities are those of its weights in Q4_0"
    ),
}
ENGINE = {
    "attention-scale": Mistake("of the server's engine does not scale the scores: 1 for 0.125"),
    "mask-behind": Mistake("masks one key too many: no token sees itself"),
    "rope-layout": Mistake("of the server's engine rotates (i, i+32); this model needs (2i, 2i+1)"),
    "rope-on-v": Mistake("of the server's engine is rotated by RoPE, as only Q and K should be"),
    "rope-half": Mistake("of the server's engine rotates the first 32 values of a head; this model rotates 64"),
    "query-position": Mistake("of the server's engine rotates by the position"),
}
MORE = {
    "norm-mean": Mistake("attn_norm-0 of the server's engine subtracts the mean, as LayerNorm does"),
    "output-norm-missing": Mistake("result_norm of the server's engine is left out"),
    "ffn-norm-missing": Mistake("ffn_norm-0 of the server's engine is left out"),
    "gqa-modulo": Mistake("of the server's engine reads KV head h % 2 for query head h"),
    "gelu": Mistake("takes GELU (erf) of the gate; this model takes SiLU"),
    "gate-up-swapped": Mistake("multiplies by blk.0.ffn_up.weight, not blk.0.ffn_gate.weight"),
    "softcap": Mistake("the server's engine caps logits at 30; this model has no softcap"),
}
TWENTY = {**TOKENS, **SETTINGS, **ENGINE}
SERVERS = {
    "20 of a row": ("--api", "llama-server"),
    **{f"{k} of a row, 4 digits": ("--api", "openai", "--most-logprobs", str(k), "--digits", "4") for k in (5, 10, 20)},
}
CHEAP = (
    *TOKENS,
    "context-shift",
    "cache-q4_0",
    "rope-base",
    "rope-scaling",
    "requantized-q4_0",
)  # nothing is searched for


def judged(url: str, model: Path | None = None, text: str = TEXT, *, chat: bool = False) -> Comparison:
    return compare(model or shipped_model(), Run(prompt=TURN if chat else text, chat=chat), url, How(timeout=HANG))


def check(result: Comparison, mistake: Mistake) -> None:
    assert mistake.says in result.headline
    assert result.verdict in mistake.verdicts
    assert any("as far as " in said for said in (result.headline, *result.proof))


# -- twenty mistakes ---------------------------------------------------------------------------------------------------


def test_the_twenty():
    """8 of tokens, 6 of settings, 6 of the engine."""
    kinds = [[name for name in TWENTY if name in mistakes(kind)] for kind in ("tokens", "settings", "engine")]
    assert [len(names) for names in kinds] == [8, 6, 6]
    assert kinds[:2] == [list(TOKENS), list(SETTINGS)]
    assert set(mistakes("tokens", "settings")) == {*TOKENS, *SETTINGS}
    assert not [name for name, mistake in TWENTY.items() if mistake.says == OFF]


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("name", CHEAP)
def test_a_mistake_before_the_layers_is_named(name, kind, served):
    check(judged(f"{served(*SERVERS[kind])}/mistake/{name}", chat=TWENTY[name].chat), TWENTY[name])


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("attention-scale",) else pytest.mark.slow)
        for name in TWENTY if name not in CHEAP
    ],
)  # fmt: skip
def test_a_mistake_of_the_engine_is_named(name, kind, served):
    check(judged(f"{served(*SERVERS[kind])}/mistake/{name}"), TWENTY[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_mistakes_of_the_engine_are_named(name, served):
    check(judged(f"{served()}/mistake/{name}"), MORE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(mistakes("engine").keys() - ENGINE.keys() - MORE.keys()))
def test_what_is_not_named_is_noticed(name, served):
    assert judged(f"{served()}/mistake/{name}").verdict in UNCHECKED


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("flags", [("--api", "ollama"), ("--api", "vllm"), ("--api", "llama-server", "--no-ids")])
def test_tokens_of_other_servers(flags, name, served):
    """Of a server that takes texts alone, too, and of one whose /tokenize says what it does."""
    check(judged(f"{served(*flags)}/mistake/{name}", chat=TOKENS[name].chat), TOKENS[name])


@pytest.mark.parametrize("name", ["bos-twice", "eos-appended", "newline-eaten", "context-shift"])
@pytest.mark.parametrize("flags", [("--api", "ollama"), ("--api", "openai"), ("--api", "llama-server")])
def test_of_a_quantized_file(flags, name, served):
    model, mistake = shipped_model(quantized=True), TWENTY[name]
    check(judged(f"{served(*flags, model=model)}/mistake/{name}", model, chat=mistake.chat), mistake)


# -- other token ids ---------------------------------------------------------------------------------------------------

UNIGRAM = {"Once upon a time": [501, 503, 261, 464, 287]}  # mistral.rs 0.9.5: the best sum of scores, without BOS


def as_unigram(_path: str, body: Any) -> Any:
    return (
        {**body, "prompt": UNIGRAM.get(body["prompt"], body["prompt"])} if isinstance(body.get("prompt"), str) else body
    )


def test_token_ids_that_no_known_mistake_makes(served):
    """As mistral.rs has them: what follows the text is not what follows the file's ids."""
    with between(served("--api", "openai"), request=as_unigram) as url:
        result = judged(url, text="Once upon a time")
    assert result.verdict == "wrong"
    assert result.headline.startswith("the server has other token ids for the prompt")


# -- log-probabilities that are not the model's ------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [False, True], ids=["F16", "Q4_K_M"])
def test_after_temperature(quantized, served):
    model = shipped_model(quantized)
    result = judged(served("--sampled", "--stubborn", model=model), model)
    check(result, Mistake("the server gives log-probabilities after temperature 0."))
    assert float(result.headline.rpartition(" ")[2]) == pytest.approx(0.8, abs=0.01)


def test_what_a_server_is_asked_undoes_its_sampling(served):
    for api in ("llama-server", "openai", "vllm", "ollama"):
        assert judged(served("--api", api, "--sampled")).verdict in RIGHT


BANNED = 261  # " a"


def without_a_token(path: str, answer: Any) -> Any:
    """As a bias of -100 on a token, in a server that gives log-probabilities after it."""
    for entry in answer.get("completion_probabilities", []) if path == "/completion" else ():
        likely = [each for each in entry["top_logprobs"] if each["id"] != BANNED]
        lost = math.log1p(-sum(math.exp(each["logprob"]) for each in entry["top_logprobs"] if each["id"] == BANNED))
        entry.update(likely[0] if entry["id"] == BANNED else {})
        for each in (entry, *likely):
            each["logprob"] -= lost
        entry["top_logprobs"] = likely
    return answer


def test_a_token_that_is_left_out(served):
    with between(served(), without_a_token) as url:
        result = judged(url)
    check(result, Mistake("the server leaves out token 261 ' a'"))


# -- another file, other settings --------------------------------------------------------------------------------------


@pytest.fixture
def beside(tmp_path) -> tuple[Path, Path]:
    """Both shipped models in one directory, F16 first."""
    names = ("model.F16.gguf", "model.Q4_K_M.gguf")
    for name, quantized in zip(names, (False, True), strict=True):
        shutil.copy(shipped_model(quantized), tmp_path / name)
    return tmp_path / names[0], tmp_path / names[1]


@pytest.mark.parametrize(
    "flags", [("--api", "llama-server"), ("--api", "openai", "--digits", "4"), ("--api", "ollama")]
)
@pytest.mark.parametrize("quantized", [False, True], ids=["F16 served", "Q4_K_M served"])
def test_another_file_of_the_model(quantized, flags, beside, served):
    own, other = (beside[0], beside[1]) if quantized else (beside[1], beside[0])
    result = judged(served(*flags, model=shipped_model(quantized)), own)
    says = f"the server does not run {own.name}: its log-probabilities are those of {other.name}, which lies beside it"
    check(result, Mistake(says))


@pytest.mark.parametrize("cache", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_types_of_a_cache(cache, served):
    """Those of 8 bits and more are no mistake, and 4 bits are told."""
    result = judged(served("--cache", cache))
    assert result.verdict in RIGHT, result.headline
    assert (", with a coarse cache" in result.headline) is (cache == "q4_0")


def test_a_coarse_cache_of_a_quantized_file_is_told(served):
    """Though what it moves sets off other roundings."""
    model = shipped_model(quantized=True)
    check(judged(served("--cache", "q4_0", model=model), model), SETTINGS["cache-q4_0"])
