"""``tokenizer_json.py GGUF JSON``: a Hugging Face tokenizer of a .gguf file's vocabulary, as its original would be."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[4])]

from ext.prompt.tokens.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary  # noqa: E402

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BEFORE, UPPER, LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "gpt-2": GPT_2,
    "llama-bpe": LLAMA_3,
    "dbrx": LLAMA_3,
    "qwen2": LLAMA_3.replace("{1,3}", ""),
    "gpt-4o": f"{BEFORE}{UPPER}*{LOWER}+{CONTRACTIONS}?|{BEFORE}{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def tokenizer_json(v: Vocabulary) -> dict[str, Any]:
    """All of the file. Raises KeyError for a kind of tokenizer, or a pre-tokenizer, that is not here."""
    special = [i for i, kind in enumerate(v.kinds) if kind in {CONTROL, UNKNOWN, USER_DEFINED}]
    strips = {i for i in special if v.is_phi_3 and v.texts[i] not in {"<s>", "<unk>", "<|endoftext|>"}}
    added = [
        {"id": i, "content": v.texts[i], "single_word": False, "lstrip": False, "rstrip": i in strips,
         "normalized": False, "special": v.kinds[i] != USER_DEFINED}
        for i in special
    ]  # fmt: skip
    kind = {"gpt2": byte_level, "llama": sentence_piece, "bert": word_piece}[v.model](v)
    around = [[v.bos] if v.adds_bos else [], [v.sep] if v.model == "bert" else [v.eos] if v.adds_eos else []]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "post_processor": template(v, *around) if any(around) else None, **kind,
    }  # fmt: skip


def template(v: Vocabulary, before: list[int], after: list[int]) -> dict[str, Any]:
    """What is added around a text."""
    put = lambda ids: [{"SpecialToken": {"id": v.texts[i], "type_id": 0}} for i in ids]  # noqa: E731
    text = lambda name: [*put(before), {"Sequence": {"id": name, "type_id": 0}}, *put(after)]  # noqa: E731
    named = {v.texts[i]: {"id": v.texts[i], "ids": [i], "tokens": [v.texts[i]]} for i in before + after}
    return {"type": "TemplateProcessing", "single": text("A"), "pair": text("A") + text("B"), "special_tokens": named}


def bpe(v: Vocabulary, merges: list[list[str]], **more: Any) -> dict[str, Any]:
    """A model of merges, in their order."""
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return {**model, **more, "vocab": {text: i for i, text in enumerate(v.texts)}, "merges": merges}


def byte_level(v: Vocabulary) -> dict[str, Any]:
    """GPT-2's way, with the model's expression."""
    byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERNS[v.pre]}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte]}, "decoder": byte,
        "model": bpe(v, [merge.split(" ") for merge in v.merges], ignore_merges=v.pre == "llama-bpe"),
    }  # fmt: skip


def sentence_piece(v: Vocabulary) -> dict[str, Any]:
    """Llama's way: merges of characters, U+2581 for spaces and one in front, bytes for what is no token."""
    replace = lambda old, new: {"type": "Replace", "pattern": {"String": old}, "content": new}  # noqa: E731
    prepend = [{"type": "Prepend", "prepend": "▁"}] * bool(v.get("add_space_prefix", True))
    decoders = [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]  # fmt: skip
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace(" ", "▁")]}, "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": bpe(v, [*implied(v)], unk_token=v.texts[v.unknown], fuse_unk=True, byte_fallback=True),
    }  # fmt: skip


def implied(v: Vocabulary) -> Iterator[list[str]]:
    """The merges that scores imply: every cut of a token into two tokens, the best score first."""
    ids = {text: i for i, text in enumerate(v.texts)}
    for i in sorted(range(len(v.texts)), key=lambda i: -v.scores[i]):
        cuts = [(v.texts[i][:at], v.texts[i][at:]) for at in range(1, len(v.texts[i]))]
        found = [cut for cut in cuts if cut[0] in ids and cut[1] in ids]
        yield from map(list, sorted(found, key=lambda cut: (ids[cut[0]], ids[cut[1]])))


def word_piece(v: Vocabulary) -> dict[str, Any]:
    """BERT's way: "##" before what goes on a word, where the .gguf has U+2581 before what begins one."""
    plain = {CONTROL, UNKNOWN, USER_DEFINED}
    texts = [
        text if kind in plain or f"{text[0]}{text[-1]}" == "[]" else text[1:] if text[0] == "▁" else f"##{text}"
        for text, kind in zip(v.texts, v.kinds, strict=True)
    ]
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
                  "lowercase": True}  # fmt: skip
    model = {"type": "WordPiece", "unk_token": v.texts[v.unknown], "continuing_subword_prefix": "##",
             "max_input_chars_per_word": 100, "vocab": {text: i for i, text in enumerate(texts)}}  # fmt: skip
    return {
        "normalizer": normalizer, "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": model,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    }  # fmt: skip


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(tokenizer_json(Vocabulary(sys.argv[1]))), encoding="utf-8")
