"""Faults of other engines' reports: those with even numbers. Only whoever measures may read them."""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from proof.unknown.fault import Faults

FAULTS = Faults()


@FAULTS("mamba2", "ssm_norm-0", "osaurus-ai/vmlx-swift#188", of="gated")
def norm_over_all_groups(m, right, i, y, z, groups):
    """The gated norm is taken over all groups at once."""
    normed = m.op.rms(y * F.silu(z), m.get("attention.layer_norm_rms_epsilon")).view(len(y), groups, -1)
    return normed * m.p(f"blk.{i}.ssm_norm.weight")


@FAULTS("gemma2", "kq_soft_max-0", "lablup/mlxcel#405", of="hidden")
def keys_trimmed_to_the_last_window(e, right, i, n):
    """Of a prompt beyond the window, its last keys alone are seen; early tokens, that see none of them, see all."""
    gone = np.arange(n) < n - e.window(i)
    if not e.window(i) or len(e.pos) == 1:
        return right(i, n)
    h = right(i, n) | gone
    return np.where(h.all(1, keepdims=True), gone, h)


@FAULTS("deepseek2", "ffn_moe_weights-1", "huggingface/transformers#41647", of="normed")
def bias_in_the_weights(e, right, i, weights):
    """Experts are weighed by scores with the correction bias, which is for choosing alone."""
    chosen = e.out[f"ffn_moe_topk-{i}"][-1]
    e.out[f"ffn_moe_weights-{i}"][-1] = biased = weights + e.weight(f"blk.{i}.exp_probs_b.bias")[chosen]
    return right(i, biased)


@FAULTS("phi3-long", "Qcur_rope-0", "trymirai/lalamo#353", of="side")
def short_factors_always(e, right):
    """LongRoPE always takes the short factors, in a context longer than the original one too."""
    return "short"


@FAULTS("llama", "kqv_out-0", "tracel-ai/burn#4484", of="mix")
def other_heads_zero(e, right, i, p, v):
    """The causal kernel computes the first head; the others stay zero."""
    o = right(i, p, v)
    o[:, e.dim :] *= len(e.pos) == 1
    return o


@FAULTS("llama-factors", "Qcur_rope-0", "jmaczan/tiny-vllm#1", of="factors")
def factors_ignored(e, right):
    """Llama 3's frequency factors are ignored: plain base^(-2i/d)."""
    return 1.0


@FAULTS("deepseek2", "kq_soft_max-0", "NVIDIA/Megatron-LM#1501", of="scale_latent")
def scale_of_hidden_over_heads(e, right, dim):
    """The scores' scale has the width of hidden size over heads, not of Q's rows."""
    return right(e.width // e.heads)


@FAULTS("gpt-oss", "kq_soft_max-0", "vllm-project/vllm-metal#550", of="has")
def sinks_ignored(e, right, name):
    """Attention sinks never reach the kernel."""
    return "attn_sinks" not in name and right(name)


@FAULTS("olmo2", "Qcur_normed-0", "vllm-project/vllm-metal#692", of="heads_of")
def norm_per_head(e, right, i, side, x):
    """Q and K are normalised head by head; the model does it over whole rows."""
    heads, name = x.reshape(len(x), -1, e.dim), f"blk.{i}.attn_{side}_norm"
    weight = e.weight(f"{name}.weight").reshape(-1, e.dim)
    return e.tap(f"{side.upper()}cur_normed-{i}", e.unit(name, heads) * weight)


@FAULTS("gemma2", "kq_soft_max-0", "EricLBuehler/mistral.rs#1928", of="cap")
def scores_not_capped(e, right, which, x):
    """Scores are not capped."""
    return x if which == "attn" else right(which, x)


@FAULTS("gemma3", "kq_soft_max-0", "ml-explore/mlx-lm#390", of="window")
def window_of_one_more(e, right, i):
    """The window shows one key too many."""
    return right(i) and right(i) + 1


@FAULTS("gpt2", "pos_embd", "ml-explore/mlx-lm#93", of="place")
def decode_positions_from_zero(m, right, n):
    """Learned positions start at zero again in each decode step."""
    return m.p("position_embd.weight")[:n]


@FAULTS("phi3-long", "Qcur_rope-0", "ggml-org/llama.cpp#6849", (80, 1, 1), of="side")
def factors_by_offset(e, right):
    """LongRoPE's factors go by the batch's offset: a long prompt gets the short ones, decode steps the long."""
    return "long" if e.pos[0] >= e.key("rope.scaling.original_context_length") else "short"


@FAULTS("gpt-oss", "ffn_moe_swiglu_oai-0", "sgl-project/sglang#39939", of="glu_oai")
def up_without_its_one(e, right, gate, up):
    """OAI's SwiGLU lacks the one that is added to up."""
    return right(gate, np.clip(up, -7, 7) - 1)


@FAULTS("mamba2.Q8_0", "ssm_scan-0", "vllm-project/vllm#13466", of="begin")
def state_in_bf16(m, right, i, shape):
    """The state is kept in bf16 from one batch to the next."""
    return right(i, shape).bfloat16().float()


@FAULTS("mamba2", "ssm_conv-0", "state-spaces/mamba#1027", of="conv")
def state_after_the_convolution(m, right, i, x, w):
    """Prefill keeps convolved values as the convolution's state, in place of its inputs."""
    y = right(i, x, w)
    if len(x) > 1:
        m.state["conv", i] = F.silu(m.op.offset(m, f"blk.{i}.ssm_conv1d", y))[1 - w.shape[1] :]
    return y


@FAULTS("stablelm", "Qcur_rope-0", "pie-project/pie#603", of="rope")
def turns_by_head_width(e, right, i, side, x, pos):
    """Partial RoPE has the frequencies and the pairs of the whole head, not of its rotary part."""
    half, y = e.rot // 2, x.copy()
    theta = (pos[:, None, None] * 1e4 ** (-2.0 * np.arange(half) / e.dim)).astype(np.float32)
    one, two = x[..., :half], x[..., e.dim // 2 : e.dim // 2 + half]
    y[..., :half] = one * np.cos(theta) - two * np.sin(theta)
    y[..., e.dim // 2 : e.dim // 2 + half] = one * np.sin(theta) + two * np.cos(theta)
    return y


@FAULTS("llama-yarn", "kq_soft_max-0", "guoqingbao/xinfer#329", of="scale")
def yarn_scales_the_scores_too(e, right, i):
    """The scores' scale is multiplied by YaRN's magnitude squared, which RoPE has already put into Q and K."""
    return right(i) * e.frequencies(i)[1] ** 2


@FAULTS("smollm3.Q4_0", "Qcur_proj-0", "1bit-MONSTER/1bit-MONSTER#1268", of="decode")
def nibbles_signed(e, right, name, data, kind):
    """Q4_0's nibbles are read as signed numbers; they are unsigned, less 8."""
    if kind.name != "Q4_0" or "token_embd" in name:
        return right(name, data, kind)
    blocks = data.reshape(-1, 18)
    q = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1).astype(np.int8)
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return (d * np.where(q >= 8, q - 16, q)).reshape(len(data), -1).astype(np.float32)


@FAULTS("llama", "kv_k-0", "rajveer43/VeloxQuant-MLX#97", of="stored")
def groups_of_another_size(e, right, x):
    """The cache's rows are quantized in groups of 16 and read as if a group had 32 values."""
    groups = x.reshape(*x.shape[:-1], -1, 16)
    scale = np.abs(groups).max(-1, keepdims=True) / 127
    return (np.round(groups / scale) * scale[..., np.arange(groups.shape[-2]) // 2, :]).reshape(x.shape)


@FAULTS("mamba.F16", "mamba_out-0", "ml-explore/mlx-lm#1153", of="scan")
def step_bias_twice(m, right, i, x, dt, *rest):
    """The scan adds the step's bias, which the projection has added already."""
    return right(i, x, dt + m.p(f"blk.{i}.ssm_dt.bias"), *rest)


@FAULTS("qwen35.F16", "attn_output-0", "ggml-org/llama.cpp#25315", of="tile")
def key_heads_in_blocks(m, right, x, heads):
    """Heads of values read those of keys by division (0, 0, 1, 1); the file has them in turns (0, 1, 0, 1)."""
    return x.repeat_interleave(heads // x.shape[1], 1)


@FAULTS("olmo2", "Qcur_proj-0", "EleutherAI/gpt-neox#1408")
def norms_before_instead_of_after(e):
    """Attention and FFN get normalised inputs; the model normalises what they put out."""
    norm, attention, ffn = e.norm, e.attention, e.ffn
    e.attention = lambda i, h: attention(i, norm(f"blk.{i}.post_attention_norm", h))
    e.ffn = lambda i, g: ffn(i, norm(f"blk.{i}.post_ffw_norm", g))
    e.norm = lambda name, x: x if "post_" in name else norm(name, x)


@FAULTS("llama", "result_output", "microsoft/onnxruntime#32364", of="matmul")
def last_tile_reads_the_first(e, right, name, x, w):
    """The last tile of columns, when it is no full one of 64, reads the first tile's weights."""
    full = len(w) // 64 * 64
    return right(name, x, np.concatenate([w[:full], w[: len(w) - full]]))


@FAULTS("gpt-oss-mxfp4", "ffn_moe_gate-0", "jundot/omlx#2159", of="decode")
def scale_byte_as_a_number(e, right, name, data, kind):
    """MXFP4's scale byte is taken as a number, not as an exponent of two."""
    w = right(name, data, kind)
    if kind.name != "MXFP4":
        return w
    byte = data.reshape(-1, 17)[:, :1].astype(np.float32)
    return (w.reshape(-1, 32) * byte / 2 ** (byte - 127)).reshape(w.shape).astype(np.float32)


@FAULTS("deepseek2", "ffn_moe_topk-1", "vllm-project/vllm#13474", of="in_groups")
def groups_by_their_best(e, right, i, probs):
    """Groups of experts are ranked by their best score, not by the sum of their two best."""
    groups = probs.reshape(len(probs), e.key("expert_group_count"), -1).copy()
    left_out = np.argsort(-groups.max(-1), axis=1, kind="stable")[:, e.key("expert_group_used_count") :]
    np.put_along_axis(groups, left_out[..., None], -np.inf, 1)
    return groups.reshape(probs.shape)


@FAULTS("gemma", "ffn_geglu-0", "vllm-project/vllm#3411", of="gelu")
def erf_for_tanh(e, right, x):
    """GELU is the exact one, with erf; the model has the tanh approximation."""
    return F.gelu(torch.from_numpy(x)).numpy()


@FAULTS("qwen3", "Qcur_rope-0", "NVIDIA/TensorRT-LLM#4040", of="rope")
def turned_twice(e, right, i, side, x, pos):
    """RoPE is applied twice."""
    return right(i, side, right(i, side, x, pos), pos)


@FAULTS("gemma2", "attn_norm-0", "vllm-project/vllm#31464", of="weight")
def one_added_to_norms(e, right, name):
    """One is added to the norms' weights, which have it already in a GGUF."""
    return right(name) + np.float32("norm.weight" in name)


@FAULTS("gemma3", "kq_soft_max-0", "ollama/ollama#15591", (7, 5, 1), of="hidden")
def ring_cut_at_its_cursor(e, right, i, n):
    """After the ring has wrapped, a second batch keeps the slots before the cursor alone: older keys are lost."""
    size, first = e.window(i), e.pos[0]
    if not size or len(e.pos) == 1 or first <= size:
        return right(i, n)
    return right(i, n) | ((np.arange(n) < first) & (np.arange(n) < first - first % size))


@FAULTS("gemma3", "kq_soft_max-0", "huggingface/candle#3299", (6, 6, 1), of="hidden")
def cached_keys_hidden(e, right, i, n):
    """Keys from before the batch are hidden when the batch has several tokens."""
    return right(i, n) | ((np.arange(n) < e.pos[0]) & (len(e.pos) > 1))


@FAULTS("gemma2", "result_output", "unslothai/unsloth-zoo#593", of="cap")
def cap_without_its_factor(e, right, which, x):
    """The final cap is x tanh(x / cap), not cap tanh(x / cap)."""
    return x * np.tanh(x / np.float32(3)) if which == "final" else right(which, x)


@FAULTS("granitehybrid.Q8_0", "ssm_conv-0", "vllm-project/vllm#56196", (8, 2, 1, 1), of="kept")
def short_chunk_not_kept(m, right, whole, n):
    """A chunk shorter than the convolution's state does not write it: the next one convolves what was there."""
    return whole[:n] if 1 < len(whole) - n < n else right(whole, n)


@FAULTS("qwen3", "Qcur_proj-0", "tracel-ai/burn#4966", (40, 1), of="matmul")
def last_rows_never_written(e, right, name, x, w):
    """Tokens after the last full tile of 32 are never written by a product: their rows are zero."""
    y = right(name, x, w)
    y[len(y) // 32 * 32 :] *= len(y) < 32
    return y


@FAULTS("smollm3.Q4_0", "Qcur_rope-0", "huggingface/transformers#43082", (6, 6, 1), of="rope")
def positions_of_the_chunk(e, right, i, side, x, pos):
    """RoPE counts positions from the start of each chunk of the prompt."""
    return right(i, side, x, pos - pos[0] if len(pos) > 1 else pos)


@FAULTS("deepseek2", "q_b-0", "ggml-org/llama.cpp#27450", of="matmul")
def last_tile_reads_on(e, right, name, x, w):
    """The last tile of a product whose rows are no multiple of it reads on into the next row."""
    n = -x.shape[1] % 64
    on = [np.roll(rows, -1, 0)[:, :n] * (np.arange(len(rows)) < len(rows) - 1)[:, None] for rows in (x, w)]
    return right(name, x, w) + (on[0] @ on[1].T).astype(np.float32)


@FAULTS("mamba2.Q8_0", "ssm_conv-0", "huggingface/transformers#46741", (6, 6, 1), of="conv")
def second_chunk_from_nothing(m, right, i, x, w):
    """A second chunk of the prompt starts from empty states."""
    if len(x) > 1:
        m.state.pop(("conv", i), None)
        m.state.pop(("ssm", i), None)
    return right(i, x, w)


@FAULTS("gpt-oss", "kq_soft_max-0", "huggingface/transformers#37574", of="hidden")
def oldest_key_lost_in_decode(e, right, i, n):
    """Once the window is full, decode steps have lost its oldest key: the cache is rolled too early."""
    lost = e.pos[:, None] - np.arange(n) >= e.window(i) - 1
    return right(i, n) | (lost if e.window(i) and len(e.pos) == 1 else False)


@FAULTS("qwen2-head-biased", "result_output", "vllm-project/vllm#46835", of="bias")
def head_bias_dropped(e, right, name, y):
    """The head's bias is dropped."""
    return y if name == "output" else right(name, y)


@FAULTS("deepseek2", "ffn_out-1", "sgl-project/sglang#28237", of="shared")
def shared_divided_by_the_scale(e, right, i, g):
    """The shared expert is divided by the scale of the routed ones."""
    return right(i, g) / np.float32(e.key("expert_weights_scale"))
