"""The interface of all sources of candidates: each gets a context and gives named tensors, which become a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff import plugins
from llamadiff.candidates import name_map
from llamadiff.candidates.pieces import Piece, Unread, place_in_tap
from llamadiff.engines.model_file import Runnable
from llamadiff.llamacpp.request import Settings
from llamadiff.numerics.arithmetic import precision
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress, silent
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import WEIGHTS

Array = NDArray[Any]
FOUND_MAP = "map"  # the key of a producer under which the lines of a map stand that was found by values
ROOM = 2  # times the values of the file's tensor: what a dumped weight may have, to be told what is wrong with it


@dataclass(frozen=True)
class Context:
    """What is known when a candidate is loaded: the model, the tokens to run, and how its names are read.

    ``baseline``: what llama.cpp recorded of them, where it has been run; ``place``: the
    settings that say which llama.cpp that was, and where.
    """

    model: Runnable
    tokens: tuple[int, ...]
    n_prefill: int
    mapping: name_map.Map = field(default_factory=name_map.identity_map)
    timeout: float = 600.0
    progress: Progress = silent
    baseline: Trace | None = None
    place: Settings = field(default_factory=Settings)

    @property
    def is_identity(self) -> bool:
        """Whether names and layouts are the taps' own."""
        return self.mapping == name_map.identity_map()


@dataclass(frozen=True)
class CandidateSource:
    """A candidate that was read, as far as that is possible before anything is run.

    ``tokens`` are the ids that it states, and ``run`` how it ran them, if it says so; ``untold`` says where it could
    have, if it states none. ``load`` makes it a trace, once the tokens are known; raises UserError for what does not
    fit them or the model. ``recorded``: it is there already, nothing has to be run for it.
    """

    load: Callable[[Context], Trace]
    tokens: tuple[int, ...] = ()
    untold: str = ""
    recorded: bool = False
    run: Info | None = None


def assemble(
    pieces: Iterable[Piece | Unread],
    context: Context,
    producer: Mapping[str, Any],
    tokens: tuple[int, ...] = (),
    unread: Sequence[str] = (),
) -> Trace:
    """Named tensors as a trace: names mapped, axes ordered, treatments undone, partial ones marked, weights kept.

    Names that no map entry has are kept as extras (named in the report), and so are those that were ``unread``.
    Of these no value is read, and no more of the others than the model can have. Raises UserError for a shape that does
    not fit, or if no name is known.
    """
    run = tokens or context.tokens
    if len(run) > context.model.n_ctx_train:
        raise UserError(
            f"the candidate has {len(run)} tokens, more than the model's context of {context.model.n_ctx_train}"
        )
    arrays: dict[str, Array] = {}
    known: dict[str, Array] = {}
    kept: dict[str, str] = {}
    weights: dict[str, Array] = {}
    extras: list[Piece | Unread] = []
    pieces, mapping = list(pieces), context.mapping
    if mapping is name_map.AUTO:
        found_map = plugins.ask_first(lambda each: each.map_by_values(pieces, context.model, run))
        if found_map is None:
            raise UserError("--map auto: the slice that finds names by values is missing; give a TOML file")
        mapping, lines = found_map
        producer = {**producer, FOUND_MAP: lines}
    names = name_map.Names(mapping, context.model)
    for unopened in pieces:
        if unopened.name.startswith(WEIGHTS):
            weights[unopened.name] = _weight(unopened, context.model)
            continue
        found = names.tap(unopened.name)
        if found is None:
            extras.append(unopened)
            continue
        tap, entry = found
        piece = unopened.load(name_map.most_values(unopened.shape, tap, entry, context.model, len(run)))
        if entry.done:
            kept.setdefault(tap.name, precision(piece.array))
        values, mask = place_in_tap(piece, tap, entry, context.model, len(run))
        if mask is not None and tap.name in known:  # several rows of one tap
            values, mask = np.where(mask, values, arrays[tap.name]), mask | known[tap.name]
        arrays[tap.name] = values
        if mask is not None and not mask.all():
            known[tap.name] = mask
        else:
            known.pop(tap.name, None)
    own = name_map.Names(name_map.identity_map(), context.model)
    lost = [piece.name for piece in extras if own.tap(piece.name) is not None]
    if lost and context.mapping is not name_map.AUTO and arrays.keys() <= {piece.name for piece in pieces}:
        what = f"translates no name of the candidate's, and loses {len(lost)} that are taps' own"
        raise UserError(f"--map {what} (the first is {lost[0][:80]}); leave it out")
    if not arrays and not weights:
        raise UserError(_nothing_known(extras, context, len(run)))
    positions = tuple(range(len(run)))
    n_prefill = min(context.n_prefill or len(run), len(run))
    ignored = [*(piece.name for piece in extras), *unread]
    info = Info(run, positions, n_prefill, None, {**producer, "extra": ignored}, {})
    arrays |= weights
    return Trace(info, arrays, dict.fromkeys(arrays, "F32"), known=known, kept=kept)


def _weight(piece: Piece | Unread, model: Runnable) -> Array:
    """A dumped weight; of one that the file does not have, nothing is read. Raises UserError for one far too large."""
    tensor = piece.name.removeprefix(WEIGHTS)
    if tensor not in model.weights:
        return np.zeros(0, np.float32)
    shape = model.weights.shape(tensor)
    most = math.prod(shape)
    if piece.shape is not None and math.prod(piece.shape) > ROOM * most:
        raise UserError(f"{piece.name} has shape {list(piece.shape)}; the file's is {list(shape)}")
    return piece.load(ROOM * most).array


def _nothing_known(extras: list[Piece | Unread], context: Context, n_tokens: int) -> str:
    if not extras:
        return "the candidate holds no tensors; llamadiff taps MODEL lists what to write"
    first = extras[0]
    line = name_map.propose_name(first.name, first.shape or (), context.model, n_tokens)
    proposed = f"a line for --map: {line}" if line else None
    listed = (
        "llamadiff taps MODEL lists the names, --map auto finds them by their values, --map FILE.toml translates them"
    )
    known = plugins.ask_first(lambda each: each.mistake([piece.name for piece in extras], "names"))
    count, hint = len(extras), known or proposed or listed
    return f"none of the candidate's {count} tensors has a name that is known (the first is {first.name[:80]}); {hint}"
