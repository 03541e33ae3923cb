"""What an engine does in its own way and is right about: it is told, and judged by. Plain data, and its words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llamadiff.numerics.policies import F32
from llamadiff.numerics.rounding import Rounding

_OPERANDS = {"cache_k": "Q and K", "cache_v": "V or its weights", "kept_k": "its K cache", "kept_v": "its V cache"}
_OPS = {"ROPE": "RoPE", "SOFT_MAX": "the softmax", "SWIGLU": "the activation"}


@dataclass(frozen=True)
class Choice:
    """What an engine does, as a clause without its subject, and the map lines that state it: word -> done."""

    says: str
    done: Mapping[str, str]

    @property
    def lines(self) -> str:
        """How a map states it."""
        return "  ".join(f'[{word}] done = ["{treatment}"]' for word, treatment in self.done.items())


@dataclass(frozen=True)
class Conventions:
    """What is an engine's own and no mistake.

    ``precision``: what its tensors were kept in; ``roundings`` by kind of operand, where they are not ggml's;
    ``adds_in_half``: sums of float16's numbers are kept in float16; ``cache``: the type of K and V, where not stated;
    ``compute``: what activations are rounded to, likewise.
    """

    choices: tuple[Choice, ...] = ()
    roundings: Mapping[str, Rounding] = field(default_factory=dict)
    precision: str = F32
    adds_in_half: bool = False
    cache: str = ""
    compute: str = ""

    def clauses(self) -> Iterator[str]:
        """Each in words, as a clause."""
        for choice in self.choices:
            yield f"it {choice.says} (a map states it: {choice.lines})"
        if self.precision != F32:
            yield f"its tensors were kept in {self.precision}"
        if self.adds_in_half:
            yield "it adds products of F16 numbers in float16, as some CPUs and GPUs do"
        if self.cache:
            yield f"it keeps K and V in {self.cache} (producer.settings.type_k and type_v state it)"
        if self.compute:
            yield f"it rounds activations to {self.compute} (producer.settings.compute states it)"
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
