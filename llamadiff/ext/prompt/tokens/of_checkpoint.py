"""The checkpoint's tokenizer against the file's: tables, flags, and the ids that both give for awkward strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from llamaref import ModelError

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.prompt.templates.apart import template_oddities, templates_in
from llamadiff.ext.prompt.tokenizer import (
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    USER_DEFINED,
    Tokenizer,
    as_original,
    rules_of,
)
from llamadiff.ext.prompt.tokenizer.pre_tokenizers import GPT2
from llamadiff.ext.prompt.tokens.changes import Ids
from llamadiff.ext.prompt.tokens.explain import explain
from llamadiff.ext.prompt.tokens.lacking import lacking
from llamadiff.ext.prompt.tokens.sentencepiece import kind_of, metadata_of, spaced
from llamadiff.ext.prompt.tokens.sides import Side, by_tokenizers, independent, llama_cpp
from llamadiff.ext.prompt.tokens.smallest import smallest
from llamadiff.ext.prompt.tokens.texts import texts_for
from llamadiff.llamacpp.request import Settings
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UserError
from llamadiff.system.progress import silent
from llamadiff.trace.stated import read_json

MAX_TOKENIZER = 1 << 27  # bytes: vocabularies of a quarter of a million tokens take a tenth of it
MAX_CONFIG = 1 << 24
SHOWN = 60
DIGITS = re.compile("[0-9]{1,8}")
PIECES = "tokenizer.model of SentencePiece's"
TEXTS = 4000  # that both tokenizers are given


@dataclass(frozen=True)
class Tokenizers:
    """What a checkpoint says of its tokenizer, each empty where there is none.

    ``data``: tokenizer.json; ``config``: tokenizer_config.json; ``pieces``: where there is no tokenizer.json, what
    tokenizer.model comes to as a GGUF file's metadata. ``path``: the one of the two that there is.
    """

    path: Path
    data: Mapping[str, Any]
    config: Mapping[str, Any]
    pieces: Mapping[str, Any] = field(default_factory=dict)

    def oddities(self, model: ModelFile) -> Iterator[Oddity]:
        """Where the tables, flags and chat templates of the file are not the checkpoint's."""
        yield from tokenizer_oddities(model, self)
        wanted = templates_in(self.path.parent, self.config)
        fix = f"convert {model.path.name} again"
        yield from template_oddities(model.weights.fields, "the file", wanted, "the checkpoint", fix)

    def ids(self, model: ModelFile) -> Sequence[Oddity | str]:
        """What asking both tokenizers comes to."""
        if not self.is_there:
            return ["the checkpoint has no tokenizer.json or tokenizer.model: no tokenizer was compared"]
        return list(ids_oddities(model, self))

    @property
    def is_there(self) -> bool:
        """Whether anything is said."""
        return bool(self.data or self.config or self.pieces)

    @property
    def added(self) -> dict[int, Mapping[str, Any]]:
        """Added tokens by their ids: content, special, lstrip, rstrip."""
        found = self.data.get("added_tokens")
        return _added(found) if isinstance(found, list) else _added_by_config(self.config)

    @property
    def kinds(self) -> dict[int, int]:
        """What tokens are by their ids, as GGUF numbers it: those of tokenizer.model, and added ones."""
        kinds = dict(enumerate(self.pieces.get("tokenizer.ggml.token_type", ())))
        return kinds | {i: kind_of(token) for i, token in self.added.items()}

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
        elif self.pieces:
            words = dict(enumerate(self.pieces["tokenizer.ggml.tokens"]))
        return words | {i: token["content"] for i, token in self.added.items()}

    @property
    def merges(self) -> list[str]:
        """In their order, each as GGUF writes it; none where nothing is merged by a list."""
        model = self.data.get("model")
        merges = model.get("merges") if isinstance(model, dict) else self.pieces.get("tokenizer.ggml.merges")
        listed = merges if isinstance(merges, list) else ()
        return [each if isinstance(each, str) else _merge(each) for each in listed]

    @property
    def pre_tokenizers(self) -> tuple[str, ...]:
        """llama.cpp's names of those that have the expressions of tokenizer.json, and its normalization."""
        own, normalizer = tuple(_expressions(self.data.get("pre_tokenizer"))), self.data.get("normalizer")
        form = normalizer.get("type") if isinstance(normalizer, dict) else None
        same = [name for name, pre in PRE_TOKENIZERS.items() if own in (pre.original, pre.patterns)]
        return tuple(name for name in same if PRE_TOKENIZERS[name].normalization == form) or tuple(same)

    def special_id(self, kind: str) -> int | None:
        """The id of the bos or eos token that tokenizer_config.json names, or tokenizer.model."""
        named = self.config.get(f"{kind}_token")
        text = named.get("content") if isinstance(named, dict) else named
        if not isinstance(text, str):
            return self.pieces.get(f"tokenizer.ggml.{kind}_token_id")
        return next((i for i, word in self.words.items() if word == text), None)

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


def _merge(pair: Any) -> str:
    """A merge that is stated as two tokens; GGUF parts them by a space, which stands for itself nowhere."""
    both = pair if isinstance(pair, list) and all(isinstance(each, str) for each in pair) else ()
    return " ".join(each.replace(" ", "\u0120") for each in both)


def _expressions(pre_tokenizer: Any) -> Iterator[str]:
    """How tokenizer.json cuts a text into words, one expression after the other."""
    if not isinstance(pre_tokenizer, dict):
        return
    inner, pattern = pre_tokenizer.get("pretokenizers"), pre_tokenizer.get("pattern")
    for each in inner if isinstance(inner, list) else ():
        yield from _expressions(each) if isinstance(each, dict) and "pretokenizers" not in each else ()
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    if isinstance(expression, str):
        yield expression
    if pre_tokenizer.get("type") == "ByteLevel" and pre_tokenizer.get("use_regex", True):
        yield GPT2


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


def _added(tokens: Sequence[Any]) -> dict[int, Mapping[str, Any]]:
    """Those that have an id and a content, by their ids."""
    known = [t for t in tokens if isinstance(t, dict) and _is_id(t.get("id")) and isinstance(t.get("content"), str)]
    return {token["id"]: token for token in known}


def _added_by_config(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The same of tokenizer_config.json, whose keys are the ids."""
    found = config.get("added_tokens_decoder")
    tokens = found.items() if isinstance(found, dict) else ()
    return _added([each | {"id": int(i)} for i, each in tokens if isinstance(each, dict) and DIGITS.fullmatch(i)])


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 24


def open_tokenizers(folder: Path, called: str = "tokenizer.json") -> Tokenizers:
    """What a directory says of a tokenizer. Raises UserError for files that are not what their names say."""
    parts = []
    for name, most in ((called, MAX_TOKENIZER), ("tokenizer_config.json", MAX_CONFIG)):
        path = folder / name
        data = read_json(path, most, "a tokenizer as JSON") if path.is_file() else {}
        if not isinstance(data, dict):
            raise UserError(f"{path}: expected an object; download it anew")
        parts.append(data)
    data, config = parts
    path = folder / "tokenizer.model"
    if data or not path.is_file():
        return Tokenizers(folder / called, data, config)
    return Tokenizers(path, data, config, metadata_of(path, _added_by_config(config)))


def original_of(path: Path) -> Side:
    """A tokenizer.json as its model's library has it: what the tokenizer_config.json beside it adds is added.

    Raises UserError where that cannot be.
    """
    side = by_tokenizers(path)
    tokenizers = open_tokenizers(path.parent, path.name)
    (added,) = side.ids([""])
    first, last = (added or ())[:1], (added or ())[-1:]
    begin, start = _end(tokenizers, "bos", first)
    end, stop = _end(tokenizers, "eos", last)

    def ids(texts: Sequence[str]) -> list[Ids | None]:
        return [begin + each[start : len(each) - stop] + end for each in side.ids(texts) if each is not None]

    original = lambda model: tokenizer_oddities(model, tokenizers)  # noqa: E731
    return replace(side, ids=ids, original=original, pre_tokenizers=tokenizers.pre_tokenizers)


def _end(tokenizers: Tokenizers, kind: str, library: Ids) -> tuple[Ids, int]:
    """What stands at an end of a text besides what the ``library`` puts there, and how many of its ids go."""
    wanted, special = tokenizers.config.get(f"add_{kind}_token"), tokenizers.special_id(kind)
    if not isinstance(wanted, bool) or special is None or wanted == (library == (special,)):
        return (), 0
    return ((special,), 0) if wanted else ((), 1)


def tokenizer_oddities(model: ModelFile, tokenizers: Tokenizers) -> Iterator[Oddity]:
    """Where the tables and flags of the file are not the checkpoint's."""
    yield from table_oddities(model, tokenizers)
    yield from _special_id(model, "bos", tokenizers.special_id("bos"))
    ends = _end_of_document(tokenizers.path.parent)
    if ends is None or ends != model.special_id("eos"):
        yield from _special_id(model, "eos", tokenizers.special_id("eos"))


def _end_of_document(folder: Path) -> int | None:
    """HunYuan's config.json has an ``eod_token_id``, which converters write in place of the tokenizer's EOS token."""
    path = folder / "config.json"
    config = read_json(path, MAX_CONFIG, "the config.json of a checkpoint") if path.is_file() else {}
    stated = config.get("eod_token_id") if isinstance(config, dict) else None
    return stated if isinstance(stated, int) else None


def table_oddities(model: ModelFile, tokenizers: Tokenizers) -> Iterator[Oddity]:
    """Where tokens, their types, scores and merges of the file are not those of another tokenizer of the model."""
    tokens = model.weights.fields.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokenizers.words:
        is_word_piece = model.weights.fields.get("tokenizer.ggml.model") == "bert" and not tokenizers.pieces
        yield from _tables(tokens, tokenizers, is_word_piece)
        yield from _kinds(model, tokenizers)
        yield from _scores(model, tokenizers)
        yield from _merges(model, tokenizers)


def _special_id(model: ModelFile, kind: str, wanted: int | None) -> Iterator[Oddity]:
    """Where llama.cpp takes another token for this than the checkpoint: by the file, or for want of a key in it."""
    found, key = model.special_id(kind), f"tokenizer.ggml.{kind}_token_id"
    if wanted is None or wanted == found:
        return
    decides, takes = lacking(model.weights.fields, key, wanted) if found is None else (True, "")
    if decides:
        here = f"is {found}" if found is not None else f"is not in the file: {takes}"
        yield Oddity(key, f"{here}; the checkpoint's {kind.upper()} token is {wanted}", f"{kind}-id")


def _tables(tokens: Sequence[Any], tokenizers: Tokenizers, is_word_piece: bool) -> Iterator[Oddity]:
    words, kinds = tokenizers.words, tokenizers.kinds

    def meant(i: int) -> set[str]:
        if is_word_piece:  # as llama.cpp's converter writes them
            return {words[i], words[i][2:] if words[i].startswith("##") else f"▁{words[i]}"}
        return {words[i], spaced(words[i])} if kinds.get(i) == USER_DEFINED else {words[i]}

    apart = [i for i in sorted(words) if i >= len(tokens) or tokens[i] not in meant(i)]
    if apart:
        i = apart[0]
        found = repr(tokens[i])[:SHOWN] if i < len(tokens) else "not there"
        says = f"token {i} is {found}; {tokenizers.path.name} has {words[i][:SHOWN]!r}{_more(apart, len(words))}"
        yield Oddity("tokenizer.ggml.tokens", says, "tokens")


def _more(apart: Sequence[int], count: int) -> str:
    return f" ({len(apart)} of {count} are other)" if len(apart) > 1 else ""


def _kinds(model: ModelFile, tokenizers: Tokenizers) -> Iterator[Oddity]:
    """Special tokens that the file calls normal: llama.cpp would not find them in a prompt."""
    kinds = model.weights.fields.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list):
        return
    meant = tokenizers.kinds
    normal = [i for i, kind in enumerate(kinds) if kind == NORMAL and meant.get(i) == CONTROL]
    if normal:
        more = f" (and {len(normal) - 1} more)" if len(normal) > 1 else ""
        i = normal[0]
        says = f"token {i} {tokenizers.words[i][:SHOWN]!r} is special in {tokenizers.path.name}, normal here{more}"
        yield Oddity("tokenizer.ggml.token_type", says, "special-token")


def _scores(model: ModelFile, tokenizers: Tokenizers) -> Iterator[Oddity]:
    """Scores that are not tokenizer.model's: of added tokens it has none."""
    found, wanted = (each.get("tokenizer.ggml.scores") for each in (model.weights.fields, tokenizers.pieces))
    if not isinstance(found, list) or wanted is None:
        return
    pairs = [*zip(np.asarray(found, np.float32), np.asarray(wanted, np.float32), strict=False)]
    apart = [i for i, (one, other) in enumerate(pairs) if one != other and i not in tokenizers.added]
    if apart:
        i = apart[0]
        name = tokenizers.path.name
        says = f"token {i} has {pairs[i][0]:g}; {name} has {pairs[i][1]:g}{_more(apart, len(pairs))}"
        yield Oddity("tokenizer.ggml.scores", says, "token-scores")


def _merges(model: ModelFile, tokenizers: Tokenizers) -> Iterator[Oddity]:
    """The first merge that is not the other tokenizer's."""
    found, wanted = model.weights.fields.get("tokenizer.ggml.merges"), tokenizers.merges
    if not isinstance(found, list) or not wanted or found == wanted:
        return
    count = min(len(found), len(wanted))
    i = next((i for i in range(count) if found[i] != wanted[i]), count)
    ours, theirs = (repr(each[i])[:SHOWN] if i < len(each) else "not there" for each in (found, wanted))
    says = f"merge {i} is {ours}; {tokenizers.path.name} has {theirs} ({len(found)} merges, {len(wanted)} there)"
    yield Oddity("tokenizer.ggml.merges", says, "token-merges")


def ids_oddities(model: ModelFile, tokenizers: Tokenizers) -> Iterator[Oddity | str]:
    """Ids that the two tokenizers give, nothing added: oddities, and in words what could not be asked."""
    fields = model.weights.fields
    texts = [*islice(texts_for(fields), TEXTS)]
    try:
        with llama_cpp(model.path, Settings(), silent) as vocabulary:
            ours = vocabulary.plain_ids(texts)
            yield from _bos(model, tokenizers, vocabulary.adds_bos)
            if not tokenizers.data and not tokenizers.pieces:
                yield f"ids of the two tokenizers were not compared: there is no tokenizer.json, and no {PIECES}"
                return
            if _normalizes(tokenizers.pieces):
                yield "tokenizer.model normalises texts first, which llama.cpp does not for BPE, and was not looked at"
            theirs = by_tokenizers(tokenizers.path, special=False) if tokenizers.data else _by_pieces(tokenizers)
            found = theirs.ids(texts)
            apart = [n for n in range(len(texts)) if found[n] != ours[n]]
            if apart:
                both = lambda text: (theirs.ids(text), vocabulary.plain_ids(text))  # noqa: E731
                yield _apart(fields, texts, found, ours, both, tokenizers)
    except (UserError, ModelError) as error:
        yield f"ids of the two tokenizers were not compared: {error}"


def _normalizes(pieces: Mapping[str, Any]) -> bool:
    """Whether it is one whose BPE changes a text: by a table, or where several spaces are one."""
    changes = (pieces.get(f"tokenizer.ggml.{key}") for key in ("precompiled_charsmap", "remove_extra_whitespaces"))
    return bool(pieces) and rules_of(pieces).kind == "spm" and any(changes)


def _by_pieces(tokenizers: Tokenizers) -> Side:
    """The independent tokenizer, with the tables of tokenizer.model. Raises ModelError for tables that are damaged."""
    fields, prefix, added = tokenizers.pieces, tokenizers.config.get("add_prefix_space"), tokenizers.added.items()
    left, right = (frozenset(i for i, token in added if token.get(side) is True) for side in ("lstrip", "rstrip"))
    rules = replace(as_original(rules_of(fields)), strip_left=left, strip_right=right)
    rules = replace(rules, add_space_prefix=prefix) if isinstance(prefix, bool) else rules
    return independent(Tokenizer(fields, rules))


def _bos(model: ModelFile, tokenizers: Tokenizers, found: bool | None) -> Iterator[Oddity]:
    """Where the checkpoint's tokenizer begins a prompt otherwise than llama.cpp does."""
    wanted = tokenizers.adds_bos()
    if wanted is not None and wanted != found:
        stated = model.weights.fields.get("tokenizer.ggml.add_bos_token")
        here = f"is {stated}" if stated is not None else f"is not in the file: llama.cpp takes {found}"
        yield Oddity("tokenizer.ggml.add_bos_token", f"{here}; the checkpoint's tokenizer says {wanted}", "bos-flag")


def _apart(
    fields: Mapping[str, Any], texts: Sequence[str], theirs: Sequence[Ids | None], ours: Sequence[Ids | None],
    both: Callable[[Sequence[str]], tuple[Sequence[Ids | None], Sequence[Ids | None]]], tokenizers: Tokenizers,
) -> Oddity | str:  # fmt: skip
    """Why the two part, at the key that says it wrong if there is one, with the smallest text that shows it."""
    explanation, original, name = None, None, tokenizers.path.name
    with suppress(ModelError):
        tokenizer = Tokenizer(fields, replace(rules_of(fields), add_bos=False, add_eos=False))
        explanation = explain(tokenizer, texts, theirs, ours, tokenizers.pre_tokenizers)
        original = tokenizer.with_rules(as_original(tokenizer.rules))
    if explanation is not None and not explanation.mistakes:
        ways = "; ".join(change.says for change in explanation.changes)
        return f"llama.cpp has other ids than the checkpoint's tokenizer, which no key of a file can mend: that {ways}"

    def parts(tried: Sequence[str]) -> list[bool]:
        found, right = both(tried)
        return [
            a != b and (original is None or a != tuple(original.encode(text)))
            for text, a, b in zip(tried, found, right, strict=True)
        ]

    unlike = sorted((n for n in range(len(texts)) if theirs[n] != ours[n]), key=lambda n: len(texts[n]))
    first = next((n for n in unlike if parts([texts[n]])[0]), None)
    if first is None:
        text = texts[unlike[0]]
        return (
            f"llama.cpp's ids are not the checkpoint's for {len(unlike)} of {len(texts)} texts, in ways that no key of "
            f"a file can mend: {text!r} is {list(ours[unlike[0]] or ())} in llama.cpp, {list(theirs[unlike[0]] or ())} "
            f"by {name}"
        )
    text = smallest(texts[first], parts)
    found, right = (list(each[0] or ()) for each in both([text]))
    says = f"{text!r} is {right} in llama.cpp, {found} by {name}; {len(unlike)} of {len(texts)} texts part"
    change = explanation.mistakes[0] if explanation is not None else None
    if change is None or change.stated is None:
        why = f"{name} {change.says}: " if change is not None else ""
        return Oddity("tokenizer", why + says, "token-ids")
    oddity = stated_otherwise(fields, change.stated, name)
    return replace(oddity, says=f"{oddity.says}: {says}")


def stated_otherwise(fields: Mapping[str, Any], stated: tuple[str, Any], name: str) -> Oddity:
    """A key that has another value than the one with which llama.cpp would give the ids of the tokenizer ``name``."""
    key, value = stated
    here = f"is {fields[key]!r}" if key in fields else f"is not in the file: {lacking(fields, key, value)[1]}"
    return Oddity(key, f"{here}; {name}'s is {value!r}", "token-ids")
