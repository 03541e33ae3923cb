"""What holds of verdicts whatever the mistake, the arithmetic and the taps are: on cases drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llamadiff.judge import tap_verdicts
from llamadiff.judge.evidence import Evidence
from llamadiff.judge.schedule import Schedule
from llamadiff.judge.verdict import SEVERITY
from llamadiff.report.json import to_object
from proof.properties import cases
from proof.properties.cases import drawn, judged, right_run, run, shows, subset, verdicts

QUICK, PART = 8, 100  # cases of each property in the quick suite; in each of the slow parts
PARTS = 20
SEEDS = [
    pytest.param(range(QUICK), id="some"),
    *(
        pytest.param(range(1000 + PART * n, 1000 + PART * (n + 1)), id=f"part {n}", marks=pytest.mark.slow)
        for n in range(PARTS)
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("properties")


@pytest.fixture(params=SEEDS)
def seeds(request: pytest.FixtureRequest) -> Iterator[np.random.Generator]:
    return (np.random.default_rng(seed) for seed in request.param)


def some_run(rng: np.random.Generator, folder: Path) -> tuple[cases.Case, dict, tuple[str, ...]]:
    """A case, right or not, what it recorded, and some of those taps."""
    case = drawn(rng)
    taps = run(case, folder) if rng.random() < 0.7 else right_run(case, folder)
    names = subset(rng, list(taps)) if rng.random() < 0.7 else tuple(taps)
    return case, dict(taps), names


def test_the_schedule_does_not_matter(
    seeds: Iterator[np.random.Generator], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes that may be left out may be kept as well: all of them, or any."""
    for rng in seeds:
        case, taps, names = some_run(rng, folder)
        found = judged(case, taps, folder, names)
        usual, share = Schedule._needed_lanes, rng.choice([0.3, 1.0])

        def some_more(self, source, part, usual=usual, share=share, rng=rng):
            own = [lane for lane in self.replay.lanes if lane.source == source.name]
            needed = usual(self, source, part)
            return [lane for lane in own if lane in needed or rng.random() < share]

        with monkeypatch.context() as patched:
            patched.setattr(Schedule, "_needed_lanes", some_more)
            if share == 1:
                patched.setattr(Schedule, "_likely", lambda self, part: self.every)
            whole = judged(case, taps, folder, names)
        assert verdicts(found) == verdicts(whole), (case, names)


def test_less_evidence_never_acquits(seeds: Iterator[np.random.Generator], folder: Path) -> None:
    """What is wrong as a whole is never right in part, as far as it shows at all; what is right is never wrong."""
    for rng in seeds:
        case = drawn(rng)
        taps, right = run(case, folder), right_run(case, folder)
        if judged(case, right, folder).verdict in ("match", "noise"):
            names = subset(rng, list(right))
            assert judged(case, right, folder, names).verdict != "wrong", (case, names)
        names = subset(rng, list(taps))
        if judged(case, taps, folder).verdict == "wrong" and shows(case, taps, names, folder):
            assert judged(case, taps, folder, names).verdict in ("wrong", "unchecked"), (case, names)


def test_more_error_is_never_milder(seeds: Iterator[np.random.Generator], folder: Path) -> None:
    for rng in seeds:
        case = drawn(rng)
        small = 10 ** rng.uniform(-6, 0.3)
        scales = (small, small * 10 ** rng.uniform(0.05, 2.5))
        names = subset(rng, list(right_run(case, folder))) if rng.random() < 0.7 else None
        found = []
        for scale in scales:
            scaled = replace(case, scale=float(scale))
            found.append(judged(scaled, run(scaled, folder), folder, names).verdict)
        assert SEVERITY.index(found[0]) <= SEVERITY.index(found[1]), (case, scales, names, found)


def test_order_does_not_matter(
    seeds: Iterator[np.random.Generator], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of taps in the file; of what was found of them; of a second run after another one."""
    for rng in seeds:
        case, taps, names = some_run(rng, folder)
        found = judged(case, taps, folder, names)
        shuffled = [names[i] for i in rng.permutation(len(names))]

        def of(measured, assumed=(), rng=rng):
            several = list(measured)
            return Evidence.of([several[i] for i in rng.permutation(len(several))], assumed)

        with monkeypatch.context() as patched:
            patched.setattr(tap_verdicts, "Evidence", SimpleNamespace(of=of))
            again = judged(case, taps, folder, shuffled)
        assert verdicts(again) == verdicts(found), (case, names)
        second = judged(case, taps, folder, names)
        assert to_object(second)["taps"] == to_object(found)["taps"], (case, names)
