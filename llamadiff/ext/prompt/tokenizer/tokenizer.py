"""Text to ids and back: special tokens, normalisation, words, and what is added around them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from llamaref.errors import ModelError

from llamadiff.ext.prompt.tokenizer.bpe import Bpe
from llamadiff.ext.prompt.tokenizer.pieces import Pieces, cleaned
from llamadiff.ext.prompt.tokenizer.rules import Rules, rules_of
from llamadiff.ext.prompt.tokenizer.rwkv import Rwkv
from llamadiff.ext.prompt.tokenizer.special import Specials
from llamadiff.ext.prompt.tokenizer.spm import Spm
from llamadiff.ext.prompt.tokenizer.ugm import Ugm
from llamadiff.ext.prompt.tokenizer.unicode_text import valid
from llamadiff.ext.prompt.tokenizer.vocabulary import SPECIAL, USER_DEFINED, Vocabulary
from llamadiff.ext.prompt.tokenizer.wpm import Wpm


class Model(Protocol):
    """What makes ids of the text between special tokens; its words are what no token crosses."""

    def words(self, text: str) -> list[str]: ...

    def ids(self, text: str) -> list[int]: ...


MODELS: Mapping[str, Callable[[Vocabulary, Rules], Model]] = {
    "spm": Spm, "bpe": Bpe, "wpm": Wpm, "ugm": Ugm, "rwkv": Rwkv,
}  # fmt: skip


class Tokenizer:
    """The tokenizer of a GGUF file's metadata. Raises ModelError for one that is not known, and for broken tables."""

    def __init__(self, fields: Mapping[str, Any], rules: Rules | None = None) -> None:
        self._set(Vocabulary(fields), rules_of(fields) if rules is None else rules)

    def _set(self, vocabulary: Vocabulary, rules: Rules) -> None:
        if rules.kind not in MODELS:
            raise ModelError(f"kind = {rules.kind!r}: the kinds are {', '.join(MODELS)}")
        self.vocabulary, self.rules = vocabulary, rules
        self.model: Model = MODELS[rules.kind](vocabulary, rules)

    def with_rules(self, rules: Rules) -> Tokenizer:
        """Another one of the same tables, which are not read again."""
        other = Tokenizer.__new__(Tokenizer)
        other._set(self.vocabulary, rules)
        return other

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text, with what is added around it. ``special``: texts of control tokens are those tokens."""
        rules, found = self.rules, []
        if rules.add_bos and rules.bos is not None:
            found += [rules.bos] * (2 if rules.bos_twice else 1)
        found += self._middle(valid(text, rules.invalid), special and rules.parse_special)
        if rules.add_eos and rules.eos is not None:
            found.append(rules.eos)
        return [i + rules.offset for i in found] if rules.offset else found

    def decode(self, ids: Sequence[int], special: bool = True) -> bytes:
        """The text of ids, all at once, as llama_detokenize gives it. ``special``: control tokens are shown."""
        pieces = [*self.pieces(ids, special)]
        if pieces and self.rules.add_space_prefix:
            pieces[0] = pieces[0].removeprefix(b" ")
        text = b"".join(pieces)
        return cleaned(text) if self.rules.clean_spaces else text

    def pieces(self, ids: Sequence[int], special: bool = True) -> Iterator[bytes]:
        """The bytes of each token, as llama_token_to_piece gives them."""
        return (self._pieces.of(i, special) for i in ids)

    def _middle(self, text: str, special: bool) -> list[int]:
        """The ids of a text, nothing added."""
        specials, found = self._specials if special else self._user_defined, list[int]()
        if not self.rules.special_first:
            for word in self.model.words(self._normalized(text, True)) if text else ():
                for part in specials.split(word):
                    found += (part,) if isinstance(part, int) else self.model.ids(part)
            return found
        after_special, texts = True, 0
        for part in specials.split(text):
            if isinstance(part, int):
                found.append(part)
            else:
                prefixed = {"each": after_special, "first": texts == 0, "start": not found}[self.rules.prefixed]
                found += self.model.ids(self._normalized(part, prefixed))
                texts += 1
            after_special = isinstance(part, int)
        return found

    def _normalized(self, text: str, prefixed: bool) -> str:
        """A text before it is cut into words; BERT's and the unigram model's normalisation is their own."""
        rules = self.rules
        if rules.normalization is not None and not text.isascii():
            text = unicodedata.normalize(rules.normalization, text)
        if rules.kind != "wpm" and rules.lowercase:
            text = text.lower() if text.isascii() else "".join(map(str.lower, text))
        if rules.kind in {"wpm", "ugm"}:
            return text
        if prefixed and rules.add_space_prefix:
            text = " " + text
        return text.replace(" ", "▁") if rules.escape_spaces else text

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self.vocabulary, self.rules)

    @cached_property
    def _specials(self) -> Specials:
        return self._specials_of(SPECIAL)

    @cached_property
    def _user_defined(self) -> Specials:
        return self._specials_of({USER_DEFINED})

    def _specials_of(self, wanted: set[int]) -> Specials:
        kinds = self.vocabulary.kinds if self.rules.retyped else self.vocabulary.stated_kinds
        texts = self.vocabulary.texts
        found = [
            (text, i) for i, (text, kind) in enumerate(zip(texts, kinds, strict=False))
            if kind in wanted and i not in self.rules.overlooked
        ]  # fmt: skip
        return Specials(dict(found if self.rules.equal_tokens == "last" else reversed(found)), self.rules)
