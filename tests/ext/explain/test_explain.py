"""A bug's page, and the right code on it: each function computes what the reference engine and gguf-py do."""

from __future__ import annotations

import ctypes
import io
import json
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from command import run
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from llamaref import ops
from llamaref.config import Rope
from optional import needs
from rich.console import Console

from llamadiff import UserError
from llamadiff.ext.explain import listing
from llamadiff.ext.explain.listing import explanation, print_explanation
from llamadiff.ext.explain.mends import right
from llamadiff.ext.explain.mends.kinds import FOLDER, KINDS, LANGUAGES, kind_of, right_code
from llamadiff.ext.explain.registry import known_bugs

RNG = np.random.default_rng(11)
HEADS, KV_HEADS, DIM, KEYS, N = 4, 2, 8, 5, 16
Answers = dict[str, np.ndarray]


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


X, WEIGHT, TABLE, BIAS = floats(N), floats(N), floats(7, N), floats(7)
Q, K, V, LOGITS = floats(HEADS, DIM), floats(KEYS, KV_HEADS, DIM), floats(KEYS, KV_HEADS, DIM), floats(6)
SCORES = np.ascontiguousarray(np.einsum("hd,khd->hk", Q, np.repeat(K, 2, axis=1)))
STATE, CONVOLUTION = floats(3, N), floats(N, 4)
Q4_0 = np.concatenate([np.array([0.037], np.float16).view(np.uint8), RNG.integers(0, 256, 16, np.uint8)])
Q4_K = np.concatenate([np.array([0.01, 0.02], np.float16).view(np.uint8), RNG.integers(0, 256, 140, np.uint8)])
POSITION = 3


@pytest.fixture(scope="module")
def expected() -> Answers:
    """What the reference engine, and gguf-py, make of the same."""
    cos, sin = ops.rope_angles(Rope(6, 500.0), np.array([POSITION]))
    here, all_keys = np.array([POSITION]), np.arange(KEYS)
    scores = ops.attention_scores(Q[None, None], K[None])
    weights = ops.causal_softmax(scores, 1 / np.sqrt(DIM), here, all_keys)
    spread = np.repeat(V, HEADS // KV_HEADS, axis=1)
    probabilities = ops.softmax(LOGITS)
    chosen = np.argsort(-probabilities)[:2]
    seen = np.concatenate([STATE, X[None]])
    return {
        "pairs": ops.rope_pairs(Q[None, None], cos, sin)[0, 0],
        "halves": ops.rope_halves(Q[None, None], cos, sin)[0, 0],
        "norm": ops.rms_norm(X, WEIGHT, 1e-3), "softmax": weights[0, :, 0],
        "attend": np.einsum("hk,khd->hd", weights[0, :, 0], spread).reshape(-1),
        "linear": TABLE @ X + BIAS, "swiglu": X / (1 + np.exp(-X)) * WEIGHT, "add": X + WEIGHT, "embed": TABLE[3],
        "joined": np.concatenate([X, WEIGHT]), "joined_first": np.concatenate([X, 0 * X]),
        "q4_0": dequantize(Q4_0, Type.Q4_0), "q4_k": dequantize(Q4_K, Type.Q4_K),
        "chosen": chosen, "weights": probabilities[chosen] / probabilities[chosen].sum(),
        "convolved": (seen.T * CONVOLUTION).sum(axis=1), "state": seen[1:],
        "bf16": np.array([1.0, 1.0, 1.015625, -3.140625]),
    }  # fmt: skip


ROUNDED = np.array([1.0, 1.00390625, 1.01171875, -3.1415927], np.float32)


def in_python() -> Answers:
    one = np.array([POSITION])
    chosen, weights = right.route(LOGITS[None], 2)
    convolved, state = right.convolve(STATE, X[None], CONVOLUTION)
    scores = SCORES[:, None]
    cache = np.zeros((9, N), np.float32)
    assert np.array_equal(right.remember(cache, X[None], 2), [*np.zeros((2, N)), X])
    return {
        "pairs": right.rope(Q[None], one, 6, 500.0, True)[0], "halves": right.rope(Q[None], one, 6, 500.0, False)[0],
        "norm": right.rms_norm(X, WEIGHT, 1e-3), "softmax": right.causal_softmax(scores, DIM**-0.5, one)[:, 0],
        "attend": right.attend(Q[None], K, V, DIM**-0.5, one)[0], "linear": right.linear(X[None], TABLE, BIAS)[0],
        "swiglu": right.swiglu(X, WEIGHT), "add": right.add(X, WEIGHT), "embed": right.embed(TABLE, [3])[0],
        "joined": right.join(np.stack([X, X]), np.stack([WEIGHT, X]))[1],
        "joined_first": right.join(X[None], X[None])[0],
        "q4_0": right.decode_q4_0(Q4_0.tobytes()), "q4_k": right.decode_q4_k(Q4_K.tobytes()), "chosen": chosen[0],
        "weights": weights[0], "convolved": convolved[0], "state": state, "bf16": right.to_bf16(ROUNDED),
    }  # fmt: skip


class Compiled:
    """The C code, called as C does."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def __call__(self, name: str, *arguments: Any) -> int:
        given = [ctypes.c_float(a) if isinstance(a, float) else a.ctypes if isinstance(a, np.ndarray) else a
                 for a in arguments]  # fmt: skip
        passed = [a.data_as(ctypes.c_void_p) if hasattr(a, "data_as") else a for a in given]
        return int(getattr(self.library, name)(*passed))

    def rope(self, pairs: int) -> np.ndarray:
        y = Q.copy()
        for head in range(HEADS):
            self("rope", y[head], POSITION, 6, 500.0, pairs)
        return y


def in_c(folder: Any) -> Answers:
    library = folder / "right.so"
    subprocess.run(["cc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, FOLDER / "right.c", "-lm"], check=True)
    c, a = Compiled(ctypes.CDLL(str(library))), {}
    made = {"norm": N, "linear": 7, "swiglu": N, "embed": N, "joined": 2 * N, "joined_first": 2 * N,
            "attend": HEADS * DIM, "q4_0": 32, "q4_k": 256, "convolved": N}  # fmt: skip
    a = {name: np.zeros(size, np.float32) for name, size in made.items()}
    a |= {"chosen": np.zeros(2, np.int32), "weights": np.zeros(2, np.float32), "add": X.copy(), "state": STATE.copy()}
    c("rms_norm", a["norm"], X, WEIGHT, N, 1e-3)
    a["softmax"] = SCORES.copy()
    for row in a["softmax"]:
        c("causal_softmax", row, KEYS, DIM**-0.5, POSITION)
    c("attend", a["attend"], Q, K, V, np.zeros(KEYS, np.float32), HEADS, KV_HEADS, DIM, KEYS, POSITION)
    c("linear", a["linear"], X, TABLE, BIAS, N, 7)
    c("swiglu", a["swiglu"], X, WEIGHT, N)
    c("add", a["add"], WEIGHT, N)
    c("embed", a["embed"], TABLE, 3, N)
    c("join", a["joined"], X, WEIGHT, 1, N)
    c("join", a["joined_first"], X, X, 0, N)
    c("decode_q4_0", a["q4_0"], Q4_0)
    c("decode_q4_k", a["q4_k"], Q4_K)
    c("route", a["chosen"], a["weights"], LOGITS.copy(), 6, 2)
    c("convolve", a["convolved"], a["state"], X, CONVOLUTION, N, 4)
    cache = np.zeros((9, N), np.float32)
    assert c("remember", cache, X, N, 2) == 3
    assert np.array_equal(cache[2], X)
    c.library.to_bf16.restype = ctypes.c_float
    a["bf16"] = np.array([c.library.to_bf16(ctypes.c_float(value)) for value in ROUNDED])
    return a | {"pairs": c.rope(1), "halves": c.rope(0)}


RUST = """
mod right {{ include!({path}); }}
use right::*;
fn say(name: &str, values: &[f32]) {{ println!("{{name}} {{values:?}}"); }}
fn main() {{
    let (x, weight, table, bias): (Vec<f32>, Vec<f32>, Vec<f32>, Vec<f32>) = ({X}, {WEIGHT}, {TABLE}, {BIAS});
    let (q, k, v, mut logits): (Vec<f32>, Vec<f32>, Vec<f32>, Vec<f32>) = ({Q}, {K}, {V}, {LOGITS});
    let (mut state, convolution): (Vec<f32>, Vec<f32>) = ({STATE}, {CONVOLUTION});
    let (mut scores, rounded): (Vec<f32>, Vec<f32>) = ({SCORES}, {ROUNDED});
    for (name, pairs) in [("pairs", true), ("halves", false)] {{
        let mut y = q.clone();
        y.chunks_mut({DIM}).for_each(|head| rope(head, {POSITION}, 6, 500.0, pairs));
        say(name, &y);
    }}
    say("norm", &rms_norm(&x, &weight, 1e-3));
    scores.chunks_mut({KEYS}).for_each(|row| causal_softmax(row, 1.0 / ({DIM} as f32).sqrt(), {POSITION}));
    say("softmax", &scores);
    say("attend", &attend(&q, &k, &v, {KV_HEADS}, {DIM}, {POSITION}));
    say("linear", &linear(&x, &table, Some(&bias)));
    assert_eq!(linear(&x, &table, None).len(), bias.len());
    say("swiglu", &swiglu(&x, &weight));
    let mut sum = x.clone();
    add(&mut sum, &weight);
    say("add", &sum);
    say("embed", embed(&table, 3, {N}));
    say("joined", &join(&x, &weight, 1));
    say("joined_first", &join(&x, &x, 0));
    say("q4_0", &decode_q4_0(&{Q4_0}));
    say("q4_k", &decode_q4_k(&{Q4_K}));
    let routed = route(&mut logits, 2);
    say("chosen", &routed.iter().map(|r| r.0 as f32).collect::<Vec<_>>());
    say("weights", &routed.iter().map(|r| r.1).collect::<Vec<_>>());
    say("convolved", &convolve(&mut state, &x, &convolution, 4));
    say("state", &state);
    say("bf16", &rounded.iter().map(|&r| to_bf16(r)).collect::<Vec<_>>());
    let mut cache = vec![0.0; 9 * {N}];
    assert_eq!((remember(&mut cache, &x, 2), &cache[2 * {N}..3 * {N}]), (3, &x[..]));
}}
"""


def in_rust(folder: Any) -> Answers:
    def vec(x: np.ndarray) -> str:
        return f"vec!{x.reshape(-1).tolist()}"

    arrays = {"X": X, "WEIGHT": WEIGHT, "TABLE": TABLE, "BIAS": BIAS, "Q": Q, "K": K, "V": V, "LOGITS": LOGITS,
              "STATE": STATE, "CONVOLUTION": CONVOLUTION, "SCORES": SCORES, "ROUNDED": ROUNDED, "Q4_0": Q4_0,
              "Q4_K": Q4_K}  # fmt: skip
    numbers = {"DIM": DIM, "POSITION": POSITION, "KEYS": KEYS, "KV_HEADS": KV_HEADS, "N": N}
    filled = {name: vec(x) for name, x in arrays.items()} | {name: str(x) for name, x in numbers.items()}
    (folder / "main.rs").write_text(
        RUST.format(path=json.dumps(str(FOLDER / "right.rs"), ensure_ascii=False), **filled), encoding="utf-8"
    )
    subprocess.run(["rustc", "-D", "warnings", "-o", folder / "main", folder / "main.rs"], check=True)
    done = subprocess.run([folder / "main"], capture_output=True, text=True, check=True, encoding="utf-8")
    return {
        name: np.array(json.loads(text)) for name, _, text in (line.partition(" ") for line in done.stdout.splitlines())
    }


@pytest.mark.parametrize("make", [
    pytest.param(lambda folder: in_python(), id="python"),
    pytest.param(in_c, id="c", marks=needs("cc")),
    pytest.param(in_rust, id="rust", marks=needs("rustc")),
])  # fmt: skip
def test_right_code_is_right(make: Callable[[Any], Answers], expected: Answers, tmp_path: Any) -> None:
    answers = make(tmp_path)
    assert set(answers) == set(expected)
    for name, values in expected.items():
        assert answers[name].reshape(-1) == pytest.approx(np.asarray(values).reshape(-1), rel=2e-5, abs=2e-6), name


def test_every_bug_has_a_page_with_code_in_each_language() -> None:
    for bug in known_bugs().values():
        code = dict(right_code(kind_of(bug)))
        assert set(code) == set(LANGUAGES)
        assert all(len(text.splitlines()) >= 3 for text in code.values()), bug.name
    assert {kind_of(bug).name for bug in known_bugs().values()} == set(KINDS)


def test_explain_prints_a_page() -> None:
    done = run("explain", "rope-layout")
    assert (done.returncode, done.stderr) == (0, "")
    bug = known_bugs()["rope-layout"]
    for words in ("# rope-layout", bug.about, bug.fix, "llama.cpp#22611", "How it looks: The size of each head stays",
                  "Ops of ggml: ROPE", "```c\n", "```rust\n", "```python\n",
                  "void rope(", "pub fn rope(", "def rope("):  # fmt: skip
        assert words in done.stdout, words
    assert "rms_norm" not in done.stdout
    assert "no mistake: a tap that it explains is NOISE" in run("explain", "rope-other-order").stdout
    two = run("explain", "rope-layout + norm-epsilon").stdout
    assert "# rope-layout" in two
    assert "# norm-epsilon" in two


@pytest.mark.parametrize(
    ("asked", "has", "lacks"), [("rust", "pub fn rope(", "def rope("), ("py", "def rope(", "void rope("),
                                ("C++", "void rope(", "pub fn rope(")]
)  # fmt: skip
def test_explain_prints_the_language_asked_for(asked, has, lacks) -> None:
    page = explanation("rope-layout", asked)
    assert (has in page, lacks in page) == (True, False)


def test_a_language_that_no_page_has() -> None:
    with pytest.raises(UserError, match="zig: the right ops are in c, rust, python; give one of these"):
        explanation("rope-layout", "zig")


def test_on_a_terminal_a_page_is_laid_out(monkeypatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(listing, "make_console", lambda: Console(file=file, force_terminal=True, width=80))
    print_explanation("rope-layout", "rust")
    assert "pub" in file.getvalue()
    assert not {"```", "# rope-layout", "## Rust"} & set(file.getvalue().splitlines())
    assert "```" not in file.getvalue()


def test_a_name_that_no_bug_has() -> None:
    done = run("explain", "rope-layot\x1b")
    assert (done.returncode, done.stdout) == (2, "")
    hint = "no known bug is called so or mentions it; did you mean rope-layout?"
    assert done.stderr == f"llamadiff: rope-layot\\x1b: {hint}\n"
