"""A small model of a checkpoint's architecture: the same config with small sizes, random weights, and its .gguf.

Every kind of layer that the config has is there, sizes are different from each other, and no weight, bias or norm is
trivial: what an engine mixes up shows.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.port import tiny_heads
from llamadiff.ext.port.loading import folder_of
from llamadiff.ext.port.torch_ops import layers_of, recorded
from llamadiff.ext.pytorch.transformers import config_of, randomly
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress, silent
from llamadiff.trace import taps
from llamadiff.trace.metadata import Info
from llamadiff.verbs.verbs import keep_sketch

GGUF, GOLDEN = "tiny.gguf", "golden.safetensors"
HEADS, SIZE, WIDTH = 6, 16, 96  # heads, values of each, and of a row
NARROW = 72  # of a row, where heads are not as wide as it together
LEAST_LAYERS, WINDOW, SECONDS = 3, 8, 600
TOKENS = 12  # of the golden run: more than the window
# Names in config.json and small sizes: each only where the config has it. Groups of heads and of experts stay groups.
SMALL: Mapping[str, int] = {
    "intermediate_size": 112, "ffn_dim": 112, "ffn_hidden_size": 112, "n_inner": 112, "moe_intermediate_size": 40,
    "expert_ffn_hidden_size": 40, "shared_expert_intermediate_size": 56, "moe_shared_expert_intermediate_size": 56,
    "shared_intermediate_size": 56, "dense_intermediate_size": 104, "block_ff_dim": 112, "head_dim": SIZE,
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20,
    "sliding_window": WINDOW, "attention_window_size": WINDOW, "state_size": 16, "mamba_d_state": 16,
    "ssm_state_size": 16, "time_step_rank": 6, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6,
    "moe_num_experts": 6, "global_head_dim": 32,
}  # fmt: skip
FEW: Mapping[str, int] = {  # and the most that may be
    "num_experts_per_tok": 2, "moe_topk": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
    "topk_group": 1, "n_groups": 2, "mamba_n_groups": 2,
    **dict.fromkeys(tiny_heads.COUNTS, tiny_heads.MOST),
}  # fmt: skip
DENSE = "dense"  # a layer without experts, where they are listed
FFN = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")  # which some make of the row's size
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
ROWS = ("hidden_size", "n_embd", "d_model")
MANY_HEADS = ("num_attention_heads", "n_head", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
PERIODS = ("sliding_window_pattern", "no_rope_layer_interval", "attn_layer_period", "full_attention_interval")
TOKENIZERS = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.model", "*.tiktoken",
              "chat_template*", "generation_config.json")  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """What was made: the checkpoint's folder, its file, and the recording of the model's own run, if one was asked.

    ``heads`` that predict a token more were written; ``converted``: how many of them the file has.
    """

    folder: Path
    gguf: Path
    golden: Path | None
    layers: int
    parameters: int
    heads: int = 0
    converted: int = 0


def tiny(
    checkpoint: Path, folder: Path, converter: Path, golden: bool = False, seed: int = 1, progress: Progress = silent
) -> Tiny:
    """Make one. ``folder`` must not be there yet, or be empty. Raises UserError."""
    if folder.exists() and any(folder.iterdir()):
        other = next(path for number in count(2) if not (path := folder.with_name(f"{folder.name}-{number}")).exists())
        raise UserError(f"--output {folder}: is not empty; nothing that is there is overwritten, give --output {other}")
    if not converter.is_file():
        raise UserError(f"--converter {converter}: no such file; give llama.cpp's convert_hf_to_gguf.py")
    progress("making a small model")
    config = config_of(folder_of(str(checkpoint), or_function=False))
    small = shrunk(config.to_dict())
    model = randomly(type(config), small, seed, checkpoint)
    model.save_pretrained(folder)
    heads = tiny_heads.write_heads(type(config), small, checkpoint, folder, seed)
    for path in dict.fromkeys(path for pattern in TOKENIZERS for path in sorted(checkpoint.glob(pattern))):
        if path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    progress("converting it")
    try:
        _convert(converter, folder)
    except UserError:
        shutil.rmtree(folder, ignore_errors=True)  # was empty before, and stands in the way of the next try
        raise
    recording = folder / GOLDEN if golden else None
    if recording is not None:
        progress("recording its own run")
        _record(model, folder / GGUF, recording, seed)
    parameters = sum(int(x.numel()) for x in model.parameters())
    converted = ModelFile(folder / GGUF).hyper_parameter("nextn_predict_layers") if heads else 0
    return Tiny(folder, folder / GGUF, recording, len(layers_of(model)), parameters, heads, int(converted or 0))


def shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with small sizes; what is no size stays as it is."""
    old = dict(config)
    heads, rows = (next((old[key] for key in keys if _is_size(old.get(key))), 0) for keys in (MANY_HEADS, ROWS))
    is_recurrent = not any(_is_size(old.get(key)) for key in MANY_HEADS[:2])
    is_wide = not is_recurrent and _is_size(old.get("head_dim")) and old["head_dim"] * heads != rows
    width = NARROW if is_wide else WIDTH
    new = {**old, **{key: size for key, size in SMALL.items() if _is_size(old.get(key))}}
    new |= {key: min(old[key], most) for key, most in FEW.items() if _is_size(old.get(key))}
    for key in FFN:
        if _is_size(old.get(key)) and old[key] in (2 * rows, 3 * rows, 4 * rows):
            new[key] = old[key] // rows * width
    for key in MANY_HEADS:
        new |= {key: 2 * width // SIZE if is_recurrent else HEADS} if _is_size(old.get(key)) else {}
    for key in KV_HEADS:
        if _is_size(old.get(key)):
            new[key] = HEADS if old[key] == heads else 1 if old[key] == 1 else 2
    for key, value in old.items():
        same = value == rows and not any(word in key for word in ("position", "vocab", "window", "_id", "context"))
        new |= {key: width} if _is_size(value) and same else {}
    if _is_size(old.get("query_pre_attn_scalar")):
        new["query_pre_attn_scalar"] = SIZE if old["query_pre_attn_scalar"] == old.get("head_dim") else width // HEADS
    new |= dict(_fewer_layers(old))
    if _is_size(new.get("first_k_dense_replace")) and DENSE in new.get("mlp_layer_types", ()):  # which say it again
        new["first_k_dense_replace"] = len([*takewhile(DENSE.__eq__, new["mlp_layer_types"])])
    turned = old.get("partial_rotary_factor")
    return {key: _fitted(value, turned) if "rope" in key else value for key, value in new.items()}


def _fewer_layers(old: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """As many layers as it takes to have one of every kind, and what is said layer by layer for these."""
    key = next((key for key in LAYERS if _is_size(old.get(key))), None)
    if key is None:
        return
    lists = {name: value for name, value in old.items() if isinstance(value, list) and len(value) == old[key]}
    kinds = list(zip(*(map(str, value) for value in lists.values()), strict=True))
    most = max([kinds.index(kind) for kind in dict.fromkeys(kinds)], default=0) + 1
    periods = [old[name] for name in PERIODS if _is_size(old.get(name))]
    wanted = [*periods, most, int(old.get("first_k_dense_replace") or 0) and 3, LEAST_LAYERS]
    count = min(max(wanted), old[key])
    yield from ((name, count) for name in LAYERS if name in old)
    yield from ((name, value[:count]) for name, value in lists.items())
    if isinstance(old.get("full_attn_idxs"), list):
        inside = [i for i in old["full_attn_idxs"] if i < count]
        yield "full_attn_idxs", inside or [count - 1]


def _fitted(rope: Any, turned: float | None = None) -> Any:
    """RoPE's settings with as many factors and sections as a small head has pairs; ``turned``: the part in pairs."""
    if not isinstance(rope, dict):
        return rope
    turned = rope.get("partial_rotary_factor") or turned
    found = {key: _fitted(value, turned) for key, value in rope.items()}
    for key in ("long_factor", "short_factor"):
        if isinstance(found.get(key), list):
            found[key] = found[key][: SIZE // 2]
    sections = found.get("mrope_section")
    if isinstance(sections, list) and sections:
        whole = int(SIZE // 2 * (turned or 1.0))
        small = [whole * part // sum(sections) for part in sections]
        found["mrope_section"] = [size + (place < whole - sum(small)) for place, size in enumerate(small)]
    return found


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _convert(converter: Path, folder: Path) -> None:
    """Run the user's converter. Raises UserError with the last thing that it said."""
    command = [sys.executable, converter, folder, "--outfile", folder / GGUF, "--outtype", "f32"]
    try:
        done = subprocess.run(  # noqa: S603
            [*map(str, command)], capture_output=True, text=True, check=False, encoding="utf-8", errors="replace",
            timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"--converter {converter}: did not end within {SECONDS} seconds") from None
    if done.returncode or not (folder / GGUF).is_file():
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise UserError(
            f"--converter {converter}: made no file of {folder} (it said: {said[-1][:200] if said else 'nothing'})"
            f"{_remedy(converter, done.stderr + done.stdout)}"
        )


def _remedy(converter: Path, said: str) -> str:
    """What to do about a converter's usual failures."""
    lacking = re.search(r"No module named '([\w.]{1,60})'", said)
    if lacking is not None:
        wanted = converter.parent / "requirements" / "requirements-convert_hf_to_gguf.txt"
        what = f"-r {wanted}" if wanted.is_file() else lacking[1].partition(".")[0]
        return f"; the converter needs it: {sys.executable} -m pip install {what}"
    if "pre-tokenizer was not recognized" in said:
        found = re.search(r"chkhsh:\s+([0-9a-f]{64})", said)
        return (
            f"; its pre-tokenizer ({f'chkhsh {found[1]}' if found else 'chkhsh'}) is not in the converter's "
            "get_vocab_base_pre(): add it, in llama.cpp by convert_hf_to_gguf_update.py, and to llama-vocab.cpp"
        )
    return ""


def _record(model: Any, gguf: Path, path: Path, seed: int) -> None:
    """What the model's own code gives: each layer's output and the logits, sketched."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = tuple(int(x) for x in np.random.default_rng(seed).integers(0, vocabulary, TOKENS))
    run = recorded(model, tokens, {})
    n_layer = len(layers_of(model))
    named = {f"{taps.RESIDUAL}-{i}": run.ops[run.ends[i + 1]].values for i in range(n_layer)}
    named[taps.LOGITS] = run.ops[run.ends[-1]].values
    arrays = {name: x.reshape(len(tokens), -1).astype(np.float32) for name, x in named.items()}
    about = ModelFile(gguf).describe()
    producer = {"name": "transformers", "version": version("transformers")}
    info = Info(tokens, tuple(range(len(tokens))), len(tokens), producer=producer, model=about)
    keep_sketch(path, info, arrays)
