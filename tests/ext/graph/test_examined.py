"""The doctor says which of ggml's ops are judged."""

from __future__ import annotations

from llamadiff.ext.graph.examined import ops_judged
from llamadiff.llamacpp.doctor import NOTE, OK


def test_the_doctor_names_the_ops_that_are_not_judged():
    known = ops_judged(["CONV_2D", "SILU", "CUSTOM", "OPT_STEP_SGD"])
    assert known.state == OK
    assert known.found == "2 of 4 in its ggml.h; UNCHECKED, as a program's own or of training: CUSTOM, OPT_STEP_SGD"
    new = ops_judged(["CONV_9D", "SILU", "CUSTOM"])
    assert new.state == NOTE
    assert new.found == "1 of 3 in its ggml.h; UNCHECKED, as llamadiff does not know them: CONV_9D"
