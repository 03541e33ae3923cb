"""Record what a PyTorch model computes, module by module: ``llamadiff.torch.record(model, ids)``.

    from llamadiff.torch import record

    record(model, ids, "mine.safetensors")  # a Hugging Face model
    llamadiff compare model.gguf --candidate mine.safetensors --map hf

torch is imported where a model of it is run, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.candidates.map_file import INPUT, load_map
from llamadiff.candidates.name_map import Entry
from llamadiff.ext.writers.trace_writer import TraceWriter
from llamadiff.system.errors import UserError
from llamadiff.system.output import check_target
from llamadiff.trace import taps
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace

Array = NDArray[Any]
Recorded = dict[str, tuple[str, Array]]  # name -> type in a file, values (bfloat16: its bits)

HEAD = "lm_head"  # Hugging Face's name of what gives the logits
_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32"}


def record(
    model: Any,
    ids: Sequence[int],
    path: str | Path | None = None,
    mapping: str | Path | Mapping[str, str] = "hf",
    call: Callable[[Any], Any] | None = None,
) -> Trace:
    """Run a ``torch.nn.Module`` on token ids and keep what those modules put out that a map names.

    ``mapping``: a map as ``--map`` takes it (``hf``, a TOML file); tensors are called as the modules are, and the same
    map is given to the comparison. Or a mapping of taps to modules, ``{"l_out": "blocks.{i}", "embd": "wte"}``; tensors
    are then called as the taps are, and no map is needed. A name that ends in `` (input)`` is what a module takes in.
    ``call`` runs the model on ids [1, n], where that is not ``model(ids)``. The trace is written to ``path`` if there
    is one; a trace that is there is replaced. Raises UserError if the model has no such module, or runs one twice.
    """
    if path is not None:
        check_target(Path(path))
    ids = _checked(ids)
    names = _names(model, mapping)
    if not names:
        first = ", ".join(name for name, _ in list(model.named_modules())[1:6])
        raise UserError(
            f"no module of {type(model).__name__} has a name that the map has; the first are {first}; "
            'give mapping={"l_out": "blocks.{i}", ...}, with a name for each tap'
        )
    kept = {names[name]: stored(name, value) for name, value in run(model, ids, names, call).items()}
    info = Info(tuple(ids), tuple(range(len(ids))), len(ids), None, _producer(model), {})
    if path is not None:
        return _written(Path(path), info, kept)
    return Trace(info, {name: values for name, (_, values) in kept.items()}, {n: kind for n, (kind, _) in kept.items()})


def _checked(ids: Any) -> list[int]:
    """The ids of one text, as a list or a tensor of them, [n] or [1, n]. Raises UserError for what is none."""
    if isinstance(ids, str):
        raise UserError("ids: is a text; give its token ids, such as tokenizer(text).input_ids")
    given = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if given and isinstance(given[0], (list, tuple)):
        if len(given) > 1:
            raise UserError(f"ids: {len(given)} rows; a trace is of one text, record them one by one")
        given = list(given[0])
    for place, token in enumerate(given):
        if isinstance(token, (bool, float)) or not hasattr(token, "__index__"):
            raise UserError(f"ids[{place}] is {str(token)[:40]!r}; expected whole numbers, such as [1, 17, 5]")
    return [int(token) for token in given]


def run(
    model: Any, ids: Sequence[int], wanted: Iterable[str] | None = None, call: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """What modules put out, and took in (``NAME (input)``), in one pass: those that are wanted, or all.

    Raises UserError for a wanted module that ran more than once.
    """
    import torch

    only = None if wanted is None else set(wanted)
    seen: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        if only is not None and name not in only:
            return
        if only is not None and name in seen:
            raise UserError(f"{name} ran more than once in one pass; name modules that run once for all tokens")
        value = value[0] if isinstance(value, tuple) and value else value
        if torch.is_tensor(value):
            seen[name] = value.detach().cpu().clone()

    given = torch.tensor([list(map(int, ids))], device=next((x.device for x in model.parameters()), None))
    with _observed(model, keep), torch.no_grad():
        if call is not None:
            gave = call(given)
        else:
            gave = model(given, use_cache=False) if hasattr(model, "config") else model(given)
    logits: Any = getattr(gave, "logits", None)
    if HEAD in seen and torch.is_tensor(logits) and logits.shape == seen[HEAD].shape:  # scaled, or capped, behind it
        seen[HEAD] = logits.detach().cpu().clone()
    return seen


@contextmanager
def _observed(model: Any, keep: Callable[[str, Any], None]) -> Iterator[None]:
    """Every module tells what it takes in and puts out; the model is without dropout for as long as it runs."""
    hooks, training = [], bool(model.training)
    for name, module in model.named_modules():
        hooks.append(module.register_forward_hook(lambda _, __, out, name=name: keep(name, out)))
        hooks.append(module.register_forward_pre_hook(lambda _, args, name=name: keep(name + INPUT, args)))
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()


def stored(name: str, tensor: Any) -> tuple[str, Array]:
    """A tensor's type in a file, and its values; of bfloat16, which numpy lacks, the bits."""
    import torch

    kind = _TYPES.get(str(tensor.dtype).removeprefix("torch."))
    if kind is None:
        raise UserError(f"{name} has values of type {tensor.dtype}; a trace holds {', '.join(_TYPES)}")
    plain = tensor.contiguous()
    bits = plain.view(torch.int16).numpy().view(np.uint16) if kind == "BF16" else plain.numpy()
    return kind, np.asarray(bits)


def _names(model: Any, mapping: str | Path | Mapping[str, str]) -> dict[str, str]:
    """The modules that a map names, and what their tensors are called."""
    if isinstance(mapping, Mapping):
        unknown = next((word for word in mapping if word not in taps.BY_WORD), None)
        if unknown is not None:
            raise UserError(f"mapping: {unknown} is no tap; llamadiff taps MODEL lists them")
        entries = {word: Entry(word, name) for word, name in mapping.items()}
    elif isinstance(mapping, (str, Path)):
        entries = dict(load_map(str(mapping)))
    else:
        raise UserError(f"mapping: is {mapping!r:.40}; expected hf, a map's file, or a mapping of taps to modules")
    found, used = {}, set[str]()
    for module, _ in model.named_modules():
        for name in (module, module + INPUT):
            for entry in entries.values():
                match = re.fullmatch(re.escape(entry.name).replace(re.escape("{i}"), "([0-9]{1,4})"), name)
                if match:
                    tap = entry.word + "".join(f"-{int(layer)}" for layer in match.groups())
                    found[name] = tap if isinstance(mapping, Mapping) else name
                    used.add(entry.word)
    if isinstance(mapping, Mapping):
        for word in [word for word in entries if word not in used]:
            raise UserError(f"mapping: {word}: {_no_module(model, entries[word].name)}")
    return found


def _no_module(model: Any, name: str) -> str:
    """That a model has no such module, and the nearest that it has."""
    known = dict.fromkeys(re.sub(r"(?<=\.)[0-9]+(?=\.|$)", "{i}", module) for module, _ in model.named_modules())
    near = get_close_matches(name.removesuffix(INPUT), known, 1)
    return f"{type(model).__name__} has no module {name}" + (f"; did you mean {near[0]}?" if near else "")


def _producer(model: Any) -> dict[str, Any]:
    import torch

    return {"name": type(model).__name__, "version": f"torch {torch.__version__}"}


def _written(path: Path, info: Info, kept: Recorded) -> Trace:
    writer = TraceWriter(path, info.tokens)
    for key in ("name", "version"):
        writer.state(key, info.producer[key])
    for name, (kind, values) in kept.items():
        writer.add_as(name, kind, values)
    try:
        writer.end()
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    return Trace.open(path)
