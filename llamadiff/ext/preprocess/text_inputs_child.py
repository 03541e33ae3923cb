"""The child process that runs a checkpoint as far as its text model, and writes down what that is given.

Nothing in a checkpoint's folder is run but what transformers has of it, and nothing is fetched.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.preprocess.wav import is_wav, read_wav, resampled
from llamadiff.system.input import read_bytes
from llamadiff.system.python_child import leave_no_core, watch_parent

Array = NDArray[Any]
LOCAL = {"local_files_only": True, "trust_remote_code": False}
MAX_PICTURE = 1 << 28  # bytes of a file
PLACEHOLDERS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")


class _ReachedError(Exception):
    """The text model was reached, and what it was given is known."""


def main(checkpoint: str, file: str, prompt: str, to: str) -> None:
    """Write the arrays to a file, and say in one line what they are."""
    leave_no_core()
    os.environ["HF_HUB_OFFLINE"] = "1"
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is none of the answers
    watch_parent(lambda: None)
    try:
        arrays, about = text_inputs(Path(checkpoint), Path(file), prompt)
        np.savez(to, allow_pickle=False, **arrays)
    except Exception as error:  # its loaders raise many kinds
        about = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    said.write(json.dumps(about) + "\n")
    said.flush()


def text_inputs(checkpoint: Path, file: Path, prompt: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """What a checkpoint's text model is given of a prompt and a picture or a sound."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.from_pretrained(checkpoint, **LOCAL)
    processor = _processor(checkpoint, config)
    processed = _processed(processor, file, prompt)
    model = _model(checkpoint, config)
    place = next(getattr(config, name) for name in PLACEHOLDERS if getattr(config, name, None) is not None)
    with torch.no_grad():
        found = _reached(model, processed)
        own = model.get_input_embeddings()(torch.tensor([[place]]))[0]
    ids = np.asarray(processed["input_ids"][0])
    tokenizer = processor.tokenizer
    arrays = {
        "ids": ids, "embeds": _array(found["inputs_embeds"])[0], "is_media": ids == place,
        "placeholder": _array(own)[0],
        **{f"mask {name}": mask for name, mask in _masks(found["masks"], len(ids)).items()},
    }  # fmt: skip
    positions = found.get("position_ids")
    if positions is not None:
        arrays["positions"] = _array(positions).reshape(-1, len(ids))
    scale = getattr(model.get_input_embeddings(), "scalar_embed_scale", getattr(model, "embed_scale", 1.0))
    about = {
        "class": type(model).__name__, "texts": [str(each) for each in tokenizer.convert_ids_to_tokens(ids.tolist())],
        "scale": float(scale), "placeholder": str(tokenizer.convert_ids_to_tokens([place])[0]),
    }  # fmt: skip
    return arrays, about


def _array(values: Any) -> Array:
    return np.asarray(values.detach().to("cpu").float().numpy())


def _processor(checkpoint: Path, config: Any) -> Any:
    """The checkpoint's processor; one for videos needs torchvision, and is left out where that is not."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    try:
        return transformers.AutoProcessor.from_pretrained(checkpoint, backend="pil", **LOCAL)
    except (ImportError, OSError, ValueError, AttributeError):
        name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
        if name is None:
            raise
        kind = getattr(transformers, name)
        kind.check_argument_for_proper_class = lambda *_: None
        parts: dict[str, Callable[[], Any]] = {
            "image_processor": lambda: transformers.AutoImageProcessor.from_pretrained(
                checkpoint, backend="pil", **LOCAL
            ),
            "feature_extractor": lambda: transformers.AutoFeatureExtractor.from_pretrained(checkpoint, **LOCAL),
            "tokenizer": lambda: transformers.AutoTokenizer.from_pretrained(checkpoint, **LOCAL),
            "video_processor": lambda: None,
        }
        known = signature(kind.__init__).parameters
        return kind(**{part: make() for part, make in parts.items() if part in known})


def _processed(processor: Any, file: Path, prompt: str) -> Any:
    """A prompt with its picture or sound, as the model takes it."""
    word = getattr(processor, "image_token", None) or getattr(processor, "audio_token", None) or ""
    what = "audio" if is_wav(file) else "image"
    text = prompt
    if word not in prompt:
        content = [{"type": what}, {"type": "text", "text": prompt}]
        if getattr(processor, "chat_template", None):
            text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        else:
            text = f"{word}{prompt}"
    if what == "audio":
        sound, rate = read_wav(file), int(processor.feature_extractor.sampling_rate)
        samples = sound.samples.mean(1)
        samples = samples if sound.rate == rate else resampled(samples, sound.rate, rate, "sinc")
        return processor(text=[text], audio=[samples.astype(np.float32)], return_tensors="pt", sampling_rate=rate)
    from PIL import Image

    image = Image.open(io.BytesIO(read_bytes(file, MAX_PICTURE, "a picture"))).convert("RGB")
    bos = getattr(processor.tokenizer, "bos_token", None)
    more = {"add_special_tokens": False} if bos and text.startswith(bos) else {}
    return processor(text=[text], images=[[image]], return_tensors="pt", **more)


def _model(checkpoint: Path, config: Any) -> Any:
    """The model in float32, with one layer of text: no more is run."""
    import torch
    import transformers

    kind = getattr(transformers, config.architectures[0])
    text = config.get_text_config()
    options = {"attn_implementation": "eager", "dtype": torch.float32, **LOCAL}
    try:
        text.num_hidden_layers = 1
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:1]
        return kind.from_pretrained(checkpoint, config=config, **options).eval()
    except (ValueError, KeyError, IndexError, RuntimeError, TypeError):
        return kind.from_pretrained(checkpoint, **options).eval()


def _reached(model: Any, processed: Any) -> dict[str, Any]:
    """What the text model and its first layer are given."""
    import torch

    found: dict[str, Any] = {}
    decoder = model.get_decoder()
    layers = next(each for each in decoder.modules() if isinstance(each, torch.nn.ModuleList) and len(each))

    def enter(_: Any, positional: Any, named: Any) -> None:
        if named.get("inputs_embeds") is not None and "inputs_embeds" not in found:
            found["inputs_embeds"], found["position_ids"] = named["inputs_embeds"], named.get("position_ids")
            if isinstance(named.get("attention_mask"), dict):
                found["masks"] = named["attention_mask"]

    def first(_: Any, positional: Any, named: Any) -> None:
        found.setdefault("masks", {"": named.get("attention_mask")})
        if found.get("position_ids") is None:
            found["position_ids"] = named.get("position_ids")
        raise _ReachedError

    hooks = [
        decoder.register_forward_pre_hook(enter, with_kwargs=True),
        layers[0].register_forward_pre_hook(first, with_kwargs=True),
    ]
    try:
        model(**processed, use_cache=False)
    except _ReachedError:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    if "inputs_embeds" not in found:
        raise ValueError("its text model is not given embeddings")
    return found


def _masks(masks: Any, count: int) -> dict[str, Array]:
    """Which rows each row sees, of every kind of layer: [row, row]; all before it where nobody says otherwise."""
    found = {}
    for name, mask in masks.items():
        if mask is None:
            found[name] = np.tri(count, dtype=bool)
        elif mask.ndim == 4:
            part = mask[0, 0, :, :count]
            found[name] = np.asarray(part.cpu().numpy() if part.dtype.is_floating_point is False else part.cpu() > -1e4)
    return {name: np.asarray(mask, bool) for name, mask in found.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
