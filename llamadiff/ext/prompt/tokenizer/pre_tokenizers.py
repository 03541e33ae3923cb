"""How BPE cuts a text into words before it merges: from the names in tokenizer.ggml.pre to regexes and options.

The names are llama.cpp's (src/llama-vocab.cpp), the regexes those of the models' tokenizer.json. Each regex is applied
to what the ones before it left: a match is a piece, and so is what lies between two. Where llama.cpp, which has but
C++'s std::regex, cuts differently, ``original`` is the model's own regex, and ``patterns`` does what llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import regex

# -- parts that many have in common ------------------------------------------------------------------------------------

SPACE = regex.compile(r"\s+")
SUFFIX = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
ANY_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # U+017F too is an s
WORD, NUMBER, LINES = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r"\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LETTER = r"[\p{L}\p{M}]"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NOT_LOWER, NOT_UPPER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"  # std::regex knows the case of ASCII alone
# llama.cpp's unicode_cpt_is_han
HAN = r"[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f]"
# digits in groups of three from the right: a run begins with what is left over; llama.cpp adds what stands before it
GROUPED = r"(?:(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})+(?!\p{N}))|\p{N}{1,3})"
GROUPED_WITH_BEFORE = rf"(?<!\P{{N}})\P{{N}}*+{GROUPED}"
CASED = (  # deepseek-llm's tokenizer.json
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    r"\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    r"\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    r"\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    r"\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    r"\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    r"\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
MARKED = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
SENTENCE = r" ?[^(\s|.,!?…。，、।۔،)]+"
LINEWISE = r"[^\n]+|\n+"


def _cased(upper: str, lower: str, suffix: str, number: str = NUMBER) -> str:
    """Words that end where a capital follows a small letter, as GPT-4o's do."""
    start = r"[^\r\n\p{L}\p{N}]?"
    signs = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    return f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}|{number}|{signs}|{LINES}"


@dataclass(frozen=True)
class Pre:
    """One pre-tokenizer: its regexes, in their order, and what llama.cpp sets besides where it is named.

    ``normalization`` is that of the model's tokenizer.json, which GGUF files do not tell and llama.cpp does not do.
    """

    patterns: tuple[str, ...]
    original: tuple[str, ...] | None = None
    add_bos: bool = False
    no_bos: bool = False  # the default id of BOS does not hold
    ignore_merges: bool = False
    clean_spaces: bool = False
    byte_level: bool = True
    escape_spaces: bool = False
    always_bos: bool = False  # whatever the file says
    drop_space: bool = False  # white space is no piece
    normalization: Literal["NFC"] | None = None

    def words(self, text: str, original: bool = False) -> list[str]:
        """The pieces of a text, which are all of it unless white space is dropped."""
        pieces = [text]
        for pattern in self.original if original and self.original else self.patterns:
            split = _splitter(pattern)
            pieces = [word for piece in pieces for word in split(piece) if word]
        return [word for word in pieces if not SPACE.fullmatch(word)] if self.drop_space else pieces


@cache
def _splitter(pattern: str) -> Callable[[str], list[str]]:
    """What cuts a text into matches and what lies between; some are empty."""
    split: Callable[[str], list[str]] = regex.compile(f"({pattern})").split
    return split


_GPT2, _STARCODER = Pre((GPT2,)), Pre((r"\p{N}", GPT2))
_LLAMA3 = Pre((f"{SUFFIX}|{WORD}|{NUMBER}|{SIGNS}|{LINES}",), (f"{ANY_SUFFIX}|{WORD}|{NUMBER}|{SIGNS}|{LINES}",))
_QWEN2 = Pre((f"{SUFFIX}|{WORD}|\\p{{N}}|{SIGNS}|{LINES}",), (f"{ANY_SUFFIX}|{WORD}|\\p{{N}}|{SIGNS}|{LINES}",))
_DEEPSEEK3 = Pre((NUMBER, CJK, f"{PUNCTUATED}|{MARKED}| ?[\\p{{P}}\\p{{S}}]+[\\r\\n]*|{LINES}"))
_GPT4O = Pre((_cased(NOT_LOWER, NOT_UPPER, f"{SUFFIX}?"),), (_cased(UPPER, LOWER, f"{ANY_SUFFIX}?"),))
_MARKS = r"(?:(?=[\p{L}\p{M}])[^a-z])", r"(?:(?=[\p{L}\p{M}])[^A-Z])"
_LINEWISE = Pre((LINEWISE,), byte_level=False, escape_spaces=True)
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_JAIS2 = "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"\s{1,2}(?!\S)|\s"
_BAILING = r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
_DEFAULT = Pre((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), clean_spaces=True)
_NOT_HAN = rf"(?:(?!{HAN})\p{{L}})+"

_ASIAN = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]"
_FULL_WIDTH = "!-/:-~！-／：-～‘-‟"
_NO_SPACE = rf"(?:(?!\s){_DEEPSEEK})+"  # std::regex is given a vertical tab for every white space beyond ASCII

_AFMOE = (
    "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
    f"{PUNCTUATED}|{MARKED}| ?[\\p{{P}}\\p{{S}}]+[\\r\\n]*|{LINES}",
)

_TABLE: Mapping[str, Pre] = {
    "default": _DEFAULT,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": replace(
        _LLAMA3, ignore_merges=True, add_bos=True, clean_spaces=True
    ),
    "dbrx smaug-bpe": replace(_LLAMA3, clean_spaces=True),
    "chatglm-bpe": replace(_LLAMA3, no_bos=True, clean_spaces=True),
    "glm4 glm5": replace(_LLAMA3, no_bos=True, ignore_merges=True, clean_spaces=True),
    "jais-2": Pre((f"{SUFFIX}|{WORD}|{NUMBER}|{SIGNS}|\\s*[\\r\\n]+|{_JAIS2}",), clean_spaces=True),
    "minicpm5": Pre(
        (NUMBER, f"{SUFFIX}|{WORD}|\\p{{N}}+|{SIGNS}|{LINES}"), ignore_merges=True, clean_spaces=True
    ),
    "deepseek-llm": Pre(
        (r"[\r\n]", rf"\s?[{CASED}]+", rf"\s?[{_FULL_WIDTH}\u3001-。]+", r"\s+\Z", _NO_SPACE, r"\p{N}+"),
        (r"[\r\n]", rf"\s?[{CASED}]+", rf"\s?[{_FULL_WIDTH}\u3000-。]+", r"\s+\Z", f"{_DEEPSEEK}+", r"\p{N}"),
    ),
    "deepseek-coder": Pre(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _NO_SPACE, r"\p{N}"),
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"{_DEEPSEEK}+", r"\p{N}"),
    ),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": _DEEPSEEK3,
    "spark2_5": Pre((NUMBER, CJK, rf"{PUNCTUATED}|{MARKED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "youtu": Pre(
        (
            _ASIAN,
            _cased(LETTER, LETTER, f"{SUFFIX}?", r"\p{N}"),
        ),
        (_ASIAN, _cased(UPPER, LOWER, f"{SUFFIX}?", r"\p{N}")),
        ignore_merges=True,
    ),
    "falcon": Pre((r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"), clean_spaces=True),
    "starcoder refact codeshell exaone minerva-7b mellum2": replace(_STARCODER, clean_spaces=True),
    "command-r": replace(_STARCODER, normalization="NFC"),
    "smollm": _STARCODER,
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code"
    " roberta-bpe exaone4 jais": replace(_GPT2, clean_spaces=True),
    "mpt olmo": replace(_GPT2, clean_spaces=True, normalization="NFC"),
    "trillion granite-docling": _GPT2,
    "qwen2 deepseek-r1-qwen kormo f2llmv2": replace(_QWEN2, normalization="NFC"),
    "megrez stablelm2": replace(_QWEN2, clean_spaces=True),
    "hunyuan solar-open grok-2": _QWEN2,
    "qwen35": Pre(
        (rf"{SUFFIX}|{_MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}",), normalization="NFC"
    ),
    "poro-chat": Pre((SENTENCE,)),
    "bloom gpt3-finnish": Pre((SENTENCE,), clean_spaces=True),
    "viking": Pre((SENTENCE, r"\p{N}")),
    "tekken": Pre(
        (_cased(NOT_LOWER, NOT_UPPER, "", r"\p{N}"),), (_cased(UPPER, LOWER, "", r"\p{N}"),),
        ignore_merges=True, add_bos=True,
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _GPT4O,
    "granite-embed-multi-97m": replace(
        _GPT4O, patterns=(_cased(*_MARKS, f"{SUFFIX}?"),), ignore_merges=True
    ),
    "tiny_aya cohere2moe": Pre(
        (GROUPED_WITH_BEFORE, _cased(LETTER, LETTER, f"{SUFFIX}?")),
        (r"\d{1,3}(?=(?:\d{3})*\b)", _cased(UPPER, LOWER, f"{ANY_SUFFIX}?")),
    ),
    "kimi-k2": Pre(
        (f"{HAN}+|[^\\r\\n\\p{{L}}\\p{{N}}]?{_NOT_HAN}{SUFFIX}?|{NUMBER}|{SIGNS}|{LINES}",),
        (
            r"\p{Han}+|[^\r\n\p{L}\p{N}]?" + rf"(?:(?!\p{{Han}}){UPPER})*(?:(?!\p{{Han}}){LOWER})+{ANY_SUFFIX}?"
            r"|[^\r\n\p{L}\p{N}]?" + rf"(?:(?!\p{{Han}}){UPPER})+(?:(?!\p{{Han}}){LOWER})*{ANY_SUFFIX}?"
            rf"|{NUMBER}|{SIGNS}|{LINES}",
        ),
    ),
    "superbpe": Pre((r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))")),
    "bailingmoe bailingmoe2 llada-moe": Pre(
        (rf"{_BAILING}|{WORD}|\p{{N}}|{SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",),
        (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
         r"|\s*[\r\n]|\s+(?!\S)|\s+",),
    ),
    "seed-coder": Pre(
        (rf"{SUFFIX}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES}",),
        (rf"{ANY_SUFFIX}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES}",),
    ),
    "ufakzeka": Pre((f"{WORD}|\\p{{N}}|{SIGNS}|{LINES}",)),
    "afmoe": Pre((GROUPED_WITH_BEFORE, *_AFMOE), (GROUPED, *_AFMOE)),
    "laguna": Pre((LINEWISE, *_QWEN2.patterns)),
    "exaone-moe": Pre((
        rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ), clean_spaces=True),
    "chameleon": Pre(
        ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", GPT2),
        add_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": replace(_LINEWISE, clean_spaces=True, always_bos=True),
    "sarvam-moe": _LINEWISE,
    "whitespace": Pre((r"\S+",), byte_level=False, drop_space=True, clean_spaces=True),
}  # fmt: skip
PRE_TOKENIZERS: Mapping[str, Pre] = {name: pre for names, pre in _TABLE.items() for name in names.split()}
