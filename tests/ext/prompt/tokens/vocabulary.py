"""A file's tokens, and what it says of them."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from ext.prompt.tokens.characters import as_bytes

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
ENDS = {  # whatever their type is, llama.cpp makes them control tokens
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
}  # fmt: skip
SPACE = "▁".encode()


def fields_of(path: str) -> dict[str, Any]:
    """A file's metadata. By hand: gguf's reader takes ten seconds for 280,000 merges."""
    with open(path, "rb") as file:
        data = file.read()
    at = 24

    def number(kind: str) -> Any:
        nonlocal at
        at += struct.calcsize(kind)
        return struct.unpack_from("<" + kind, data, at - struct.calcsize(kind))[0]

    def text() -> str:
        nonlocal at
        at += 8 + (size := struct.unpack_from("<Q", data, at)[0])
        return data[at - size : at].decode("utf-8", "surrogateescape")

    def value(kind: int) -> Any:
        nonlocal at
        if kind == 8:
            return text()
        if kind != 9:
            return number(NUMBERS[kind])
        kind, count = number("I"), number("Q")
        if kind in {8, 9}:
            return [value(kind) for _ in range(count)]
        at += struct.calcsize(many := f"<{count}{NUMBERS[kind]}")
        return struct.unpack_from(many, data, at - struct.calcsize(many))

    return {text(): value(number("I")) for _ in range(struct.unpack_from("<Q", data, 16)[0])}


class Vocabulary:
    """A file's tokens, and what it says of them."""

    def __init__(self, path: str) -> None:
        fields = fields_of(path)
        self.get: Callable[..., Any] = lambda key, default=None: fields.get(f"tokenizer.ggml.{key}", default)
        self.model, self.pre = self.get("model"), self.get("pre", "default")
        self.texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(self.get("tokens"))]
        self.types = [*self.get("token_type", [NORMAL] * len(self.texts))]
        self.kinds = [CONTROL if text in ENDS else kind for text, kind in zip(self.texts, self.types, strict=True)]
        self.scores = self.get("scores", [0.0] * len(self.texts))
        self.merges = self.get("merges", [])
        self.is_phi_3 = any(name in fields.get("general.name", "").lower() for name in ("phi-3", "phi3"))
        self.bos = self.get("bos_token_id", {"llama": 1, "gpt2": 11, "bert": 101}.get(self.model, -1))
        self.eos = self.get("eos_token_id", {"llama": 2, "gpt2": 11, "t5": 1}.get(self.model, -1))
        self.sep = self.get("seperator_token_id", 102)
        self.unknown = self.get("unknown_token_id", {"llama": 0, "bert": 100, "t5": 2}.get(self.model, -1))
        adds = self.model in {"llama", "bert"} or self.pre == "llama-bpe"
        self.adds_bos = self.model == "bert" or self.get("add_bos_token", adds)
        self.adds_eos = self.get("add_eos_token", self.model == "t5")


class Tables:
    """What is looked up in a vocabulary; ``has`` says which mistakes are made."""

    def __init__(self, vocabulary: Vocabulary, has: Any) -> None:
        self.vocabulary = v = vocabulary
        self.ids = {text: i for i, text in enumerate(v.texts)}
        self.by_bytes = {as_bytes(text): i for text, i in self.ids.items()}
        if has("equal-first"):
            self.by_bytes = {}
            for i, (text, kind) in enumerate(zip(v.texts, v.kinds, strict=True)):
                self.by_bytes.setdefault(bytes([int(text[3:5], 16)]) if kind == BYTE else as_bytes(text), i)
        self.most = max(map(len, self.by_bytes))
        self.scores = v.scores
        if has("scores-half"):
            with np.errstate(over="ignore"):
                self.scores = np.array(v.scores, np.float32).astype(np.float16).tolist()
        kinds = v.types if has("types-believed") else v.kinds
        wanted = {CONTROL, UNKNOWN, USER_DEFINED} - ({USER_DEFINED} if has("user-defined-missing") else set())
        count = 0 if has("special-as-text") else len(v.texts) - has("special-last-missing")
        special = [(as_bytes(v.texts[i]), i) for i in range(count) if kinds[i] in wanted]
        self.special = sorted(special, key=lambda each: -len(each[0]))
        self.unknown = v.get("padding_token_id", 0) if has("unknown-other") else v.unknown
