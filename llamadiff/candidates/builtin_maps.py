"""Maps that many people need: llama.cpp's own names, Hugging Face's modules, TransformerLens' hooks."""

from __future__ import annotations

from collections.abc import Mapping

from llamadiff.candidates.name_map import Entry, Map, identity_map


def _map(**lines: tuple[str, ...]) -> dict[str, Entry]:
    """word = (name, axes, treatment ...); an empty axes string means the tap's own."""
    entries = {}
    for word, (name, *rest) in lines.items():
        axes = tuple(rest[0].split()) if rest and rest[0] else None
        entries[word] = Entry(word, name, axes, tuple(rest[1:]))
    return entries


INPUT = " (input)"  # after a module's name: what it takes in, where no module puts that out
_ROWS = "batch token embd"
_LAYER = "model.layers.{i}."

HF = _map(
    embd=("model.embed_tokens", _ROWS),
    attn_norm=(_LAYER + "input_layernorm", _ROWS),
    Qcur_proj=(_LAYER + "self_attn.q_proj", "batch token head*dim", "permuted"),
    Kcur_proj=(_LAYER + "self_attn.k_proj", "batch token kv_head*dim", "permuted"),
    Vcur_proj=(_LAYER + "self_attn.v_proj", "batch token kv_head*dim"),
    Qcur_normed=(_LAYER + "self_attn.q_norm", "batch token head dim"),
    Kcur_normed=(_LAYER + "self_attn.k_norm", "batch token kv_head dim"),
    attn_out=(_LAYER + "self_attn.o_proj", _ROWS),
    ffn_norm=(_LAYER + "post_attention_layernorm", _ROWS),
    ffn_gate=(_LAYER + "mlp.gate_proj", "batch token ff"),
    ffn_up=(_LAYER + "mlp.up_proj", "batch token ff"),
    ffn_out=(_LAYER + "mlp.down_proj", _ROWS),
    l_out=("model.layers.{i}", _ROWS),
    result_norm=("model.norm", _ROWS),
    result_output=("lm_head", "batch token vocab"),
)

# Under keys of their own: who has these taps may still call them as llama.cpp does.
HF |= {
    f"{word}{INPUT}": Entry(word, _LAYER + module + INPUT, tuple(axes.split()))
    for word, module, axes in (
        ("kqv_out", "self_attn.o_proj", "batch token head*dim"),
        ("ffn_inp", "post_attention_layernorm", _ROWS),
        ("ffn_swiglu", "mlp.down_proj", "batch token ff"),
    )
}

_BLOCK = "blocks.{i}."

TRANSFORMER_LENS = _map(
    embd=("hook_embed", _ROWS),
    attn_norm=(_BLOCK + "ln1.hook_normalized", _ROWS, "unweighted"),
    Qcur_proj=(_BLOCK + "attn.hook_q", "batch token head dim", "permuted"),
    Kcur_proj=(_BLOCK + "attn.hook_k", "batch token kv_head dim", "permuted"),
    Vcur_proj=(_BLOCK + "attn.hook_v", "batch token kv_head dim"),
    Qcur_rope=(_BLOCK + "attn.hook_rot_q", "batch token head dim", "permuted"),
    Kcur_rope=(_BLOCK + "attn.hook_rot_k", "batch token kv_head dim", "permuted"),
    kq=(_BLOCK + "attn.hook_attn_scores", "batch head query key", "scaled"),
    kq_soft_max=(_BLOCK + "attn.hook_pattern", "batch head query key"),
    kqv_out=(_BLOCK + "attn.hook_z", "batch token head dim"),
    attn_out=(_BLOCK + "hook_attn_out", _ROWS),
    ffn_inp=(_BLOCK + "hook_resid_mid", _ROWS),
    ffn_norm=(_BLOCK + "ln2.hook_normalized", _ROWS, "unweighted"),
    ffn_gate=(_BLOCK + "mlp.hook_pre", "batch token ff"),
    ffn_up=(_BLOCK + "mlp.hook_pre_linear", "batch token ff"),
    ffn_swiglu=(_BLOCK + "mlp.hook_post", "batch token ff"),
    ffn_out=(_BLOCK + "hook_mlp_out", _ROWS),
    l_out=(_BLOCK + "hook_resid_post", _ROWS),
    result_norm=("ln_final.hook_normalized", _ROWS, "unweighted"),
    result_output=("logits", "batch token vocab"),
)

BUILT_IN: Mapping[str, Map] = {"llama.cpp": identity_map(), "hf": HF, "transformer-lens": TRANSFORMER_LENS}
