"""Small checkpoints of transformers' own classes, and llama.cpp's own converter to make files of them.

A model's numbers are all different, norms and biases are nowhere trivial, and every kind of layer is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ext.file.conversion.checkpoints import VOCAB, write_tokenizer

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": True}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """transformers' name of a model, and its config; ``whole``: the class, where it is not Name + ForCausalLM.

    ``config``: keys of config.json that transformers no longer writes, and the converter still reads.
    """

    name: str
    options: dict[str, Any]
    whole: str = ""
    config: tuple[tuple[str, Any], ...] = ()


def _of(name: str, whole: str = "", config: dict[str, Any] | None = None, **options: Any) -> Architecture:
    return Architecture(name, {**SIZES, **options}, whole, tuple((config or {}).items()))


ARCHITECTURES = {
    "llama": _of("Llama"),
    "qwen2": _of("Qwen2"),
    "qwen3": _of("Qwen3", head_dim=24),
    "qwen3moe": _of("Qwen3Moe", head_dim=24, norm_topk_prob=True, **EXPERTS),
    "qwen2moe": _of("Qwen2Moe", shared_expert_intermediate_size=56, **EXPERTS),
    "mixtral": _of("Mixtral", num_local_experts=6, num_experts_per_tok=2),
    "gemma": _of("Gemma", head_dim=16, tie_word_embeddings=True),
    "gemma2": _of("Gemma2", **GEMMA),
    "gemma3": _of("Gemma3Text", "Gemma3ForCausalLM", **{**GEMMA, "num_hidden_layers": 7}),
    "stablelm": _of("StableLm", use_qkv_bias=True),
    "starcoder2": _of("Starcoder2"),
    "gpt2": Architecture("GPT2", {"vocab_size": VOCAB, "n_positions": 128, "n_embd": 64, "n_layer": 3, "n_head": 4,
                                  **IDS}, "GPT2LMHeadModel", (("n_ctx", 128),)),
    "falcon": Architecture("Falcon", {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3,
                                      "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True,
                                      "alibi": False, "bias": False, "activation": "gelu_new", **IDS}),
    "mamba": Architecture("Mamba", {"vocab_size": VOCAB, "hidden_size": 64, "state_size": 16, "num_hidden_layers": 3,
                                    "tie_word_embeddings": False, **IDS}),
    "mamba2": Architecture("Mamba2", {"vocab_size": VOCAB, "hidden_size": 64, "num_heads": 8, "head_dim": 16,
                                      "n_groups": 2, "state_size": 16, "num_hidden_layers": 3,
                                      "tie_word_embeddings": False, **IDS}),
    "cohere": _of("Cohere", tie_word_embeddings=True, logit_scale=0.5),
    "cohere2": _of("Cohere2", config={"rotary_pct": 1.0}, num_hidden_layers=4, sliding_window=8,
                   tie_word_embeddings=True, logit_scale=0.5,
                   rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "glm4": _of("Glm4", head_dim=16, partial_rotary_factor=0.25),
    "granite": _of("Granite", **GRANITE),
    "granitemoe": _of("GraniteMoe", num_local_experts=6, num_experts_per_tok=2, **GRANITE),
    "olmo": _of("Olmo"),
    "olmo2": _of("Olmo2"),
    "smollm3": _of("SmolLM3", num_hidden_layers=4),
    "nemotron": _of("Nemotron"),
    "ernie4_5": _of("Ernie4_5", head_dim=16),
    "gpt-oss": _of("GptOss", head_dim=16, num_local_experts=6, num_experts_per_tok=2, sliding_window=8,
                   intermediate_size=64, rope_parameters=YARN),
    "arcee": _of("Arcee"),
    "seedoss": _of("SeedOss", head_dim=16),
    "hunyuan": _of("HunYuanDenseV1", head_dim=16),
    "lfm2": _of("Lfm2", full_attn_idxs=[1], block_ff_dim=96, block_multiple_of=8),
    "apertus": _of("Apertus"),
    "deepseek2": _of("DeepseekV2", q_lora_rank=24, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16,
                     v_head_dim=20, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1,
                     moe_intermediate_size=40, first_k_dense_replace=1, num_key_value_heads=4, topk_group=1,
                     n_group=1),
}  # fmt: skip
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20,
           "num_key_value_heads": 4}  # fmt: skip
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 1,
           "n_group": 1, "topk_group": 1, "num_hidden_layers": 6}  # fmt: skip
_INDEXER = {"index_head_dim": 128, "index_n_heads": 2, "index_topk": 32}
_DELTA = {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
          "linear_value_head_dim": 32, "num_hidden_layers": 8}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
             "mrope_interleaved": True}  # fmt: skip
_NEXTN, _MTP = {"num_nextn_predict_layers": 1}, {"mtp_num_hidden_layers": 1}
_SHARED = {**EXPERTS, "shared_expert_intermediate_size": 56}
# Those with heads that draft, which transformers' code has not.
DRAFTING = {
    "glm4_moe": _of("Glm4Moe", config=_NEXTN, head_dim=16, partial_rotary_factor=0.5, first_k_dense_replace=1,
                    **_ROUTED),
    "deepseek_v32": _of("DeepseekV32", config={"scoring_func": "sigmoid", **_NEXTN}, first_k_dense_replace=1,
                        **_ROUTED, **_LATENT, **_INDEXER),
    "glm_moe_dsa": _of("GlmMoeDsa", config=_NEXTN, **_ROUTED, **_LATENT, **_INDEXER),
    "qwen3_next": _of("Qwen3Next", decoder_sparse_step=1, **_DELTA, **_SHARED),
    "qwen3_5": _of("Qwen3_5Text", "Qwen3_5ForCausalLM", _MTP, rope_parameters=_SECTIONS, **_DELTA),
    "qwen3_5_moe": _of("Qwen3_5MoeText", "Qwen3_5MoeForCausalLM", _MTP, rope_parameters=_SECTIONS, **_DELTA,
                       **_SHARED),
    "hy_v3": _of("HYV3", config=_NEXTN, head_dim=16, **EXPERTS),
}  # fmt: skip
KEPT = ("A_log", ".D", "dt_bias")  # parameters whose numbers are not to be moved


def make(folder: Path, name: str) -> Path:
    """Write a checkpoint and its tokenizer."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    architecture = ARCHITECTURES[name]
    describe(folder, name, architecture.options)
    torch.manual_seed(7 * len(name) + 1)
    config = getattr(transformers, f"{architecture.name}Config")(**architecture.options)
    model = getattr(transformers, architecture.whole or f"{architecture.name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter, x in model.named_parameters():
            if not parameter.endswith(KEPT):
                x.add_((0.3 if x.ndim == 1 else 0.05) * torch.randn_like(x))
    about = (folder / "config.json").read_text("utf-8")
    model.save_pretrained(folder)
    (folder / "config.json").write_text(about, encoding="utf-8")
    return folder


def make_bert(folder: Path, activation: str) -> Path:
    """Write a checkpoint of a model that embeds texts, with its tokenizer."""
    import torch
    import transformers
    from tokenizers import BertWordPieceTokenizer

    letters = [chr(97 + place) for place in range(26)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=64, hidden_act=activation,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.BertModel(config)
    with torch.no_grad():
        for x in model.parameters():
            x.add_((0.3 if x.ndim == 1 else 0.05) * torch.randn_like(x))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertWordPieceTokenizer(vocab={word: place for place, word in enumerate(words)}).save(str(folder / "tokenizer.json"))
    named = {f"{word.strip('[]').lower()}_token": word for word in words[:5]}
    about = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


def pool(folder: Path, mode: str) -> Path:
    """Say how a checkpoint pools, in sentence-transformers' files."""
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken", "max_tokens")}
    (folder / "1_Pooling/config.json").write_text(json.dumps(modes), encoding="utf-8")
    return folder


def describe(folder: Path, name: str, options: dict[str, Any]) -> Path:
    """Write all of a checkpoint but its weights."""
    import transformers

    folder.mkdir(exist_ok=True)
    architecture = {**ARCHITECTURES, **DRAFTING}[name]
    config = getattr(transformers, f"{architecture.name}Config")(**options)
    config.architectures = [architecture.whole or f"{architecture.name}ForCausalLM"]
    about = {**json.loads(config.to_json_string(use_diff=False)), **dict(architecture.config)}
    (folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
    write_tokenizer(folder)
    (folder / "tokenizer.model").touch()
    _name_tokens(folder / "tokenizer.json")
    return folder


def _name_tokens(path: Path) -> None:
    """The last tokens have the names that a converter looks for."""
    about = json.loads(path.read_text("utf-8"))
    for place, word in enumerate(("[gMASK]", "<sop>", "<|endoftext|>", "<|user|>", "<|observation|>")):
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        about["added_tokens"].append({"id": VOCAB - 5 + place, "content": word, **plain, "special": True})
    path.write_text(json.dumps(about), encoding="utf-8")


# The converter asks for a tokenizer that it knows, and some architectures for SentencePiece's.
CONVERTING = f"""
import sys, types
sys.path[:0] = [sys.argv[1] + "/gguf-py", sys.argv[1]]
class Pieces:
    def __init__(self, *_): self.n = {VOCAB}
    LoadFromFile = __init__
    def vocab_size(self): return self.n
    def IdToPiece(self, i):
        return ("<unk>", "<s>", "</s>")[i] if i < 3 else "<0x%02X>" % (i - 3) if i < 259 else "p%d" % i
    def GetScore(self, i): return -float(i)
    def IsUnknown(self, i): return i == 0
    def IsControl(self, i): return i in (1, 2)
    def IsUnused(self, i): return False
    def IsByte(self, i): return 3 <= i < 259
class Any(type):
    def __getattr__(self, name): return self
    def __iter__(self): return iter(())
class Absent(metaclass=Any): __version__ = "99"  # which transformers asks for
for name in ("", ".tokens", ".tokens.tokenizers", ".tokens.tokenizers.base", ".tokens.tokenizers.multimodal",
             ".tokens.tokenizers.tekken", ".tokens.tokenizers.sentencepiece"):
    sys.modules["mistral_common" + name] = Absent  # until 2026 it had to be there
import convert_hf_to_gguf
try: from conversion.base import TextModel
except ImportError: from convert_hf_to_gguf import TextModel  # until 2026
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
try:
    from conversion.deepseek import DeepseekV32Model
    DeepseekV32Model.set_vocab = lambda self: self._set_vocab_gpt2()  # whose tokenizer must be LLaMA's
except ImportError: pass
sys.modules["sentencepiece"] = types.SimpleNamespace(SentencePieceProcessor=Pieces)
sys.argv[1:] = sys.argv[2:]
convert_hf_to_gguf.main()
"""


def convert(source: Path, folder: Path, path: Path, *options: str) -> Path:
    """Have llama.cpp's converter, of these sources, make a file of a checkpoint."""
    words = [sys.executable, "-c", CONVERTING, source, folder, "--outfile", path, "--outtype", "f32", *options]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [*map(str, words)], capture_output=True, text=True, check=False, encoding="utf-8", env=environment
    )
    assert path.is_file(), done.stderr[-500:]
    return path
