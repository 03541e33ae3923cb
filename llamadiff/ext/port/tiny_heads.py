"""The heads of a small model that predict a token more (MTP, nextn): tensors that transformers' own code does not have.

A head is a layer more, of the kind that the last one with full attention is, and what joins the embedding to the hidden
state. Its tensors are called as checkpoints call them: behind the layers' (GLM, DeepSeek), or ``mtp.`` (Qwen).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llamadiff.ext.file.safetensors_files import open_checkpoint
from llamadiff.ext.pytorch.transformers import randomly
from llamadiff.system.errors import UserError

FILE = "model-heads.safetensors"  # beside model.safetensors, where a converter looks
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # in config.json: how many there are
BESIDE = ("mtp_num_hidden_layers",)  # those of checkpoints whose heads are not behind the layers, but beside them
UNSAID = ("qwen3_next",)  # architectures that have one, beside the layers, whatever config.json says
MOST = 3
FULL = "full_attention"
JOINED = "eh_proj"
# What is in front of a head's layer and behind it: as DeepSeek and GLM call it, and as Qwen does.
JOINING = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", JOINED: "fc", "shared_head.norm": "norm"
}  # fmt: skip
TABLES = frozenset({"embed_tokens", "shared_head.head"})  # which may be the trunk's


def count_of(config: Mapping[str, Any]) -> int:
    """How many heads a small copy of a model has: as many as the model, up to MOST."""
    counts = [config[key] for key in COUNTS if isinstance(config.get(key), int)]
    return min(max(counts, default=0), MOST) or int(config.get("model_type") in UNSAID)


def write_heads(kind: Any, config: Mapping[str, Any], checkpoint: Path, folder: Path, seed: int) -> int:
    """Write the heads of a small model, which ``config`` is of, into its folder -> how many. Raises UserError."""
    count = count_of(config)
    if not count:
        return 0
    from safetensors.torch import save_file

    layers = int(config["num_hidden_layers"])
    with TemporaryDirectory() as place:  # a model of more layers, saved as its checkpoints have them
        randomly(kind, _longer(config, count), seed, checkpoint).save_pretrained(place)
        saved = _tensors(Path(place))
    is_beside = any(config.get(key) for key in BESIDE) or config.get("model_type") in UNSAID
    tables = _tables_of(checkpoint)
    heads = (_head(saved, layers, number, is_beside, tables) for number in range(count))
    save_file({name: x for head in heads for name, x in head}, folder / FILE, metadata={"format": "pt"})
    return count


def _longer(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The config with so many layers more, of the kind of the last one, or with full attention."""
    layers = config["num_hidden_layers"]
    lists = {
        key: [*value, *[FULL if FULL in value else value[-1]] * count]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == layers
    }
    return {**config, **lists, "num_hidden_layers": layers + count}


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def _tables_of(checkpoint: Path) -> frozenset[str]:
    """Which tables a checkpoint's heads have of their own; all, where it has no weights."""
    try:
        names = open_checkpoint(checkpoint)[0]
    except UserError:
        return TABLES
    return frozenset(table for table in TABLES for name in names if ".layers." in name and f".{table}." in name)


def _head(
    saved: Mapping[str, Any], layers: int, number: int, is_beside: bool, tables: frozenset[str]
) -> Iterator[tuple[str, Any]]:  # fmt: skip
    """A head's tensors: those of a layer, and what joins the embedding to the hidden state; ``tables`` of its own."""
    import torch

    stem = next(name for name in saved if f"layers.{layers}." in name).partition("layers.")[0]
    rows, width = next(x for name, x in saved.items() if name.endswith("embed_tokens.weight")).shape
    layer = f"{stem}layers.{layers + number}."
    own = f"mtp.layers.{number}." if is_beside else layer
    yield from ((own + name.removeprefix(layer), x) for name, x in saved.items() if name.startswith(layer))
    if is_beside:
        names = {f"mtp.{beside}": name for name, beside in JOINING.items()} if number == 0 else {}
    else:
        names = {f"{layer}{name}": name for name in (*JOINING, *sorted(tables))}
    for called, name in names.items():
        if name in TABLES:
            yield f"{called}.weight", 0.05 * torch.randn(rows, width)
        elif name == JOINED:
            yield f"{called}.weight", 0.05 * torch.randn(width, 2 * width)
        else:
            yield f"{called}.weight", 1 + 0.3 * torch.randn(width)
