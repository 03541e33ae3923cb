"""The checkpoint's tokenizer against the file's: tables, flags, and the ids that both give for awkward strings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llamadiff.engines.model_file import ModelFile
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request
from llamadiff.system.errors import UserError
from llamadiff.system.progress import silent
from llamadiff.trace.stated import read_json
from llamadiff.weights.result import Oddity

MAX_TOKENIZER = 1 << 27  # bytes: vocabularies of a quarter of a million tokens take a tenth of it
MAX_CONFIG = 1 << 24
NORMAL, CONTROL = 1, 3  # llama.h, llama_token_type
SHOWN = 60
SHRUNK = 8  # strings of which all parts are tried
LONGEST = 48  # characters of a string that is shrunk: all its parts are tried at once

CORPUS = (
    "a", " a", "  a", "a ", "\n", "a\n\nb", "\t\tx", "Hello, world", " Hello", "don't", "I'LL we've", "123", "1234567",
    "3.14159", "a1b22c333", "x = y**2;", "café naïve", "cafe\u0301", "Ünïcödé", "the cat and the hat", "in one of them",
    "你好世界", "こんにちは", "안녕하세요", "Привет", "مرحبا", "🙂", "\U0001f469\u200d\U0001f467", "a🙂b", "\u00a0",
    "/usr/bin/env", "https://a.b/c?d=e", "    four", "CamelCaseWords", "ALLCAPS", "\ufb01", "½", "\r\n", "<s>", "</s>",
    "a<s>b", "…—“”",
)  # fmt: skip


@dataclass(frozen=True)
class Tokenizers:
    """What a checkpoint says of its tokenizer: tokenizer.json and tokenizer_config.json, empty where there is none."""

    path: Path
    data: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def added(self) -> list[Mapping[str, Any]]:
        """Added tokens: id, content, special."""
        found = self.data.get("added_tokens")
        tokens = found if isinstance(found, list) else []
        return [t for t in tokens if isinstance(t, dict) and _is_id(t.get("id")) and isinstance(t.get("content"), str)]

    @property
    def words(self) -> dict[int, str]:
        """Id -> text, the added ones too."""
        model = self.data.get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        words: dict[int, str] = {}
        if isinstance(vocab, dict):
            words = {i: text for text, i in vocab.items() if _is_id(i)}
        elif isinstance(vocab, list):
            words = {i: pair[0] for i, pair in enumerate(vocab) if isinstance(pair, list) and pair}
        return words | {token["id"]: token["content"] for token in self.added}

    def special_id(self, kind: str) -> int | None:
        """The id of the bos or eos token that tokenizer_config.json names."""
        named = self.config.get(f"{kind}_token")
        text = named.get("content") if isinstance(named, dict) else named
        return next((i for i, word in self.words.items() if word == text), None) if isinstance(text, str) else None

    def adds_bos(self) -> bool | None:
        """Whether a beginning-of-text token is put before a prompt; None if nothing says so."""
        said = self.config.get("add_bos_token")
        if isinstance(said, bool):
            return said
        template = _template(self.data.get("post_processor"))
        bos = self.config.get("bos_token")
        text = bos.get("content") if isinstance(bos, dict) else bos
        if template is None or not isinstance(text, str):
            return None
        first = template[0].get("SpecialToken") if template and isinstance(template[0], dict) else None
        return isinstance(first, dict) and first.get("id") == text


def _template(processor: Any) -> list[Any] | None:
    """What a post-processor puts around a prompt; None where there is no such processor."""
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "TemplateProcessing":
        single = processor.get("single")
        return single if isinstance(single, list) else None
    inner = processor.get("processors")
    found = [_template(each) for each in inner] if isinstance(inner, list) else []
    return next((each for each in found if each is not None), None)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 24


def open_tokenizers(folder: Path) -> Tokenizers:
    """What a directory says of a tokenizer. Raises UserError for files that are no JSON objects."""
    parts = []
    for name, most in (("tokenizer.json", MAX_TOKENIZER), ("tokenizer_config.json", MAX_CONFIG)):
        path = folder / name
        data = read_json(path, most, "a tokenizer as JSON") if path.is_file() else {}
        if not isinstance(data, dict):
            raise UserError(f"{path}: expected an object; download it anew")
        parts.append(data)
    return Tokenizers(folder / "tokenizer.json", *parts)


def tokenizer_oddities(model: ModelFile, tokenizers: Tokenizers) -> Iterator[Oddity]:
    """Where the tables and flags of the file are not the checkpoint's."""
    tokens = model.weights.fields.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokenizers.words:
        yield from _tables(tokens, tokenizers)
        yield from _kinds(model, tokenizers)
    for kind in ("bos", "eos"):
        wanted, found = tokenizers.special_id(kind), model.special_id(kind)
        if wanted is not None and found is not None and wanted != found:
            says = f"is {found}; the checkpoint's {kind.upper()} token is {wanted}"
            yield Oddity(f"tokenizer.ggml.{kind}_token_id", says, f"{kind}-id")


def _tables(tokens: Sequence[Any], tokenizers: Tokenizers) -> Iterator[Oddity]:
    words = tokenizers.words
    apart = [i for i, word in sorted(words.items()) if i >= len(tokens) or tokens[i] != word]
    if apart:
        i = apart[0]
        found = repr(tokens[i])[:SHOWN] if i < len(tokens) else "not there"
        more = f" ({len(apart)} of {len(words)} are other)" if len(apart) > 1 else ""
        yield Oddity("tokenizer.ggml.tokens", f"token {i} is {found}; tokenizer.json has {words[i][:SHOWN]!r}{more}",
                     "tokens")  # fmt: skip


def _kinds(model: ModelFile, tokenizers: Tokenizers) -> Iterator[Oddity]:
    """Special tokens that the file calls normal: llama.cpp would not find them in a prompt."""
    kinds = model.weights.fields.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list):
        return
    normal = [t for t in tokenizers.added if t.get("special") is True and t["id"] < len(kinds)]
    normal = [t for t in normal if kinds[t["id"]] == NORMAL]
    if normal:
        more = f" (and {len(normal) - 1} more)" if len(normal) > 1 else ""
        says = (
            f"token {normal[0]['id']} {normal[0]['content'][:SHOWN]!r} is special in tokenizer.json, normal here{more}"
        )
        yield Oddity("tokenizer.ggml.token_type", says, "special-token")


def ids_oddities(model: ModelFile, tokenizers: Tokenizers) -> Iterator[Oddity | str]:
    """Ids that the two tokenizers give: oddities, and in words what could not be asked."""
    texts = tuple(dict.fromkeys((*CORPUS, *(token["content"][:SHOWN] for token in tokenizers.added[:16]))))
    try:
        ours = _of_llamacpp(model, texts)
    except UserError as error:
        yield f"ids of the two tokenizers were not compared: {error}"
        return
    if ours is None:
        yield "the file has no tokenizer: none was compared"
        return
    wanted, found = tokenizers.adds_bos(), ours["add_bos"]
    if wanted is not None and wanted != found:
        stated = model.weights.fields.get("tokenizer.ggml.add_bos_token")
        here = f"is {stated}" if stated is not None else f"is not in the file, and llama.cpp assumes {found}"
        yield Oddity("tokenizer.ggml.add_bos_token", f"{here}; the checkpoint's tokenizer says {wanted}", "bos-flag")
    if find_spec("tokenizers") is None or not tokenizers.data:
        lacking = "there is no tokenizer.json" if not tokenizers.data else "needs tokenizers: pip install tokenizers"
        yield f"ids of the two tokenizers were not compared: {lacking}"
        return
    yield from _ids_apart(model, tokenizers, texts, ours["ids"])


def _of_llamacpp(model: ModelFile, texts: tuple[str, ...]) -> dict[str, Any] | None:
    request = Request(str(model.path), tuple(map(str, model.weights.files)), errand="tokenize", texts=texts)
    with Child() as child:
        answers = child.ask(request, silent)
    return answers if answers.get("ids") is not None else None


def _ids_apart(
    model: ModelFile, tokenizers: Tokenizers, texts: Sequence[str], ours: Sequence[Any]
) -> Iterator[Oddity | str]:
    """The shortest string that both tokenizers cut otherwise."""
    try:
        from tokenizers import Tokenizer

        theirs = Tokenizer.from_file(str(tokenizers.path))
    except Exception as error:  # the library raises plain Exception
        yield f"ids of the two tokenizers were not compared: {tokenizers.path.name} cannot be read ({str(error)[:100]})"
        return

    def wanted(text: str) -> list[int]:
        return list(theirs.encode(text, add_special_tokens=False).ids)

    apart = [text for text, (_, plain) in zip(texts, ours, strict=True) if plain != wanted(text)]
    if not apart:
        return
    few = sorted(apart, key=len)[:SHRUNK]
    parts = tuple(dict.fromkeys(sorted((part for text in few for part in _parts(text)), key=len)))
    again = _of_llamacpp(model, parts)
    told = {text: plain for text, (_, plain) in zip(parts, again["ids"], strict=True)} if again else {}
    shortest = next((text for text in parts if told.get(text) != wanted(text)), few[0])
    says = f"{shortest!r} is {told.get(shortest)} in llama.cpp, {wanted(shortest)} by tokenizer.json"
    yield Oddity("tokenizer", f"{says}; {len(apart)} of {len(texts)} strings are cut otherwise", "token-ids")


def _parts(text: str) -> list[str]:
    """All parts of a short string, itself too."""
    text = text[:LONGEST]
    return [text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)]
