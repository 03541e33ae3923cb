"""Bugs of llama.cpp's kernels for CPUs that few have: WRONG under an emulator where they are, MATCH where they are not.

Others found some on machines of their own: an old release has them, at the op whose kernel was mended, and the newest
is right. Two are in the newest, and another CPU is right. `make backends PARTS="arm old"` asks for all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import small
from tools.asking import asked, note
from tools.backends import named
from tools.parts import Usage

from llamadiff.llamacpp.shipped import shipped_model

pytestmark = [pytest.mark.backends, pytest.mark.slow]
NAMED = named(os.environ.get("PARTS", "").split())


def of_sizes(path: Path, **sizes: int) -> Path:
    """A model of F32 weights, one layer, with these of the sizes in small.py."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(small, name, size)
        return small.write_model(path, kind="F32", layers=1)


def large_sums(path: Path) -> Path:
    """Queries of some 1e5: each operand is a float16, each sum is more than float16 holds."""
    values = 16 * np.random.default_rng(1).standard_normal((4 * small.DIM, small.EMBD)) / np.sqrt(small.EMBD)
    large = {"blk.0.attn_norm.weight": np.full(small.EMBD, 8000, "f4"), "blk.0.attn_q.weight": values.astype("f2")}
    return small.write_model(path, kind="F16", layers=1, tensors=large)


@dataclass(frozen=True)
class Bug:
    """Its name, the part that has it, the one that has not, what shows it, and at which op and node."""

    name: str
    wrong: str
    right: str
    write: Callable[[Path], Path]
    op: str
    node: str
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


BUGS = [  # named by the pull requests that mended them
    Bug("24699", "0.3.23-sve256", "sve256", partial(of_sizes, FF=172), "MUL_MAT", "ffn_out-0"),
    Bug("22841", "0.3.23-sve256", "sve256", large_sums, "MUL_MAT", "Qcur_proj-0"),
    Bug("24059", "0.3.23-sve128", "sve128", partial(of_sizes, DIM=64), "MUL_MAT", "node_7",
        ("--llama-cpp", "kv=q8_0,flash_attn=on"), {"LLAMA_ATTN_ROT_DISABLE": "0"}),
    Bug("16443", "0.3.16-sve256", "sve256", partial(of_sizes, EMBD=76), "RMS_NORM", "norm-0"),
    Bug("sums-in-float16", "arm82", "sve256", large_sums, "MUL_MAT", "Qcur_proj-0"),
    Bug("k-quants-at-512-bits", "sve512", "sve256", lambda _: shipped_model(quantized=True), "MUL_MAT", "Qcur_proj-0"),
]  # fmt: skip


def judged(usage: Usage, bug: Bug, path: Path) -> dict[str, Any]:
    full = Usage(usage.options, {**usage.environment, **bug.environment})
    done = asked(full, "backend", bug.write(path), "--tokens", "1,38,75,12", *bug.options, "-o", "json:-")
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.wrong in NAMED], ids=lambda bug: bug.name)
def test_a_bug_is_wrong_where_it_is_and_right_elsewhere(bug, usage, tmp_path):
    usages = usage(bug.wrong), usage(bug.right)
    there, elsewhere = (judged(each, bug, tmp_path / "model.gguf") for each in usages)
    note(bug.wrong, 4, bug.name, there)
    at = {(tap["op"], tap["tap"]) for tap in there["taps"] if tap["verdict"] == "wrong"}
    assert (bug.op, bug.node) in at, there["headline"]
    assert elsewhere["verdict"] == "match", elsewhere["headline"]
