"""Every way in which a run of an engine reaches the comparison."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from places import TESTS

from llamadiff import compare
from llamadiff.engines import run_spec
from llamadiff.result.comparison import Comparison
from llamadiff.verbs.verbs import diff, record
from proof.decoding.bugs import DECODING
from proof.decoding.engine import CHUNKS, Generating, save
from proof.strangers.model import read

PROMPT = "Once upon a time there was a"
STEPS = 5


@dataclass(frozen=True)
class Run:
    """One model, how the prompt is fed, and what the engine does wrongly."""

    model: Path
    how: str
    bug: str
    prompt: tuple[int, ...]
    folder: Path

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """What the engine ran: the prompt, and what it generated."""
        return self._generated[1]

    @cached_property
    def trace(self) -> Path:
        return self._generated[0]

    @cached_property
    def _generated(self) -> tuple[Path, tuple[int, ...]]:
        engine = Generating(read(self.model), len(self.prompt) + STEPS, DECODING[self.bug])
        tokens = engine.generate(self.prompt, self.how, STEPS)
        return save(self.folder / "mine.safetensors", engine, tokens, len(self.prompt)), tuple(tokens)


def alone(run: Run) -> Comparison:
    return compare(run.model, candidate=run.trace)


def with_tokens(run: Run) -> Comparison:
    return compare(run.model, run.tokens, candidate=run.trace)


def with_prompt(run: Run) -> Comparison:
    return compare(run.model, run_spec.Run(PROMPT, n_predict=STEPS), candidate=run.trace)


def diffed(run: Run) -> Comparison:
    theirs = record(run.model, run_spec.Run(PROMPT, n_predict=STEPS), run.folder / "theirs.safetensors")
    return diff(theirs, run.trace, run.model)


def as_command(run: Run) -> Comparison:
    words = [sys.executable, "-m", "proof.decoding.engine", "--how", run.how, "--bug", run.bug]
    place = shlex.quote(str(TESTS))
    command = f"cmd: env PYTHONPATH={place} {shlex.join(words)} --model {{model}} --prompt {{prompt}} " + (
        "--n-predict {n_predict} --out {out}"
    )
    return compare(run.model, run_spec.Run(PROMPT, n_predict=STEPS), candidate=command)


WAYS: dict[str, Callable[[Run], Comparison]] = {
    "trace alone": alone,
    "--tokens": with_tokens,
    "prompt": with_prompt,
    "diff": diffed,
    "cmd:": as_command,
}


def exists(how: str, bug: str) -> bool:
    """Of a batch of one token no other comes late."""
    return how == CHUNKS or bug != "first token fed twice"
