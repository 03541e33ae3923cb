"""The tests' own server: its numbers are llama.cpp's, each mistake and each hostile answer is one, its APIs' shapes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from ext.server.proof.asking import ask, bytes_of
from ext.server.proof.llama_logits import log_probabilities
from gguf import GGUFValueType
from llama_tokens import LlamaTokens
from models.gguf_file import finish
from optional import needs, program
from random_texts import RandomTexts
from servers import SERVER, hostile, mistakes, started
from waiting import HANG

from llamadiff.llamacpp.shipped import shipped_model

pytestmark = needs("node")

TEXT = "Once upon a time there was a little girl"
TEXTS = (
    TEXT, "User: Tell me a story about a dog.\nStory:", "Lily went to the park. She", "xyz 123 é !",
    "One day, a boy named Tom found a red ball. He",
)  # fmt: skip
MESSAGES = [{"role": "user", "content": "Tell me a story.\nAbout a dog."}]
SHOWING = f"{TEXT} named Lily.</s>\nShe"  # long enough for a window of 8, with a special token
GREEDY = {"temperature": 0, "n_predict": 1, "n_probs": 20}
ELSEWHERE = "http://elsewhere.invalid/"
Servers = Callable[..., str]


@pytest.fixture(scope="module")
def server(served: Servers) -> Servers:
    """server("--api", "vllm"): the address of such a server, started once."""
    return lambda *flags, model=None: served(*flags, model=model or shipped_model(quantized=True))


def tokens_of(url: str, text: str) -> list[int]:
    ids: list[int] = ask(f"{url}/tokenize", {"content": text, "add_special": True}).value["tokens"]
    return ids


def logged(url: str, prompt: str | list[int], **more: object) -> dict[int, float]:
    """The likeliest tokens that come next."""
    answer = ask(f"{url}/completion", {"prompt": prompt, **GREEDY, **more})
    assert answer.status == 200, answer.value
    return {each["id"]: each["logprob"] for each in answer.value["completion_probabilities"][0]["top_logprobs"]}


def distances(url: str, prompts: list[list[int]], right: list[np.ndarray]) -> list[list[float]]:
    """Of each position of each prompt: how far the likeliest tokens' log-probabilities are from the right ones."""
    return [
        [max(abs(log - rows[i][one]) for one, log in logged(url, ids[: i + 1]).items()) for i in range(len(ids))]
        for ids, rows in zip(prompts, right, strict=True)
    ]


# -- numbers ------------------------------------------------------------------------------------------------


def in_floats(path: Path, to: Path) -> Path:
    """The same model with all tensors in F32."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for name, each in reader.fields.items():
        if not name.startswith("GGUF.") and name not in {"general.architecture", "general.file_type"}:
            inner = each.types[-1] if each.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, each.contents(), each.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    finish(writer)
    return to


@pytest.mark.parametrize("quantized", [False, True], ids=["F16", "Q4_K_M"])
def test_numbers_are_llama_cpps(server, tmp_path, quantized):
    """Where llama.cpp rounds nothing that it multiplies, in F32: the blocks are read right, and so is the rest."""
    path = shipped_model(quantized)
    url = server("--exact", "--cache", "f32", model=path)
    prompts = [tokens_of(url, text) for text in TEXTS[:3]]
    right = log_probabilities(in_floats(path, tmp_path / "tiny.F32.gguf"), prompts)
    assert max(map(max, distances(url, prompts, right))) < 1e-3


@pytest.mark.parametrize("quantized", [False, True], ids=["F16", "Q4_K_M"])
def test_operands_are_rounded_as_llama_cpp_rounds_them(server, quantized):
    """A last bit can decide to what a value is rounded, on every CPU at another token, and what follows is another run:
    on the whole what is rounded is nearer than what is not.
    """
    path = shipped_model(quantized)
    url, exact = server(model=path), server("--exact", model=path)
    prompts = [tokens_of(url, text) for text in TEXTS]
    right = log_probabilities(path, prompts)
    near, far = (np.concatenate(distances(each, prompts, right)) for each in (url, exact))
    assert np.mean(near) < np.mean(far) / 2


def test_what_was_computed_before_changes_nothing(server):
    """Answers are the same to the last bit, whatever was asked before."""
    url = server()
    ids = tokens_of(url, TEXT)
    asked = [ids, ids[:5], [*ids[:5], 300, 301], ids[:8], ids, ids[:1], [7], ids]
    found = [logged(url, prompt) for prompt in asked]
    with started(shipped_model(quantized=True)) as fresh:
        assert [logged(fresh, prompt) for prompt in asked[::-1]] == found[::-1]
    assert found[0] == found[4] == found[7]


def test_tokens_are_llama_cpps(server):
    url, path = server(), shipped_model(quantized=True)
    known = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()
    texts = [*TEXTS, *(text for text in RandomTexts(known, ["<s>", "</s>"])(60) if len(text) < 300)]
    for special in (True, False):
        asked = [{"content": text, "add_special": True, "parse_special": special} for text in texts]
        own = [ask(f"{url}/tokenize", body).value["tokens"] for body in asked]
        assert own == LlamaTokens(path).encoded(texts, special)
    ids = [*range(len(known))]
    pieces = ask(f"{url}/tokenize", {"content": ids, "with_pieces": True}).value["tokens"]
    as_bytes = [each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in pieces]
    assert as_bytes == LlamaTokens(path).pieces()


# -- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mistakes("tokens"))
def test_mistakes_of_tokens_leave_prompts_of_ids_alone(server, name):
    ids = tokens_of(server(), TEXT)
    assert logged(f"{server()}/mistake/{name}", ids) == logged(server(), ids)


def test_mistakes_are_what_they_say(server):
    url = server()
    right = tokens_of(url, SHOWING)

    def wrong(name: str) -> list[int]:
        return tokens_of(f"{url}/mistake/{name}", SHOWING)

    assert wrong("bos-twice") == [1, *right]
    assert wrong("bos-missing") == right[1:]
    assert wrong("eos-appended") == [*right, 2]
    assert 2 in right
    assert 2 not in wrong("special-as-text")
    assert logged(f"{url}/mistake/window-8", right[:8]) == logged(url, right[:8])
    assert logged(f"{url}/mistake/window-8", right[:9]) != logged(url, right[:9])
    assert logged(f"{url}/mistake/context-shift", right[:9]) == logged(url, [1, *right[5:9]])

    def prompt(name: str = "") -> str:
        asked = ask(f"{url}{name and '/mistake/'}{name}/apply-template", {"messages": MESSAGES})
        return str(asked.value["prompt"])

    assert prompt() == "User: Tell me a story.\nAbout a dog.\nStory:"
    assert prompt("newline-eaten") == "User: Tell me a story.\nAbout a dog.Story:"
    assert prompt("template-left-out") == MESSAGES[0]["content"]
    assert prompt("system-added").endswith(prompt())


# -- the APIs -----------------------------------------------------------------------------------------------


def ordered(logs: list[float]) -> bool:
    return all(a >= b for a, b in pairwise(logs)) and logs[0] <= 0


def test_llama_server(server):
    url = server()
    props = ask(f"{url}/props").value
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["chat_template"].startswith("{% for")
    answer = ask(f"{url}/completion", {"prompt": TEXT, **GREEDY, "n_predict": 3}).value
    assert answer["tokens_evaluated"] == len(tokens_of(url, TEXT))
    assert answer["tokens_predicted"] == len(answer["completion_probabilities"]) == 3
    for each in answer["completion_probabilities"]:
        assert list(each) == ["id", "token", "bytes", "logprob", "top_logprobs"]
        assert bytes(each["bytes"]).decode() == each["token"]
        assert len(each["top_logprobs"]) == 20
        assert ordered([top["logprob"] for top in each["top_logprobs"]])
        assert each["id"] == each["top_logprobs"][0]["id"]
    assert answer["content"] == "".join(each["token"] for each in answer["completion_probabilities"])
    after = ask(f"{url}/completion", {"prompt": TEXT, **GREEDY, "temperature": 1, "post_sampling_probs": True}).value
    assert sum(top["prob"] for top in after["completion_probabilities"][0]["top_probs"]) == pytest.approx(1)
    both = ask(f"{url}/completion", {"prompt": [[1, 300], [1, 301]], **GREEDY}).value
    assert [each["index"] for each in both] == [0, 1]
    assert ask(f"{url}/detokenize", {"tokens": [1, 503]}).value == {"content": "<s> upon"}
    assert ask(f"{url}/completion", {}).status == ask(f"{url}/completion", {"prompt": [704]}).status == 400
    assert ask(f"{url}/nowhere").status == 404


def test_openai(server):
    url = server("--api", "openai")
    assert ask(f"{url}/v1/models").value["data"][0]["id"] == "tiny.Q4_K_M"
    body = {"model": "tiny.Q4_K_M", "prompt": TEXT, "max_tokens": 1, "temperature": 0, "logprobs": 5, "echo": True}
    answer = ask(f"{url}/v1/completions", body).value
    found, right = answer["choices"][0]["logprobs"], logged(server(), TEXT)
    ids = tokens_of(server(), TEXT)
    assert answer["usage"]["prompt_tokens"] == len(ids) == len(found["tokens"]) - 1
    assert {len(each) for each in found.values()} == {len(ids) + 1}
    assert found["top_logprobs"][0] is found["token_logprobs"][0] is None
    assert list(found["top_logprobs"][-1].values()) == list(right.values())[:5]
    assert answer["choices"][0]["text"] == "".join(found["tokens"])
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(len(ids) + 1)]
    by_ids = ask(f"{url}/v1/completions", {**body, "prompt": ids}).value
    assert by_ids["choices"] == answer["choices"]
    two = ask(f"{url}/v1/completions", {**body, "prompt": [TEXT, "Once"]}).value["choices"]
    assert two[0] == answer["choices"][0]
    assert two[1]["index"] == 1
    chat = {"messages": MESSAGES, "max_tokens": 2, "temperature": 0, "logprobs": True, "top_logprobs": 4}
    content = ask(f"{url}/v1/chat/completions", chat).value["choices"][0]["logprobs"]["content"]
    assert len(content) == 2
    for each in content:
        assert list(each) == ["token", "logprob", "bytes", "top_logprobs"]
        assert [list(top) for top in each["top_logprobs"]] == [["token", "logprob", "bytes"]] * 4
    assert ask(f"{url}/v1/completions", {**body, "logprobs": 21}).status == 400
    assert ask(f"{url}/v1/chat/completions", {**chat, "logprobs": False}).status == 400


def test_vllm(server):
    url = server("--api", "vllm")
    model = ask(f"{url}/v1/models").value["data"][0]
    assert model["max_model_len"] == 512
    ids = tokens_of(server(), TEXT)
    tokens = ask(f"{url}/tokenize", {"prompt": TEXT, "add_special_tokens": True}).value
    assert tokens == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 3, "prompt_logprobs": 3}
    choice = ask(f"{url}/v1/completions", {**body, "return_tokens_as_token_ids": True}).value["choices"][0]
    right = logged(server(), ids)
    assert choice["logprobs"]["top_logprobs"] == [{f"token_id:{i}": right[i] for i in list(right)[:3]}]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(ids) - 1
    for i, row in enumerate(rest, 1):
        assert str(ids[i]) in row
        right = logged(server(), ids[:i], n_probs=704)
        assert all(each["logprob"] == right[int(one)] for one, each in row.items())
        assert {each["rank"] for each in row.values()} >= {1, 2, 3}


def test_ollama(server):
    url = server("--api", "ollama")
    (model,) = (each["name"] for each in ask(f"{url}/api/tags").value["models"])
    shown = ask(f"{url}/api/show", {"model": model}).value
    assert shown["model_info"]["llama.context_length"] == 512
    options = {"temperature": 0, "num_predict": 2}
    body = {"model": model, "stream": False, "logprobs": True, "top_logprobs": 5, "options": options}
    answer = ask(f"{url}/api/generate", {**body, "prompt": TEXT, "raw": True}).value
    assert answer["prompt_eval_count"] == len(tokens_of(server(), TEXT))
    assert len(answer["logprobs"]) == answer["eval_count"] == 2
    right = list(logged(server(), TEXT).values())[:5]
    assert [each["logprob"] for each in answer["logprobs"][0]["top_logprobs"]] == right
    chat = ask(f"{url}/api/chat", {**body, "messages": MESSAGES}).value
    generated = ask(f"{url}/api/generate", {**body, "prompt": MESSAGES[0]["content"]}).value
    assert chat["logprobs"] == generated["logprobs"]
    assert ask(f"{url}/api/generate", {**body, "prompt": TEXT, "stream": True}).status == 400
    assert ask(f"{url}/api/show", {"model": "another"}).status == 404


# -- flags --------------------------------------------------------------------------------------------------


def test_flags_of_answers(server):
    right = logged(server(), TEXT)
    assert logged(server("--digits", "2"), TEXT) == {one: pytest.approx(log, abs=0.005) for one, log in right.items()}
    neutral = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
    sampled = server("--sampled")
    assert logged(sampled, TEXT) == {next(iter(right)): 0}
    assert logged(sampled, TEXT, **neutral) == right
    hot = logged(sampled, TEXT, **(neutral | {"temperature": 2}))
    gaps = [(a - b) / 2 for a, b in pairwise(right.values())]
    assert [a - b for a, b in pairwise(hot.values())] == pytest.approx(gaps, abs=1e-4)
    assert len(logged(sampled, TEXT, **(neutral | {"top_k": 3}))) == 3
    stubborn = server("--sampled", "--stubborn")
    assert logged(stubborn, "The", **neutral) == logged(stubborn, "The", temperature=0) != logged(server(), "The")


def test_flags_of_requests(server):
    url = server("--api", "openai", "--no-ids", "--no-usage", "--key", "sesame", "--without", "/v1/models",
                 "--most-logprobs", "5", "--delay", "60")  # fmt: skip
    body = {"prompt": TEXT, "max_tokens": 1, "logprobs": 5}
    key = {"Authorization": "Bearer sesame"}
    assert ask(f"{url}/v1/completions", body).status == 401
    start = time.monotonic()
    assert "usage" not in ask(f"{url}/v1/completions", body, **key).value
    assert time.monotonic() - start >= 0.06
    assert ask(f"{url}/v1/completions", {**body, "prompt": [1, 300]}, **key).status == 400
    assert ask(f"{url}/v1/completions", {**body, "logprobs": 6}, **key).status == 400
    assert ask(f"{url}/v1/models", **key).status == 404


def test_limits_of_rate_and_hostility_from_some_request_on():
    flags = ("--rate-limit", "3", "--retry-after", "2", "--hostile", "answer-null", "--hostile-after", "4")
    with started(shipped_model(quantized=True), *flags) as url:
        found = [ask(f"{url}/health") for _ in range(5)]
    assert [each.status for each in found] == [200, 200, 429, 200, 200]
    assert found[2].headers["Retry-After"] == "2"
    assert [each.value for each in found][3:] == [{"status": "ok"}, None]


def test_the_server_ends_with_who_started_it():
    command = [program("node") or "node", str(SERVER), str(shipped_model()), "--with-parent"]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False, timeout=HANG)
    assert done.returncode == 0


# -- hostile answers ----------------------------------------------------------------------------------------


def completion(url: str, name: str) -> bytes:
    body = {"prompt": TEXT, "max_tokens": 2, "n_predict": 2, "logprobs": 3, "n_probs": 3, "temperature": 0}
    return bytes_of(f"{url}/hostile/{name}/completion", body, 1 << 21)


def test_hostile_answers_are_what_they_say(server):
    url = server("--elsewhere", ELSEWHERE)
    assert f"Location: {ELSEWHERE}".encode() in completion(url, "redirect")
    assert b"sesame" in completion(url, "key-echoed")
    assert b"Bearer sesame" in completion(url, "key-in-tokens")
    assert b'"logprob":NaN' in completion(url, "nan")
    with pytest.raises(RecursionError):
        json.loads(completion(url, "nested").partition(b"\r\n\r\n")[2])
    with pytest.raises(UnicodeDecodeError):
        completion(url, "not-utf8").decode()
    other = ask(f"{url}/hostile/other-prompt/completion", {"prompt": TEXT, **GREEDY}).value
    assert other["prompt"] != ask(f"{url}/completion", {"prompt": TEXT, **GREEDY}).value["prompt"]
    assert len(hostile()) >= 25


def test_nothing_of_the_server_is_the_judges():
    """It requires Node's own modules and its own files, and nothing else."""
    for path in SERVER.parent.rglob("*.js"):
        for line in path.read_text("utf-8").splitlines():
            if "require(" in line and "APIS[" not in line:
                name = line.split("require(")[1].split("'")[1]
                assert name in {"fs", "http", "path", "zlib"} or name.startswith((".", "..")), f"{path}: {line}"
    assert os.path.commonpath([*map(str, SERVER.parent.rglob("*.js"))]) == str(SERVER.parent)
