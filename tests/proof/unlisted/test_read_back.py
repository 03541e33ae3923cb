"""What is read back of random errors is true: they are put into right taps, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile, Runnable
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import Run
from llamadiff.ext.explain.case import Case, NotRecordedError, Recording
from llamadiff.ext.explain.read_back.reading import read_back
from llamadiff.ext.graph.model import by_its_graph
from llamadiff.judge.fact import Fact
from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.trace.taps import Tap
from proof.injected import BUGS
from proof.random_errors import ERRORS, Right, kinds_from
from proof.strangers.arithmetic import BY_NAME
from proof.strangers.crossing import model_file, opened
from proof.strangers.engine import Engine
from proof.strangers.recording import without_cache
from proof.unlisted.bugs import TOKENS
from proof.unlisted.true import Op, is_true

Array = np.ndarray
QUICK, THOROUGH = 5, 300  # errors that are put into each tap


@dataclass(frozen=True)
class Setting:
    """A right run of a stranger, and what cases are made of."""

    model: Model
    graph: Runnable  # llama.cpp's
    file: Any
    taps: dict[str, Array]
    right: Right | None
    own: tuple[str, ...]  # how the taps begin that the quick test takes of this model

    def read(self, name: str, recorded: Array) -> tuple[Fact, ...]:
        """What is read back of a tap with other values than the right ones, everything else right."""
        return read_back(self._case(self.model, name, recorded), self._case(self.graph, name, recorded))

    def _case(self, model: Runnable, name: str, recorded: Array) -> Case:
        tap = next(tap for tap in self.model.taps if tap.name == name)
        shapes = {tap: values.shape for tap, values in self.taps.items()}
        positions, n = np.arange(len(TOKENS)), len(TOKENS)
        run = Recording(model, TOKENS, positions, (0, n), n, Carrier([("f32", {})]), shapes, {})

        def values(other: str) -> Array:
            if other not in self.taps:
                raise NotRecordedError(other)
            x = self.taps[other][None]
            return x.astype(np.int32 if other.startswith("ffn_moe_topk") else np.float32)

        return Case(run, tap, values, recorded.astype(np.float32), limit=1e-12)


OWN = {"llama": ("",), "qwen3": ("Qcur", "Kcur"), "moe": ("ffn_moe", "ffn_out")}


@pytest.fixture(scope="module", params=OWN)
def setting(request, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    path = model_file(tmp_path_factory.mktemp("read-back"), request.param, "F16")
    model, taps = Model(Path(path)), without_cache(Engine(opened(path), BY_NAME["float32"]).run(TOKENS))
    kinds = {tap.name: tap for tap in model.taps if tap.name in taps}
    graph, right = _graph(path, tmp_path_factory), Right(taps, kinds, model.ropes[0], model.sizes["dim"])
    return Setting(model, graph, opened(path), taps, right, OWN[request.param])


def _graph(path: Path, folders: pytest.TempPathFactory) -> Runnable:
    request = text_request(
        ModelFile(path), Run(tokens=TOKENS, patterns=("embd",)), folders.mktemp("graph") / "b.safetensors"
    )
    return by_its_graph(path, request)[0]


def _told(setting: Setting, name: str, count: int) -> Iterator[tuple[str, Op]]:
    """What is read back of random errors in a tap."""
    rng, kinds, right = np.random.default_rng([3, *name.encode()]), kinds_from(name), setting.right
    for number in range(count):
        kind = kinds[number % len(kinds)]
        rows = ERRORS[kind](right.rows(name), rng, right)
        recorded = np.moveaxis(rows, 0, right.kinds[name].row_axis).astype(np.float32)
        for fact in setting.read(name, recorded):
            yield f"{name}, {kind}", Op(setting.file, name, recorded, setting.taps[name], setting.taps, fact)


def _false(setting: Setting, count: int, taps: Callable[[Tap], bool] = lambda tap: True) -> list[str]:
    names = [name for name, tap in setting.right.kinds.items() if tap.kind.op != "ARGSORT" and taps(tap)]
    told = [pair for name in names for pair in _told(setting, name, count)]
    return [f"{how}: {op.fact.says}" for how, op in told if not is_true(op, TOKENS)]


def test_what_is_read_back_of_random_errors_is_true(setting):
    assert _false(setting, QUICK, lambda tap: not tap.layer and tap.kind.word.startswith(setting.own)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BUGS if BUGS[name].models[0] in ("llama", "qwen2", "qwen3", "moe")])
def test_what_is_read_back_of_a_known_bug_is_true(name: str, tmp_path_factory: pytest.TempPathFactory):
    """It cannot contradict the cause that is named then."""
    injection = BUGS[name]
    path = model_file(tmp_path_factory.getbasetemp(), injection.models[0], "F16")
    file, n_prefill = opened(path), len(TOKENS) - injection.decode
    taps = without_cache(Engine(file, BY_NAME["float32"], BUGS[name]).run(TOKENS, n_prefill))
    right = Engine(file, BY_NAME["float32"]).run(TOKENS, n_prefill, given=taps)
    setting = Setting(Model(Path(path)), _graph(path, tmp_path_factory), file, taps, None, ())
    told = [
        Op(file, tap, taps[tap], right[tap], taps, fact)
        for tap in taps
        if taps[tap].shape == right[tap].shape and np.isfinite(taps[tap]).all()
        for fact in setting.read(tap, taps[tap])
    ]
    assert [f"{op.tap}: {op.fact.says}" for op in told if not is_true(op, TOKENS)] == []


@pytest.mark.slow
def test_what_is_read_back_of_thousands_of_errors_is_true(setting):
    assert _false(setting, THOROUGH) == []
