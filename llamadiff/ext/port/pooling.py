"""A model that embeds texts with its pooling: what its folder says that is made of the rows of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llamadiff.ext.port.torch_ops import logits_in
from llamadiff.system.errors import UserError
from llamadiff.trace.stated import read_json

MOST = 1 << 20  # bytes of a description
POOLED = "result_embd_pooled"  # what llama.cpp calls the row of a text
MODES: Mapping[str, Callable[[Any], Any]] = {  # of rows [batch, token, embd], by sentence-transformers' names
    "cls": lambda x: x[:, 0],
    "mean": lambda x: x.mean(dim=1),
    "lasttoken": lambda x: x[:, -1],
    "max": lambda x: x.amax(dim=1),
    "mean_sqrt_len_tokens": lambda x: x.sum(dim=1) / x.shape[1] ** 0.5,
}


def mode_of(folder: Path) -> str | None:
    """How the rows of a text become one, as sentence-transformers' files say; None where they are none's.

    Raises UserError for a way that is not known.
    """
    listed = folder / "modules.json"
    modules = read_json(listed, MOST, "modules") if listed.is_file() else []
    listed_modules = [each for each in modules if isinstance(each, dict)] if isinstance(modules, list) else []
    paths = [str(each.get("path")) for each in listed_modules if str(each.get("type")).endswith(".Pooling")]
    where = folder / paths[0] / "config.json" if paths else None
    if where is None or not where.is_file():
        return None
    said = read_json(where, MOST, "a pooling")
    said = said if isinstance(said, dict) else {}
    flags = [name for name, value in said.items() if name.startswith("pooling_mode_") and value]
    chosen = [name.removeprefix("pooling_mode_") for name in flags]
    chosen = [said["pooling_mode"]] if isinstance(said.get("pooling_mode"), str) else chosen
    modes = [name if name in MODES else name.removesuffix("_token").removesuffix("_tokens") for name in chosen]
    if len(modes) != 1 or modes[0] not in MODES:
        raise UserError(f"{where}: pooling by {', '.join(chosen) or 'nothing'}; known are {', '.join(MODES)}")
    return str(modes[0])


def with_pooling(model: Any, mode: str) -> Any:
    """The same model, which gives one row for a text."""
    pool = MODES[mode]

    class Pooling:
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return pool(logits_in(super().forward(*args, **kwargs)))  # type: ignore[misc]

    model.__class__ = type(type(model).__name__, (Pooling, type(model)), {})
    return model
