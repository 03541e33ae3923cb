"""Captures recorded anew: llama.cpp runs what they are of again, and what changed is told in numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamadiff.engines.model_file import ModelFile, adapter_settings
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.captures.changed import Changed
from llamadiff.judge.sketching import estimate_difference
from llamadiff.llamacpp.request import Settings
from llamadiff.numerics import metrics
from llamadiff.system.errors import UserError
from llamadiff.system.output import check_target, unwritten
from llamadiff.system.stale_files import temporary_file
from llamadiff.trace import taps
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from llamadiff.verbs.check_traces import model_of
from llamadiff.verbs.verbs import record


def update(path: Path, model: Path | None, how: How, force: bool = False) -> Changed:
    """Record a capture anew, as it says that it was run, and put it in its place when it is complete.

    ``model``: None for the file that it names; another one than the capture is of is taken by ``force`` alone.
    Raises UserError, and leaves the file as it was, for one that is not llama.cpp's, or that cannot be recorded.
    """
    check_target(path)
    before = Trace.open(path)
    if before.info.producer.get("name") != "llama.cpp":
        raise UserError(f"{path}: was recorded by {before.info.producer.get('name') or 'somebody unnamed'}, "
                        "not by llama.cpp; only llama.cpp's captures are recorded anew")  # fmt: skip
    with temporary_file(path) as fresh:
        own, is_sketch = model or model_of(path, before), before.sketch is not None
        if not force:
            _check_model(path, before.info, own)
        after = record(own, _run_of(before, own), fresh, how, is_sketch, before.info.prompt)
        changed = _changed(path, before, after)
        del before, after  # Windows puts nothing in a mapped file's place
        try:
            os.replace(fresh, os.path.realpath(path))
        except OSError as error:
            raise unwritten(path, error) from None
    return changed


def _check_model(path: Path, info: Info, model: Path) -> None:
    """Raise UserError for a model that a capture is not of."""
    named, found = info.model.get("sha256"), ModelFile(model).sha256
    if named and named != found:
        raise UserError(
            f"{path}: is of {info.model.get('file') or 'another model'} (sha256 {str(named)[:12]}), and {model} is "
            f"another (sha256 {found[:12]}); give that model, or --force to record it anew of this one"
        )


def _run_of(trace: Trace, model: Path) -> Run:
    """The run that a capture is of: its prompt's ids, and as many greedy steps."""
    info = trace.info
    settings = Settings.from_stated(info.producer.get("settings"), whole=True)
    asked = info.producer.get("asked")
    asked = asked if isinstance(asked, dict) else {}
    layers: Any = asked.get("layers")
    return Run(
        tokens=info.tokens[: info.n_prefill], n_predict=len(info.tokens) - info.n_prefill,
        patterns=tuple(map(str, asked.get("taps", ()))),
        layers=range(layers[0], layers[1] + 1) if _are_two(layers) else None,
        settings=adapter_settings(trace, model, settings),
    )  # fmt: skip


def _are_two(layers: Any) -> bool:
    return isinstance(layers, list) and len(layers) == 2 and all(type(layer) is int for layer in layers)


def _changed(path: Path, before: Trace, after: Trace) -> Changed:
    was, now = list(_names(before)), list(_names(after))
    both = [name for name in now if name in set(was)]
    apart = {name: distance for name in both if (distance := _distance(before, after, name)) > 0}
    gone, new = (tuple(name for name in one if name not in other) for one, other in ((was, now), (now, was)))
    return Changed(path, before.info, after.info, len(now), apart, gone, new)


def _names(trace: Trace) -> Iterator[str]:
    yield from (trace.sketch.rows if trace.sketch is not None else trace)


def _distance(before: Trace, after: Trace, name: str) -> float:
    """The NMSE of a tap against what it was; infinite where it has another shape."""
    if before.sketch is not None and after.sketch is not None:
        same = before.sketch.shapes[name] == after.sketch.shapes[name]
        alike = (before.sketch.seed, before.sketch.projections) == (after.sketch.seed, after.sketch.projections)
        if not (same and alike):
            return float("inf")
        return estimate_difference(after.sketch.rows[name], before.sketch.rows[name]).nmse
    if before.shape(name) != after.shape(name):
        return float("inf")
    tap = taps.parse(name)
    return metrics.nmse(after[name], before[name], tap.row_axis if tap is not None else 0)
