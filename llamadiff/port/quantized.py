"""A model with the weights of a quantized file: what the quantization made of the checkpoint's, in their places.

So a file is judged within its own quantization: what that costs is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.engines.model_file import ModelFile
from llamadiff.port.alignment import distance
from llamadiff.port.tensors import Tensors
from llamadiff.system.errors import UserError

Array = NDArray[Any]
NEAR = 0.5  # NMSE of what a quantization makes of a matrix; that of another one is 2


def with_weights_of(parameters: Mapping[str, Array], file: ModelFile, layers: list[str]) -> dict[str, Array]:
    """Matrices of a model, by name, with the file's values. Raises UserError for one that the file does not have."""
    tensors = Tensors(file.weights, file.architecture, parameters, layers)
    sizes = {name: int(np.prod(file.weights.shape(name))) for name in file.tensors}
    found = {}
    for name, x in parameters.items():
        if x.ndim > 1:
            values = _found(x, name, tensors, file, sizes)
            if values is None:
                raise UserError(
                    f"{file.path}: is quantized, and {name} of the model is not found in it; convert the checkpoint "
                    "with --outtype f32 (or bf16), and compare that file with this one afterwards"
                )
            found[name] = values
    return found


def _found(x: Array, name: str, tensors: Tensors, file: ModelFile, sizes: Mapping[str, int]) -> Array | None:
    """A matrix as the file has it: as one tensor, or as two or three that are its parts."""
    usual = tensors.usual_name(name)
    alike = [each for each in sizes if sizes[each] == x.size]
    for each in sorted(alike, key=lambda other: other != usual):
        values = _laid_out(file.weights.whole(each), x)
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
    alike = (_laid_out(file.weights.whole(each), part) for each in sizes if sizes[each] == part.size)
    return next((values for values in alike if values is not None), None)


def _laid_out(tensor: Array, x: Array) -> Array | None:
    """A tensor's values where a matrix has its own; None if they are not near."""
    for values in _layouts(tensor, x.shape):
        if distance(values.ravel(), x.ravel()) <= NEAR:
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
