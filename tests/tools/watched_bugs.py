"""20 bugs in the kernels of ops that text models lack: `watch` must find each at its node, and `replay` what it saved.

    python tests/tools/watched_bugs.py CHECKOUT           put the bugs into a llama.cpp; then build it (target llama)
    python tests/tools/watched_bugs.py CHECKOUT --check BUILD/bin    watch a program of these ops, with each bug

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

sys.path.insert(0, str(Path(__file__).parent.parent))
from tools.kernel_bugs import run

OPS = Path("ggml/src/ggml-cpu/ops.cpp")
HELPER = """
#include <stdlib.h>
static int llamadiff_bug(int number) {
    static int bug = -1;
    if (bug < 0) { const char * s = getenv("LLAMADIFF_BUG"); bug = s != NULL ? atoi(s) : 0; }
    return bug == number;
}
"""


@dataclass(frozen=True)
class Bug:
    """In a function of ops.cpp, what is replaced and by what ({} stands for whether the bug is awake); the node."""

    function: str
    old: str
    new: str
    node: str


BUGS = (
    Bug("im2col_f32(", "iow*s0 + ikw*d0 - p0", "iow*s0 + ikw*d0 - p0 + {}", "patches"),
    Bug("conv_2d_impl(", "kx * dilation_x - pad_x", "kx * dilation_x - pad_x + {}", "conv"),
    Bug("conv_2d_dw_whcn(", "* src_data[src_y * p.src_w + src_x]",
        "* src_data[src_y * p.src_w + src_x] * ({} ? 1.001f : 1.0f)", "depthwise"),
    Bug("conv_transpose_1d_f32(", "dst_data[i10*s0 + i00] += v;", "dst_data[i10*s0 + i00] += i00 < ne00 - {} ? v : 0;",
        "transposed_1d"),
    Bug("conv_transpose_2d_impl(", "i10*stride + i00] += v;", "i10*stride + i00] += {} && i00 == 0 ? 0.5f * v : v;",
        "transposed_2d"),
    Bug("pool_2d(", "res /= ka; break;", "res /= ka + {}; break;", "pooled"),
    Bug("pool_1d_ksp(", "(int) ow * s - p;", "(int) ow * s - p + {};", "pooled_1d"),
    Bug("group_norm_f32(", "sum / (ne00 * ne01 * step);", "sum / (ne00 * ne01 * step + {});", "group_norm"),
    Bug("pad_f32(", "dst_ptr[dst_idx] = 0;", "dst_ptr[dst_idx] = {} ? 1e-3f : 0;", "padded"),
    Bug("pad_reflect_1d(", "left[-i0] = left[i0];", "left[-i0] = left[i0 - {}];", "reflected"),
    Bug("arange_f32(", "start + step * i;", "start + step * (i + {});", "range"),
    Bug("timestep_embedding_f32(", "-logf(max_period) * j / half", "-logf(max_period) * (j + {}) / half", "timesteps"),
    Bug("upscale_f32(", "i00 = i0 / sf0;", "i00 = (i0 - ({} && i0 > 0)) / sf0;", "upscaled"),
    Bug("roll_f32(", "ggml_wrap_index(i1 - s1, ne01)", "ggml_wrap_index(i1 - s1 * !{}, ne01)", "rolled"),
    Bug("cumsum_f32(", "ggml_vec_cumsum_f32(ne00, dst_row, src_row);",
        "ggml_vec_cumsum_f32(ne00, dst_row, src_row); if ({}) dst_row[ne00 - 1] *= 1.01f;", "sums"),
    Bug("win_part_f32(", "const int64_t i01 = px*w + i1;", "const int64_t i01 = px*(w - {}) + i1;", "windows"),
    Bug("get_rel_pos_f16(", "(w - i1 - 1) + i2;", "(w - i1 - 1) + i2 * !{};", "positions"),
    Bug("leaky_relu_f32(", "(src0->nb[1])), negative_slope);", "(src0->nb[1])), negative_slope * (1 + {}));", "leaky"),
    Bug("norm_f32(", "float mean = sum/ne00;", "float mean = sum/(ne00 + {});", "norm"),
    Bug("rms_norm_f32(", "i01 < ne01; i01 += nth", "i01 < ne01 - {}; i01 += nth", "rms_norm"),
)  # fmt: skip


def put_in(checkout: Path) -> None:
    """Change the sources, once."""
    text = (checkout / OPS).read_text("utf-8")
    if HELPER in text:
        return
    for number, bug in enumerate(BUGS, 1):
        place = text.index(bug.old, text.index(f"ggml_compute_forward_{bug.function}"))
        text = text[:place] + bug.new.replace("{}", f"llamadiff_bug({number})") + text[place + len(bug.old) :]
    (checkout / OPS).write_text(HELPER + text, encoding="utf-8")


def program(checkout: Path, libraries: Path, folder: Path) -> Path:
    """ops.c, linked with the build."""
    target, source = folder / "ops", Path(__file__).with_name("ops.c")
    words = [f"-I{checkout}/ggml/include", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    subprocess.run(["cc", "-o", target, source, *words, "-lggml", "-lggml-base", "-lggml-cpu"], check=True)
    return target


def check(checkout: Path, libraries: Path) -> bool:
    """What watch says of each bug, and replay of what it saved: by the ggml with the bug, and by one without."""
    with tempfile.TemporaryDirectory() as folder:
        ops = program(checkout, libraries, Path(folder))
        found = [_is_found(ops, number, Path(folder), checkout) for number in range(len(BUGS) + 1)]
        return all(found)


def _is_found(ops: Path, number: int, folder: Path, checkout: Path) -> bool:
    kept, node = folder / f"kept{number}", BUGS[number - 1].node if number else ""
    environment = {**os.environ, "LLAMADIFF_BUG": str(number)}
    done = run(environment, "watch", "--keep", kept, "-o", "json:-", "--", ops)
    (report,) = json.loads(done.stdout).values()
    verdicts = {tap["tap"]: tap["verdict"] for tap in report["taps"]}
    wrong = [name for name, verdict in verdicts.items() if verdict == "wrong"]
    saved = sorted(kept.glob("*.safetensors"))
    again = run(environment, "replay", *saved, "--llama-cpp", checkout).returncode if saved else 0
    elsewhere = run(dict(os.environ), "replay", *saved).returncode if saved else 0
    codes = done.returncode, len(saved), again, elsewhere
    right = (wrong, codes) == (([node], (1, 1, 1, 0)) if number else ([], (0, 0, 0, 0)))
    said = f"wrong {wrong}, exit {done.returncode}, saved {len(saved)}, replayed {again} and {elsewhere}"
    print(f"{'ok ' if right else 'BAD'} {node or 'no bug'}: {said}; {len(verdicts)} nodes", flush=True)
    return right


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if "--check" in sys.argv:
        sys.exit(0 if check(where, Path(sys.argv[3])) else 1)
    put_in(where)
