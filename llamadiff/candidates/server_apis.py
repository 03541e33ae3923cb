"""How servers are asked for log-probabilities of the next token: one class for each kind of API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from llamadiff.candidates.answers import Next, Reader
from llamadiff.candidates.http import LacksError, RefusedError, Server
from llamadiff.system.errors import UserError

MOST = 20  # tokens of a row that are asked for
FEWER = (20, 10, 5)  # what servers allow, OpenAI's last
UNSAID = 422, 400  # codes of a request that is understood, and not liked
PLAIN = {"temperature": 0.0, "seed": 0}  # the first token is taken, and nothing changed before
Rows: TypeAlias = "tuple[list[Next | None], int | None]"


class Api(Protocol):
    """What a kind of server can be asked."""

    kind: str
    takes_ids: bool
    about: dict[str, str]

    def after(self, prompt: str | Sequence[int], count: int = 1) -> Rows:
        """The next tokens after a prompt, taken one by one, and how many tokens the server says the prompt has."""

    def chat(self, text: str, count: int) -> Rows:
        """The same of an answer to a user's turn."""

    def tokens_of(self, text: str, chat: bool) -> tuple[int, ...] | None:
        """The ids that the server has for a text or a user's turn; None where it does not say."""


def api_of(server: Server, model: str, reader: Reader) -> Api:
    """The kind of a server, found by asking. Raises UserError where it is none that is known."""
    for kind in (LlamaServer, Ollama, OpenAi):
        with suppress(LacksError):
            return kind(server, model, reader)
    raise UserError(
        f"{server.name}: answers none of /props, /api/tags and /v1/models; give the address of a llama-server, an "
        "Ollama, or a server with OpenAI's API"
    )


class LlamaServer:
    """llama.cpp's server (tools/server/README.md): /completion, which takes ids."""

    kind, takes_ids = "llama-server", True

    def __init__(self, server: Server, model: str, reader: Reader) -> None:
        props = _object(server, "/props", server.ask("/props"))
        if "default_generation_settings" not in props and "model_path" not in props:
            raise LacksError(f"{server.name}: /props is not llama-server's", 404, "")
        self.server, self.reader = server, reader
        self.about = _texts(props, ("model_path", "build_info", "model_alias"))
        self._more = {"model": model} if model else {}

    def after(self, prompt: str | Sequence[int], count: int = 1) -> Rows:
        said = self.server.ask("/completion", {
            **self._more, **PLAIN, "prompt": prompt if isinstance(prompt, str) else list(prompt), "n_predict": count,
            "n_probs": MOST, "cache_prompt": True, "samplers": ["temperature"], "ignore_eos": False,
        })  # fmt: skip
        said = _object(self.server, "/completion", said)
        return self.reader.all(said.get("completion_probabilities")), _count(said.get("tokens_evaluated"))

    def chat(self, text: str, count: int) -> Rows:
        return _chat(self.server, self.reader, self._more, text, count, MOST)

    def tokens_of(self, text: str, chat: bool) -> tuple[int, ...] | None:
        if chat:
            asked = {"messages": [{"role": "user", "content": text}]}
            text = _object(self.server, "/apply-template", self.server.ask("/apply-template", asked)).get("prompt", "")
        body = {"content": text, "add_special": True, "parse_special": True}
        return _ids(_object(self.server, "/tokenize", self.server.ask("/tokenize", body)).get("tokens"))


class OpenAi:
    """OpenAI's API as vLLM, llama_cpp.server, LM Studio, mistral.rs and others have it: /v1/completions."""

    kind, takes_ids = "OpenAI's API", True

    def __init__(self, server: Server, model: str, reader: Reader) -> None:
        self._prefix = "" if server.name.endswith("/v1") else "/v1"
        self.server, self.reader, self.most = server, reader, MOST
        said = _object(server, "models", server.ask(f"{self._prefix}/models"))
        self.model = _chosen(server, model, [each.get("id") for each in _objects(said.get("data"))])
        self.about = {"model": self.model}

    def after(self, prompt: str | Sequence[int], count: int = 1) -> Rows:
        asked = prompt if isinstance(prompt, str) else list(prompt)
        body = {"model": self.model, **PLAIN, "prompt": asked, "max_tokens": count}
        said = self._fewer(lambda most: self.server.ask(f"{self._prefix}/completions", {**body, "logprobs": most}))
        return self._read(said)

    def chat(self, text: str, count: int) -> Rows:
        more = {"model": self.model}
        found: Rows = self._fewer(lambda most: _chat(self.server, self.reader, more, text, count, most, self._prefix))
        return found

    def tokens_of(self, text: str, chat: bool) -> tuple[int, ...] | None:
        if self._prefix == "":
            return None
        asked: dict[str, Any] = {"model": self.model, "prompt": text}
        if chat:
            asked = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        with suppress(RefusedError):  # vLLM has it
            return _ids(_object(self.server, "/tokenize", self.server.ask("/tokenize", asked)).get("tokens"))
        return None

    def _fewer(self, ask: Any) -> Any:
        """An answer with as many log-probabilities as the server allows."""
        for most in (each for each in FEWER if each <= self.most):
            try:
                said = ask(most)
            except RefusedError as error:
                if most == FEWER[-1] or error.code not in UNSAID or isinstance(error, LacksError):
                    raise
            else:
                self.most = most
                return said
        raise AssertionError

    def _read(self, said: Any) -> Rows:
        said = _object(self.server, "/v1/completions", said)
        choices, usage = _objects(said.get("choices")), said.get("usage")
        rows = self.reader.all(choices[0].get("logprobs")) if choices else []
        return rows, _count(usage.get("prompt_tokens")) if isinstance(usage, dict) else None


class Ollama:
    """Ollama's own API: /api/generate, which has log-probabilities since 0.12.11, and takes texts alone."""

    kind, takes_ids = "Ollama", False

    def __init__(self, server: Server, model: str, reader: Reader) -> None:
        said = _object(server, "/api/tags", server.ask("/api/tags"))
        self.server, self.reader = server, reader
        self.model = _chosen(server, model, [each.get("name") for each in _objects(said.get("models"))])
        self.about = {"model": self.model}

    def after(self, prompt: str | Sequence[int], count: int = 1) -> Rows:
        return self._asked("/api/generate", {"prompt": prompt, "raw": True}, count)

    def chat(self, text: str, count: int) -> Rows:
        return self._asked("/api/chat", {"messages": [{"role": "user", "content": text}]}, count)

    def tokens_of(self, text: str, chat: bool) -> tuple[int, ...] | None:
        return None

    def _asked(self, path: str, more: Mapping[str, Any], count: int) -> Rows:
        options = {**PLAIN, "num_predict": count, "repeat_penalty": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        asked = {"model": self.model, "stream": False, "options": options, "logprobs": True, "top_logprobs": MOST}
        said = _object(self.server, path, self.server.ask(path, {**asked, **more}))
        return self.reader.all(said.get("logprobs")), _count(said.get("prompt_eval_count"))


def _chat(
    server: Server, reader: Reader, more: Mapping[str, Any], text: str, count: int, most: int, prefix: str = "/v1"
) -> Rows:
    """An answer of /v1/chat/completions to a user's turn."""
    asked = {**more, **PLAIN, "messages": [{"role": "user", "content": text}], "max_tokens": count, "logprobs": True,
             "top_logprobs": most}  # fmt: skip
    said = _object(server, "chat/completions", server.ask(f"{prefix}/chat/completions", asked))
    choices, usage = _objects(said.get("choices")), said.get("usage")
    rows = reader.all(choices[0].get("logprobs")) if choices else []
    return rows, _count(usage.get("prompt_tokens")) if isinstance(usage, dict) else None


def _chosen(server: Server, model: str, served: Sequence[Any]) -> str:
    """The model that is asked: the one that there is, or that is named. Raises UserError for another."""
    names = [name for name in served if isinstance(name, str)]
    if model in names or (model and not names):
        return model
    listed = ", ".join(name[:40] for name in names[:6]) or "none"
    if model:
        raise UserError(f"{server.name}: does not serve {model[:60]}; it serves {listed}")
    if len(names) != 1:
        raise UserError(
            f"{server.name}: serves {len(names)} models ({listed}); name one after the address: {server.name}#NAME"
        )
    return names[0]


def _object(server: Server, path: str, said: Any) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise UserError(f"{server.name}: answers {path} with a {type(said).__name__}; expected an object")
    return said


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _texts(said: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    return {name: str(said[name])[:200] for name in names if isinstance(said.get(name), str)}


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _ids(value: Any) -> tuple[int, ...] | None:
    """Ids that a server states; llama-server may put them into objects."""
    if not isinstance(value, list):
        return None
    listed = [_count(each.get("id") if isinstance(each, dict) else each) for each in value]
    found = tuple(each for each in listed if each is not None)
    return found if len(found) == len(listed) else None
