"""A converter of the tests' own, written from what each architecture's files hold, which errs when it is told to."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from models.gguf_file import finish
from safetensors.numpy import load_file

from llamadiff.llamacpp.library import load

Array = np.ndarray
Tensors = dict[str, Array]
PLAIN = ("ffn_gate_inp", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm", "rope_f", "q_norm", "k_norm")


class Converter:
    """One conversion. ``mistake`` is a name of mistakes.py, or None."""

    def __init__(self, folder: Path, architecture: str, mistake: str | None = None) -> None:
        self.config = json.loads((folder / "config.json").read_text("utf-8"))
        self.folder, self.arch, self.mistake = folder, architecture, mistake
        self.source: Tensors = {}
        for path in sorted(folder.glob("*.safetensors")):
            self.source |= load_file(path)
        self.heads = self.config.get("num_attention_heads", self.config.get("n_head", 0))
        self.kv = self.config.get("num_key_value_heads", self.heads)
        self.layers = self.config.get("num_hidden_layers", self.config.get("n_layer"))
        self.rope = self.config.get("rope_parameters", {})
        self.full = self.rope.get("full_attention", self.rope)

    # -- tensors --------------------------------------------------------------------------------------------------

    def tensors(self) -> Tensors:
        out = {"gpt2": self.gpt2, "mamba2": self.mamba2}.get(self.arch, self.transformer)()
        return self.spoiled(out)

    def transformer(self) -> Tensors:
        out = {"token_embd.weight": self.take("model.embed_tokens.weight"),
               "output_norm.weight": self.norm("model.norm.weight")}  # fmt: skip
        if "model.norm.bias" in self.source:
            out["output_norm.bias"] = self.take("model.norm.bias")
        if not self.config.get("tie_word_embeddings"):
            out["output.weight"] = self.take("lm_head.weight")
        for i in range(self.layers):
            out |= {f"blk.{i}.{name}": values for name, values in self.layer(f"model.layers.{i}.").items()}
        return out | self.factors()

    def layer(self, at: str) -> Tensors:
        out: Tensors = {}
        norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
        if self.arch in ("gemma2", "gemma3"):
            norms = {
                "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
                "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
            }  # fmt: skip
        if self.arch in ("qwen3", "qwen3moe", "gemma3"):
            norms |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
        for source, name in norms.items():
            out[f"{name}.weight"] = self.norm(f"{at}{source}.weight")
            if f"{at}{source}.bias" in self.source:
                out[f"{name}.bias"] = self.take(f"{at}{source}.bias")
        out |= self.attention(at + "self_attn.")
        return out | (self.experts(at + "mlp.") if self.arch == "qwen3moe" else self.ffn(at + "mlp."))

    def attention(self, at: str) -> Tensors:
        out = {"attn_output.weight": self.take(at + "o_proj.weight")}
        if self.arch == "phi3":
            return out | {"attn_qkv.weight": self.take(at + "qkv_proj.weight")}
        for part, heads in (("q", self.heads), ("k", self.kv), ("v", 0)):
            for kind in ("weight", "bias"):
                if f"{at}{part}_proj.{kind}" in self.source:
                    values = self.take(f"{at}{part}_proj.{kind}")
                    out[f"attn_{part}.{kind}"] = self.turned(values, heads, part) if heads else values
        if self.config.get("qk_layernorm"):
            for part, heads in (("q", self.heads), ("k", self.kv)):
                norms = [self.take(f"{at}{part}_layernorm.norms.{x}.weight") for x in range(heads)]
                out[f"attn_{part}_norm.weight"] = np.stack(norms)
        return out

    def turned(self, values: Array, heads: int, part: str) -> Array:
        """Llama's RoPE turns pairs in GGUF files; in checkpoints, halves."""
        if self.mistake == "permutation-extra":
            return pairs(values, heads)
        if self.arch != "llama" or self.mistake == "permutation-missing":
            return values
        if self.mistake == "head-count" and part == "k":
            heads = self.heads
        return pairs(values, heads)

    def ffn(self, at: str) -> Tensors:
        out = {"ffn_down.weight": self.take(at + "down_proj.weight")}
        if self.arch == "phi3":
            return out | {"ffn_up.weight": self.take(at + "gate_up_proj.weight")}
        return out | {f"ffn_{part}.weight": self.take(f"{at}{part}_proj.weight") for part in ("gate", "up")}

    def experts(self, at: str) -> Tensors:
        out = {"ffn_gate_inp.weight": self.take(at + "gate.weight")}
        order = list(range(self.config.get("num_local_experts", self.config.get("num_experts"))))
        if self.mistake == "expert-order":
            order = [2, 0, 3, 1]
        for part in ("gate", "up", "down"):
            own = [self.take(f"{at}experts.{x}.{part}_proj.weight") for x in order]
            out[f"ffn_{part}_exps.weight"] = np.stack(own)
        return out

    def gpt2(self) -> Tensors:
        out = {"token_embd.weight": self.take("transformer.wte.weight"),
               "position_embd.weight": self.take("transformer.wpe.weight")}  # fmt: skip
        out |= {f"output_norm.{kind}": self.take(f"transformer.ln_f.{kind}") for kind in ("weight", "bias")}
        names = {"attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up",
                 "mlp.c_proj": "ffn_down", "ln_1": "attn_norm", "ln_2": "ffn_norm"}  # fmt: skip
        for i in range(self.layers):
            for source, name in names.items():
                for kind in ("weight", "bias"):
                    out[f"blk.{i}.{name}.{kind}"] = self.take(f"transformer.h.{i}.{source}.{kind}").T
        return out

    def mamba2(self) -> Tensors:
        out = {"token_embd.weight": self.take("backbone.embeddings.weight"),
               "output_norm.weight": self.take("backbone.norm_f.weight"),
               "output.weight": self.take("lm_head.weight")}  # fmt: skip
        groups = self.config["n_groups"]
        for i in range(self.layers):
            at, blk = f"backbone.layers.{i}.", f"blk.{i}."
            out[blk + "attn_norm.weight"] = self.take(at + "norm.weight")
            for source, name in {"in_proj.weight": "ssm_in.weight", "out_proj.weight": "ssm_out.weight",
                                 "conv1d.bias": "ssm_conv1d.bias", "dt_bias": "ssm_dt.bias"}.items():  # fmt: skip
                out[blk + name] = self.take(f"{at}mixer.{source}")
            out[blk + "ssm_conv1d.weight"] = self.take(at + "mixer.conv1d.weight")[:, 0]
            log = self.take(at + "mixer.A_log")[:, None]
            out[blk + "ssm_a"] = log if self.mistake == "exp-missing" else -np.exp(log)
            out[blk + "ssm_d"] = self.take(at + "mixer.D")[:, None]
            out[blk + "ssm_norm.weight"] = self.take(at + "mixer.norm.weight").reshape(groups, -1)
        return out

    def take(self, name: str) -> Array:
        return self.source[name].astype(np.float32)

    def norm(self, name: str) -> Array:
        """Gemma multiplies by weight + 1."""
        more = {"plus-one-missing": 0, "plus-one-twice": 2}.get(self.mistake or "", 1)
        return self.take(name) + (more if self.arch in ("gemma2", "gemma3") else 0)

    def factors(self) -> Tensors:
        """Factors of RoPE's frequencies."""
        if self.mistake == "rope-scaling":
            return {}
        kind = self.full.get("rope_type")
        if kind == "longrope":
            return {f"rope_factors_{side}.weight": np.array(self.full[f"{side}_factor"], np.float32)
                    for side in ("long", "short")}  # fmt: skip
        return {"rope_freqs.weight": self.llama3()} if kind == "llama3" else {}

    def llama3(self) -> Array:
        """transformers' own frequencies, divided into the plain ones."""
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = AutoConfig.from_pretrained(self.folder)
        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
        size = 2 * len(scaled)
        plain = self.full["rope_theta"] ** (-np.arange(0, size, 2) / size)
        return np.asarray(plain / scaled, np.float32)

    def spoiled(self, out: Tensors) -> Tensors:
        """Mistakes that are made of what is there."""
        if self.mistake == "transposed":
            name = next(n for n in ("blk.1.attn_output.weight", "blk.1.ssm_out.weight") if n in out)
            out[name] = np.ascontiguousarray(out[name].T)
        if self.mistake == "gate-up-swapped":
            self._swap_gates(out)
        if self.mistake == "tied-head":
            out.pop("output.weight")
        if self.mistake == "head-is-embedding":
            out["output.weight"] = out["token_embd.weight"]
        if self.mistake == "qkv-order":
            for name in [name for name in out if "attn_qkv" in name]:
                out[name] = self._reordered(out[name])
        return out

    def _swap_gates(self, out: Tensors) -> None:
        for i in range(self.layers):
            if self.arch == "phi3":
                out[f"blk.{i}.ffn_up.weight"] = np.roll(out[f"blk.{i}.ffn_up.weight"], 512, 0)
                continue
            gate, up = (next(n for n in out if n.startswith(f"blk.{i}.ffn_{part}") and "inp" not in n)
                        for part in ("gate", "up"))  # fmt: skip
            out[gate], out[up] = out[up], out[gate]

    def _reordered(self, fused: Array) -> Array:
        size = len(fused) // (self.heads + 2 * self.kv)
        q, k, v = np.split(fused, [self.heads * size, (self.heads + self.kv) * size])
        return np.concatenate([k, q, v] if self.arch == "phi3" else [v, k, q])

    # -- metadata -------------------------------------------------------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        c, out = self.config, self.sizes()
        eps = 1e-3 if self.mistake == "epsilon" else None
        for key, name in {"rms_norm_eps": "attention.layer_norm_rms_epsilon",
                          "layer_norm_eps": "attention.layer_norm_epsilon",
                          "layer_norm_epsilon": "attention.layer_norm_epsilon"}.items():  # fmt: skip
            if key in c:
                out["attention.layer_norm_rms_epsilon" if self.arch == "mamba2" else name] = eps or c[key]
        if self.arch not in ("gpt2", "mamba2"):
            out |= self.ropes()
        for key, name in {"attn_logit_softcapping": "attn_logit_softcapping",
                          "final_logit_softcapping": "final_logit_softcapping"}.items():  # fmt: skip
            if c.get(key):
                out[name] = c[key]
        if self.arch in ("gemma2", "gemma3", "phi3") and c.get("sliding_window"):
            out["attention.sliding_window"] = c["sliding_window"]
        if self.arch == "stablelm":
            out["use_parallel_residual"] = c["use_parallel_residual"]
        return out

    def sizes(self) -> dict[str, Any]:
        c = self.config
        if self.arch == "mamba2":
            return {"block_count": self.layers, "context_length": 1 << 20, "embedding_length": c["hidden_size"],
                    "feed_forward_length": 0, "attention.head_count": 0, "ssm.conv_kernel": c["conv_kernel"],
                    "ssm.inner_size": c["expand"] * c["hidden_size"], "ssm.state_size": c["state_size"],
                    "ssm.time_step_rank": c["num_heads"], "ssm.group_count": c["n_groups"]}  # fmt: skip
        embd = c.get("hidden_size", c.get("n_embd"))
        out = {"block_count": self.layers, "context_length": c.get("max_position_embeddings", c.get("n_positions")),
               "embedding_length": embd, "feed_forward_length": c.get("intermediate_size", 4 * embd),
               "attention.head_count": self.heads, "attention.head_count_kv": self.kv}  # fmt: skip
        if "head_dim" in c:
            out |= {"attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"]}
        if self.arch == "qwen3moe":
            out |= {"expert_count": c.get("num_local_experts", c.get("num_experts")),
                    "expert_used_count": c["num_experts_per_tok"],
                    "expert_feed_forward_length": c["moe_intermediate_size"]}  # fmt: skip
        return out

    def ropes(self) -> dict[str, Any]:
        c, full = self.config, self.full
        out: dict[str, Any] = {} if self.mistake == "rope-base" else {"rope.freq_base": float(full["rope_theta"])}
        size = c.get("head_dim", c["hidden_size"] // self.heads)
        out["rope.dimension_count"] = int(size * full.get("partial_rotary_factor", 1.0))
        if self.mistake != "rope-scaling" and full.get("rope_type") in ("linear", "yarn"):
            out |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": float(full["factor"])}
        if self.mistake != "rope-scaling" and full.get("rope_type") in ("yarn", "longrope"):
            out["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        return out


def pairs(values: Array, heads: int) -> Array:
    """Rows of each head from halves to pairs."""
    rest = values.shape[1:]
    return values.reshape(heads, 2, -1, *rest).swapaxes(1, 2).reshape(values.shape)


# -- the file -----------------------------------------------------------------------------------------------------


def convert(folder: Path, architecture: str, out: Path, kind: str = "F16", mistake: str | None = None) -> Path:
    """Write the GGUF of a checkpoint, with matrices of a type (Q4_K_M: a mix of two)."""
    converter = Converter(folder, architecture, mistake)
    writer = gguf.GGUFWriter(out, architecture)
    for key, value in converter.metadata().items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)
    add_tokenizer(writer, folder, mistake)
    for name, values in converter.tensors().items():
        data, number = stored(name, np.ascontiguousarray(values), kind)
        writer.add_tensor(name, data, raw_dtype=number)
    finish(writer)
    return out


def stored(name: str, values: Array, kind: str) -> tuple[Array, Type | None]:
    """A tensor as a file of this type keeps it."""
    if values.ndim == 1 or any(part in name for part in PLAIN) or kind == "F32":
        return values, None
    if kind == "F16":
        return values.astype(np.float16), None
    number = Type.Q8_0
    if kind == "Q4_K_M":
        number = Type.Q6_K if "ffn_down" in name or "attn_v" in name or name == "output.weight" else Type.Q4_K
    elif kind != "Q8_0":
        number = Type[kind]
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[number][0]:
        number = Type.Q8_0
    return quantized(values, number), number


def quantized(values: Array, number: Type) -> Array:
    """Blocks as ggml makes them."""
    quantizer = load("ggml-base").ggml_quantize_chunk
    place, count = ctypes.c_void_p, ctypes.c_int64
    quantizer.restype, quantizer.argtypes = ctypes.c_size_t, [ctypes.c_int, place, place, count, count, count, place]
    per_block, size = gguf.GGML_QUANT_SIZES[number]
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    out = np.zeros((len(rows), rows.shape[1] // per_block * size), np.uint8)
    even = np.ones(rows.shape[1], np.float32)
    quantizer(int(number), rows.ctypes.data, out.ctypes.data, 0, *rows.shape, even.ctypes.data)
    return out.reshape(*values.shape[:-1], -1)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, mistake: str | None) -> None:
    """The byte-level BPE of tokenizer.json."""
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    words = {index: text for text, index in data["model"]["vocab"].items()}
    special = {token["id"] for token in data["added_tokens"]}
    count = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    tokens = [words.get(index, f"[PAD{index}]") for index in range(count)]
    kinds = [3 if index in special else 1 if index in words else 5 for index in range(count)]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in data["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if mistake != "bos-flag":
        writer.add_add_bos_token(json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["add_bos_token"])
