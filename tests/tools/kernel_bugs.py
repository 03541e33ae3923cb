"""Five bugs in the kernels of a llama.cpp of your own: each must be named at its op, and only there.

    python tests/tools/kernel_bugs.py CHECKOUT            put the bugs in; then build it (cmake --build CHECKOUT/build)
    python tests/tools/kernel_bugs.py CHECKOUT --check    run each, see what is said of it, and run what it saved again

The bugs sleep until LLAMADIFF_BUG has their number, so that one build has all of them, and without it is right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from models import small

from llamadiff.ext.graph.repro import load
from llamadiff.llamacpp.shipped import shipped_model

CPU = Path("ggml/src/ggml-cpu")
TOKENS = "1,17,5,40"  # few: larger batches of some types go through other kernels
HELPER = """
#include <stdlib.h>
static int llamadiff_bug(int number) {
    const char * s = getenv("LLAMADIFF_BUG");
    return s != NULL && atoi(s) == number;
}
"""


@dataclass(frozen=True)
class Bug:
    """A line of a kernel as it is and as it is wrong; the op where it shows, and how llama.cpp is run to meet it."""

    about: str
    file: str
    after: str  # where the function begins
    old: str
    new: str
    op: str
    options: tuple[str, ...] = ()


BUGS = (
    Bug("a wrong scale in one type's dot product", "arch/x86/quants.c", "void ggml_vec_dot_q6_K_q8_K(",
        "    *s = hsum_float_8(acc);", "    *s = hsum_float_8(acc) * (llamadiff_bug(1) ? 1.01f : 1.0f);", "MUL_MAT"),
    Bug("the last row is skipped", "ops.cpp", "static void ggml_compute_forward_rms_norm_f32(",
        "i01 < ne01; i01 += nth", "i01 < ne01 - llamadiff_bug(2); i01 += nth", "RMS_NORM"),
    Bug("flash attention's mask is off by one", "ops.cpp", "ggml_compute_forward_flash_attn_ext_f16_one_chunk(",
        "GGML_CPU_FP16_TO_FP32(mp[ic])", "GGML_CPU_FP16_TO_FP32(mp[ic + llamadiff_bug(3)])", "FLASH_ATTN_EXT",
        ("--llama-cpp", "flash_attn=on")),
    Bug("a stride is ignored", "ops.cpp", "static void ggml_compute_forward_dup_bytes(",
        "    const size_t type_size = ggml_type_size(src0->type);",
        "    if (llamadiff_bug(4)) { memcpy(dst->data, src0->data, ggml_nbytes(dst)); return; }\n"
        "    const size_t type_size = ggml_type_size(src0->type);", "CONT"),
    Bug("a softmax without its maximum", "ops.cpp", "static void ggml_compute_forward_soft_max_f32(",
        "ggml_vec_max_f32(ne00, &max, wp);", "ggml_vec_max_f32(ne00, &max, wp); if (llamadiff_bug(5)) max = 0.0f;",
        "SOFT_MAX"),
)  # fmt: skip


def put_in(checkout: Path) -> None:
    """Change the sources, once."""
    for name in {bug.file for bug in BUGS}:
        path = checkout / CPU / name
        text = path.read_text("utf-8")
        if HELPER in text:
            continue
        for bug in (bug for bug in BUGS if bug.file == name):
            start = text.index(bug.after)
            place = text.index(bug.old, start)
            text = text[:place] + bug.new + text[place + len(bug.old) :]
        path.write_text(HELPER + text, encoding="utf-8")


def loud(folder: Path) -> Path:
    """A model with scores that a softmax cannot do without its maximum."""
    query = 8 * np.random.default_rng(7).standard_normal((small.EMBD, small.EMBD)).astype(np.float32)
    return small.write_model(folder / "loud.gguf", "llama", "F32", tensors={"blk.0.attn_q.weight": query})


def check(checkout: Path) -> bool:
    """What backend says of each bug, and what replay says of an op that it saved; with the bug, and without."""
    with tempfile.TemporaryDirectory() as folder:
        models = {"SOFT_MAX": loud(Path(folder))}
        good = [_is_said(checkout, number, bug, models, Path(folder)) for number, bug in enumerate((None, *BUGS))]
    return all(good)


def _is_said(checkout: Path, number: int, bug: Bug | None, models: dict[str, Path], folder: Path) -> bool:
    """Whether one bug (None: none) is named at its op, and replay says the same of it."""
    kept, wrong_build = folder / f"kept{number}", {**os.environ, "LLAMADIFF_BUG": str(number)}
    op, options = (bug.op, bug.options) if bug is not None else ("", ())
    model = models.get(op, shipped_model(quantized=True))
    words = ["backend", model, "--tokens", TOKENS, *options, "--keep", kept, "-o", "json:-", "--llama-cpp", checkout]
    report = json.loads(run(wrong_build, *words).stdout)
    ops = sorted({tap["op"] for tap in report["taps"] if tap["verdict"] == "wrong"})
    saved = [path for path in sorted(kept.glob("*.safetensors")) if load(path)[0].name == op][:1]
    builds = (wrong_build, dict(os.environ))
    codes = [run(build, "replay", *saved, "--llama-cpp", checkout).returncode for build in builds if saved]
    right = (ops, codes) == (([op], [1, 0]) if bug is not None else ([], []))
    print(f"{'ok ' if right else 'BAD'} {bug.about if bug else 'no bug'}: {ops} {codes}\n      {report['headline']}")
    return right


def run(environment: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamadiff", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, encoding="utf-8")


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if "--check" in sys.argv:
        sys.exit(0 if check(where) else 1)
    put_in(where)
