"""The tables of a GGUF file's tokenizer: tokens, what kind each is, scores and merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llamaref.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.h, enum llama_token_type
SPECIAL = {UNKNOWN, CONTROL, USER_DEFINED}  # found in a text before it is cut into words

# Texts that make a token a control token, whatever the file says: llama-vocab.cpp, llama_vocab::impl::load. The first
# end a generation; the others do where the file names no token for the key.
ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
})  # fmt: skip
FILLS = {
    ("fim_pre", "prefix"): {
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|prefix|>",
    },
    ("fim_suf", "suffix"): {
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|suffix|>",
    },
    ("fim_mid", "middle"): {
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
        "<|middle|>",
    },
    ("fim_pad",): {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"},
    ("fim_rep",): {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"},
    ("fim_sep",): {"<|file_sep|>"},
}  # fmt: skip
HARMONY = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})  # always shown


class Vocabulary:
    """Tokens by id and ids by text. Raises ModelError for tables that do not fit one another."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        texts = fields.get("tokenizer.ggml.tokens")
        if not isinstance(texts, list) or not texts:
            raise ModelError("metadata key tokenizer.ggml.tokens is missing: the file has no vocabulary")
        self.texts: Sequence[str] = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
        self.stated_kinds: Sequence[int] = self._column("token_type", NORMAL)

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each text; of equal ones the last."""
        return {text: i for i, text in enumerate(self.texts)}

    @cached_property
    def first_ids(self) -> dict[str, int]:
        """The same; of equal ones the first."""
        return {text: i for i, text in reversed([*enumerate(self.texts)])}

    @cached_property
    def longest(self) -> int:
        """The characters of the longest token."""
        return max(map(len, self.texts))

    @cached_property
    def scores(self) -> Sequence[float]:
        """A score for each token, rounded to float32."""
        return [float(score) for score in np.asarray(self._column("scores", 0.0), np.float32)]

    @cached_property
    def merges(self) -> dict[tuple[str, str], int]:
        """The rank of each pair that BPE merges: its place in the file's list, the first one of equal pairs.

        The two are separated by the first space after the first character.
        """
        ranks: dict[tuple[str, str], int] = {}
        for rank, line in enumerate(self.fields.get("tokenizer.ggml.merges") or ()):
            cut = line.find(" ", 1)
            ranks.setdefault((line[:cut], line[cut + 1 :]) if cut > 0 else ("", ""), rank)
        return ranks

    @cached_property
    def byte_ids(self) -> Mapping[int, int]:
        """The token of each byte that has one: ``<0x41>``."""
        return {byte: i for byte in range(256) if (i := self.ids.get(f"<0x{byte:02X}>")) is not None}

    @cached_property
    def kinds(self) -> Sequence[int]:
        """What each token is, with llama.cpp's repairs: tokens that converters forgot to mark as control tokens."""
        kinds, ids = list(self.stated_kinds), self.ids
        present = {text for text in ENDS if text in ids}
        for keys, texts in FILLS.items():
            if not any(f"tokenizer.ggml.{key}_token_id" in self.fields for key in keys):
                present |= {text for text in texts if text in ids}
        for text in present:
            kinds[ids[text]] = CONTROL
        for text in HARMONY & ids.keys():
            kinds[ids[text]] = USER_DEFINED
        calls = present & {"<|call|>", "<|calls|>"}
        if "<|end|>" in present and calls and present & {"<|return|>", "<|flush|>"}:
            kinds[ids["<|end|>"]] = USER_DEFINED
        if "</s>" in present and ({"<|tool_response>"} & present or "<|plamo:eos|>" in ids):
            kinds[ids["</s>"]] = NORMAL
        return kinds

    def _column(self, name: str, default: Any) -> Any:
        values = self.fields.get(f"tokenizer.ggml.{name}")
        if values is None:
            return [default] * len(self.texts)
        if len(values) < len(self.texts):
            raise ModelError(f"tokenizer.ggml.{name} has {len(values)} values for {len(self.texts)} tokens")
        return values
