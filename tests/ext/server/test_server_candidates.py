"""A server as a candidate: right ones of every API, what they are asked, hostile ones, and what is kept of them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from between import between
from command import in_process_of_its_own, run
from optional import needs
from servers import hostile
from waiting import HANG

from llamadiff import UserError
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.prompt.http import KEY
from llamadiff.ext.server.answers import Answers, read_answers
from llamadiff.ext.server.candidate import POSITIONS, Question, as_trace, ask, beginnings, chosen, matches
from llamadiff.judge.verdict import RIGHT
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.system.progress import silent
from llamadiff.trace.taps import LOGITS
from llamadiff.verbs.verbs import compare

pytestmark = needs("node")

APIS = ("llama-server", "openai", "vllm", "ollama")
TEXT = "Once upon a time there was a little girl named Lily.</s>\nShe"
LONG = f"{TEXT} had a red ball and a small dog. They went to the park and saw a big tree. It was a sunny day."
TURN = "Tell me a story.\nAbout a dog."
SECRET = "sk-0123456789abcdef-hidden"
RIGHT_SAID = "the server's log-probabilities are right up to rounding, as far as "


@pytest.fixture(scope="module")
def file() -> ModelFile:
    return ModelFile(shipped_model())


def asked(url: str, file: ModelFile, text: str | None = TEXT, patience: float = HANG, n_prefill: int = 0) -> Answers:
    """What a server answers about a text; or about its ids alone."""
    tokens = tuple(tokens_of(file, text or TEXT))
    return ask(url, Question(file, tokens, n_prefill or len(tokens), text), patience, silent)


def tokens_of(file: ModelFile, text: str) -> list[int]:
    from llamadiff.ext.prompt.tokenizer import Tokenizer

    return Tokenizer(file.weights.fields).encode(text)


# -- right ones --------------------------------------------------------------------------------------------------------

FLAGS = {
    "": (), "texts alone": ("--no-ids",), "no /tokenize": ("--without", "/tokenize"),
    "texts, no /tokenize, no usage": ("--no-ids", "--without", "/tokenize", "--no-usage"),
    "5 of a row": ("--most-logprobs", "5"), "4 digits": ("--digits", "4"),
    "10 of a row, 4 digits": ("--most-logprobs", "10", "--digits", "4"), "2 digits": ("--digits", "2"),
    "busy": ("--rate-limit", "4", "--retry-after", "0"), "nothing rounded": ("--exact", "--cache", "f32"),
    "cache f32": ("--cache", "f32"), "cache bf16": ("--cache", "bf16"), "cache q8_0": ("--cache", "q8_0"),
}  # fmt: skip


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("quantized", [False, True], ids=["F16", "Q4_K_M"])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("api", APIS)
def test_a_right_server_is_not_accused(api, flags, quantized, chat, served):
    model = shipped_model(quantized)
    url = served("--api", api, *FLAGS[flags], model=model)
    result = compare(model, Run(prompt=TURN if chat else TEXT, chat=chat), url, How(timeout=HANG))
    assert result.verdict in RIGHT, (result.headline, result.proof)
    assert result.headline.startswith("the server's log-probabilities are right up to rounding")


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("api", APIS)
def test_a_right_server_that_goes_on(api, chat, served):
    """What it generates is judged, too."""
    run_of = Run(prompt=TURN if chat else TEXT, chat=chat, n_predict=6)
    result = compare(shipped_model(), run_of, served("--api", api), How(timeout=HANG))
    assert result.verdict in RIGHT, (result.headline, result.proof)
    assert len(result.tokens) > 21 - 3 * chat


@pytest.mark.parametrize("api", APIS)
def test_ids_without_a_text(api, served):
    """A server that takes texts alone cannot be asked about them."""
    url, tokens = served("--api", api), [1, 501, 503, 261, 502, 404]
    if api == "ollama":
        with pytest.raises(UserError, match="takes texts alone, and no token ids; give the prompt as text"):
            compare(shipped_model(), tokens, url)
    else:
        assert compare(shipped_model(), tokens, url).verdict in RIGHT


def test_the_command_says_how_much_was_seen(served):
    done = run("compare", shipped_model(), TEXT, "--candidate", served())
    assert done.returncode == 0
    assert " ".join(done.stdout.split()).startswith(
        f"NOISE {RIGHT_SAID}20 log-probabilities of each of 21 positions show"
    )


def test_with_a_key(served, monkeypatch):
    url = served("--key", SECRET)
    monkeypatch.setenv(KEY, SECRET)
    done = run("compare", shipped_model(), TEXT, "--candidate", url)
    assert done.returncode == 0
    assert SECRET not in done.stdout + done.stderr
    monkeypatch.setenv(KEY, "sk-another-one-that-is-wrong")
    done = run("compare", shipped_model(), TEXT, "--candidate", url)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert f"code 401: does not take the key that is in {KEY}" in done.stderr
    monkeypatch.delenv(KEY)
    assert f"wants a key; put it into {KEY}" in run("compare", shipped_model(), TEXT, "--candidate", url).stderr


def test_a_directory_of_a_server(served):
    """What stands before the API's paths is kept."""
    assert compare(shipped_model(), TEXT, f"{served('--api', 'openai')}/v1").verdict in RIGHT


# -- what they are asked -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--no-ids",)], ids=["ids", "texts"])
@pytest.mark.parametrize("api", APIS)
def test_positions(api, flags, served, file):
    """All at once where a server has that; else some, with the first and the last."""
    tokens = tokens_of(file, LONG)
    answers = asked(served("--api", api, *flags), file, LONG)
    by_ids = api != "ollama" and not flags
    assert (answers.tokens, answers.n_prefill, answers.by_ids) == (tuple(tokens), len(tokens), by_ids)
    if api in ("openai", "vllm"):
        assert set(range(2, len(tokens) + 1)) <= answers.rows.keys() <= set(range(1, len(tokens) + 1))
    else:
        assert len(answers.rows) == POSITIONS + (not by_ids)  # the whole text was asked about before
        assert len(answers.rows) < len(tokens)
        assert {len(tokens)} <= answers.rows.keys()
    assert all(len(row) in (20, 21) for row in answers.rows.values())


def test_one_request_for_each_position(served, file):
    """And each stops at one token, with the prompt kept by the server."""
    bodies = list[Any]()

    def kept(path: str, body: Any) -> Any:
        bodies.extend([body] * (path == "/completion"))
        return body

    with between(served(), request=kept) as url:
        asked(url, file)
    tokens = tokens_of(file, TEXT)
    bodies, past = bodies[: len(tokens) + 2], bodies[len(tokens) + 2 :]  # whether it takes ids; the text
    assert all(body["n_predict"] == 1 and body["cache_prompt"] for body in bodies)
    assert [body["prompt"] for body in bodies[-len(tokens) :]] == [tokens[: i + 1] for i in range(len(tokens))]
    assert [body["n_predict"] for body in past] == [8] + [1] * 7


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000])
def test_some_of_many(count):
    found = chosen(range(1, count + 1))
    assert len(found) == min(count, POSITIONS) == len(set(found))
    assert (found[0], found[-1]) == (1, count)


@pytest.mark.parametrize("text", [TEXT, LONG, "é\u4e2d\U0001f600 x", "a" * 2000])
def test_beginnings(text, file):
    """They have the first tokens of the whole text."""
    tokens = tuple(tokens_of(file, text))
    found = beginnings(Question(file, tokens, len(tokens), text))
    assert found
    for size, beginning in found.items():
        assert text.startswith(beginning)
        assert tuple(tokens_of(file, beginning)) == tokens[:size]


def test_beginnings_of_other_tokens(file):
    assert beginnings(Question(file, (5, 6), 2, TEXT)) == {}
    assert beginnings(Question(file, (5, 6), 2)) == {}


def test_what_is_an_address():
    assert [matches(spec) for spec in ("http://a", "https://a#b", "a.answers.json", "a.json", "cmd: http://a")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def several(path: str, answer: Any) -> Any:
    """A server of three models."""
    if path == "/v1/models":
        return {"data": [{"id": name} for name in ("tiny.F16", "other", "more")]}
    return answer


def test_one_of_several_models(served):
    with between(served("--api", "openai"), several) as url:
        done = run("compare", shipped_model(), TEXT, "--candidate", url)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert f"serves 3 models (tiny.F16, other, more); name one after the address: {url}#NAME" in done.stderr
        done = run("compare", shipped_model(), TEXT, "--candidate", f"{url}#fourth")
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert "does not serve fourth; it serves tiny.F16, other, more" in done.stderr
        assert run("compare", shipped_model(), TEXT, "--candidate", f"{url}#tiny.F16").returncode == 0


# -- as a trace --------------------------------------------------------------------------------------------------------


def test_as_a_trace(file):
    """What is not told is not known, and rows of one token tell nothing."""
    answers = Answers("here", "x", (1, 501, 503), 3, {1: {5: -0.25, 7: -1.5}, 2: {5: -0.5}, 3: {1: -2.125, 2: -3.0}})
    trace = as_trace(answers, file, None)
    assert trace.known is not None
    known = trace.known[LOGITS]
    assert [np.flatnonzero(row).tolist() for row in known] == [[5, 7], [], [1, 2]]
    assert trace[LOGITS][0, [5, 7]].tolist() == [-0.25, -1.5]


# -- kept --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("mistake", ["", "bos-twice", "eos-appended", "newline-eaten", "context-shift"])
def test_judged_again_without_the_server(mistake, api, chat, served, tmp_path):
    url = served("--api", api) + (f"/mistake/{mistake}" if mistake else "")
    words = ["compare", shipped_model()]
    first = run(*words, *(["--chat", TURN] if chat else [TEXT]), "--candidate", url, "-o", f"{tmp_path}/x/")
    kept = tmp_path / "x/server.answers.json"
    again = run(*words, "--candidate", kept)
    assert again.returncode == first.returncode, again.stderr
    assert headline(again.stdout) == headline(first.stdout)
    assert read_answers(kept).api
    assert json.loads(kept.read_text("utf-8"))["name"] == url


def headline(text: str) -> str:
    """The verdict and what is found."""
    return " ".join(text.partition("\n\n")[0].split()).partition(";")[0].partition(" 1 tap judged")[0]


# -- hostile ones ------------------------------------------------------------------------------------------------------

IDS = {f"id-{what}" for what in ("too-large", "negative", "fraction", "huge", "boolean", "text")}
# What changes nothing of what is read, as that is not in the API's answers, or beside what counts in them.
HARMLESS = {
    "llama-server": {"choices-empty", "escapes", "unsorted", "lists-uneven"},
    "openai": {*IDS, "same-token", "unsorted", "positions-more", "positions-many", "lists-uneven"},
    "vllm": {"escapes", "same-token", "unsorted", "lists-uneven"},
    "ollama": {*IDS, "choices-empty", "escapes", "unsorted", "positions-more", "positions-many"},
}
# What is well said, and false.
FALSE = {"llama-server": {"positions-more"}, "openai": set(), "vllm": {"positions-more"}, "ollama": set()}
LATE = {name for name in hostile() if name in ("never", "slow") or name.startswith("endless")}  # have no end
SEARCHED = "other-prompt"  # is well said, too, and a cause is looked for


@pytest.fixture
def one(served, monkeypatch) -> Callable[[str, str], str]:
    """one(API, NAME): such a hostile server, which knows the key."""
    monkeypatch.setenv(KEY, SECRET)

    def get(api: str, name: str) -> str:
        return f"{served('--api', api, '--key', SECRET, '--elsewhere', 'http://127.0.0.1:9/')}/hostile/{name}"

    return get


@pytest.mark.parametrize("name", [name for name in hostile() if name != SEARCHED])
@pytest.mark.parametrize("api", APIS)
def test_a_hostile_answer_is_one_line(api, name, one):
    patience = 1 if name in LATE else HANG
    done = run("compare", shipped_model(), "Once upon a time", "--candidate", one(api, name), "--timeout", patience)
    assert SECRET not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    if name in HARMLESS[api]:
        assert done.returncode == 0, done.stderr
    elif name in FALSE[api]:
        assert done.returncode == 1
        assert done.stdout.startswith("WRONG  the server has other token ids")
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines() == [done.stderr.rstrip("\n")]
        assert done.stderr.startswith("llamadiff: http://127.0.0.1:")
        assert done.stderr.rstrip("\n").isprintable()
        assert len(done.stderr) < 500


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_an_answer_to_another_prompt_is_wrong(api, one):
    done = run("compare", shipped_model(), "Once upon a time", "--candidate", one(api, SEARCHED), "--timeout", HANG)
    assert done.returncode == 1
    assert done.stdout.startswith("WRONG  the server")


@pytest.mark.parametrize("name", ["never", "nested-objects", "key-echoed", "escapes"])
def test_of_a_command_of_its_own(name, one):
    done = in_process_of_its_own(
        "compare",
        shipped_model(),
        "Once upon a time",
        "--candidate",
        one("openai", name),
        "--timeout",
        1 if name in LATE else HANG,
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert SECRET not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("spec", ["http://127.0.0.1:{port}", "https://127.0.0.1:{port}", "http://127.0.0.1:{port}#x"])
def test_nobody_listens(spec):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = run("compare", shipped_model(), TEXT, "--candidate", spec.format(port=port))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "does a server listen at this address?" in done.stderr


def without_logprobs(_path: str, answer: Any) -> Any:
    """As LM Studio and transformers' server answer: what was asked for is not there."""
    for choice in answer.get("choices", []):
        choice["logprobs"] = None
    return answer


def test_a_server_without_log_probabilities(served):
    with between(served("--api", "openai"), without_logprobs) as url:
        done = run("compare", shipped_model(), TEXT, "--candidate", url)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "gives no log-probabilities of next tokens" in done.stderr


@pytest.mark.parametrize("what", ["{}", "[]", "nothing"])
def test_what_was_kept_and_is_none(what, tmp_path):
    path = tmp_path / "server.answers.json"
    if what != "nothing":
        path.write_text(what, encoding="utf-8")
    done = run("compare", shipped_model(), "--candidate", path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_answers_of_another_model(small_model, served, tmp_path):
    """Ids that the file does not have are one line, whatever the answers are held against."""
    run("compare", shipped_model(), TEXT, "--candidate", served(), "-o", f"{tmp_path}/x/")
    done = run("compare", small_model(), "--candidate", tmp_path / "x/server.answers.json")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
