"""What the bugs of one kind of op have in common: how they look in tensors, and the right code to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llamadiff.ext.explain.registry import Bug

FOLDER = Path(__file__).parent
LANGUAGES: Mapping[str, str] = {"C": "right.c", "Rust": "right.rs", "Python": "right.py"}
_LINE = "-- "  # after the language's sign of a comment: a section begins


@dataclass(frozen=True)
class KindOfBug:
    """``name`` is that of the bugs' family, and of a section of right code."""

    name: str
    op: str
    looks: str


KINDS = {
    kind.name: kind
    for kind in (
        KindOfBug("rope", "RoPE", "The size of each head stays: RMS and norms show nothing. Token 0 is right where "
                  "positions count from 0, since it is not turned; errors grow with the position. Q and K are off "
                  "alike, V is not."),
        KindOfBug("norms", "the norm", "A row is off by one factor (epsilon, the mean square), each channel by its own "
                  "(the weight), or all by one sum (the mean). Epsilon shows in rows of small values alone."),
        KindOfBug("softmax", "the softmax of the scores", "Rows still add up to 1. A wrong scale makes them flatter or "
                  "sharper; a wrong mask gives weight to keys that a query must not see, or takes it from its own: the "
                  "first token then differs most."),
        KindOfBug("attention", "attention", "Some heads are right and others not: those that read another KV head, or "
                  "lie at another place. With as many KV heads as heads nothing shows."),
        KindOfBug("cache", "the KV cache", "The prompt is right; decode steps are wrong, or all batches but the first. "
                  "Compare with --n-predict."),
        KindOfBug("matmul", "the matrix product", "The whole tensor is off and looks like noise (another weight, a "
                  "transposed one), by the same amount in every row (a bias), or by one factor."),
        KindOfBug("activations", "the activation", "Signs and sizes are near, values are not: silu and gelu differ by "
                  "a few hundredths where they are small."),
        KindOfBug("residuals", "the addition of a branch", "Everything before is right. Without the residual RMS stops "
                  "growing over the layers; with it twice, it grows too fast."),
        KindOfBug("embedding", "the row lookup", "embd is wrong, and so are all taps after it, each of them right on "
                  "what it was given."),
        KindOfBug("heads", "the head that drafts", "The text is right, and drafts are refused: the trunk is as it "
                  "was. Row 0 is right, or it alone is wrong, where the hidden state is another token's."),
        KindOfBug("misread", "the decoding of blocks", "One product is off by much, in every row. The same tensor "
                  "dumped as weights/NAME shows blocks whose values are right and in the wrong places, or parts of 16 "
                  "or 32 that are off by one factor and one sum."),
        KindOfBug("moe", "the router", "Other experts are chosen for some tokens, or the right ones weigh too much: "
                  "ffn_out is off by a factor, or for these tokens alone."),
        KindOfBug("recurrent", "the recurrent layer", "The first tokens are right or nearly so; errors grow along the "
                  "sequence, or start with a new batch: the state."),
        KindOfBug("precision", "the precision", "Errors are small and all over; or some values are Inf or NaN, where "
                  "float16 ends (65,504)."),
    )
}  # fmt: skip


def kind_of(bug: Bug) -> KindOfBug:
    """The kind of a bug: its family."""
    return KINDS[bug.family]


def right_code(kind: KindOfBug) -> Iterator[tuple[str, str]]:
    """The right op in each language, by the language's name."""
    for language, file in LANGUAGES.items():
        yield language, _sections(file)[kind.name]


@cache
def _sections(file: str) -> Mapping[str, str]:
    """The parts of a file of right code, each under a line such as ``// -- rope``."""
    found: dict[str, list[str]] = {}
    name = None
    for line in (FOLDER / file).read_text("utf-8").splitlines():
        sign, is_head, section = line.partition(_LINE)
        if is_head and sign in ("// ", "# "):
            name = section
        elif name is not None:
            found.setdefault(name, []).append(line)
    return {name: "\n".join(lines).strip() for name, lines in found.items()}
