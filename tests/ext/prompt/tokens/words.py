"""The expressions that cut a text into words, of a dozen models."""

from collections.abc import Iterator
from typing import Any

CONTRACTIONS = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
SPACES = r"|\s+(?!\S)|\s+"
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + SPACES
LLAMA_3 = "(?:" + CONTRACTIONS + r")|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + SPACES
QWEN_2 = LLAMA_3.replace("{1,3}", "")
QWEN_35 = QWEN_2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
BEFORE = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"  # as far as llama.cpp tells them apart
GPT_4O = (
    f"{BEFORE}{UPPER}*{LOWER}+(?:{CONTRACTIONS})?|{BEFORE}{UPPER}+{LOWER}*(?:{CONTRACTIONS})?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+" + SPACES
)
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-"
    "\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-"
    "ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
ASIAN = r"[[一-龥ࠀ-一가-\ud7ff]--\s]+"  # white space beyond ASCII is a vertical tab to llama.cpp here
PRE = {  # expressions one after another, each of what the ones before have left or cut
    "gpt-2": [GPT_2],
    "mpt": [GPT_2],
    "llama-bpe": [LLAMA_3],
    "dbrx": [LLAMA_3],
    "qwen2": [QWEN_2],
    "qwen35": [QWEN_35],
    "gpt-4o": [GPT_4O],
    "deepseek-llm": [r"[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3001-。]+", r"\s+\Z", ASIAN, r"\p{N}+"],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, r"\p{N}"],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT_2, "[0-9]{3}"],
    "starcoder": [r"\p{N}", GPT_2],
    "refact": [r"\p{N}", GPT_2],
    "command-r": [r"\p{N}", GPT_2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9]{3}"],
}
EDITS = {  # mistakes in an expression
    "digits-single": [(r"\p{N}{1,3}", r"\p{N}"), (r"\p{N}+", r"\p{N}")],
    "digits-all": [(r"\p{N}{1,3}", r"\p{N}+")],
    "contractions-lower": [(CONTRACTIONS, "'s|'t|'re|'ve|'m|'ll|'d")],
    "letters-ascii": [(r"\p{L}", "[A-Za-z]")],
    "letters-words": [(r"\p{L}", r"\w")],
    "spaces-ascii": [(r"\s", r"[ \t\n\v\f\r]"), (r"\S", r"[^ \t\n\v\f\r]")],
    "lookahead-missing": [(r"\s+(?!\S)|", "")],
    "signs-end-lines": [(r"]+[\r\n]*", "]+"), (r"]+[\r\n/]*", "]+")],
}


def cut(pattern: Any, text: str) -> Iterator[str]:
    """What an expression finds in a text, and what lies between."""
    end = 0
    for found in pattern.finditer(text):
        if found.start() > end:
            yield text[end : found.start()]
        yield found[0]
        end = found.end()
    if end < len(text):
        yield text[end:]


def edited(pattern: str, has: Any) -> str:
    """An expression, with the mistakes that are made in it."""
    for mistake, edits in EDITS.items():
        for old, new in edits if has(mistake) else []:
            pattern = pattern.replace(old, new)
    return pattern
