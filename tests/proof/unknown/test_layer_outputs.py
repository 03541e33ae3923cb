"""From layer outputs or logits alone: right engines pass, and rows that are wrong beside exact ones are no rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")  # whose engine they run

from proof.unknown import report
from proof.unknown.fault import Fault
from proof.unknown.shown import FAULTS

ROWS = ["position_after_restoring", "a_page_too_many", "half_of_the_head_in_decode", "pages_taken_as_neighbours",
        "state_decayed_again"]  # fmt: skip
RIGHT = ["gemma3", "gpt-oss", "qwen3moe", "mpt.Q8_0", "lfm2.F16", "starcoder2.Q5_K_M", "llama-loud"]


def judged(folder: Path, fault: Fault, dump: str) -> dict[str, object]:
    report.write_models(folder, {fault.model})
    return report.judge(folder, fault, dump)


@pytest.mark.parametrize("name", ROWS)
def test_wrong_rows_beside_exact_ones_are_wrong(name: str, tmp_path: Path) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    said = judged(tmp_path, fault, "layers")
    assert (said["code"], said["tap"]) == (1, "l_out-0"), said["text"]


@pytest.mark.parametrize("dump", ["layers", "logits"])
@pytest.mark.parametrize("model", RIGHT)
def test_right_engines_pass(model: str, dump: str, tmp_path: Path) -> None:
    """With their cache in float16, stated: a value that lies between two of its steps may go either way."""
    said = judged(tmp_path, Fault("right", lambda _: None, model, "", "", "", (10, 1, 1, 1)), dump)
    assert said["code"] == 0, said["text"]
