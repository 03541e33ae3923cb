"""What a candidate does in its own way and is right: what it rounds, and which legal choices it made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from threadpoolctl import threadpool_limits

from llamadiff.diagnose.conventions.choices import Choice, suspected, without
from llamadiff.diagnose.conventions.reading import read
from llamadiff.diagnose.diagnosis import Scene, scene_of
from llamadiff.engines.model_file import Runnable
from llamadiff.engines.run_spec import How
from llamadiff.judge.finding import Local
from llamadiff.judge.run import Passes, run_passes
from llamadiff.judge.settings import adding
from llamadiff.numerics import half_sums, tolerances
from llamadiff.numerics.policies import F32, JITTERS
from llamadiff.numerics.rounding import Rounding
from llamadiff.trace.reader import Trace

SECONDS = 10.0  # that it may take to ask whether a rounding is a known bug
WORSE = 10.0  # how many times the error that a tap had is too much where a choice is undone
_OPERANDS = {"cache_k": "Q and K", "cache_v": "V or its weights", "kept_k": "its K cache", "kept_v": "its V cache"}
_OPS = {"ROPE": "RoPE", "SOFT_MAX": "the softmax", "SWIGLU": "the activation"}


@dataclass(frozen=True)
class Conventions:
    """What is an engine's own and no mistake.

    ``precision``: what its tensors were kept in; ``roundings`` by kind of operand, where they are not ggml's;
    ``adds_in_half``: sums of float16's numbers are kept in float16.
    """

    choices: tuple[Choice, ...] = ()
    roundings: Mapping[str, Rounding] = field(default_factory=dict)
    precision: str = F32
    adds_in_half: bool = False

    def clauses(self) -> Iterator[str]:
        """Each in words, as a clause."""
        for choice in self.choices:
            yield f"it {choice.says} (a map states it: {choice.lines})"
        if self.precision != F32:
            yield f"its tensors were kept in {self.precision}"
        if self.adds_in_half:
            yield "it adds products of F16 numbers in float16, as some CPUs and GPUs do"
        for op, name in _OPS.items():
            if op in self.roundings:
                yield f"it computes {name} to about {self.roundings[op].bits} bits"
        operands = {kind: rounding.words() for kind, rounding in self.roundings.items() if kind not in _OPS}
        for words in dict.fromkeys(operands.values()):
            yield f"it rounds {_operands([kind for kind in operands if operands[kind] == words])} to {words}"


def _operands(kinds: Sequence[str]) -> str:
    """What is rounded, in words: ``activations for Q4_K and Q6_K weights``."""
    weights = list(dict.fromkeys(kind.partition(":")[0] for kind in kinds if kind not in _OPERANDS))
    named = [f"activations for {' and '.join(weights)} weights"] if weights else []
    return " and ".join([*named, *(_OPERANDS[kind] for kind in kinds if kind in _OPERANDS)])


def understood(
    model: Runnable,
    baseline: Trace,
    candidate: Trace,
    passes: Passes,
    how: How,
    graph: Callable[[], Runnable | None],
) -> tuple[Conventions, Trace, Passes]:
    """A candidate's conventions, its trace as it would be without its choices, and what passes under these find.

    Costs nothing where everything is right in a way that is known; else another pass for each thing found out.
    ``graph`` is llama.cpp's: what a known bug explains is no rounding.
    """

    def scene(of: Runnable | None) -> Scene | None:
        return None if of is None else scene_of(of, passes, "candidate", SECONDS, how.progress)

    sums = next((way for way in half_sums.WAYS if way in passes.judge.ways), "")
    if sums:
        candidate = adding(candidate, sums)
        passes = run_passes(model, baseline, candidate, how)
    choices, candidate, passes = _with_choices(model, baseline, candidate, passes, how)
    with threadpool_limits(1, "blas"):
        own_scene = scene(model)
        assert own_scene is not None
        own, roundings = read(own_scene, passes.findings, lambda: scene(graph()))
    if roundings:
        passes = run_passes(model, baseline, candidate, how, None, roundings)
    if any(_stands_out(finding.local.get("candidate")) for finding in passes.findings):
        passes = run_passes(model, baseline, candidate, how, None, roundings, len(JITTERS))
    precision = passes.judge.sources["candidate"].precision
    return Conventions(tuple(choices), own, precision, bool(sums)), candidate, passes


def _stands_out(local: Local | None) -> bool:
    """Whether only a part of a tap is wrong: then what rounding does to that part is worth more than one sample."""
    return local is not None and local.verdict == tolerances.WRONG and local.limit < local.nmse <= local.noise_limit


def _with_choices(
    model: Runnable, baseline: Trace, candidate: Trace, passes: Passes, how: How
) -> tuple[Sequence[Choice], Trace, Passes]:
    """The legal choices that explain what looks wrong, the candidate without them, and what passes over it find.

    A choice that is none makes some taps right, and others worse than they were.
    """
    wrong = passes.wrong("candidate")
    found = suspected(model, baseline, candidate, {tap.kind.word for tap in wrong.values()})
    for choices in (found, *([choice] for choice in found if len(found) > 1)):
        if choices:
            plain = without(choices, model, candidate)
            again = run_passes(model, baseline, plain, how)
            if again.wrong("candidate").keys() < wrong.keys() and not _is_worse(again, passes):
                more, plain, again = _with_choices(model, baseline, plain, again, how)
                return [*choices, *more], plain, again
    return (), candidate, passes


def _is_worse(again: Passes, before: Passes) -> bool:
    """Whether a tap that is wrong is much further off than it was."""
    errors = {f.tap.name: f.local["candidate"].nmse for f in before.findings if "candidate" in f.local}
    wrong = again.wrong("candidate")
    return any(
        finding.local["candidate"].nmse > WORSE * errors[finding.tap.name]
        for finding in again.findings
        if finding.tap.name in wrong
    )
