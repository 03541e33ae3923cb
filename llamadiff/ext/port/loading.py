"""The model whose code is held against llama.cpp's graph: a checkpoint's, or what a function of the user's builds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from llamaref.known_tensors import usual_names
from numpy.typing import NDArray

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.pairs import in_file
from llamadiff.ext.file.views import Stored, View, whole
from llamadiff.ext.port.alignment import distance
from llamadiff.ext.port.tensors import Tensors
from llamadiff.ext.port.torch_ops import is_read, layers_of
from llamadiff.ext.prompt.own_code import function_of, is_function
from llamadiff.system.errors import UserError
from llamadiff.trace.metadata import Info
from llamadiff.trace.stated import reason

Array = NDArray[Any]
KEPT = {"F16": "float16", "BF16": "bfloat16"}  # types of matrices that a model's own are rounded to
MERGED = 1e-4  # NMSE of what a merged adapter is off by, rounded to 16 bits
NEAR = 0.5  # NMSE of what a quantization makes of a matrix; that of another one is 2
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
NEEDS = "port needs torch and transformers: pip install torch transformers"


def model_of(spec: str) -> Any:
    """A directory of a checkpoint, in transformers; or ``file.py:function``, which builds a torch module.

    A checkpoint's code is transformers' own: what lies in its directory is never run. Raises UserError.
    """
    check_installed()
    if is_function(spec):
        return _built(spec)
    from llamadiff.ext.pytorch.transformers import loaded

    return loaded(folder_of(spec), "f32", {})


def check_installed() -> None:
    """Raise UserError where torch or transformers is not."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise UserError(NEEDS)


def folder_of(spec: str, or_function: bool = True) -> Path:
    """The directory of a checkpoint. Raises UserError for what is none; ``or_function``: what else it may have been."""
    path = Path(spec)
    if path.is_dir():
        return path
    end = "no directory of a checkpoint"
    end += ", and no file.py:function that builds a torch module" if or_function else ""
    if path.is_file() and path.with_name("config.json").is_file():
        raise UserError(f"{spec}: is {end}; give the directory that it lies in, {path.parent}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and not path.exists():
        end += f"; nothing is downloaded here: hf download {spec} --local-dir checkpoint, and give checkpoint"
    raise UserError(f"{spec}: {end}")


def other_ids(checkpoint: str, info: Info) -> tuple[int, ...] | None:
    """The prompt's ids by the checkpoint's own tokenizer, where they are others than llama.cpp's; None where they are
    the same but for what stands before and after a text, or cannot be had.
    """
    if info.prompt is None or not any((Path(checkpoint) / name).is_file() for name in TOKENIZERS):
        return None
    from llamadiff.ext.pytorch.transformers import tokenizer_of

    try:
        own = tokenizer_of(checkpoint)
        plain = tuple(own(info.prompt, add_special_tokens=False).input_ids)
        known = {plain, tuple(own(info.prompt).input_ids)}
    except Exception:  # its loaders raise many kinds; weights compares the tokenizers without it
        return None
    ids = tuple(info.tokens[: info.n_prefill])
    ends = {ids[first : len(ids) - last] for first in (0, 1) for last in (0, 1)}
    return None if known & ends else plain


def matrices_of(model: Any) -> dict[str, View]:
    """The parameters of a module."""
    return {name: Stored(x.detach().float().cpu().numpy(), "F32") for name, x in model.named_parameters()}


def _built(spec: str) -> Any:
    """What a user's function returns."""
    import torch

    build = function_of(spec)
    try:
        model = build()
    except Exception as error:  # a stranger's code may raise anything
        raise UserError(f"{spec}: failed ({reason(error)})") from None
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"{spec}: gave {type(model).__name__}; expected a function that builds a torch module")
    return model.float().eval()


def kept_as_in(model: Any, file: ModelFile) -> tuple[str, ...]:
    """Give a model's matrices what the type that the file keeps its own in made of them -> the quantized types.

    Raises UserError for a quantized file that does not have them.
    """
    import torch

    weights = file.weights
    kinds = {weights.type(name) for name in file.tensors if len(weights.shape(name)) > 1} - {"F32"}
    quantized = tuple(sorted(kinds - set(KEPT)))
    with torch.no_grad():
        if quantized:
            parameters = {name: x.detach().float().numpy() for name, x in model.named_parameters()}
            layers = [name for name, _ in layers_of(model)]
            for name, values in with_weights_of(parameters, file, layers, partial(is_read, model)).items():
                model.get_parameter(name).copy_(torch.from_numpy(np.array(values, order="C")))
        else:
            usual = usual_names(file.architecture, len(layers_of(model)))
            common = kinds.pop() if len(kinds) == 1 else None  # of what has another name in the file
            adapted = weights.adapter.pairs if weights.adapter is not None else {}
            for name, values in model.named_parameters():
                tensor = usual(name) or ""
                if tensor in adapted:
                    merged = _laid_out(_values(file, tensor), values.detach().float().numpy(), MERGED)
                    values.copy_(values if merged is None else torch.from_numpy(np.array(merged, order="C")))
                    continue
                kind = weights.type(tensor) if tensor in weights else common
                if values.ndim > 1 and kind in KEPT:
                    values.copy_(values.to(getattr(torch, KEPT[kind])).to(values.dtype))
    return quantized


def kept_by_values(model: Any, file: ModelFile) -> tuple[str, ...]:
    """Give a module's matrices what the type that the file keeps its own in made of them -> the quantized types.

    Which tensor is a matrix is told by its values: there are no usual names. One that is in no tensor, since that is
    wrong, is kept as those of its size are. Raises UserError as ``kept_as_in`` does.
    """
    import torch

    weights = file.weights
    kinds = {name: weights.type(name) for name in file.tensors if len(weights.shape(name)) > 1}
    if {*kinds.values()} - {"F32", *KEPT}:
        return kept_as_in(model, file)
    tensors = Tensors(weights, file.architecture, {}, [])
    sizes = {name: int(np.prod(weights.shape(name))) for name in kinds}
    halves = sorted({*kinds.values()} - {"F32"})
    with torch.no_grad():
        for _, values in model.named_parameters() if halves else ():
            if values.ndim < 2 or _has_values(values, tensors):
                continue
            rounded = {kind: values.to(getattr(torch, KEPT[kind])).to(values.dtype) for kind in halves}
            alike = {kinds[name] for name, size in sizes.items() if size == values.numel()}
            kind = next((each for each in halves if _has_values(rounded[each], tensors)), None)
            kind = alike.pop() if kind is None and len(alike) == 1 else kind
            if kind in rounded:
                values.copy_(rounded[kind])
    return ()


def _has_values(values: Any, tensors: Tensors) -> bool:
    return tensors.is_kept(values.detach().float().numpy())


def check_vocabulary(model: Any, tokens: tuple[int, ...]) -> None:
    """Raise UserError for tokens that the model's embedding does not have."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    count = getattr(embedding, "num_embeddings", None)
    if count is not None and max(tokens, default=0) >= count:
        beyond = int(np.max(tokens))
        raise UserError(f"token {beyond} is not among the model's {count}: is the file of this checkpoint?")


def with_weights_of(
    parameters: Mapping[str, Array], file: ModelFile, layers: list[str], is_needed: Callable[[str], bool]
) -> dict[str, Array]:
    """Matrices of a model, by name, with the file's values: what the quantization made of the checkpoint's.

    So a file is judged within its own quantization: what that costs is not looked at. Raises UserError for a matrix
    that the file does not have, and that what the model gives depends on (``is_needed``).
    """
    tensors = Tensors(file.weights, file.architecture, parameters, layers)
    sizes = {name: int(np.prod(file.weights.shape(name))) for name in file.tensors}
    found = {}
    for name, x in parameters.items():
        if x.ndim > 1:
            values = _found(x, name, tensors, file, sizes)
            if values is None and not is_needed(name):
                continue
            if values is None:
                raise UserError(
                    f"{file.path}: is quantized, and {name} of the model is not found in it, or is another; what it "
                    f"has there says llamadiff weights {file.path} CHECKPOINT"
                )
            found[name] = values
    return found


def _found(x: Array, name: str, tensors: Tensors, file: ModelFile, sizes: Mapping[str, int]) -> Array | None:
    """A matrix as the file has it: as one tensor, or as two or three that are its parts."""
    usual = tensors.usual_name(name)
    alike = [each for each in sizes if sizes[each] == x.size]
    for each in sorted(alike, key=lambda other: other != usual):
        values = _laid_out(_values(file, each), x)
        if values is not None:
            return values
    for count in (2, 3):
        for axis in [axis for axis in range(x.ndim) if x.shape[axis] % count == 0]:
            parts = [_whole(part, file, sizes) for part in np.split(x, count, axis)]
            known = [part for part in parts if part is not None]
            if len(known) == count:
                return np.concatenate(known, axis)
    return None


def _whole(part: Array, file: ModelFile, sizes: Mapping[str, int]) -> Array | None:
    alike = (_laid_out(_values(file, each), part) for each in sizes if sizes[each] == part.size)
    return next((values for values in alike if values is not None), None)


def _values(file: ModelFile, tensor: str) -> Array:
    """A tensor with what an adapter adds to it."""
    return whole(in_file(file, tensor)).reshape(file.weights.shape(tensor))


def _laid_out(tensor: Array, x: Array, near: float = NEAR) -> Array | None:
    """A tensor's values where a matrix has its own; None if they are not near."""
    for values in _layouts(tensor, x.shape):
        if distance(values.ravel(), x.ravel()) <= near:
            return values
    return None


def _layouts(tensor: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """A tensor as a matrix of this shape: as it is, transposed, and with pairs of rows as halves of heads."""
    if tensor.size != np.prod(shape):
        return
    if tensor.squeeze().shape == tuple(size for size in shape if size > 1):
        yield tensor.reshape(shape)
    if len(shape) == 2:
        if tensor.squeeze().T.shape == shape:
            yield tensor.squeeze().T
        rows = shape[0]
        for heads in [heads for heads in range(1, rows // 2 + 1) if rows % (2 * heads) == 0]:
            if tensor.squeeze().shape == shape:
                yield tensor.reshape(heads, -1, 2, shape[1]).swapaxes(1, 2).reshape(shape)
