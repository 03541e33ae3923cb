"""The verb's other direction: does a stranger's engine make of ids the text that llama.cpp makes, token by token."""

from __future__ import annotations

import random
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

from llamaref import ModelError

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.prompt.tokenizer import BYTE, CONTROL, SPECIAL, UNKNOWN, rules_of
from llamadiff.ext.prompt.tokens.candidates import DETOKENIZE, answering
from llamadiff.ext.prompt.tokens.changes import Ids
from llamadiff.ext.prompt.tokens.sides import llama_cpp
from llamadiff.ext.prompt.tokens.smallest import Search
from llamadiff.ext.prompt.tokens.texts import texts_for
from llamadiff.judge.verdict import of_check
from llamadiff.llamacpp.request import Settings
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress

RANDOM = 0.25  # of the lists: tokens in any order, which cut characters
LONGEST = 12  # tokens of such a list
SHOWN = 2
BROKEN = re.compile("\ufffd+")


@dataclass(frozen=True)
class Token:
    """The bytes of a token, its text as the vocabulary has it, and what kind it is."""

    piece: bytes
    stored: str
    kind: int


Step = Callable[[Token], bytes]


@dataclass(frozen=True)
class Mistake:
    """One way to make a wrong text of tokens: each token's bytes otherwise, all bytes, or the text."""

    name: str
    says: str
    fix: str
    each: Step | None = None
    between: bytes = b""
    decode: Callable[[Sequence[bytes]], str] | None = None
    after: Callable[[str], str] | None = None


@dataclass(frozen=True)
class Way:
    """What a caller may choose: whether special tokens are shown, a text's first space, and spaces before signs."""

    special: bool = True
    first_space: bool = True
    cleaned: bool = False


def _ways(fields: Mapping[str, Any]) -> tuple[Way, ...]:
    """Those of a file: llama_detokenize drops spaces before signs for some, llama_token_to_piece for none."""
    cleans = False
    with suppress(ModelError):
        cleans = rules_of(fields).clean_spaces
    return tuple(
        Way(*chosen) for chosen in product((True, False), (True, False), (False, True) if cleans else (False,))
    )


@dataclass(frozen=True)
class Shown:
    """Token ids, few, and both texts."""

    ids: Ids
    pieces: tuple[str, ...]
    right: str
    found: str


@dataclass(frozen=True)
class Back:
    """What came of it."""

    model: str
    candidate: str
    lists: int
    parted: int
    mistakes: tuple[Mistake, ...]
    examples: tuple[Shown, ...]

    @property
    def verdict(self) -> str:
        return of_check(self.parted)


def back(
    model: Path, spec: str, settings: Settings, progress: Progress, count: int, seed: int, patience: float
) -> Back:
    """A candidate's texts of token ids against llama.cpp's. Raises UserError for whatever a user can mend."""
    fields = ModelFile(model).weights.fields
    with (
        llama_cpp(model, settings, progress) as vocabulary,
        answering(spec, patience, DETOKENIZE, progress) as (name, answers),
    ):
        tokens = _tokens(fields, vocabulary.pieces())
        lists = [ids for ids in vocabulary.ids([*islice(texts_for(fields, seed), count)]) if ids]
        rng = random.Random(seed)  # noqa: S311
        lists += [tuple(rng.choices(range(len(tokens)), k=rng.randint(1, LONGEST))) for _ in range(int(count * RANDOM))]
        progress(f"{name} makes {len(lists)} texts")

        def asked(ids: Sequence[Ids]) -> list[str]:
            told = answers([list(each) for each in ids])
            return [_text(name, each, said) for each, said in zip(ids, told, strict=True)]

        found = asked(lists)
        progress("trying what may be wrong")
        so_far = Back(model.name, name, len(lists), 0, (), ())
        return _judged(so_far, tokens, _ways(fields), lists, found, asked)


def _tokens(fields: Mapping[str, Any], pieces: Sequence[bytes]) -> list[Token]:
    stored, kinds = fields.get("tokenizer.ggml.tokens") or (), fields.get("tokenizer.ggml.token_type") or ()
    kinds = [*kinds, *[1] * (len(pieces) - len(kinds))]
    return [Token(piece, str(text), kind) for piece, text, kind in zip(pieces, stored, kinds, strict=False)]


def _text(name: str, ids: Ids, said: Any) -> str:
    """A candidate's answer: a text, or the parts of one. Raises UserError for anything else."""
    parts = said if isinstance(said, list) else [said]
    if not all(isinstance(part, str) for part in parts):
        raise UserError(f"{name}: gives {said!r:.60} for {list(ids)!r:.42}; expected a text, or a list of its parts")
    return _whole("".join(parts))


def _whole(text: str) -> str:
    """However engines spell bytes that are no UTF-8: one U+FFFD for some in a row."""
    text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return BROKEN.sub("\ufffd", text)


def _judged(
    so_far: Back, tokens: Sequence[Token], ways: Sequence[Way], lists: Sequence[Ids], found: Sequence[str],
    asked: Callable[[Sequence[Ids]], list[str]],
) -> Back:  # fmt: skip
    def apart(ids: Sequence[Ids], texts: Sequence[str]) -> list[bool]:
        return [all(read(tokens, i, way) != text for way in ways) for i, text in zip(ids, texts, strict=True)]

    def parts(ids: Sequence[Ids]) -> list[bool]:
        return apart(ids, asked(ids))

    parted = [n for n, is_apart in enumerate(apart(lists, found)) if is_apart]
    if not parted:
        return so_far
    first = sorted(parted, key=lambda n: len(lists[n]))
    few = [*first[:64], *islice((n for n in range(len(lists)) if n not in {*parted}), 64)]
    mistakes = [
        mistake for mistake in MISTAKES
        if any(
            all(read(tokens, lists[n], way, mistake) == found[n] for n in few)
            and all(read(tokens, ids, way, mistake) == text for ids, text in zip(lists, found, strict=True))
            for way in ways
        )
    ]  # fmt: skip
    shown = dict.fromkeys(Search(parts).shortest(lists[n]) for n in first[:SHOWN])
    examples = tuple(
        Shown(ids, tuple(tokens[i].stored for i in ids), read(tokens, ids, Way()), asked([ids])[0]) for ids in shown
    )
    return replace(so_far, parted=len(parted), mistakes=tuple(mistakes), examples=examples)


def read(tokens: Sequence[Token], ids: Ids, way: Way, mistake: Mistake | None = None) -> str:
    """The text of ids, made one way, with a mistake."""
    chosen = [
        tokens[i] for i in ids if 0 <= i < len(tokens) and (way.special or tokens[i].kind not in {UNKNOWN, CONTROL})
    ]
    each = mistake.each if mistake is not None and mistake.each is not None else _piece
    pieces = [each(token) for token in chosen]
    if pieces and not way.first_space:
        pieces[0] = pieces[0].removeprefix(b" ")
    if mistake is not None and mistake.between:
        pieces = [piece for n, piece in enumerate(pieces) for piece in ((mistake.between, piece) if n else (piece,))]
    text = mistake.decode(pieces) if mistake is not None and mistake.decode is not None else _decoded(pieces)
    text = mistake.after(text) if mistake is not None and mistake.after is not None else text
    return _whole(_cleaned(text) if way.cleaned else text)


def _cleaned(text: str) -> str:
    return re.sub(" ([?!.,])", r"\1", text)


def _piece(token: Token) -> bytes:
    return token.piece


def _decoded(pieces: Sequence[bytes], errors: str = "replace") -> str:
    return b"".join(pieces).decode("utf-8", errors)


def _alone(pieces: Sequence[bytes], errors: str = "replace") -> str:
    return "".join(piece.decode("utf-8", errors) for piece in pieces)


def _unfinished(pieces: Sequence[bytes]) -> str:
    return getincrementaldecoder("utf-8")("replace").decode(b"".join(pieces))


def _special(token: Token, changed: Callable[[bytes], bytes]) -> bytes:
    return changed(token.piece) if token.kind in {UNKNOWN, CONTROL} else token.piece


def _stored(token: Token) -> bytes:
    return token.stored.encode("utf-8", "surrogatepass")


def _mark(token: Token) -> bytes:
    return _stored(token) if "\u2581" in token.stored else token.piece


def _byte_name(token: Token) -> bytes:
    return _stored(token) if token.kind == BYTE else token.piece


def _as_stored(token: Token) -> bytes:
    return token.piece if token.kind in SPECIAL else _stored(token)


_HELD = "hold bytes back until the character is whole"
MISTAKES = (
    Mistake("each-alone", "decodes each token's bytes by themselves, and breaks characters that lie in several tokens",
            _HELD, decode=_alone),
    Mistake("each-alone", "drops the bytes of characters that lie in several tokens", _HELD,
            decode=partial(_alone, errors="ignore")),
    Mistake("invalid-dropped", "drops bytes that are no UTF-8", "show U+FFFD for them",
            decode=partial(_decoded, errors="ignore")),
    Mistake("latin-1", "takes bytes for characters of Latin-1", "decode them as UTF-8",
            decode=lambda pieces: b"".join(pieces).decode("latin-1")),
    Mistake("end-lost", "loses the bytes that it holds back when the ids end", "send them as U+FFFD at the end",
            decode=_unfinished),
    Mistake("spaces-dropped", "drops the space that a token begins with", "keep it: only a text's first one may go",
            each=lambda token: token.piece.removeprefix(b" ")),
    Mistake("spaces-dropped", "strips each token", "keep white space: it is the text's",
            each=lambda token: token.piece.strip()),
    Mistake("mark-left", 'shows "\u2581" where there is a space', 'replace "\u2581" (U+2581) by a space', each=_mark),
    Mistake("alphabet-left", "shows tokens as the vocabulary has them (\u0120 for a space)",
            "map each character back to its byte, as GPT-2 does", each=_as_stored),
    Mistake("alphabet-left", "shows all tokens as the vocabulary has them", "map each back to its bytes", each=_stored),
    Mistake("byte-names", "shows bytes by their tokens' names (<0x0A>)", "make the byte of it", each=_byte_name),
    Mistake("joined-by-spaces", "puts a space between tokens", "join them by nothing", between=b" "),
    Mistake("cleaned-up", "drops the space before signs (clean_up_tokenization_spaces)", "keep it: it is the text's",
            after=_cleaned),
    Mistake("words", "puts a space before each token", "join them by nothing",
            each=lambda token: token.piece if token.kind in {UNKNOWN, CONTROL} else b" " + token.piece),
    Mistake("special-spaced", "puts spaces around special tokens", "join them by nothing",
            each=partial(_special, changed=lambda piece: b" " + piece + b" ")),
    Mistake("special-spaced", "puts a space after special tokens", "join them by nothing",
            each=partial(_special, changed=lambda piece: piece + b" ")),
    Mistake("cut-at-nul", "ends each token at its first NUL", "give the length along: it is no C string",
            each=lambda token: token.piece.partition(b"\0")[0]),
    Mistake("cut-at-nul", "ends a text at its first NUL", "give the length along: it is no C string",
            after=lambda text: text.partition("\0")[0]),
    Mistake("newline-added", "adds a newline", "leave it out: print adds it", after=lambda text: text + "\n"),
    Mistake("stripped", "drops white space at both ends", "keep it: it is the text's", after=str.strip),
    Mistake("stripped", "drops white space at the end", "keep it: it is the text's", after=str.rstrip),
    Mistake("stripped", "drops all white space at the beginning", "drop one space at most", after=str.lstrip),
    Mistake("first-lost", "loses the first token", "skip a beginning-of-text token only",
            decode=lambda pieces: _decoded(pieces[1:])),
    Mistake("last-lost", "loses the last token", "skip an end-of-text token only",
            decode=lambda pieces: _decoded(pieces[:-1])),
    Mistake("unknown-marked", 'shows the unknown token as " \u2047 "', "show its text",
            each=lambda token: " \u2047 ".encode() if token.kind == UNKNOWN else token.piece),
)  # fmt: skip
