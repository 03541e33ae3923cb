"""Mistakes for the engines in Python here: the text of each that is replaced, and the taps that may be named for it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import gguf

ENGINES = Path(__file__).with_name("engines")


class Mistake(NamedTuple):
    """``old`` becomes ``new`` in an engine's file; ``words``: of the taps that are wrong then."""

    engine: str
    name: str
    old: str
    new: str
    words: tuple[str, ...]


NUMPY, BATCH, LISTS, TORCH = "with_numpy", "with_numpy_batch", "with_lists", "with_torch"
Q_AND_K = ("Qcur_rope", "Kcur_rope")
MISTAKES = (
    Mistake(NUMPY, "RoPE's base", "base=10000.0", "base=1000.0", Q_AND_K),
    Mistake(NUMPY, "RoPE turned back", "a * cos - b * sin\n", "a * cos + b * sin\n", Q_AND_K),
    Mistake(NUMPY, "RoPE a position late", "angle = pos * freq", "angle = (pos + 1) * freq", ()),  # no mistake
    Mistake(NUMPY, "no scale", "scores / np.sqrt(c.head_dim)", "scores / c.head_dim", ("kqv_out",)),
    Mistake(NUMPY, "heads by modulo", "kv = h // group", "kv = h % c.n_kv_heads", ("kqv_out",)),
    Mistake(NUMPY, "GELU", "gate = silu(w.w1[l] @ x)", "g = w.w1[l] @ x\n        gate = g / (1 + np.exp(-1.702 * g))",
            ("ffn_swiglu", "ffn_out", "l_out")),
    Mistake(NUMPY, "eps", "eps=1e-5", "eps=1e-2", ("attn_norm", "ffn_norm", "result_norm")),
    Mistake(NUMPY, "the other norm's weight", "h = rmsnorm(x, self.w.ffn_norm[l])",
            "h = rmsnorm(x, self.w.att_norm[l])", ("ffn_norm",)),
    Mistake(NUMPY, "no residual", "x = x + self.attention(l, h, pos)", "x = self.attention(l, h, pos)", ("ffn_inp",)),
    Mistake(NUMPY, "without the last key", "self.k_cache[l, : pos + 1, kv] @ q[h]",
            "self.k_cache[l, : pos + 1, kv] @ q[h]\n            scores[pos] = scores[pos] if pos < 3 else -np.inf",
            ("kqv_out",)),
    Mistake(NUMPY, "a transposed matrix", "return w.wo[l] @", "return w.wo[l].T @", ("attn_out",)),
    Mistake(NUMPY, "sums in float16", "return w.w2[l] @ (gate * up)",
            "return (w.w2[l].astype(np.float16) @ (gate * up).astype(np.float16)).astype(np.float32)", ("ffn_out",)),
    Mistake(NUMPY, "V of the layer before", "@ self.v_cache[l, :", "@ self.v_cache[max(0, l - 1), :", ("kqv_out",)),
    Mistake(NUMPY, "one layer without FFN", "x = x + self.ffn(l, h)", "x = x + self.ffn(l, h) * (l != 1)",
            ("l_out", "ffn_out")),
    Mistake(BATCH, "the mask off by one", "-np.inf), 1)", "-np.inf), 2)", ("kqv_out",)),
    Mistake(BATCH, "RoPE in halves", "x[..., 0::2] + 1j * x[..., 1::2]",
            "x[..., : dim // 2] + 1j * x[..., dim // 2 :]", (*Q_AND_K, "kqv_out")),
    Mistake(BATCH, "tiled for repeated heads", "k = np.repeat(k, n_heads // n_kv, axis=0)",
            "k = np.tile(k, (n_heads // n_kv, 1, 1))", ("kqv_out",)),
    Mistake(BATCH, "up for gate", "gate / (1 + np.exp(-gate)) * up", "up / (1 + np.exp(-up)) * gate", ("ffn_swiglu",)),
    Mistake(BATCH, "no norm at the end", 'norm(x, params["norm"]) @', "x @", ("result_norm", "result_output")),
    Mistake(BATCH, "heads not joined", ".transpose(1, 0, 2).reshape(n, dim)", ".reshape(n, dim)",
            ("kqv_out", "attn_out", "ffn_inp")),
    Mistake(LISTS, "RoPE's angle by the pair's place in the row", "(i % head_size) / head_size", "i / len(v)", Q_AND_K),
    Mistake(LISTS, "K is not turned", "            rotate(k, pos, head_size)\n", "", ("Kcur_rope", "kqv_out")),
    Mistake(LISTS, "SiLU without its product", "(1.0 + math.exp(-hb[i])) * hb2[i]", "(1.0 + math.exp(-hb[i]))",
            ("ffn_swiglu",)),
    Mistake(LISTS, "the sum of squares not divided", "sum(v * v for v in x) / len(x)", "sum(v * v for v in x)",
            ("attn_norm", "ffn_norm", "result_norm")),
    Mistake(LISTS, "softmax in place of its sum", "return [v / total for v in e]",
            "return [v / (total + 1) for v in e]", ("kqv_out",)),
    Mistake(TORCH, "no causal mask", "is_causal=True", "is_causal=False", ("kqv_out",)),
    Mistake(TORCH, "RoPE's base", "theta=10000.0", "theta=500000.0", Q_AND_K),
    Mistake(TORCH, "ReLU", "F.silu(self.w1(x))", "F.relu(self.w1(x))", ("ffn_swiglu", "ffn_out")),
    Mistake(TORCH, "layer norm", "rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5)",
            "rsqrt(f.var(-1, keepdim=True) + 1e-5)", ("attn_norm", "ffn_norm", "result_norm")),
    Mistake(TORCH, "FFN of what attention was given", "h + self.feed_forward(self.ffn_norm(h))",
            "h + self.feed_forward(self.ffn_norm(x))", ("ffn_norm",)),
)  # fmt: skip


def write_engine(folder: Path, engine: str, mistake: Mistake | None = None) -> Path:
    """An engine's file, with a mistake in it."""
    text = (ENGINES / f"{engine}.py").read_text("utf-8")
    if mistake is not None:
        assert text.count(mistake.old) == 1, mistake
        text = text.replace(mistake.old, mistake.new)
    path = folder / f"{engine}.py"
    path.write_text(text, "utf-8")
    return path


STACKED = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_down", "ffn_up")
SIZES = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count", "attention.head_count_kv")


def write_weights(model: Path, path: Path) -> Path:
    """A model's weights in float32, one after the other, as these engines read them."""
    file = gguf.GGUFReader(model)
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype("<f4") for t in file.tensors}
    sizes = [file.fields[f"llama.{name}"].contents() for name in SIZES]
    embedding = tensors["token_embd.weight"]
    names = [f"blk.{layer}.{name}.weight" for name in STACKED for layer in range(sizes[2])]
    arrays = [embedding, *(tensors[name] for name in names), tensors["output_norm.weight"]]
    arrays.append(tensors.get("output.weight", embedding))
    path.write_bytes(struct.pack("7i", *sizes, len(embedding), 64) + b"".join(each.tobytes() for each in arrays))
    return path
