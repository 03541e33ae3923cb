"""Every injected bug that a prefill shows, in a prompt of 600 tokens: found where it is, all else right by sketch."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from llamaref import Engine
from models.options import write_long

from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How
from llamadiff.trace.taps import parse
from llamadiff.verbs.verbs import diff
from proof.injected import INJECTIONS
from proof.injected.base import Injection
from proof.injected.runs import record_faulty

TOKENS = tuple(int(token) for token in np.random.default_rng(3).integers(3, 90, 600))
# all products are wrong; rows differ so much in size that none is clearly right for the faintest; all has 16 bits
NONE_BY_SKETCH = ("transposed: all", "norm: sum overflows in some rows", "half: all activations")
WRONG = [each for each in INJECTIONS if not (each.harmless or each.choice or each.decode)]


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """model, kind -> the file and a right engine's run."""

    @cache
    def get(model, kind):
        path = write_long(tmp_path_factory.mktemp("m") / "m.gguf", model, kind, 1024)
        return path, record(Engine(path), TOKENS, "right")

    return get


@pytest.mark.slow
@pytest.mark.parametrize("injection", WRONG, ids=lambda injection: injection.name)
def test_an_injected_bug_is_found_at_its_tap(injection: Injection, right):
    path, run = right(injection.models[0], injection.kinds[-1])
    found = diff(run, record_faulty(injection, path, TOKENS), path, how=How(diagnose=False))
    assert found.first_divergence is not None
    first, present = parse(found.first_divergence.tap), {parse(row.tap).kind.word for row in found.rows}
    assert first.kind.word == next(word for word in injection.words if word in present)
    assert first.layer in (injection.layer, None)
    assert {parse(row.tap).kind.word for row in found.wrong} <= set(injection.words)
    assert any(row.local and row.local.sketched for row in found.rows) or injection.name in NONE_BY_SKETCH
