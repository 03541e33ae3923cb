"""Name maps that are given: TOML as people write it, checked; and those that many people need, which are built in.

These are llama.cpp's own names, Hugging Face's modules and TransformerLens' hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from llamadiff.candidates.name_map import AUTO, DONE, Entry, Map, concerns, identity_map
from llamadiff.engines.treatments import factor_of
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.trace.stated import brief, read_toml


def load_map(spec: str) -> Map:
    """A built-in map by its name, or a TOML file; taps that it says nothing of have their own names. AUTO for "auto".

    Raises UserError for an unknown tap, axis or treatment.
    """
    if spec == "auto":
        return AUTO
    stated = BUILT_IN[spec] if spec in BUILT_IN else _read_map(spec)
    return {**stated, **{word: entry for word, entry in identity_map().items() if word not in stated}}


def _read_map(spec: str) -> Map:
    path = Path(spec)
    if not path.exists():
        raise UserError(f"--map {spec}: no such file, and no built-in map ({', '.join(BUILT_IN)}, auto)")
    return {word: _entry(path, word, table) for word, table in read_toml(path).items()}


def _entry(path: Path, word: str, table: Any) -> Entry:
    where = f"{path}: [{word[:40]}]"
    if word not in taps.BY_WORD:
        near = get_close_matches(word, list(taps.BY_WORD), 1)
        raise UserError(f"{where} is no tap{f'; did you mean [{near[0]}]?' if near else ''}")
    own = identity_map()[word].name
    if not isinstance(table, dict) or set(table) - {"name", "axes", "done"}:
        raise UserError(f'{where} may have name = "...", axes = "..." and done = [...]; nothing else')
    name, axes = table.get("name", own), table.get("axes")
    if not isinstance(name, str) or not name:
        raise UserError(f"{where} name = {brief(name)} is no name; left out, it is {own!r}")
    if taps.BY_WORD[word].layered and "{i}" not in name and "{i+1}" not in name:
        raise UserError(f"{where} name = {brief(name)} has no {{i}} for the layer's number")
    done = _read_treatments(where, word, table.get("done", []))
    return Entry(word, name, None if axes is None else _axes(where, word, axes), done)


def _axes(where: str, word: str, text: Any) -> tuple[str, ...]:
    axes = tuple(text.split()) if isinstance(text, str) else ()
    batches = [axis for axis in axes if "batch" in axis.split("*")]
    own = {part for axis in taps.BY_WORD[word].axes for part in axis.split("*")}
    stated = [part for axis in axes for part in axis.split("*") if part != "batch"]
    renamed = {"head" if part == "kv_head" else part for part in own}
    if sorted(stated) not in (sorted(own), sorted(renamed)) or batches not in ([], ["batch"]):
        known = " ".join(taps.BY_WORD[word].axes)
        raise UserError(f"{where} axes = {brief(text)}: a {word} has the axes {known} (and perhaps batch)")
    return axes


def _read_treatments(where: str, word: str, value: Any) -> tuple[str, ...]:
    treatments = value if isinstance(value, list) else [value]
    for treatment in treatments:
        if not isinstance(treatment, str) or (treatment not in DONE and not factor_of(treatment)):
            raise UserError(f"{where} done = {brief(treatment)}: known are {', '.join(DONE)}")
        if not concerns(treatment, taps.BY_WORD[word]):
            raise UserError(f"{where} done = {brief(treatment)} is not for a {word}: {DONE[treatment]}")
    return tuple(treatments)


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
