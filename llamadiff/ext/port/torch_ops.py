"""Every op that a PyTorch model computes, with its values and the line of the model's code that asks for it."""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.system.errors import UserError
from llamadiff.trace.stated import reason

Array = NDArray[Any]
SCAFFOLD = tuple(
    part.replace("/", os.sep)
    for part in (__file__, "/torch/", "/transformers/utils/", "/transformers/integrations/", "/contextlib.py")
)
# What shows the values of another tensor, in another shape or order, or some of them.
LOOKS = {
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "expand", "slice", "select", "unsqueeze", "squeeze",
    "clone", "_to_copy", "detach", "split", "split_with_sizes", "chunk", "contiguous", "alias", "repeat",
}  # fmt: skip


FEEDS = "projector_model.py"  # whose ops are no code of the model's
FEW = 4  # ids that a model is tried with
GIVEN = ("logits", "last_hidden_state")  # of what a model returns, what it is run for


@dataclass(frozen=True)
class CodeLine:
    """A line of code; ``file`` is its name without folders."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class TorchOp:
    """One op: ``inputs`` are the ops before it whose results it reads, ``weights`` the model's parameters."""

    number: int
    name: str
    line: CodeLine | None
    inputs: tuple[int, ...]
    weights: tuple[str, ...]
    values: Array

    @property
    def looks(self) -> bool:
        """Whether it computes nothing."""
        return self.name in LOOKS


@dataclass(frozen=True)
class TorchRun:
    """The ops of one pass in their order. ``ends``: those that made what the first layer was about to read, what each
    layer gave, and the logits.
    """

    ops: Sequence[TorchOp]
    ends: Sequence[int]

    def readers(self) -> dict[int, list[TorchOp]]:
        """Of each op, those that read its result."""
        found: dict[int, list[TorchOp]] = {}
        for op in self.ops:
            for number in dict.fromkeys(op.inputs):
                found.setdefault(number, []).append(op)
        return found


def layers_of(model: Any, least: int = 1) -> list[tuple[str, Any]]:
    """The modules that are the model's layers: the list of modules that has most of its parameters, of those with at
    ``least`` so many modules, if there is one; or what the model calls ``lined_up``. Raises UserError for a model
    without one.
    """
    import torch

    known = getattr(model, "lined_up", None)
    if isinstance(known, list):
        return known

    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    if not lists:
        raise UserError(f"{type(model).__name__} has no list of layers (a torch.nn.ModuleList): it cannot be lined up")
    lists = [each for each in lists if len(each[1]) >= least] or lists
    name, found = max(lists, key=lambda each: sum(p.numel() for p in each[1].parameters()))
    if len({id(layer) for layer in found}) < len(found):
        raise UserError(f"{type(model).__name__} has one module as several layers ({name}): it cannot be lined up")
    return [(f"{name}.{i}", layer) for i, layer in enumerate(found)]


def recorded(model: Any, ids: Sequence[int], given: Mapping[int, Array]) -> TorchRun:
    """Run a model on token ids. ``given``: what layers read in place of what the one before gave; under the number
    after the last one, what the model goes on with.
    """
    import torch

    run = _Run(model)
    tensors = {number: torch.from_numpy(np.ascontiguousarray(x, np.float32)) for number, x in given.items()}
    with torch.no_grad(), run.replaced(layers_of(model), tensors), run.mode():
        out = _called(model, ids)
    ends = [*run.ends, run.maker_of(logits_in(out))]
    if len(ends) != len(layers_of(model)) + 2:
        raise UserError(f"{type(model).__name__}: a layer ran more than once, or not at all: it cannot be lined up")
    return TorchRun(run.ops, ends)


def check_runs(model: Any, ids: Sequence[int]) -> None:
    """Raise UserError with what the model itself raises on ids, and where: a model may be anybody's code."""
    import torch

    try:
        with torch.no_grad():
            _called(model, ids)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not any(part in frame.filename for part in SCAFFOLD)]
        where = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
        raise UserError(
            f"{type(model).__name__}: failed on ids [1, {len(ids)}]{where} ({type(error).__name__}: {reason(error)}); "
            "a module that takes [n] is wrapped by one whose forward(self, ids) returns self.m(ids[0])[None]"
        ) from None


def logits_of(model: Any, ids: Sequence[int]) -> Array:
    """What a model makes of token ids by itself."""
    import torch

    with torch.no_grad():
        out = _called(model, ids)
    return _floats(logits_in(out))


def is_read(model: Any, parameter: str) -> bool:
    """Whether what a model gives depends on a parameter: a pooler's may be there for another use."""
    import torch

    with torch.enable_grad():
        own = model.get_parameter(parameter).requires_grad_(True)
        out = logits_in(_called(model, range(FEW)))
        return not out.requires_grad or torch.autograd.grad(out.sum(), own, allow_unused=True)[0] is not None


def _called(model: Any, ids: Sequence[int]) -> Any:
    """What a model returns, without a cache where it knows one."""
    import torch

    known = inspect.signature(model.forward).parameters
    options = {"use_cache": False} if {"use_cache", "kwargs"} & set(known) else {}
    return model(torch.tensor([list(map(int, ids))]), **options)


def logits_in(out: Any) -> Any:
    """The logits of what a model returned: its field of that name, the first of several, or all of it.

    Of an embedding model it is what its last layer gives.
    """
    found = next((x for x in (getattr(out, name, None) for name in GIVEN) if x is not None), None)
    return found if found is not None else out[0] if isinstance(out, (tuple, list)) else out


class _Run:
    """Tensors are told apart by what they are, not by their values: each stays alive until the run is over."""

    def __init__(self, model: Any) -> None:
        self.ops: list[TorchOp] = []
        self.ends: list[int] = []
        named = [*model.named_parameters(), *model.named_buffers()]
        self._weights: dict[int, str] = {id(x): name for name, x in named}
        self._made: dict[int, int] = {}  # tensor -> the op that made it
        self._alive: list[Any] = []

    def mode(self) -> Any:
        """What sees every op while it is entered."""
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        run = self

        class Watching(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                leaves = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x)]
                for each in out if isinstance(out, (tuple, list)) else (out,):
                    if torch.is_tensor(each):
                        run.note(func.overloadpacket.__name__, leaves, each)
                return out

        return Watching()

    def note(self, name: str, read: Sequence[Any], made: Any) -> None:
        """An op, unless it only looks at a parameter."""
        self._alive += [made, *read]
        weights = tuple(self._weights[id(x)] for x in read if id(x) in self._weights)
        inputs = tuple(self._made[id(x)] for x in read if id(x) in self._made)
        if name in LOOKS and weights and not inputs:
            self._weights[id(made)] = weights[0]
            return
        self._made[id(made)] = len(self.ops)
        self.ops.append(TorchOp(len(self.ops), name, _line(), inputs, weights, _floats(made)))

    @contextmanager
    def replaced(self, layers: Sequence[tuple[str, Any]], given: Mapping[int, Any]) -> Iterator[None]:
        """Layers read what they are given."""
        hooks = []
        for number, (_, layer) in enumerate(layers):
            hooks.append(layer.register_forward_pre_hook(self._giving(given.get(number)), with_kwargs=True))
        last = layers[-1][1]
        hooks += [layer.register_forward_hook(self._noting) for _, layer in layers]
        hooks.append(
            last.register_forward_hook(self._ending(given.get(len(layers))), prepend=True)
        )  # before who keeps it
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _giving(self, given: Any) -> Callable[[Any, Any, Any], Any]:
        def hook(_: Any, args: Any, kwargs: Any) -> Any:
            name = "" if args else _stream_in(kwargs)
            own = args[0] if args else kwargs[name]
            if not self.ends:
                self.ends.append(self.maker_of(own))
            if given is None:
                return None
            x = self._in_place_of(own, given)
            return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})

        return hook

    def _noting(self, _: Any, __: Any, out: Any) -> None:
        self.ends.append(self.maker_of(out[0] if isinstance(out, tuple) else out))

    def maker_of(self, tensor: Any) -> int:
        """The op that made a tensor. Raises UserError where none was seen."""
        if id(tensor) not in self._made:
            raise UserError(
                "a layer gives what no op of torch's was seen to make: run the model uncompiled, in eager mode"
            )
        return self._made[id(tensor)]

    def _ending(self, given: Any) -> Callable[[Any, Any, Any], Any]:
        def hook(_: Any, __: Any, out: Any) -> Any:
            if given is None:
                return None
            is_one = not isinstance(out, tuple)
            x = self._in_place_of(out if is_one else out[0], given)
            return x if is_one else (x, *out[1:])

        return hook

    def _in_place_of(self, own: Any, given: Any) -> Any:
        """Other values, which count as made by the op that made those."""
        from torch.utils._python_dispatch import _disable_current_modes

        if given.numel() != own.numel():
            raise UserError(
                f"a layer of the model reads {list(own.shape)}, and llama.cpp's {given.numel()} values: "
                "is the file of this checkpoint?"
            )
        with _disable_current_modes():
            x = given.reshape(own.shape).to(own.dtype)
        if id(own) in self._made:
            self._made[id(x)] = self._made[id(own)]
        self._alive.append(x)
        return x


def _stream_in(kwargs: Mapping[str, Any]) -> str:
    """Which of a layer's arguments is the rows that go through all layers: that of this name, or the first tensor."""
    if "hidden_states" in kwargs:
        return "hidden_states"
    return next(name for name, x in kwargs.items() if getattr(x, "is_floating_point", bool)())


def _floats(x: Any) -> Array:
    """Values as numpy has them; of integers and flags too, as they are."""
    x = x.detach()
    return np.array(x.float().numpy() if x.is_floating_point() else x.numpy())


def _line() -> CodeLine | None:
    """The innermost line that is of the model's code, or of what it calls outside of torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(FEEDS):
            return None
        if not any(part in file for part in SCAFFOLD):
            return CodeLine(Path(file).name, frame.f_lineno, linecache.getline(file, frame.f_lineno).strip())
        frame = frame.f_back
    return None
