"""How servers are asked for log-probabilities of the next token: one class for each kind of API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from llamadiff.ext.prompt.http import LacksError, RefusedError, Server
from llamadiff.ext.server.answers import Next, Reader
from llamadiff.system.errors import UserError
from llamadiff.trace.stated import brief

MOST = 20  # tokens of a row that are asked for
FEWER = (20, 10, 5)  # what servers allow, OpenAI's last
UNSAID = 422, 400  # codes of a request that is understood, and not liked
Rows: TypeAlias = "tuple[list[Next | None], int | None]"


class Api(Protocol):
    """What a kind of server can be asked."""

    kind: str
    takes_ids: bool
    about: dict[str, str]

    def after(self, prompt: str | Sequence[int], count: int = 1) -> Rows:
        """The next tokens after a prompt, taken one by one, and how many tokens the server says the prompt has."""

    def through(self, prompt: str | Sequence[int]) -> list[Next | None]:
        """What stands at each token of a prompt, None first, and after it; empty where it cannot be had at once."""

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
        asked = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "n_predict": count, "n_probs": MOST}
        plain = {**_plain(count), "cache_prompt": True, "samplers": ["temperature"], "ignore_eos": False}
        said = _object(self.server, "/completion", self.server.ask("/completion", {**self._more, **plain, **asked}))
        return self.reader.all(said.get("completion_probabilities"), count), _count(said.get("tokens_evaluated"))

    def through(self, prompt: str | Sequence[int]) -> list[Next | None]:
        return []

    def chat(self, text: str, count: int) -> Rows:
        found: Rows
        found, _ = _allowed(lambda most: _chat(self.server, self.reader, self._more, text, count, most), MOST)
        return found

    def tokens_of(self, text: str, chat: bool) -> tuple[int, ...] | None:
        if chat:
            asked = {"messages": [{"role": "user", "content": text}]}
            text = _object(self.server, "/apply-template", self.server.ask("/apply-template", asked)).get("prompt", "")
        body = {"content": text, "add_special": True, "parse_special": True}
        return _ids(_object(self.server, "/tokenize", self.server.ask("/tokenize", body)).get("tokens"))


class OpenAi:
    """OpenAI's API as vLLM, llama_cpp.server, mistral.rs and others have it: /v1/completions."""

    kind, takes_ids = "OpenAI's API", True

    def __init__(self, server: Server, model: str, reader: Reader) -> None:
        self._prefix = "" if server.name.endswith("/v1") else "/v1"
        self.server, self.reader, self.most = server, reader, MOST
        models = _objects(_object(server, "models", server.ask(f"{self._prefix}/models")).get("data"))
        self.model = _chosen(server, model, [each.get("id") for each in models])
        self.about = {"model": self.model}
        self._is_vllm = any(each.get("owned_by") == "vllm" for each in models)
        self._ids = {"return_tokens_as_token_ids": True} if self._is_vllm else {}

    def after(self, prompt: str | Sequence[int], count: int = 1) -> Rows:
        said = self._completion(prompt, count)
        return self.reader.all(_first(said).get("logprobs"), count), _used(said)

    def through(self, prompt: str | Sequence[int]) -> list[Next | None]:
        """By vLLM's prompt_logprobs, or by ``echo``."""
        with suppress(RefusedError):
            if self._is_vllm:
                said = _first(self._completion(prompt, 1, "prompt_logprobs"))
                rows = self.reader.all(said.get("prompt_logprobs"))
                return [*rows, *self.reader.all(said.get("logprobs"), 1)] if rows else []
            return self.reader.all(_first(self._completion(prompt, 1, echo=True)).get("logprobs"))
        return []

    def chat(self, text: str, count: int) -> Rows:
        more = {"model": self.model, **self._ids}
        found: Rows = self._fewer(lambda most: _chat(self.server, self.reader, more, text, count, most, self._prefix))
        return found

    def tokens_of(self, text: str, chat: bool) -> tuple[int, ...] | None:
        """By vLLM's /tokenize, or llama_cpp.server's."""
        asked: dict[str, Any] = {"model": self.model, "prompt": text}
        if chat:
            asked = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        elsewhere = {} if chat else {"/extras/tokenize": {"input": text}}
        for path, body in ({"/tokenize": asked} | elsewhere).items() if self._prefix else ():
            with suppress(RefusedError):
                return _ids(_object(self.server, path, self.server.ask(path, body)).get("tokens"))
        return None

    def _completion(self, prompt: str | Sequence[int], count: int, also: str = "", **more: Any) -> Any:
        body = {"model": self.model, **_plain(count), **self._ids, **more, "max_tokens": count,
                "prompt": prompt if isinstance(prompt, str) else list(prompt)}  # fmt: skip

        def ask(most: int) -> Any:
            asked = {**body, "logprobs": most, **({also: most} if also else {})}
            return _object(self.server, "completions", self.server.ask(f"{self._prefix}/completions", asked))

        return self._fewer(ask)

    def _fewer(self, ask: Callable[[int], Any]) -> Any:
        said, self.most = _allowed(ask, self.most)
        return said


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

    def through(self, prompt: str | Sequence[int]) -> list[Next | None]:
        return []

    def chat(self, text: str, count: int) -> Rows:
        return self._asked("/api/chat", {"messages": [{"role": "user", "content": text}]}, count)

    def tokens_of(self, text: str, chat: bool) -> tuple[int, ...] | None:
        return None

    def _asked(self, path: str, more: Mapping[str, Any], count: int) -> Rows:
        options = {**_plain(count), "num_predict": count, "repeat_penalty": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        asked = {"model": self.model, "stream": False, "options": options, "logprobs": True, "top_logprobs": MOST}
        said = _object(self.server, path, self.server.ask(path, {**asked, **more}))
        return self.reader.all(said.get("logprobs"), count), _count(said.get("prompt_eval_count"))


def _allowed(ask: Callable[[int], Any], most: int) -> tuple[Any, int]:
    """An answer with as many log-probabilities as the server allows, and how many these are."""
    for count in (each for each in FEWER if each <= most):
        try:
            return ask(count), count
        except RefusedError as error:
            if count == FEWER[-1] or error.code not in UNSAID or isinstance(error, LacksError):
                raise
    raise AssertionError


def _chat(
    server: Server, reader: Reader, more: Mapping[str, Any], text: str, count: int, most: int, prefix: str = "/v1"
) -> Rows:
    """An answer of /v1/chat/completions to a user's turn."""
    turn = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": count,
        "logprobs": True,
        "top_logprobs": most,
    }
    said = server.ask(f"{prefix}/chat/completions", {**more, **_plain(count), **turn})
    said = _object(server, "chat/completions", said)
    return reader.all(_first(said).get("logprobs"), count), _used(said)


def _first(said: Mapping[str, Any]) -> dict[str, Any]:
    """The first of an answer's choices."""
    return next(iter(_objects(said.get("choices"))), {})


def _used(said: Mapping[str, Any]) -> int | None:
    """How many tokens the server says a prompt has."""
    usage = said.get("usage")
    return _count(usage.get("prompt_tokens")) if isinstance(usage, dict) else None


def _plain(count: int) -> dict[str, float]:
    """What leaves log-probabilities alone, as some servers give them after temperature; of several the first ones."""
    return {"temperature": 1.0 if count == 1 else 0.0, "seed": 0}


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
        raise UserError(f"{server.name}: answers {path} with {brief(said)}; expected an object")
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
