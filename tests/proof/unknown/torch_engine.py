"""An engine in PyTorch, of functions in a table, for recurrent layers and old transformers; a fault replaces one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import torch
import torch.nn.functional as F  # noqa: N812

Tensor = torch.Tensor


class Net:
    """A model, its states, and ``op``: what it computes with."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.meta = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF")}
        self.arch: str = self.meta["general.architecture"]
        self.raw = {t.name: t for t in reader.tensors}
        self.w: dict[str, Tensor] = {}
        self.op = SimpleNamespace(**{f.__name__: f for f in OPS})
        self.taps: dict[str, list[Tensor]] = {}
        self.state: dict[Any, Tensor] = {}
        self.past = 0  # tokens before this batch

    def get(self, name: str, default: Any = None) -> Any:
        return self.meta.get(f"{self.arch}.{name}") or default

    def p(self, name: str) -> Tensor:
        if name not in self.w:
            self.w[name] = torch.from_numpy(self.op.unpack(self.raw[name].data, self.raw[name].tensor_type))
        return self.w[name]

    def note(self, name: str, x: Tensor) -> Tensor:
        self.taps.setdefault(name, []).append(x.clone())
        return x

    def run(self, tokens: list[int], batches: list[int]) -> dict[str, Any]:
        with torch.no_grad():
            for self.step, size in enumerate(batches):
                self.op.model(self, torch.tensor(tokens[self.past : self.past + size]))
                self.past += size
        return {name: _joined(name, parts) for name, parts in self.taps.items()}


def _joined(name: str, parts: list[Tensor]) -> Any:
    if not name.startswith("kq") or "kqv" in name:
        return torch.cat(parts).numpy()
    n = parts[-1].shape[2]
    return torch.cat([F.pad(x, (0, n - x.shape[2])) for x in parts], 1).numpy()


def unpack(data: Any, kind: Any) -> Any:
    return gguf.quants.dequantize(data, kind).astype("float32")


def dense(m: Net, name: str, x: Tensor) -> Tensor:
    y = x @ m.p(f"{name}.weight").T
    if f"{name}.scale" in m.raw and (".ffn_" not in name or m.arch == "qwen35"):
        y = y * m.p(f"{name}.scale")
    return m.op.offset(m, name, y)


def offset(m: Net, name: str, y: Tensor) -> Tensor:
    return y + m.p(f"{name}.bias") if f"{name}.bias" in m.raw else y


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def norm(m: Net, name: str, x: Tensor) -> Tensor:
    if m.get("attention.layer_norm_rms_epsilon"):
        return m.op.rms(x, m.get("attention.layer_norm_rms_epsilon")) * m.p(f"{name}.weight")
    weight, bias = m.p(f"{name}.weight"), m.p(f"{name}.bias")
    return F.layer_norm(x, x.shape[-1:], weight, bias, m.get("attention.layer_norm_epsilon"))


def model(m: Net, ids: Tensor) -> None:
    x = m.note("model.input_embed" if m.arch == "qwen35" else "embd", m.op.embed(m, ids))
    if "position_embd.weight" in m.raw:
        x = m.note("inpL", x + m.note("pos_embd", m.op.place(m, len(ids))))
    for i in range(m.get("block_count")):
        x = m.note(f"l_out-{i}", m.op.block(m, i, x))
    x = m.note("result_norm", m.op.norm(m, "token_embd_norm" if m.arch == "lfm2" else "output_norm", x))
    m.note("result_output", m.op.head(m, x))


def embed(m: Net, ids: Tensor) -> Tensor:
    return m.p("token_embd.weight")[ids]


def place(m: Net, n: int) -> Tensor:
    return m.p("position_embd.weight")[m.past : m.past + n]


def head(m: Net, x: Tensor) -> Tensor:
    y = m.op.dense(m, "output" if "output.weight" in m.raw else "token_embd", x)
    return y / m.get("logit_scale", 1.0)


def residual(m: Net, name: str, x: Tensor, y: Tensor) -> Tensor:
    return x + m.get("residual_scale", 1.0) * y


def block(m: Net, i: int, x: Tensor) -> Tensor:
    b = f"blk.{i}."
    h = m.note(f"attn_norm-{i}", m.op.norm(m, b + "attn_norm", x))
    if m.arch in ("mamba", "mamba2"):
        return m.op.residual(m, f"l_out-{i}", x, (m.op.scan1 if m.arch == "mamba" else m.op.scan2)(m, i, h))
    recurrent = {"qwen35": m.op.delta, "granitehybrid": m.op.scan2, "lfm2": m.op.short}.get(m.arch)
    mixer = m.op.attend if f"{b}attn_output.weight" in m.raw else recurrent
    y = m.op.residual(m, f"ffn_inp-{i}", x, mixer(m, i, h))
    m.note(f"attn_residual-{i}" if m.arch == "qwen35" else f"ffn_inp-{i}", y)
    late = m.arch == "qwen35"
    g = m.op.norm(m, b + ("post_attention_norm" if late else "ffn_norm"), y)
    m.note(f"attn_post_norm-{i}" if late else f"ffn_norm-{i}", g)
    return m.op.residual(m, f"l_out-{i}", y, m.note(f"ffn_out-{i}", m.op.mlp(m, i, g)))


def mlp(m: Net, i: int, g: Tensor) -> Tensor:
    b = f"blk.{i}.ffn_"
    if f"{b}gate.weight" in m.raw:
        gate = m.note(f"ffn_gate-{i}", m.op.dense(m, b + "gate", g))
        up = m.note(f"ffn_up-{i}", m.op.dense(m, b + "up", g))
        return m.op.dense(m, b + "down", m.note(f"ffn_swiglu-{i}", F.silu(gate) * up))
    act = m.note(f"ffn_gelu-{i}", F.gelu(m.note(f"ffn_up-{i}", m.op.dense(m, b + "up", g)), approximate="tanh"))
    if f"blk.{i}.ffn.act.scales" in m.raw:
        act = m.note(f"ffn_act-{i}", act / m.p(f"blk.{i}.ffn.act.scales"))
    return m.op.dense(m, b + "down", act)


def attend(m: Net, i: int, h: Tensor) -> Tensor:
    b, (q, k, v, gate) = f"blk.{i}.attn_", m.op.qkv(m, i, h)
    if f"{b}q_norm.weight" in m.raw and m.arch != "mpt":
        q = m.note(f"Qcur_normed-{i}", m.op.norm(m, b + "q_norm", q))
        k = m.note(f"Kcur_normed-{i}", m.op.norm(m, b + "k_norm", k))
    if m.arch not in ("gpt2", "mpt"):
        at = torch.arange(m.past, m.past + len(h))
        q = m.note(f"Qcur_rope-{i}", m.op.rope(m, q, at))
        k = m.note(f"Kcur_rope-{i}", m.op.rope(m, k, at))
    keys, values = m.op.cached(m, i, "k", k), m.op.cached(m, i, "v", v)
    kq = m.note(f"kq-{i}", q.transpose(0, 1) @ spread(keys, q.shape[1]).transpose(1, 2))
    p = m.note(f"kq_soft_max-{i}", m.op.weigh(m, kq * q.shape[-1] ** -0.5))
    o = m.note(f"kqv_out-{i}", (p @ spread(values, len(p))).transpose(0, 1).flatten(1))
    if gate is not None:
        m.note(f"gate_reshaped-{i}", gate)
        o = m.note(f"attn_gated-{i}", o * m.note(f"gate_sigmoid-{i}", torch.sigmoid(gate)))
    return m.note(f"attn_out-{i}", m.op.dense(m, b + "output", o))


def qkv(m: Net, i: int, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    b, n, heads = f"blk.{i}.attn_", len(h), m.get("attention.head_count")
    dim = m.get("attention.key_length", m.get("embedding_length") // heads)
    if f"{b}qkv.weight" in m.raw:
        x = m.op.dense(m, b + "qkv", h)
        limit = m.get("attention.clamp_kqv")
        q, k, v = (x.clamp(-limit, limit) if limit else x).split(heads * dim, 1)
    else:
        q, k, v = (m.op.dense(m, b + side, h) for side in "qkv")
    m.note(f"Qcur_proj-{i}", q if m.arch != "mpt" else q.view(n, heads, dim))
    m.note(f"Kcur_proj-{i}", k if m.arch != "mpt" else k.view(n, heads, dim))
    m.note(f"Vcur_proj-{i}", v if m.arch != "mpt" else v.view(n, heads, dim))
    gate = None
    if m.arch == "qwen35":
        both = q.view(n, heads, 2, dim)
        q, gate = both[:, :, 0], both[:, :, 1].reshape(n, -1)
    return q.reshape(n, heads, dim), k.reshape(n, -1, dim), v.reshape(n, -1, dim), gate


def rope(m: Net, x: Tensor, at: Tensor) -> Tensor:
    n = m.get("rope.dimension_count", x.shape[-1])
    theta = m.op.turns(m, at, n)
    cos, sin = theta.cos().float()[:, None], theta.sin().float()[:, None]
    one, two = (x[..., 0:n:2], x[..., 1:n:2]) if m.arch == "granitehybrid" else (x[..., : n // 2], x[..., n // 2 : n])
    turned = one * cos - two * sin, one * sin + two * cos
    y = torch.stack(turned, -1).flatten(-2) if m.arch == "granitehybrid" else torch.cat(turned, -1)
    return torch.cat([y, x[..., n:]], -1)


def turns(m: Net, at: Tensor, n: int) -> Tensor:
    """Radians of each token and pair."""
    speed = m.get("rope.freq_base", 1e4) ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)
    if "rope_freqs.weight" in m.raw:
        speed = speed / m.p("rope_freqs.weight")
    theta = at[:, None] * speed
    if m.arch == "qwen35":
        theta[:, 3 * m.get("rope.dimension_sections")[0] :] = 0  # text has no fourth position
    return theta


def cached(m: Net, i: int, side: str, x: Tensor) -> Tensor:
    old = m.state.get((side, i))
    rows = x.half().float()
    m.state[side, i] = rows if old is None else torch.cat([old, rows])
    return m.state[side, i]


def spread(x: Tensor, heads: int) -> Tensor:
    """Rows of KV heads for each head: [head, key, dim]."""
    return x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1)


def weigh(m: Net, scores: Tensor) -> Tensor:
    n, keys = scores.shape[1:]
    far = torch.arange(m.past, m.past + n)[:, None] - torch.arange(keys)
    bias = m.get("attention.max_alibi_bias")
    if bias:
        scores = scores - m.op.slopes(bias, len(scores))[:, None, None] * far
    return scores.masked_fill(far < 0, -torch.inf).softmax(-1)


def slopes(bias: float, heads: int) -> Tensor:
    return 2.0 ** (-bias / heads * torch.arange(1, heads + 1))


def conv(m: Net, i: int, x: Tensor, w: Tensor) -> Tensor:
    """Each channel over its last tokens; the state is what the next batch needs: [token, channel]."""
    old = m.state.get(("conv", i))
    whole = torch.cat([x.new_zeros(w.shape[1] - 1, x.shape[1]) if old is None else old, x])
    m.state["conv", i] = m.op.kept(whole, w.shape[1] - 1)
    return whole.unfold(0, w.shape[1], 1).mul(w).sum(-1)


def kept(whole: Tensor, n: int) -> Tensor:
    return whole[-n:]


def scan(m: Net, i: int, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """x [token, head, dim], dt [token, head], a [head, state or 1], b and c [token, head, state]."""
    s = m.op.begin(m, i, (*x.shape[1:], b.shape[-1]))
    out = []
    for t in range(len(x)):
        step = m.op.softplus(dt[t])
        s = s * torch.exp(step[:, None] * a)[:, None] + (step[:, None] * x[t])[..., None] * b[t][:, None]
        out.append((s * c[t][:, None]).sum(-1))
    m.state["ssm", i] = s
    return torch.stack(out)


def begin(m: Net, i: int, shape: tuple[int, ...]) -> Tensor:
    return m.state.get(("ssm", i), torch.zeros(shape))


def softplus(x: Tensor) -> Tensor:
    return F.softplus(x)


def scan1(m: Net, i: int, h: Tensor) -> Tensor:
    b, rank, size = f"blk.{i}.ssm_", m.get("ssm.time_step_rank"), m.get("ssm.state_size")
    x, z = m.note(f"ssm_in-{i}", m.op.dense(m, b + "in", h)).chunk(2, 1)
    x = F.silu(m.note(f"ssm_conv-{i}", m.op.offset(m, b + "conv1d", m.op.conv(m, i, x, m.p(b + "conv1d.weight")))))
    dt, bs, cs = m.op.dense(m, b + "x", x).split([rank, size, size], 1)
    dt = m.note(f"ssm_dt-{i}", m.op.dense(m, b + "dt", dt))
    bs, cs = (rows[:, None].expand(-1, x.shape[1], -1) for rows in (bs, cs))
    y = m.op.scan(m, i, x[..., None], dt, m.p(b + "a"), bs, cs)
    y = y[..., 0] + m.p(b + "d") * x
    return m.note(f"mamba_out-{i}", m.op.dense(m, b + "out", y * F.silu(z)))


def scan2(m: Net, i: int, h: Tensor) -> Tensor:
    b, n = f"blk.{i}.ssm_", len(h)
    inner, size, heads = m.get("ssm.inner_size"), m.get("ssm.state_size"), m.get("ssm.time_step_rank")
    groups = m.get("ssm.group_count")
    z, xbc, dt = m.note(f"ssm_in-{i}", m.op.dense(m, b + "in", h)).split([inner, inner + 2 * groups * size, heads], 1)
    xbc = m.note(f"ssm_conv-{i}", m.op.offset(m, b + "conv1d", m.op.conv(m, i, xbc, m.p(b + "conv1d.weight"))))
    x, bs, cs = F.silu(xbc).split([inner, groups * size, groups * size], 1)
    x = x.view(n, heads, -1)
    dt = m.note(f"ssm_dt-{i}", m.op.offset(m, b + "dt", dt))
    bs, cs = (rows.view(n, groups, size).repeat_interleave(heads // groups, 1) for rows in (bs, cs))
    y = m.op.scan(m, i, x, dt, m.p(b + "a").view(-1, 1), bs, cs)
    if m.arch == "mamba2":
        m.note(f"ssm_scan-{i}", y)
    y = m.note(f"mamba2_y_add_d-{i}", y + m.p(b + "d").view(-1, 1) * x).flatten(1)
    y = m.note(f"ssm_norm-{i}", m.op.gated(m, i, y, z, groups))
    return m.note(f"mamba_out-{i}", m.op.dense(m, b + "out", y.flatten(1)))


def gated(m: Net, i: int, y: Tensor, z: Tensor, groups: int) -> Tensor:
    return m.op.norm(m, f"blk.{i}.ssm_norm", (y * F.silu(z)).view(len(y), groups, -1))


def short(m: Net, i: int, h: Tensor) -> Tensor:
    b = f"blk.{i}.shortconv."
    stem = "model.layers.{}.conv."
    bb, cc, x = m.note(f"{stem}in_proj-{i}", m.op.dense(m, b + "in_proj", h)).chunk(3, 1)
    y = m.note(f"{stem}conv-{i}", m.op.conv(m, i, bb * x, m.p(b + "conv.weight")))
    return m.note(f"{stem}out_proj-{i}", m.op.dense(m, b + "out_proj", cc * y))


def delta(m: Net, i: int, h: Tensor) -> Tensor:
    b, n = f"blk.{i}.", len(h)
    size, keys, heads = m.get("ssm.state_size"), m.get("ssm.group_count"), m.get("ssm.time_step_rank")
    mixed = m.note(f"linear_attn_qkv_mixed-{i}", m.op.dense(m, b + "attn_qkv", h))
    z = m.note(f"z-{i}", m.op.dense(m, b + "attn_gate", h))
    beta = m.note(f"beta-{i}", m.op.dense(m, b + "ssm_beta", h)[..., None])
    beta = m.note(f"beta_sigmoid-{i}", torch.sigmoid(beta))[..., 0]
    alpha = m.note(f"alpha-{i}", m.op.dense(m, b + "ssm_alpha", h))
    step = m.op.softplus(m.note(f"ssm_dt-{i}", m.op.offset(m, b + "ssm_dt", alpha)))
    gate = m.note(f"gate-{i}", m.note(f"a_softplus-{i}", step) * m.p(b + "ssm_a"))
    x = m.note(f"ssm_conv-{i}", m.op.conv(m, i, mixed, m.p(b + "ssm_conv1d.weight")))
    q, k, v = m.note(f"conv_output_silu-{i}", F.silu(x)).tensor_split([keys * size, 2 * keys * size], 1)
    q, k = m.note(f"q_conv-{i}", q.view(n, keys, size)), m.note(f"k_conv-{i}", k.view(n, keys, size))
    v = m.note(f"v_conv_predelta-{i}", v.view(n, heads, -1))
    eps = m.get("attention.layer_norm_rms_epsilon")
    q = m.note(f"q_conv_predelta-{i}", q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + eps))
    k = m.note(f"k_conv_predelta-{i}", k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + eps))
    y = m.note(f"attn_output-{i}", m.op.rule(m, i, m.op.tile(q, heads), m.op.tile(k, heads), v, gate, beta))
    y = m.note(f"ssm_norm-{i}", m.op.norm(m, b + "ssm_norm", y))
    y = m.note(f"final_output-{i}", (y * F.silu(z.view(n, heads, -1))).flatten(1))
    return m.note(f"mamba_out-{i}", m.op.dense(m, b + "ssm_out", y))


def tile(x: Tensor, heads: int) -> Tensor:
    """Keys' heads for each head of values: they take turns."""
    return x.repeat(1, heads // x.shape[1], 1)


def rule(m: Net, i: int, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor) -> Tensor:
    s = m.op.begin(m, i, (q.shape[1], v.shape[2], k.shape[2]))
    out = []
    for t in range(len(q)):
        s = s * gate[t].exp()[:, None, None]
        told = (s * k[t][:, None]).sum(-1)
        s = s + (beta[t][:, None] * (v[t] - told))[..., None] * k[t][:, None]
        out.append((s * q[t][:, None]).sum(-1) * q.shape[-1] ** -0.5)
    m.state["ssm", i] = s
    return torch.stack(out)


OPS = [f for f in list(globals().values()) if callable(f) and getattr(f, "__module__", "") == __name__ and f is not Net]
