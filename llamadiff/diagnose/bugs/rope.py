"""RoPE, and how people get it wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from llamaref import config as settings
from llamaref import ops
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.norms import Same, Through
from llamadiff.diagnose.case import Case, Recording
from llamadiff.diagnose.registry import Change, bug, recipe
from llamadiff.diagnose.solve import solve
from llamadiff.diagnose.sought import ROPE_BASE, ROPE_FACTOR

Array = NDArray[Any]
ROPE = ("Qcur_rope", "Kcur_rope")


@dataclass(frozen=True)
class Rotation:
    """Rotation of ``x`` [b, token, head, dim]: which values form a pair, by which angles, in which direction."""

    x: Array
    pairs: bool
    rope: settings.Rope
    factors: Array | None
    positions: Array
    direction: int = 1
    times: int = 1
    turned: int | None = None  # how many pairs are rotated; None: all
    again: int = 0  # from this token on it is rotated more than once
    narrow: bool = False  # whether those pairs are as close together as if there were no more

    def compute(self, case: Case) -> Array:
        cos, sin = ops.rope_angles(self.rope, self.positions, self.factors)
        cos, sin = case.carrier.angles(cos, sin, self.rope, self.positions, self.factors)
        if self.turned is not None and self.narrow:
            cos, sin = cos[..., : self.turned], sin[..., : self.turned]
        elif self.turned is not None:
            cos, sin = cos.copy(), sin.copy()
            cos[..., self.turned :], sin[..., self.turned :] = 1, 0
        rotate, x = ops.rope_pairs if self.pairs else ops.rope_halves, self.x
        if len(x) != len(cos):
            x = np.repeat(x, len(cos), axis=0)
        for number in range(self.times):
            turned = rotate(x, cos, self.direction * sin)
            x = np.concatenate([x[:, : self.again], turned[:, self.again :]], axis=1) if number else turned
        return x


@recipe(*ROPE)
def rope(case: Case) -> Rotation:
    """The rotation of a tap, as the model has it."""
    side = case.tap.kind.word[0]
    normed = f"{side}cur_normed-{case.tap.layer}" in case.run.shapes
    x = case[f"{side}cur_normed" if normed else f"{side}cur_proj"]
    return rope_on(case, x.reshape(*x.shape[:2], -1, case.config.head_k))


def rope_on(case: Case, x: Array) -> Rotation:
    """The model's rotation of any heads."""
    factors = case.engine.rope_factors(len(case.run.tokens))
    return Rotation(x, case.run.model.rope_pairs, case.config.rope, factors, case.run.positions)


def _layout(pairs: bool, n_rot: int) -> str:
    return "(2i, 2i+1)" if pairs else f"(i, i+{n_rot // 2})"


@bug(
    *ROPE,
    fix="rotate the other layout; GGUF files of llama permute the rows of Q and K for (2i, 2i+1)",
    source="TinyLlama#24, llama.cpp#22611, candle#3410, imp#503",
)
def rope_layout(r: Rotation, case: Case) -> Iterator[Change]:
    """RoPE rotates halves (i, i + n/2) where the model needs pairs (2i, 2i+1), or the other way round."""
    n = r.rope.n_rot
    says = f"rotates {_layout(not r.pairs, n)}; this model needs {_layout(r.pairs, n)}"
    yield Change(replace(r, pairs=not r.pairs), says)


@bug(*ROPE, general=True, fix="read rope.freq_base from the file (10000 where it is missing)", source="llama.cpp#3401")
def rope_base(r: Rotation, case: Case) -> Iterator[Change]:
    """RoPE's base is not the file's."""
    for value in solve(case, lambda base: _with(r, base=base), ROPE_BASE):
        if abs(value / r.rope.base - 1) > 1e-6:
            yield Change(_with(r, base=value), ROPE_BASE.says(value, r.rope.base), value=value)


def _with(r: Rotation, **changes: Any) -> Rotation:
    return replace(r, rope=replace(r.rope, **changes))


@bug(
    *ROPE, fix="apply rope.scaling.type and rope.scaling.factor of the file", source="shainet#111, mlxcel#1355, imp#880"
)
def rope_scaling_ignored(r: Rotation, case: Case) -> Iterator[Change]:
    """The file's RoPE scaling (linear or YaRN) is ignored."""
    if r.rope.factor != 1.0:
        kind = "YaRN" if r.rope.yarn else "linear"
        says = f"ignores the file's {kind} scaling by {r.rope.factor:g}"
        yield Change(_with(r, factor=1.0, yarn=False, attn_factor=1.0), says)


@bug(*ROPE, fix="divide positions by rope.scaling.factor once", source="shainet#111, mlxcel#1355, imp#880")
def rope_scaling_doubled(r: Rotation, case: Case) -> Iterator[Change]:
    """RoPE scaling is applied twice."""
    if r.rope.factor != 1.0:
        says = f"divides positions by {r.rope.factor:g} twice"
        yield Change(_with(r, factor=r.rope.factor**2), says)
        yield Change(replace(r, positions=r.positions / r.rope.factor), says, "first")


@bug(*ROPE, fix="divide positions by rope.scaling.factor; do not multiply", source="shainet#111, mlxcel#1355, imp#880")
def rope_scaling_inverted(r: Rotation, case: Case) -> Iterator[Change]:
    """Positions are multiplied by the scaling factor instead of divided."""
    if r.rope.factor != 1.0:
        says = f"multiplies positions by {r.rope.factor:g} instead of dividing"
        yield Change(_with(r, factor=1 / r.rope.factor), says)
        yield Change(_with(r, factor=1 / r.rope.factor, attn_factor=ops.rope_magnitude(r.rope)), says, "magnitude")


@bug(
    *ROPE,
    general=True,
    fix="scale positions as the file's rope.scaling says, and not otherwise",
    source="shainet#111, mlxcel#1355, imp#880",
)
def rope_scaling_applied(r: Rotation, case: Case) -> Iterator[Change]:
    """Positions are scaled by a factor that is not the file's."""
    for value in solve(case, lambda f: _with(r, factor=f, yarn=False), ROPE_FACTOR):
        yield Change(_with(r, factor=value, yarn=False), ROPE_FACTOR.says(value, r.rope.factor), value=value)


@bug(*ROPE, fix="blend scaled and plain angles by frequency, as YaRN does", source="shainet#111, mlxcel#1355, imp#880")
def rope_yarn_as_linear(r: Rotation, case: Case) -> Iterator[Change]:
    """YaRN is taken for linear scaling: all frequencies are divided."""
    if r.rope.yarn:
        says = "divides every frequency, as linear scaling does; the file says YaRN"
        yield Change(_with(r, yarn=False), says)
        yield Change(_with(r, yarn=False, attn_factor=ops.rope_magnitude(r.rope)), says, "magnitude")


@bug(*ROPE, fix="multiply cos and sin by YaRN's 0.1 ln(factor) + 1", source="shainet#111, mlxcel#1355, imp#880")
def rope_yarn_magnitude(r: Rotation, case: Case) -> Iterator[Change]:
    """YaRN's attention temperature is left out."""
    if r.rope.yarn:
        magnitude = ops.rope_magnitude(replace(r.rope, attn_factor=1.0))
        says = f"leaves out YaRN's magnitude {magnitude:.4g}"
        yield Change(_with(r, attn_factor=r.rope.attn_factor / magnitude), says)


@bug(*ROPE, fix="divide frequencies by rope_freqs.weight", source="shainet#111, mlxcel#1355, imp#880")
def rope_factors_ignored(r: Rotation, case: Case) -> Iterator[Change]:
    """The file's frequency factors (rope_freqs.weight, Llama 3.1 and later) are ignored."""
    if r.factors is not None:
        yield Change(replace(r, factors=None), "ignores the frequency factors in rope_freqs.weight")


@bug(*ROPE, fix="divide frequencies by rope_freqs.weight; do not multiply", source="shainet#111, mlxcel#1355, imp#880")
def rope_factors_inverted(r: Rotation, case: Case) -> Iterator[Change]:
    """Frequencies are multiplied by the frequency factors instead of divided."""
    if r.factors is not None:
        yield Change(
            replace(r, factors=1 / r.factors), "multiplies frequencies by rope_freqs.weight instead of dividing"
        )


@bug(*ROPE, fix="rotate only the first rope.dimension_count values of each head", source="mlx-lm#1698")
def rope_partial_ignored(r: Rotation, case: Case) -> Iterator[Change]:
    """Whole heads are rotated where the model rotates only a part of each."""
    head = r.x.shape[-1]
    if r.rope.n_rot < head and r.factors is None:
        says = f"rotates all {head} values of a head; this model rotates the first {r.rope.n_rot}"
        yield Change(_with(r, n_rot=head), says)


@bug(
    *ROPE, fix="rotate rope.dimension_count values of each head (key_length where it is missing)", source="mlx-lm#1698"
)
def rope_partial(r: Rotation, case: Case) -> Iterator[Change]:
    """Only a part of each head is rotated where the model rotates more."""
    for part in (2, 4):
        n = r.rope.n_rot // part
        if n >= 2 and n % 2 == 0 and r.factors is None:
            says = f"rotates the first {n} values of a head; this model rotates {r.rope.n_rot}"
            yield Change(_with(r, n_rot=n), says, f"1/{part}")
            says = f"rotates the first {n // 2} of {r.rope.n_rot // 2} pairs"
            for narrow in (False, True):
                yield Change(replace(r, turned=n // 2, narrow=narrow), says, f"{part} {narrow}")


@bug(*ROPE, fix="rotate by +theta: (x cos - y sin, x sin + y cos)")
def rope_direction(r: Rotation, case: Case) -> Iterator[Change]:
    """RoPE rotates in the opposite direction: the sign of sin is flipped."""
    yield Change(replace(r, direction=-1), "rotates by -theta: the sign of sin is flipped")


@bug(*ROPE, fix="count positions from 0", source="tiny-llm#46, onnxruntime-genai#2354")
def rope_position(r: Rotation, case: Case) -> Iterator[Change]:
    """Positions are off by one or two."""
    for shift in (1, -1, 2, -2):
        says = f"rotates by the position {'+' if shift > 0 else '-'} {abs(shift)}; positions count from 0"
        yield Change(replace(r, positions=r.positions + shift), says, f"{shift:+d}")


@bug(*ROPE, fix="in decode steps go on counting where the prompt ended", source="tiny-llm#46, onnxruntime-genai#2354")
def rope_position_restarted(r: Rotation, case: Case) -> Iterator[Change]:
    """Positions are wrong in decode steps: they restart at 0, stand still, or lag by one."""
    for says, positions in wrong_positions(case.run):
        yield Change(replace(r, positions=positions), says, says)


def wrong_positions(run: Recording) -> Iterator[tuple[str, Array]]:
    """Positions that go wrong after the first batch, or after the prompt, each way in words."""
    count, seen, right = len(run.positions), set[bytes](), run.positions
    begun = np.repeat([start for start, _ in run.batches], np.diff(run.edges))  # the first token of each token's batch
    within = np.arange(count) - begun
    for n in dict.fromkeys((run.edges[1], run.n_prefill)):
        if not 0 < n < count:
            continue
        decode, end = n >= run.n_prefill, right[n - 1]
        which, what = ("decode step", "the prompt") if decode else ("batch after the first", "the first batch")
        tails = {
            f"lags by one position in every {which}": right - 1,
            f"restarts at position 0 in every {which}": within,
            f"restarts counting positions from 0 {'in decode' if decode else f'after {what}'}": np.arange(count) - n,
            f"stays at {what}'s length in every {which}": end + 1 + within,
            f"stays at {what}'s last position in every {which}": end + within,
            f"is one position ahead in every {which}": right + 1,
        }
        for says, tail in tails.items():
            positions = np.concatenate([right[:n], tail[n:]]).astype(right.dtype)
            if positions.tobytes() not in seen | {right.tobytes()}:
                seen.add(positions.tobytes())
                yield says, positions


@bug(*ROPE, fix="rotate Q and K before the scores are taken")
def rope_missing(r: Rotation, case: Case) -> Iterator[Change]:
    """RoPE is left out."""
    yield Change(Same(r.x), "does not rotate at all")


@bug(*ROPE, fix="rotate once")
def rope_twice(r: Rotation, case: Case) -> Iterator[Change]:
    """RoPE is applied twice."""
    yield Change(replace(r, times=2), "rotates twice")
    first = case.run.edges[1]
    if first < len(case.run.tokens):
        which = "in decode steps" if first >= case.run.n_prefill else "after the first batch"
        yield Change(replace(r, times=2, again=first), f"rotates twice {which}", "later")


@bug(*ROPE, fix="leave the rows of Q and K as the file has them", source="TinyLlama#24, llama.cpp#22611")
def rope_permuted(r: Rotation, case: Case) -> Iterator[Change]:
    """Q or K is permuted once more, or not back, before it is rotated."""
    for to_halves in (True, False):
        way = "pairs into halves" if to_halves else "halves into pairs"
        says = f"rotates heads whose values were put from {way} first"
        yield Change(replace(r, x=reordered(r.x, to_halves)), says, str(to_halves))


@bug(
    *ROPE,
    harmless=True,
    fix='nothing, if Q and K are both so: scores are the same; done = ["permuted"] in a name map says it beforehand',
)
def rope_other_order(r: Rotation, case: Case) -> Iterator[Change]:
    """Heads hold the right values in Hugging Face's order (halves) where the file has GGUF's (pairs)."""
    for to_halves in (True, False):
        other = Through(r, partial(reordered, to_halves=to_halves))
        yield Change(other, "has the right values in the other order within each head", str(to_halves))


def reordered(x: Array, to_halves: bool) -> Array:
    """Each head's values: neighbours moved to halves, or halves to neighbours."""
    *lead, d = x.shape
    split = x.reshape(*lead, d // 2, 2) if to_halves else x.reshape(*lead, 2, d // 2)
    return np.ascontiguousarray(np.swapaxes(split, -1, -2)).reshape(x.shape)
