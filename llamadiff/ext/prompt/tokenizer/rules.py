"""What a tokenizer does besides its tables: every choice that engines get wrong, as a field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

from llamaref.errors import ModelError

from llamadiff.ext.prompt.tokenizer.pre_tokenizers import PRE_TOKENIZERS

Kind = Literal["spm", "bpe", "wpm", "ugm", "rwkv"]
Form = Literal["NFC", "NFKC", "NFD", "NFKD"]
KINDS: Mapping[str, Kind] = {
    "llama": "spm", "gpt2": "bpe", "gemma4": "bpe", "whitespace": "bpe", "bert": "wpm", "t5": "ugm", "rwkv": "rwkv",
}  # fmt: skip
BYTE_LEVEL = "gpt2"  # what a file calls the tokenizer whose words a pre-tokenizer cuts
# BOS, EOS and the unknown token where the file names none: llama-vocab.cpp, llama_vocab::impl::load
DEFAULT_IDS: Mapping[str, tuple[int | None, int | None, int | None]] = {
    "llama": (1, 2, 0), "gpt2": (11, 11, None), "gemma4": (None, None, None), "whitespace": (11, 11, None),
    "bert": (101, 102, 100), "t5": (None, 1, 2), "rwkv": (None, None, None),
}  # fmt: skip


@dataclass(frozen=True)
class Rules:
    """One way to tokenize; ``rules_of`` gives a file's own, ``as_original`` those of the model's first tokenizer.

    The first fields say what stands around the text, then how special tokens are cut out of it, how the text between
    them is normalised, how words become tokens, and what becomes of the ids and of the text that they stand for.
    """

    kind: Kind
    pre: str = "default"  # how BPE cuts words: a name of PRE_TOKENIZERS
    original_words: bool = False  # the model's own regex, where llama.cpp's only comes near it
    patterns: tuple[str, ...] | None = None  # other regexes than those of ``pre``

    bos: int | None = None
    eos: int | None = None  # of WPM: the separator
    add_bos: bool = False
    add_eos: bool = False
    bos_twice: bool = False

    parse_special: bool = True  # texts of control tokens are tokens, if the caller wants that
    retyped: bool = True  # tokens that look like control tokens are such, whatever the file says
    overlooked: frozenset[int] = frozenset()  # special tokens whose texts are text
    special_search: Literal["longest", "leftmost"] = "longest"  # who goes first where two of them overlap
    special_first: bool = True  # special tokens are cut out before the text is normalised and cut into words
    strip_left: frozenset[int] = frozenset()  # special tokens that eat the white space before them
    strip_right: frozenset[int] = frozenset()
    strip_unicode: bool = False  # they eat all white space, not ASCII's alone

    invalid: Literal["each", "part", "keep", "drop"] = "each"  # invalid UTF-8: a U+FFFD for each byte, each part ...
    normalization: Form | None = None
    lowercase: bool = False
    accents: Literal["keep", "strip", "first"] = "keep"  # of WPM; "first": only a decomposition's first character stays
    add_space_prefix: bool = False
    prefixed: Literal["each", "first", "start"] = "each"  # of texts between special tokens: all, the first, one that
    # no special token stands before
    escape_spaces: bool = False  # a space is "▁" (U+2581)
    remove_extra_whitespaces: bool = False
    treat_whitespace_as_suffix: bool = False

    byte_level: bool = False  # BPE's words are bytes in GPT-2's alphabet, not characters
    byte_fallback: bool = True  # what is no token becomes one for each byte, not the unknown one
    ignore_merges: bool = False  # a word that is a token is not made of merges
    merge_by: Literal["rank", "length", "id"] = "rank"  # which pair is merged first; SPM's rank is its score
    longest_match: bool = False  # at each place the longest token, without merges
    longest_word: int = 0  # of WPM: a word of more characters is unknown; 0: none is
    own_marks: bool = False  # of WPM: a "▁" in the text is not taken for the start of a word
    controls_first: bool = False  # of WPM: control characters are removed, those that are white space too
    equal_tokens: Literal["last", "first"] = "last"  # which of two tokens with the same text is meant
    unknown: int | None = None

    offset: int = 0  # added to every id
    clean_spaces: bool = False  # decoded text loses the spaces before punctuation


def rules_of(fields: Mapping[str, Any]) -> Rules:
    """The rules of a GGUF file, as llama.cpp reads it. Raises ModelError for what is not known."""
    model = str(fields.get("tokenizer.ggml.model"))
    if model not in KINDS:
        known = ", ".join(sorted(KINDS))
        raise ModelError(f"tokenizer.ggml.model = {model!r}: the tokenizers that can be run are {known}")
    kind = KINDS[model]
    rules = _with_ids(fields, model, _OF_KIND[kind] if kind != "bpe" else _bpe(fields, model))
    flags = {name: fields.get(f"tokenizer.ggml.{key}", getattr(rules, name)) for name, key in _FLAGS.items()}
    if kind == "bpe" and PRE_TOKENIZERS[rules.pre].always_bos:
        flags["add_bos"] = True
    if kind == "wpm":  # they are always added: llama-vocab.cpp, llama_vocab::impl::tokenize
        flags |= {"add_bos": True, "add_eos": True}
        lowercase = fields.get("tokenizer.ggml.normalizer.lowercase", True)
        strips = fields.get("tokenizer.ggml.normalizer.strip_accents", lowercase)
        rules = replace(rules, lowercase=lowercase, accents="first" if strips else "keep")
    if kind == "rwkv":
        flags |= {"add_bos": False, "add_eos": False}
    return _with_strips(fields, replace(rules, **flags))


def as_original(rules: Rules) -> Rules:
    """The same where llama.cpp is known to differ from the tokenizer that the model was trained with.

    Hugging Face's tokenizers search special tokens from the left (added_vocabulary.rs), strip white space of any kind,
    and of BERT decompose whole characters and remove control characters first (normalizers/bert.rs), know no word of
    more than a hundred characters (models/wordpiece), and have no "▁" that could stand in a text. Whether a token is a
    control token is what the file says.
    """
    rules = replace(rules, original_words=True, special_search="leftmost", strip_unicode=True, retyped=False)
    if rules.kind == "spm":
        return replace(rules, invalid="each")  # sentencepiece, src/normalizer.cc
    if rules.kind == "bpe":
        rules = replace(rules, normalization=PRE_TOKENIZERS[rules.pre].normalization)
    if rules.kind == "wpm":
        accents = "strip" if rules.accents == "first" else rules.accents
        rules = replace(rules, longest_word=100, own_marks=True, controls_first=True, accents=accents)
    return rules


_FLAGS = {
    "add_bos": "add_bos_token", "add_eos": "add_eos_token", "add_space_prefix": "add_space_prefix",
    "remove_extra_whitespaces": "remove_extra_whitespaces",
}  # fmt: skip
_OF_KIND: Mapping[Kind, Rules] = {
    "spm": Rules("spm", add_bos=True, add_space_prefix=True, escape_spaces=True, invalid="keep"),
    "wpm": Rules("wpm", byte_fallback=False, clean_spaces=True),
    "ugm": Rules("ugm", add_eos=True, escape_spaces=True, byte_fallback=False, invalid="keep"),
    "rwkv": Rules("rwkv", byte_fallback=False, invalid="keep"),
}


def _bpe(fields: Mapping[str, Any], model: str) -> Rules:
    name = "gemma4" if model == "gemma4" else fields.get("tokenizer.ggml.pre", "") or "default"
    if name not in PRE_TOKENIZERS:
        nearest = get_close_matches(str(name), PRE_TOKENIZERS, 1, 0)
        raise ModelError(f"tokenizer.ggml.pre = {name!r}: no such pre-tokenizer is known; the nearest is {nearest[0]}")
    pre = PRE_TOKENIZERS[name]
    return Rules(
        "bpe", name, add_bos=pre.add_bos, clean_spaces=pre.clean_spaces, ignore_merges=pre.ignore_merges,
        byte_level=pre.byte_level, escape_spaces=pre.escape_spaces,
        lowercase=bool(fields.get("tokenizer.ggml.normalizer.lowercase", False)) if model == "whitespace" else False,
    )  # fmt: skip


def _with_ids(fields: Mapping[str, Any], model: str, rules: Rules) -> Rules:
    """The ids that the file names; one that is no token counts as not named."""
    count = len(fields.get("tokenizer.ggml.tokens") or ())
    bos, eos, unknown = DEFAULT_IDS[model]
    if rules.kind == "bpe" and PRE_TOKENIZERS[rules.pre].no_bos:
        bos = None
    last = "seperator" if rules.kind == "wpm" else "eos"  # the key is spelled so

    def named(key: str, default: int | None) -> int | None:
        given = fields.get(f"tokenizer.ggml.{key}_token_id", default)
        valid = isinstance(given, int) and 0 <= given < count
        return given if valid else default if default is not None and default < count else None

    return replace(rules, bos=named("bos", bos), eos=named(last, eos), unknown=named("unknown", unknown))


def _with_strips(fields: Mapping[str, Any], rules: Rules) -> Rules:
    """Special tokens that eat white space, which llama.cpp knows by names: the end of llama_vocab::impl::load."""
    tokens = fields.get("tokenizer.ggml.tokens") or []
    pre, architecture = fields.get("tokenizer.ggml.pre") or "", fields.get("general.architecture") or ""
    name = str(fields.get("general.name") or "").lower()
    masks = {
        "<mask>": any(each in pre for each in ("jina-v2-de", "jina-v2-es", "jina-v2-code"))
        or any(each in architecture for each in ("nomic-bert-moe", "jina-bert-v3")),
        "[MASK]": "modern-bert" in name,
    }
    left = frozenset(i for i, text in enumerate(tokens) if masks.get(text))
    right: frozenset[int] = frozenset()
    if not left and ("phi-3" in name or "phi3" in name):
        kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        kept = {"<unk>", "<s>", "<|endoftext|>"}
        special = (i for i, kind in enumerate(kinds) if (kind in {2, 3, 4} or tokens[i] == "</s>"))
        right = frozenset(i for i in special if tokens[i] not in kept)
    return replace(rules, strip_left=left, strip_right=right)
