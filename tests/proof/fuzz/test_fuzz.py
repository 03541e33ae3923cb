"""Some cases of every reader, in a process of its own, whose memory is limited. ``make fuzz`` runs 10,000 of each."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from proof.fuzz import mutating
from proof.fuzz.readers import READERS, world

RUN = Path(__file__).with_name("run.py")
CASES = 100


@pytest.mark.parametrize("name", READERS)
def test_a_hostile_file_is_read_or_refused(name: str) -> None:
    command = [sys.executable, str(RUN), name, "--json", "--cases", str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout)
    assert result["failures"] == []
    assert 0 < result["refused"] < result["cases"]  # neither broken beyond reading nor left whole


def test_a_reader_that_fails_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from proof.fuzz import run

    def reader(rng: random.Random, folder: Path) -> object:
        return [list, dict, lambda: 1 / 0, lambda: sys.stderr.write("oh"), lambda: bytearray(run.MEMORY * 2)][number]

    monkeypatch.setitem(READERS, "bad", reader)
    run.watch()
    said = []
    try:
        for number in range(5):
            said += run.run("bad", [number]).failures
    finally:
        shutil.rmtree(world().folder)
        world.cache_clear()
    assert [failure.partition(": ")[2].partition(":")[0] for failure in said] == [
        "ZeroDivisionError", "said 'oh'", "MemoryError",
    ]  # fmt: skip


@pytest.mark.parametrize("mutate", [mutating.text, mutating.json_text])
def test_what_is_changed_is_the_same_for_the_same_seed(mutate) -> None:
    first, again = ([mutate(random.Random(seed), "a = [1, 2]") for seed in range(50)] for _ in range(2))
    assert first == again
    assert len(set(first)) > 30
