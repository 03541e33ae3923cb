"""llama.cpp's own server, as people run it: it is right, whatever it is started with, and however it is asked."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from llama_server import started, started_python
from models.options import OPTIONS
from models.tokenized import with_tokenizer
from waiting import HANG

from llamadiff.engines.run_spec import How, Run
from llamadiff.judge.verdict import NOISE, RIGHT, WRONG
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.result.comparison import Comparison
from llamadiff.verbs.verbs import compare

pytestmark = pytest.mark.slow
TEXTS = (
    "Once upon a time there was a little girl", "Lily went to the park. She", "One day, a boy named Tom found a ball.",
    "User: Tell me a story.\nStory:", "xyz 123 é !",
)  # fmt: skip
LETTERS = ("once upon a time", "xyz", "a model of letters alone", "mmmmmmmm a", "the quick brown fox jumps over it")
FLAGS = {
    "default": (), "flash attention off": ("-fa", "off"), "cache q8_0": ("-ctk", "q8_0", "-ctv", "q8_0"),
    "four at once": ("-np", "4"),
}  # fmt: skip
RANDOM = {"llama": "F16", "qwen2": "Q8_0", "qwen3": "Q4_0"}
MODELS = ("F16", "Q4_K_M", *RANDOM)


@contextmanager
def others_ask(url: str, prompts: Sequence[str], clients: int = 3) -> Iterator[Counter[str]]:
    """Others ask the server meanwhile, each one request after another."""
    end, seen = threading.Event(), Counter[str]()

    def ask(number: int) -> None:
        turn = 0
        while not end.is_set():
            turn += 1
            body = {"prompt": prompts[(number + turn) % len(prompts)], "n_predict": 12, "n_probs": 5}
            with urllib.request.urlopen(
                urllib.request.Request(f"{url}/completion", json.dumps(body).encode()), timeout=HANG
            ) as said:
                seen[str(said.status)] += 1

    threads = [threading.Thread(target=ask, args=[number]) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        end.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """model_of(NAME): a model that is there, or a random one that is made."""
    folder = tmp_path_factory.mktemp("letters")

    def get(name: str) -> Path:
        if name not in RANDOM:
            return shipped_model(name == "Q4_K_M")
        path = folder / f"{name}.gguf"
        return path if path.exists() else with_tokenizer(path, kind=RANDOM[name], **{"layers": 2, **OPTIONS[name]})

    return get


def judged(model: Path, url: str, prompt: str, **more: Any) -> Comparison:
    return compare(model, Run(prompt=prompt, **more), url, How(timeout=HANG))


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", MODELS)
def test_llama_server_is_not_accused(name, flags, model_of, capsys):
    """5 runs each: 100 in all."""
    model, prompts = model_of(name), LETTERS if name in RANDOM else TEXTS
    results: list[Comparison] = []
    with started(model, *FLAGS[flags]) as url, others_ask(url, prompts, 3 * (flags == "four at once")) as seen:
        results.extend(judged(model, url, prompt) for prompt in prompts)
    said = Counter((result.verdict, result.headline.partition(", as far as")[0]) for result in results)
    with capsys.disabled():
        print(f"\n{name}, {flags}: {dict(said)}, {min(result.proof for result in results)[0]}; others: {dict(seen)}")
    assert {result.verdict for result in results} <= set(RIGHT), said
    assert (flags == "four at once") is (seen["200"] > 0)


@pytest.mark.parametrize("quantized", [False, True], ids=["F16", "Q4_K_M"])
def test_what_it_generates_and_chats(quantized):
    model = shipped_model(quantized)
    with started(model) as url:
        for chat in (False, True):
            result = judged(model, url, TEXTS[0], chat=chat, n_predict=8)
            assert result.verdict in RIGHT, result.headline


@pytest.mark.parametrize("quantized", [False, True], ids=["F16", "Q4_K_M"])
def test_llama_cpp_pythons_server_is_not_accused(quantized):
    model = shipped_model(quantized)
    with started_python(model) as url:
        for text in TEXTS:
            result = judged(model, url, text)
            assert result.verdict in RIGHT, (text, result.headline, result.proof)


# -- with settings that people get wrong ---------------------------------------------------------------------

SETTINGS = {
    "--rope-freq-base 500000": "the server uses RoPE's base 500000; the file says 10000",
    "--rope-freq-scale 0.5": "the server multiplies positions by 0.5 for RoPE; the file by 1",
    "--override-kv tokenizer.ggml.add_bos_token=bool:false": "the server puts no beginning-of-text token before a text",
    "-ctk q4_0 -ctv q4_0": "with a coarse cache",
}


@pytest.mark.parametrize("flags", SETTINGS)
def test_settings_are_named(flags):
    model = shipped_model()
    with started(model, *flags.split()) as url:
        result = judged(model, url, "Once upon a time there was a little girl named Lily.\nShe")
    assert SETTINGS[flags] in result.headline
    assert result.verdict in ((NOISE,) if "coarse" in SETTINGS[flags] else (WRONG,))


def test_another_file_is_noticed():
    with started(shipped_model(quantized=True)) as url:
        result = judged(shipped_model(), url, TEXTS[0])
    assert "the server does not run tiny.F16.gguf" in result.headline
    assert result.verdict == WRONG
