"""What a tokenizer may do otherwise: changes to the independent one, each with its words; the likeliest come first."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from llamadiff.ext.prompt.tokenizer import PRE_TOKENIZERS, SPECIAL, Rules, Tokenizer, as_original

Ids = tuple[int, ...]
Encode = Callable[[str], Ids]
Pair = tuple[str, Ids, Ids]  # a text, the candidate's ids, and the right ones
FORMS = ("NFC", "NFD", "NFKC", "NFKD")
FEW = 64  # texts that data-driven changes are read off
EXCHANGED = 4  # tokens that have other ids, and each the same one everywhere
NAMED = 3  # special tokens that may be the one that is overlooked


@dataclass(frozen=True)
class Change:
    """One thing that a tokenizer does otherwise: to its rules, to a text before, to ids after.

    ``says`` goes on a sentence whose subject is the tokenizer; ``stated`` is what a file would say that does so:
    a metadata key and its value. ``own``: the model's own tokenizer does it, and llama.cpp does not.
    """

    name: str
    says: str
    fix: str
    rules: Mapping[str, Any] = field(default_factory=dict)
    before: Callable[[str], str] | None = None
    after: Callable[[Ids], Ids] | None = None
    stated: tuple[str, Any] | None = None
    own: bool = False


def changed(tokenizer: Tokenizer, changes: Sequence[Change]) -> Encode:
    """The tokenizer with all of them. Raises ModelError for rules that cannot be."""
    rules = {name: value for change in changes for name, value in change.rules.items()}
    other = tokenizer.with_rules(replace(tokenizer.rules, **rules)) if rules else tokenizer
    before, after = [c.before for c in changes if c.before], [c.after for c in changes if c.after]

    def encode(text: str) -> Ids:
        for step in before:
            text = step(text)
        ids = tuple(other.encode(text))
        for done in after:
            ids = done(ids)
        return ids

    return encode


def changes_of(tokenizer: Tokenizer, parted: Sequence[Pair]) -> Iterator[Change]:
    """All that are known for a tokenizer. ``parted``: some are read off what a candidate gave."""
    rules = tokenizer.rules
    yield from _around(rules)
    yield from _special(tokenizer, parted)
    yield from _spaces(rules)
    yield from _normal(rules)
    yield from _WORDS_BY[rules.kind](rules)
    yield from _TEXT
    yield from _ids(parted)


def own_changes(rules: Rules) -> list[Change]:
    """Where llama.cpp is known to differ from the tokenizer that the model was trained with, one by one."""
    original = as_original(rules)
    return [
        Change(f.name, _OWN.get(f.name, f"has other {f.name}"), "", {f.name: getattr(original, f.name)}, own=True)
        for f in fields(Rules) if getattr(original, f.name) != getattr(rules, f.name)
    ]  # fmt: skip


_OWN = {
    "original_words": "cuts words by the expression of the model's own tokenizer",
    "special_search": "looks for special tokens from the left",
    "strip_unicode": "takes all white space around special tokens that take any",
    "retyped": "takes for special tokens those that the file calls so, and no others",
    "invalid": "has its own way with invalid UTF-8",
    "normalization": "brings texts into the form NFC first",
    "accents": "takes accents apart",
    "longest_word": "has no words of more than a hundred characters",
    "own_marks": 'does not take a "\u2581" in a text for a space',
    "controls_first": "removes control characters before it looks for white space",
}  # fmt: skip


# -- what stands around a text -----------------------------------------------------------------------------------------


def _around(rules: Rules) -> Iterator[Change]:
    if rules.bos is not None:
        key = "tokenizer.ggml.add_bos_token"
        if rules.add_bos:
            yield Change("bos-missing", "puts no beginning-of-text token before a text",
                         f"put token {rules.bos} first", {"add_bos": False}, stated=(key, False))  # fmt: skip
            yield Change("bos-twice", "puts the beginning-of-text token twice",
                         "add it once: who calls, or a template, adds it already", {"bos_twice": True})  # fmt: skip
            if rules.eos is not None:
                yield Change("bos-other", f"begins a text with token {rules.eos}, not {rules.bos}",
                             f"put token {rules.bos} first", {"bos": rules.eos})  # fmt: skip
        else:
            yield Change("bos-added", "puts a beginning-of-text token before a text, which this model does not",
                         f"leave token {rules.bos} out: {key}", {"add_bos": True}, stated=(key, True))  # fmt: skip
    if rules.eos is None:
        return
    key = "tokenizer.ggml.add_eos_token"
    if rules.add_eos:
        yield Change("eos-missing", "puts no end-of-text token after a text", f"put token {rules.eos} last",
                     {"add_eos": False}, stated=(key, False))  # fmt: skip
        if rules.add_bos:
            yield Change("nothing-added", "adds none of the model's tokens around a text",
                         f"put token {rules.bos} first and {rules.eos} last",
                         {"add_bos": False, "add_eos": False})  # fmt: skip
    else:
        yield Change("eos-added", "puts an end-of-text token after a text, which this model does not",
                     f"leave token {rules.eos} out: {key}", {"add_eos": True}, stated=(key, True))  # fmt: skip


def _special(tokenizer: Tokenizer, parted: Sequence[Pair]) -> Iterator[Change]:
    """What becomes of special tokens in a text."""
    rules, texts = tokenizer.rules, tokenizer.vocabulary.texts
    yield Change("special-as-text", "takes special tokens in a text for plain text",
                 "look for their texts first, and cut the text there", {"parse_special": False})  # fmt: skip
    yield Change("special-late", "looks for special tokens after it has cut the text into words",
                 "cut them out first, and cut what lies between them into words", {"special_first": False})  # fmt: skip
    special = [i for i, kind in enumerate(tokenizer.vocabulary.kinds) if kind in SPECIAL]
    before, after = "strip_left", "strip_right"
    for where, sides in (("before and after", (before, after)), ("before", (before,)), ("after", (after,))):
        yield Change("special-takes-spaces", f"drops the white space {where} a special token",
                     "keep it: that is part of the text", dict.fromkeys(sides, frozenset(special)))  # fmt: skip
    if rules.strip_left or rules.strip_right:
        yield Change("special-keeps-spaces", "keeps the white space beside special tokens that take it",
                     "drop it, as rstrip and lstrip of the model's added tokens say",
                     {"strip_left": frozenset(), "strip_right": frozenset()})  # fmt: skip
    for kind, what in ((4, "user-defined"), (3, "control")):
        several = frozenset(i for i in special if tokenizer.vocabulary.kinds[i] == kind)
        if several:
            yield Change("special-overlooked", f"takes the texts of {what} tokens for plain text",
                         f"look for tokens of type {kind} in tokenizer.ggml.token_type, too",
                         {"overlooked": several})  # fmt: skip
    shortest = min((text for text, _, _ in parted), key=len, default="")
    for i in [i for i in special if texts[i] in shortest and texts[i]][:NAMED]:
        yield Change("special-overlooked", f"takes special token {i}, {texts[i]!r}, for plain text",
                     "add it to the special tokens", {"overlooked": frozenset({i})})  # fmt: skip


def _spaces(rules: Rules) -> Iterator[Change]:
    key = "tokenizer.ggml.add_space_prefix"
    if rules.add_space_prefix:
        yield Change("space-prefix", "puts no space before a text", f"put one there, as {key} says",
                     {"add_space_prefix": False}, stated=(key, False))  # fmt: skip
        if rules.prefixed == "each":
            for where, others in (("first", "first text"), ("start", "text that begins with none")):
                yield Change("space-prefix", f"puts no space after a special token, but before the {others}",
                             "put one there: what follows it is a text, too", {"prefixed": where})  # fmt: skip
    elif rules.kind != "wpm":
        for prefixed, where in (("each", "before a text, and after each special token"), ("first", "before a text")):
            yield Change("space-prefix", f"puts a space {where}, which this model does not",
                         f"leave it out: {key}", {"add_space_prefix": True, "prefixed": prefixed},
                         stated=(key, True))  # fmt: skip
    if rules.escape_spaces:
        yield Change("spaces-unescaped", 'looks for spaces as they are, where the tokens have "\u2581"',
                     'replace every space by "\u2581" (U+2581) first', {"escape_spaces": False})  # fmt: skip
    if rules.kind == "ugm":
        keeps = rules.remove_extra_whitespaces
        yield Change("spaces-merged", f"{'keeps several spaces' if keeps else 'makes one space of several'}",
                     "as tokenizer.ggml.remove_extra_whitespaces says", {"remove_extra_whitespaces": not keeps},
                     stated=("tokenizer.ggml.remove_extra_whitespaces", not keeps))  # fmt: skip


def _normal(rules: Rules) -> Iterator[Change]:
    for form in FORMS:
        yield Change("normalized", f"brings texts into the form {form} first", "take the text as it comes",
                     {"normalization": form})  # fmt: skip
    says = "keeps upper case, where this model knows lower case alone" if rules.lowercase else "makes a text lower case"
    fix = "make it lower case first" if rules.lowercase else "keep the text's case"
    yield Change("case", says, fix, {"lowercase": not rules.lowercase})


# -- how words become tokens -------------------------------------------------------------------------------------------

# Parts of pre-tokenizers' expressions, what becomes of them in other hands, and what is said of that.
_MUTATIONS = (
    (r"\p{N}{1,3}", r"\p{N}", "cuts numbers into single digits", r"cut them into groups of up to three: \p{N}{1,3}"),
    (r"\p{N}{1,3}", r"\p{N}+", "keeps numbers whole", r"cut them into groups of up to three: \p{N}{1,3}"),
    (r"|\p{N}|", r"|\p{N}{1,3}|", "keeps up to three digits together", r"cut numbers into single digits: \p{N}"),
    (r"|\p{N}|", r"|\p{N}+|", "keeps numbers whole", r"cut them into single digits: \p{N}"),
    (r" ?\p{N}+", r" ?\p{N}", "cuts numbers into single digits", r"keep them whole: \p{N}+"),
    (r"\s+(?!\S)|", "", r"lacks \s+(?!\S): the last of several spaces does not go to the word after them",
     "some libraries of expressions have no lookahead: leave the last space to the next word by hand"),
    (r"|\s+(?!\S)", "", r"lacks \s+(?!\S): the last of several spaces does not go to the word after them",
     "some libraries of expressions have no lookahead: leave the last space to the next word by hand"),
    (r"\s*[\r\n]+|", "", "cuts newlines off the white space before them",
     r"take \s*[\r\n]+ before other white space"),
    (r"[\r\n]*", "", "cuts newlines off the signs before them", r"let signs end with [\r\n]*"),
    (r"[^\r\n\p{L}\p{N}]?", " ?", "lets a space alone begin a word, and no sign",
     r"begin words with [^\r\n\p{L}\p{N}]?"),
    (r"[^\r\n\p{L}\p{N}]?", "", "lets no space or sign begin a word", r"begin words with [^\r\n\p{L}\p{N}]?"),
    (r" ?\p{L}", r"\p{L}", "cuts the space off the word after it", r"let words begin with a space: ' ?\p{L}+'"),
    ("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", "(?:'s|'t|'re|'ve|'m|'ll|'d)",
     "knows contractions ('s, 'll) in lower case alone", "look for them in any case"),
    ("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|", "", "does not cut off contractions ('s, 'll)",
     "look for them first"),
    ("'s|'t|'re|'ve|'m|'ll|'d|", "(?i:'s|'t|'re|'ve|'m|'ll|'d)|", "cuts off contractions in capitals ('S), too",
     "look for lower case alone"),
    ("'s|'t|'re|'ve|'m|'ll|'d|", "", "does not cut off contractions ('s, 'll)", "look for them first"),
)  # fmt: skip
# The same of classes of characters, which may stand in a set.
_CLASSES = (
    (r"\p{L}", "A-Za-z", "takes ASCII's letters alone for letters", r"use \p{L}, all letters of Unicode"),
    (r"\p{L}", r"\w", r"takes \w for letters: digits, marks and _ are in it", r"use \p{L}"),
    (r"\p{N}", "0-9", "takes ASCII's digits alone for numbers", r"use \p{N}, all numbers of Unicode"),
    (r"\s", r" \t\n\r\f\v", "takes ASCII's white space alone for white space", r"use Unicode's \s"),
)
_NO_WORDS = (
    ((r"(?s:.+)",), "merges across words: the text is not cut into words first", "cut it by the pre-tokenizer first"),
    ((r" ?[^ ]+",), "cuts words at spaces alone", "cut them by the pre-tokenizer's expression"),
    ((r"\s?\S+",), "cuts words at white space alone", "cut them by the pre-tokenizer's expression"),
    ((r"\S+",), "cuts words at white space alone, and makes words of it", "cut them by the pre-tokenizer's expression"),
)  # fmt: skip


def _merges(rules: Rules) -> Iterator[Change]:
    """Of both kinds that merge."""
    right = "first the pair with the lowest place in tokenizer.ggml.merges"
    if rules.kind == "spm":
        right = "first the pair whose token has the highest score"
    yield Change(
        "merges-by-length", "merges first what makes the longest token", f"merge {right}", {"merge_by": "length"}
    )
    yield Change(
        "merges-by-id", "merges first what makes the token of the lowest id", f"merge {right}", {"merge_by": "id"}
    )
    yield Change("longest-match", "takes the longest token at each place, without merges", f"merge {right}",
                 {"longest_match": True})  # fmt: skip
    if rules.byte_fallback:
        yield Change("no-byte-fallback", "has the unknown token, or none, for what it could spell in bytes",
                     "spell it in the tokens of its UTF-8 bytes", {"byte_fallback": False})  # fmt: skip
    yield from _equal(rules)


def _equal(rules: Rules) -> Iterator[Change]:
    other = "first" if rules.equal_tokens == "last" else "last"
    yield Change("equal-tokens", f"takes the {other} of two tokens with one text",
                 f"llama.cpp takes the {rules.equal_tokens} one", {"equal_tokens": other})  # fmt: skip


def _of_bpe(rules: Rules) -> Iterator[Change]:
    says, fix = "takes a word that is a token whole, whatever its merges", "merge it as any other"
    if rules.ignore_merges:
        says, fix = "merges words that are tokens themselves", "take such a word whole: ignore_merges"
    yield Change("ignore-merges", says, fix, {"ignore_merges": not rules.ignore_merges})
    own = PRE_TOKENIZERS[rules.pre].patterns
    seen = {own}
    for change in pre_tokenizers(rules, PRE_TOKENIZERS):
        patterns = PRE_TOKENIZERS[change.rules["pre"]].patterns
        if patterns not in seen:
            seen.add(patterns)
            yield change
    for swap, table in ((str.replace, _MUTATIONS), (_with_class, _CLASSES)):
        for found, instead, says, fix in table:
            patterns = tuple(filter(None, (swap(each, found, instead) for each in own)))
            if patterns not in seen:
                seen.add(patterns)
                yield Change("expression", says, fix, {"patterns": patterns})
    for patterns, says, fix in _NO_WORDS:
        yield Change("expression", says, fix, {"patterns": patterns})
    yield from _merges(rules)
    if rules.byte_level:
        yield Change("characters", "merges characters, where this vocabulary is of bytes",
                     "write each byte as GPT-2's character first", {"byte_level": False})  # fmt: skip


def pre_tokenizers(rules: Rules, names: Iterable[str]) -> Iterator[Change]:
    """Other expressions than the file's own, by their names."""
    own = PRE_TOKENIZERS[rules.pre]
    for name in names:
        pre = PRE_TOKENIZERS[name]
        if rules.kind == "bpe" and pre.patterns != own.patterns and pre.byte_level == own.byte_level:
            yield Change("pre-tokenizer", f"cuts text into words as {name!r} does, where the file says {rules.pre!r}",
                         f"use the expressions of {rules.pre!r}", {"pre": name},
                         stated=("tokenizer.ggml.pre", name))  # fmt: skip


def _with_class(pattern: str, found: str, instead: str) -> str:
    """An expression with another class of characters, in sets and outside of them."""
    parts, in_set = [], False
    for part in re.split(r"(\\p\{\w+\}|\\.|[\[\]])", pattern):
        in_set = {"[": True, "]": False}.get(part, in_set)
        parts.append((instead if in_set else f"[{instead}]") if part == found else part)
    return "".join(parts)


def _of_wpm(rules: Rules) -> Iterator[Change]:
    for accents, says in (
        ("keep", "keeps accents"),
        ("strip", "takes accents apart in its own way"),
        ("first", "drops marks"),
    ):
        if accents != rules.accents:
            yield Change("accents", says, "decompose (NFD), and drop what is of category Mn", {"accents": accents})
    yield from _equal(rules)


def _of_ugm(rules: Rules) -> Iterator[Change]:
    yield from _equal(rules)


_WORDS_BY: Mapping[str, Callable[[Rules], Iterator[Change]]] = {
    "bpe": _of_bpe, "spm": _merges, "wpm": _of_wpm, "ugm": _of_ugm, "rwkv": _equal,
}  # fmt: skip

# -- what is done to a text before, whatever the tokenizer -------------------------------------------------------------


def _latin(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("latin-1")


def _visible(text: str) -> str:
    return "".join(c for c in text if c in "\t\n\r" or unicodedata.category(c) not in {"Cc", "Cf"})


def _code_units(text: str) -> str:
    return re.sub("[\U00010000-\U0010ffff]", "\ufffd\ufffd", text)


_AS_IT_IS = "take the text as it is given"
_TEXT = (
    Change("case", "makes a text lower case", "keep the text's case", before=str.lower),
    Change("text-stripped", "drops white space at both ends of a text", _AS_IT_IS, before=str.strip),
    Change("text-stripped", "drops white space at the end of a text", _AS_IT_IS, before=str.rstrip),
    Change("text-stripped", "drops white space at the beginning of a text", _AS_IT_IS, before=str.lstrip),
    Change("text-stripped", "drops newlines at the end of a text", _AS_IT_IS, before=lambda t: t.rstrip("\r\n")),
    Change("spaces-merged", "makes one space of several", _AS_IT_IS, before=lambda t: re.sub(" +", " ", t)),
    Change("spaces-merged", "makes one space of several, and none at the ends", _AS_IT_IS,
           before=lambda t: re.sub(" +", " ", t.strip(" "))),
    Change("space-prefix", "puts a space before a text that begins with none", _AS_IT_IS,
           before=lambda t: t if t[:1].isspace() else f" {t}"),
    Change("space-prefix", "puts a space before a text", _AS_IT_IS, before=lambda t: f" {t}"),
    Change("spaces-merged", "makes one space of white space of any kind", _AS_IT_IS,
           before=lambda t: re.sub(r"\s+", " ", t)),
    Change("spaces-merged", "makes one space of white space of any kind, and none at the ends", _AS_IT_IS,
           before=lambda t: " ".join(t.split())),
    Change("newlines", "makes a newline of CR LF", _AS_IT_IS, before=lambda t: t.replace("\r\n", "\n")),
    Change("newlines", "makes a newline of CR LF and of CR", _AS_IT_IS, before=lambda t: re.sub("\r\n?", "\n", t)),
    Change("newlines", "drops CR", _AS_IT_IS, before=lambda t: t.replace("\r", "")),
    Change("cut-at-nul", "ends a text at its first NUL", "give the length along: the text is no C string",
           before=lambda t: t.partition("\0")[0]),
    Change("nul-dropped", "drops NUL characters", _AS_IT_IS, before=lambda t: t.replace("\0", "")),
    Change("latin-1", "takes the bytes of UTF-8 for characters of Latin-1", "decode them as UTF-8", before=_latin),
    Change("code-units", "cuts characters beyond U+FFFF in two (UTF-16 code units)", "go by code points",
           before=_code_units),
    Change("invisible-dropped", "drops a byte order mark (U+FEFF)", _AS_IT_IS,
           before=lambda t: t.removeprefix("\ufeff")),
    Change("invisible-dropped", "drops zero-width characters", _AS_IT_IS,
           before=lambda t: re.sub("[\u200b-\u200d\u2060\ufeff]", "", t)),
    Change("controls-dropped", "drops control and invisible characters (Cc, Cf)", _AS_IT_IS, before=_visible),
    Change("controls-dropped", "drops control characters", _AS_IT_IS,
           before=lambda t: re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", "", t)),
    Change("spaces-unified", "makes a space of every no-break space", _AS_IT_IS,
           before=lambda t: t.replace("\u00a0", " ")),
    Change("escapes", r"makes a newline of \n written as two characters", _AS_IT_IS,
           before=lambda t: t.replace("\\n", "\n").replace("\\t", "\t")),
    Change("newline-added", "adds a newline to a text", "take it off: it is the line's, not the text's",
           before=lambda t: t + "\n"),
)  # fmt: skip


def _ids(parted: Sequence[Pair]) -> Iterator[Change]:
    """What is done to ids, read off some of a candidate's."""
    few = parted[:FEW]
    offsets = {a[0] - b[0] for _, a, b in few if a and len(a) == len(b)}
    if len(offsets) == 1 and (offset := offsets.pop()):
        yield Change("ids-off", f"gives ids that are {abs(offset)} too {'large' if offset > 0 else 'small'}",
                     "number the tokens from 0, as the file does", {"offset": offset})  # fmt: skip
    most = max((len(a) for _, a, _ in parted), default=0)
    if most and any(b[:most] == a and len(b) > most for _, a, b in parted):
        yield Change(
            "truncated", f"gives no more than {most} tokens", "leave no tokens out", after=lambda ids: ids[:most]
        )
    pairs = {(x, y) for _, a, b in few if len(a) == len(b) for x, y in zip(b, a, strict=True) if x != y}
    others = dict(pairs)
    if 0 < len(others) == len(pairs) <= EXCHANGED:
        says = " and ".join(f"token {wrong} for token {right}" for right, wrong in sorted(pairs))
        yield Change("other-id", f"gives {says}", f"look up {' and '.join(f'token {i}' for i in sorted(others))} again",
                     after=lambda ids: tuple(others.get(each, each) for each in ids))  # fmt: skip
    yield Change(
        "ids-16-bits", "keeps ids in 16 bits", "keep them in 32", after=lambda ids: tuple(i & 0xFFFF for i in ids)
    )
    yield Change("last-lost", "loses the last token", "keep it", after=lambda ids: ids[:-1])
