"""The part of a checkpoint's model that sees or hears, as a module of what llama.cpp fed its own encoder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.port.loading import check_installed, folder_of, model_of
from llamadiff.ext.port.torch_ops import layers_of
from llamadiff.ext.prompt.own_code import is_function
from llamadiff.ext.pytorch.transformers import loaded_whole
from llamadiff.system.errors import UserError
from llamadiff.trace.stated import reason

Array = NDArray[Any]
TOWERS = {
    "image": ("vision_tower", "visual", "vision_model", "vision_encoder"),
    "audio": ("audio_tower", "audio_encoder", "speech_encoder", "encoder"),
}  # what transformers calls them
METHODS = {"image": "get_image_features", "audio": "get_audio_features"}
PROJECTORS = ("multi_modal_projector", "projector", "connector")
RESULTS = ("pooler_output", "last_hidden_state")  # of what a model returns, what goes to the text model
STACKED = "deepstack_features"  # and beside it, to the text model's first layers


def projector_model(checkpoint: str, sense: str, fed: Array, layers: int) -> Any:
    """The module, whose call computes what ``fed`` (llama.cpp's) becomes; the first ``layers`` of its list are those
    that are lined up. Raises UserError.
    """
    check_installed()
    if is_function(checkpoint):
        holder = model_of(checkpoint)
        run: Callable[[Any], Any] = holder.forward
    else:
        holder = _holder(loaded_whole(folder_of(checkpoint)), sense, checkpoint)
        run = _seeing(holder) if sense == "image" else _hearing(holder)

    def forward(ids: Any) -> Any:
        import torch

        return _result(run(torch.from_numpy(np.array(fed, np.float32)).clone()))

    holder.forward = forward
    holder.lined_up = layers_of(holder, layers)[:layers]
    _check(holder, checkpoint, fed)
    return holder


def config_of(model: Any) -> Mapping[str, Any]:
    """A module's config as plain data; of one's own module there may be none."""
    config: Any = getattr(model, "config", None)
    return config.to_dict() if hasattr(config, "to_dict") else {}


def _holder(model: Any, sense: str, checkpoint: str) -> Any:
    """What has the tower and its projector, without the text model. Raises UserError."""
    holder = next((each for each in (getattr(model, "model", None), model) if _tower(each, sense) is not None), None)
    if holder is None:
        word = "sees" if sense == "image" else "hears"
        raise UserError(f"{checkpoint}: {type(model).__name__} has no part that {word}; expected {TOWERS[sense][0]}")
    words = model.get_input_embeddings()
    for name, child in [*holder.named_children()]:
        if any(each is words for each in child.modules()):
            del holder._modules[name]
    return holder


def _tower(model: Any, sense: str) -> Any:
    children = dict(model.named_children()) if model is not None else {}
    return next((children[name] for name in TOWERS[sense] if name in children), None)


def _seeing(holder: Any) -> Callable[[Any], Any]:
    """What turns a picture [batch, channel, row, column] into rows for a text model."""

    def run(pixels: Any) -> Any:
        import torch

        method = getattr(holder, METHODS["image"], None) or _tower(holder, "image")
        takes = inspect.signature(method).parameters
        rows, columns = pixels.shape[-2:]
        more: dict[str, Any] = {}
        if "image_grid_thw" in takes:
            vision = _tower(holder, "image").config
            side = int(vision.patch_size)
            more["image_grid_thw"] = torch.tensor([[1, rows // side, columns // side]])
            pixels = _patches(pixels, side, int(vision.temporal_patch_size), int(vision.spatial_merge_size))
        elif "spatial_shapes" in takes:
            side = int(_tower(holder, "image").config.patch_size)
            high, wide = rows // side, columns // side
            more["spatial_shapes"] = torch.tensor([[high, wide]])
            more["pixel_attention_mask"] = torch.ones((1, high * wide), dtype=torch.long)
            pixels = _flat_patches(pixels, side)
        elif "pixel_attention_mask" in takes:
            pixels = pixels[None]
        elif "image_sizes" in takes and _needs_sizes(holder, takes["image_sizes"]):
            more["image_sizes"] = torch.tensor([[rows, columns]])
        return _projected(holder, lambda: method(pixels, **more))

    return run


def _hearing(holder: Any) -> Callable[[Any], Any]:
    """What turns mel rows [1, 1, band, frame] into rows for a text model."""

    def run(mel: Any) -> Any:
        method = getattr(holder, METHODS["audio"], None) or _tower(holder, "audio")
        return _projected(holder, lambda: method(mel[0]))

    return run


def _projected(holder: Any, run: Callable[[], Any]) -> Any:
    """What a method gives, through the projector, where the method itself leaves that to the model's own pass."""
    projector = next((child for name, child in holder.named_children() if name in PROJECTORS), None)
    if projector is None:
        return run()
    called = list[bool]()
    hook = projector.register_forward_hook(lambda *_: called.append(True))
    try:
        out = run()
    finally:
        hook.remove()
    if called:
        return out
    last = getattr(out, "last_hidden_state", None)
    x = out if last is None else last
    return projector(x.reshape(-1, x.shape[-1]))


def _needs_sizes(holder: Any, parameter: inspect.Parameter) -> bool:
    known = inspect.signature(_tower(holder, "image").forward).parameters
    return parameter.default is inspect.Parameter.empty or "image_sizes" in known


def _patches(pixels: Any, side: int, frames: int, merged: int) -> Any:
    """Rows of patches as Qwen-VL's processors order them: those that are merged are neighbours."""
    import torch

    batch, channels, rows, columns = pixels.shape
    moving = torch.stack([pixels] * frames, dim=1)
    high, wide = rows // side // merged, columns // side // merged
    cut = moving.reshape(batch, frames, channels, high, merged, side, wide, merged, side)
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * frames * side * side)


def _flat_patches(pixels: Any, side: int) -> Any:
    """Rows of patches as SigLIP 2's processor orders them."""
    batch, channels, rows, columns = pixels.shape
    cut = pixels.reshape(batch, channels, rows // side, side, columns // side, side)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, side * side * channels)


def _result(out: Any) -> Any:
    """The rows that a text model is given, of what a method returned."""
    import torch

    found = next((x for name in RESULTS if (x := getattr(out, name, None)) is not None), out)
    stacked = getattr(out, STACKED, None) or ()
    parts = [_whole(found), *map(_whole, stacked)]
    return parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1, part.shape[-1]) for part in parts], dim=-1)


def _whole(x: Any) -> Any:
    import torch

    if not isinstance(x, (list, tuple)):
        return x
    return x[0] if len(x) == 1 else torch.cat([each.reshape(-1, each.shape[-1]) for each in x])


def _check(model: Any, checkpoint: str, fed: Array) -> None:
    """Raise UserError with what the model itself raises: it may be anybody's code, or of other sizes."""
    import torch

    try:
        with torch.no_grad():
            model(None)
    except UserError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {reason(error)}"
        raise UserError(
            f"{checkpoint}: {type(model).__name__} failed on what llama.cpp was fed, {list(fed.shape)} ({what})"
        ) from None
