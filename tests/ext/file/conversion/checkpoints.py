"""Small checkpoints in Hugging Face's form, one an architecture, made with transformers; their norms are no ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 320
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [1.0 + i / 4 for i in range(16)],
        "short_factor": [1.0 + i / 8 for i in range(16)], "original_max_position_embeddings": 64}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 32, "tie_word_embeddings": True}
GPT2 = {"vocab_size": VOCAB, "n_positions": 128, "n_embd": 256, "n_layer": 2, "n_head": 8, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip
MAMBA2 = {"vocab_size": VOCAB, "hidden_size": 256, "num_heads": 8, "head_dim": 64, "n_groups": 2, "state_size": 32,
          "num_hidden_layers": 2, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
          "pad_token_id": 0, "layer_norm_epsilon": 1e-6}  # fmt: skip

# architecture -> transformers' names of it, and its config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SIZES, "rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {**SIZES, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                                                     "original_max_position_embeddings": 64}}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 64, "rope_parameters": LINEAR}),
    "gemma2": ("Gemma2", {**SIZES, **GEMMA}),
    "gemma3": ("Gemma3Text", {**SIZES, **GEMMA, "rope_parameters": GEMMA3_ROPE}),
    "phi3": ("Phi3", {**SIZES, "rope_parameters": LONG, "original_max_position_embeddings": 64,
                      "sliding_window": 64}),
    "stablelm": ("StableLm", {**SIZES, "qk_layernorm": True, "use_qkv_bias": True,
                              "rope_parameters": {"rope_type": "default", "rope_theta": 5e4,
                                                  "partial_rotary_factor": 0.25}}),
    "gpt2": ("GPT2", GPT2),
    "qwen3moe": ("Qwen3Moe", {**SIZES, "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2,
                              "moe_intermediate_size": 256, "norm_topk_prob": True, "rope_parameters": LINEAR}),
    "mamba2": ("Mamba2", MAMBA2),
}  # fmt: skip
HEADS = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def make(folder: Path, architecture: str, shard: str = "5GB", **changed: Any) -> Path:
    """Write a checkpoint with random weights and a tokenizer of bytes."""
    import torch
    import transformers

    kind, options = MODELS[architecture]
    config = getattr(transformers, f"{kind}Config")(**{**options, **changed})
    torch.manual_seed(len(architecture))
    model = getattr(transformers, HEADS.get(kind, f"{kind}ForCausalLM"))(config)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.ndim == 1 and not name.endswith(("A_log", ".D")):
                values.add_(0.3 * torch.randn_like(values))
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, add_bos: bool = True) -> None:
    """A byte-level BPE of a few merges, whose files say that a beginning-of-text token is added."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the cat sat on the mat and then the other cat sat there"] * 4, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"add_bos_token": add_bos, "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
              "tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
