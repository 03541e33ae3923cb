"""A run that is done again as the candidate did it."""

from __future__ import annotations

import pytest

from llamadiff.engines.batches import as_it_ran
from llamadiff.llamacpp.request import Request
from llamadiff.trace.metadata import Info

TOKENS = (1, 17, 5, 40, 2, 9, 33)


@pytest.mark.parametrize("batches", [(), (7,), (4, 3), (6, 1), (4, 1, 1, 1)])
def test_what_a_candidate_ran_in_several_batches_is_run_in_these(batches):
    baseline = Info(TOKENS, (*range(7),), 7)
    candidate = Info(TOKENS, (*range(7),), (*batches, 7)[0], batches=batches)
    asked = as_it_ran(Request("m", tokens=TOKENS), baseline, candidate)
    assert (asked.batches if asked is not None else ()) == (batches if len(batches) > 1 else ())
