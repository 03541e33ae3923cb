"""The mistakes that the tests' converter can make, the architectures that they are mistakes of, and their names."""

from __future__ import annotations

from dataclasses import dataclass

from ext.file.conversion.checkpoints import MODELS

EVERY = frozenset(MODELS)
ROPED = EVERY - {"gpt2", "mamba2"}
GEMMA = frozenset({"gemma2", "gemma3"})
UNTIED = EVERY - GEMMA - {"gpt2"}


@dataclass(frozen=True)
class Injected:
    """What a converter does wrongly, in which architectures, and how it must be named, where."""

    mistake: str
    architectures: frozenset[str]
    cause: str
    where: str


INJECTED = (
    Injected("permutation-missing", frozenset({"llama"}), "permutation-missing", "blk.0.attn_k.weight"),
    Injected("permutation-extra", ROPED - {"llama", "phi3"}, "permutation-extra", "blk.0.attn_q.weight"),
    Injected("head-count", frozenset({"llama"}), "head-count", "blk.0.attn_k.weight"),
    Injected("plus-one-missing", GEMMA, "plus-one-missing", "blk.0.attn_norm.weight"),
    Injected("plus-one-twice", GEMMA, "plus-one-twice", "output_norm.weight"),
    Injected("transposed", EVERY, "transposed", "blk.1."),
    Injected("gate-up-swapped", ROPED, "gate-up-swapped", "blk.0.ffn_up"),
    Injected("rope-base", ROPED - {"gemma2", "phi3"}, "rope-base", "rope.freq_base"),
    Injected("rope-scaling", ROPED - {"gemma2", "stablelm"}, "rope-scaling", "rope"),
    Injected("epsilon", EVERY, "epsilon", "epsilon"),
    Injected("tied-head", UNTIED, "tied-head", "output.weight"),
    Injected("head-is-embedding", UNTIED, "tied-head", "output.weight"),
    Injected("qkv-order", frozenset({"gpt2", "phi3"}), "qkv-order", "blk.0.attn_qkv.weight"),
    Injected("expert-order", frozenset({"qwen3moe"}), "expert-order", "blk.0.ffn_up_exps.weight"),
    Injected("exp-missing", frozenset({"mamba2"}), "exp-missing", "blk.0.ssm_a"),
    Injected("bos-flag", EVERY, "bos-flag", "tokenizer.ggml.add_bos_token"),
)
CASES = [(injected, architecture) for injected in INJECTED for architecture in sorted(injected.architectures)]
