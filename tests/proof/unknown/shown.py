"""Faults of other engines' reports: those with odd numbers, which whoever improves llamadiff may read."""

import numpy as np
import torch

from proof.unknown.fault import Faults, bf16

FAULTS = Faults()


@FAULTS("qwen2", "Qcur_rope-0", "ggml-org/llama.cpp#23400", of="positions")
def position_after_restoring(e, right, pos):
    """After the prompt's state was restored, the first token goes on one position too far."""
    return pos + (e.step == 1)


@FAULTS("qwen2", "attn_norm-0", "tile-ai/tilelang#1243", of="unit")
def epsilon_beside_the_root(e, right, name, x):
    """Epsilon is added to the root, not under it."""
    return x / (np.sqrt((x * x).mean(-1, keepdims=True)) + np.float32(e.eps))


@FAULTS("qwen3moe", "ffn_moe_gate-0", "tenstorrent/tt-metal#50669", (33, 1), of="by_expert")
def rows_of_the_next_token(e, right, name, x, chosen):
    """The last token in the list of each expert but the first is read from the row after its own."""
    x, y = x.copy(), x
    for expert in set(chosen.ravel().tolist()) - {0}:
        token, slot = np.argwhere(chosen == expert)[-1]
        x[token, slot] = y[(token + 1) % len(y), slot]
    return right(name, x, chosen)


@FAULTS("deepseek2", "ffn_moe_weights_norm-1", "pytorch/torchtitan#1418", of="normed")
def weights_not_normed(e, right, i, weights):
    """The chosen experts' sigmoids are not made to sum to one."""
    return weights


@FAULTS("mpt.Q8_0", "kq_soft_max-0", "ml-explore/mlx#3071", of="weigh")
def bias_from_a_cached_matrix(m, right, scores):
    """Decode steps get the first row of a cached ALiBi matrix: distances from position 0."""
    if scores.shape[1] > 1:
        return right(scores)
    slopes = m.op.slopes(m.get("attention.max_alibi_bias"), len(scores))
    return (scores - slopes[:, None, None] * torch.arange(scores.shape[2])).softmax(-1)


@FAULTS("granitehybrid.Q8_0", "ssm_norm-0", "1bit-MONSTER/1bit-MONSTER#1154", of="norm")
def norm_weight_missing(m, right, name, x):
    """The state space's norm has no weights."""
    return m.op.rms(x, m.get("attention.layer_norm_rms_epsilon")) if "ssm_norm" in name else right(name, x)


@FAULTS("llama-linear", "Qcur_rope-0", "mit-han-lab/llm-awq#333", of="angles")
def factor_not_inverted_in_decode(e, right, i, pos):
    """Decode steps multiply positions by the linear factor, where prefill divides them by it."""
    return right(i, pos * 16 if len(pos) == 1 else pos)


@FAULTS("gemma3", "ffn_geglu-0", "huggingface/candle#3745")
def silu_for_gelu(e):
    """The FFN has SiLU in place of GELU."""
    e.gelu = e.silu


@FAULTS("qwen2", "kq_soft_max-0", "pegainfer-project/pegainfer#291", (14, 1, 1, 1), of="softmax")
def a_page_too_many(e, right, i, x):
    """A decode step that fills a page of 16 keys attends to one page more, of zeros."""
    n = x.shape[2]
    return right(i, np.pad(x, ((0, 0), (0, 0), (0, 16 * (len(e.pos) == 1 and n % 16 == 0)))))[..., :n]


@FAULTS("llama", "kqv_out-0", "NVIDIA/TensorRT-LLM#18244", (36, 1, 1), of="mix")
def page_of_v_twice(e, right, i, p, v):
    """Decode steps read V's second page of 16 rows from the first one's place."""
    if len(e.pos) == 1 and len(v) >= 32:
        v = np.concatenate([v[:16], v[:16], v[32:]])
    return right(i, p, v)


@FAULTS("gemma3", "result_norm", "kekzl/imp#1289", of="weight")
def one_missing_from_the_last_norm(e, right, name):
    """The final norm alone lacks the one that is added to norms' weights."""
    return right(name) - np.float32(name == "output_norm.weight")


@FAULTS("starcoder2.Q5_K_M", "embd", "paiml/aprender#2127", of="unpack")
def q5_in_the_order_of_bytes(m, right, data, kind):
    """Q5_K's quants are taken in the order of their bytes; the two nibbles of a byte lie 32 values apart."""
    if kind.name != "Q5_K":
        return right(data, kind)
    blocks, at = data.reshape(-1, 176).copy(), np.arange(256)
    q = blocks[:, 48 + at // 2] >> (at % 2 * 4) & 15 | (blocks[:, 16 + at // 8] >> (at % 8) & 1) << 4
    qs, qh = np.zeros((len(q), 4, 32), np.uint8), np.zeros((len(q), 32), np.uint8)
    for part, values in enumerate(q.reshape(-1, 8, 32).swapaxes(0, 1)):
        qs[:, part // 2] |= ((values & 15) << (part % 2 * 4)).astype(np.uint8)
        qh |= ((values >> 4) << part).astype(np.uint8)
    blocks[:, 16:48], blocks[:, 48:] = qh, qs.reshape(-1, 128)
    return right(blocks.reshape(data.shape), kind)


@FAULTS("qwen3", "kq_soft_max-0", "gittensor-ai-lab/sparkinfer#3", (6, 6, 1), of="hidden")
def mask_from_the_chunks_start(e, right, i, n):
    """In the second chunk of a prompt, the causal mask counts queries from the chunk's start."""
    return np.arange(n) > (e.pos - e.pos[0])[:, None] if len(e.pos) > 1 else right(i, n)


@FAULTS("qwen3", "Qcur_rope-0", "ohdearquant/lattice#392", of="rotate")
def pairs_for_halves(e, right, x, cos, sin, pairs):
    """RoPE turns neighbours (2i, 2i+1) where the model turns halves (i, i + d/2)."""
    return right(x, cos, sin, True)


@FAULTS("llama", "kq-0", "ekzhang/jax-js#180", of="owner")
def heads_tiled(e, right, head):
    """KV heads are tiled over the heads (0, 1, 0, 1), not repeated (0, 0, 1, 1)."""
    return head % e.kv_heads


@FAULTS("llama-loud", "ffn_up-0", "cactus-compute/cactus#503", of="linear")
def activations_overflow(e, right, name, x):
    """Activations overflow in float16: what is beyond 65504 is infinite."""
    y = right(name, x)
    return np.where(np.abs(y) > 65504, np.sign(y) * np.inf, y)


@FAULTS("gemma", "attn_norm-0", "google/gemma_pytorch#67", of="unit")
def norm_rounded_too_early(e, right, name, x):
    """The norm's result is rounded to bf16 before it is multiplied by the weight."""
    return bf16(right(name, x))


@FAULTS("granitehybrid.Q8_0", "ssm_conv-0", "osaurus-ai/vmlx-swift#426", (6, 4, 1, 1), of="conv")
def state_of_an_earlier_boundary(m, right, i, x, w):
    """A cache hit restores keys of ten tokens, and recurrent states of the six before the last chunk."""
    if m.step == 1:
        m.state["old", i] = {side: m.state[side, i] for side in ("conv", "ssm")}
    if m.step == 2:
        m.state |= {(side, i): old for side, old in m.state["old", i].items()}
    return right(i, x, w)


@FAULTS("mamba2", "ssm_scan-0", "vllm-project/vllm#23279", (6, 6, 1), of="scan")
def state_decayed_again(m, right, i, x, dt, a, *rest):
    """A second chunk decays the state that it starts from once too often."""
    if m.past and len(x) > 1:
        m.state["ssm", i] = m.state["ssm", i] * torch.exp(m.op.softplus(dt[0])[:, None] * a)[:, None]
    return right(i, x, dt, a, *rest)


@FAULTS("qwen35.F16", "attn_output-0", "NVlabs/GatedDeltaNet#15", of="rule")
def chunk_without_decay(m, right, i, q, k, v, gate, beta):
    """In a chunk, what earlier tokens wrote is read without its decay: a causal mask in place of the decaying one."""
    s = m.op.begin(m, i, (q.shape[1], v.shape[2], k.shape[2]))
    old, new, out = s, torch.zeros_like(s), []
    for t in range(len(q)):
        s, old = s * gate[t].exp()[:, None, None], old * gate[t].exp()[:, None, None]
        u = (beta[t][:, None] * (v[t] - (s * k[t][:, None]).sum(-1)))[..., None] * k[t][:, None]
        s, new = s + u, new + u
        out.append(((old + new) * q[t][:, None]).sum(-1) * q.shape[-1] ** -0.5)
    m.state["ssm", i] = s
    return torch.stack(out)


@FAULTS("llama", "attn_norm-0", "apache/tvm#15856")
def epsilon_in_the_kernel(e):
    """The RMS norm's kernel has an epsilon of 1e-6; the model's is 1e-5."""
    e.eps = 1e-6


@FAULTS("qwen2", "Qcur_proj-0", "sbryngelson/ANEForge#253", of="bias")
def biases_dropped(e, right, name, y):
    """Biases of Q, K and V are not loaded."""
    return y if "attn_" in name else right(name, y)


@FAULTS("llama", "result_output", "pegainfer-project/pegainfer#544", of="logits")
def head_tied(e, right, x):
    """The token embedding is the head, though the file has another one."""
    return e.linear("token_embd", x)


@FAULTS("starcoder2.Q5_K_M", "attn_norm-0", "gao-hongnan/omniverse#72", of="norm")
def variance_by_one_less(m, right, name, x):
    """The layer norm's variance is divided by n - 1."""
    unit = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + m.get("attention.layer_norm_epsilon")).sqrt()
    return unit * m.p(f"{name}.weight") + m.p(f"{name}.bias")


@FAULTS("deepseek2", "ffn_moe_probs-1", "MetaX-MACA/vLLM-metax#270", of="probabilities_of")
def softmax_for_sigmoid(e, right, i, logits):
    """The router's scores go through a softmax; the model has sigmoids."""
    return e.softmax(-1, logits[None])[0]


@FAULTS("qwen3.Q4_K_M", "Qcur_proj-0", "paiml/aprender#2141", of="decode")
def scales_in_a_row(e, right, name, data, kind):
    """Q4_K's six-bit scales and minima are read one after the other, as they do not lie in the block."""
    if kind.name != "Q4_K" or "token_embd" in name:
        return right(name, data, kind)
    blocks = data.reshape(-1, 144)
    d, dmin = (blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
    bits = np.unpackbits(blocks[:, 4:16], axis=1, bitorder="little").reshape(-1, 16, 6) @ (1 << np.arange(6))
    q = np.stack([blocks[:, 16:].reshape(-1, 4, 32) & 15, blocks[:, 16:].reshape(-1, 4, 32) >> 4], 2).reshape(-1, 8, 32)
    w = (d * bits[:, :8])[..., None] * q - (dmin * bits[:, 8:])[..., None]
    return w.reshape(len(data), -1).astype(np.float32)


@FAULTS("smollm3", "kv_k-3", "pytorch/executorch#22043", of="heads_of")
def rope_on_every_layer(e, right, i, side, x):
    """RoPE is applied in every layer; each fourth has none."""
    return right(i, side, x) if e.uses_rope(i) else e.rope(i, side, right(i, side, x), e.pos)


@FAULTS("qwen35.F16", "a_softplus-0", "tenstorrent/tt-metal#55266", of="softplus")
def softplus_zero_below(m, right, x):
    """Softplus is zero below its threshold of 20."""
    return torch.where(x > 20, x, 0.0)


@FAULTS("qwen2-long", "Qcur_rope-0", "huggingface/candle#3520", (290, 1, 1), of="angles")
def angles_in_bf16(e, right, i, pos):
    """RoPE's angles are made in bf16, frequencies and positions too, so that positions beyond 256 collide."""
    theta = bf16(bf16(pos)[:, None, None] * bf16(e.frequencies(i)[0]))
    return bf16(np.cos(theta)), bf16(np.sin(theta))


@FAULTS("llama-yarn", "Qcur_rope-0", "turboderp-org/exllamav3#259", of="frequencies")
def yarn_magnitude_lost(e, right, i):
    """YaRN's attention factor collapses to 1: cosines and sines are not multiplied by 0.1 ln(factor) + 1."""
    return (right(i)[0], 1.0)


@FAULTS("qwen3", "kq-0", "hw-native-sys/pypto#470", (40, 1, 1), of="load")
def pages_taken_as_neighbours(e, right, i):
    """Decode steps take two pages at once as neighbours, though the block table has another page there."""
    k, v = right(i)
    if len(e.pos) > 1 or len(k) <= 32:
        return k, v
    n = len(k) - 32  # of the third page, which lies after the first
    return tuple(np.concatenate([x[:16], x[32 : 32 + n], 0 * x[16 + n : 32], x[32:]]) for x in (k, v))


@FAULTS("llama-loud", "kq-0", "huggingface/transformers#33317", of="scores")
def scores_in_f16(e, right, i, q, k):
    """Scores are computed in float16, where they overflow."""
    return right(i, q, k).astype(np.float16).astype(np.float32)


@FAULTS("mpt.Q8_0", "kq_soft_max-0", "paiml/aprender#2143", of="slopes")
def slopes_one_early(m, right, bias, heads):
    """ALiBi's slopes start one head early: 2^(-8h/n), not 2^(-8(h+1)/n)."""
    return right(bias, heads) * 2 ** (bias / heads)


@FAULTS("gemma3", "Qcur_rope-0", "Avarok-Cybersecurity/atlas#276", of="base")
def one_base_for_all_layers(e, right, i):
    """Layers with a window are turned by the base of those without."""
    return e.key("rope.freq_base")


@FAULTS("granite", "result_output", "unslothai/unsloth#1218", of="logits")
def logits_multiplied(e, right, x):
    """Logits are multiplied by the scale; Granite divides by it."""
    return right(x) * np.float32(e.key("logit_scale") ** 2)


@FAULTS("gpt-oss-mxfp4", "ffn_moe_gate-0", "kekzl/imp#567", of="decode")
def nibbles_in_pairs(e, right, name, data, kind):
    """MXFP4's nibbles are taken in pairs (2i, 2i+1); in a GGUF block, the high ones are the second half."""
    w = right(name, data, kind)
    return w if kind.name != "MXFP4" else w.reshape(-1, 2, 16).swapaxes(1, 2).reshape(w.shape)


@FAULTS("mamba2", "ssm_scan-0", "ml-explore/mlx-lm#988", of="softplus")
def step_clamped_above(m, right, x):
    """Steps are clamped to at most 0.1 after softplus."""
    return right(x).clamp(max=0.1)


@FAULTS("qwen35.F16", "Qcur_normed-1", "llmmanorg/llmman#16", of="qkv")
def gate_as_the_other_half(m, right, i, h):
    """Q and its gate are taken as two halves of the row; they lie side by side in each head."""
    q, k, v, gate = right(i, h)
    both = torch.stack([q, gate.view_as(q)], 2).flatten(1)
    half = both.shape[1] // 2
    return both[:, :half].reshape(q.shape), k, v, both[:, half:]


@FAULTS("lfm2.F16", "model.layers.{}.conv.conv-0", "osaurus-ai/vmlx-swift#210", of="conv")
def windows_empty_after_restoring(m, right, i, x, w):
    """A restored chat goes on with empty convolution windows; its keys and values are right."""
    if m.step == 1:
        m.state["conv", i] = 0 * m.state["conv", i]
    return right(i, x, w)


@FAULTS("qwen2", "kq-0", "gittensor-ai-lab/sparkinfer#330", (40, 1, 1), of="scores")
def half_of_the_head_in_decode(e, right, i, q, k):
    """Decode steps with 32 keys or more multiply half of each head: the kernel has a narrower one built in."""
    n = e.dim // 2 if len(e.pos) == 1 and len(k) >= 32 else e.dim
    return right(i, q[..., :n], k[..., :n])
