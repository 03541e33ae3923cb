"""llama.cpp's last rows of token ids: what vectors of texts and scores of documents are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llamadiff.engines.capture_request import request_for, text_request
from llamadiff.engines.model_file import ModelFile, Runnable
from llamadiff.engines.run_spec import How, Run
from llamadiff.engines.select import capture_run
from llamadiff.ext.state.variation import PREFIX, varied
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.verdict import of_answers, of_check
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.llamacpp.child import Child
from llamadiff.result.comparison import Comparison, Judged, Sides, assemble
from llamadiff.result.message import Message
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Array, Trace

ROWS = ("result_norm", "result_embd")  # of decoders, and of encoders
ROOM = 8.0  # times as much as two ways of rounding differ
EXACT = 1e-7  # NMSE of what is the same but for the order of sums
WAYS = ("kv=f16,flash_attn=on", "kv=f16")


@dataclass(frozen=True)
class LastRows:
    """Runs a model in llama.cpp, by an ``engine`` that knows its taps or by its graph."""

    file: ModelFile
    engine: Runnable | None
    run: Run
    how: How
    child: Child

    def baseline(self, run: Run, folder: Path) -> tuple[Runnable, Trace]:
        """The run that is reported, kept in the folder. Raises UserError where llama.cpp has no last rows of it."""
        request = request_for(self.engine or self.file, run, folder / "baseline.safetensors")
        opened, trace = capture_run(self.engine, replace(request, wanted=ROWS), self.how.progress, self.child)
        rows_in(trace, self.file)
        return opened, trace

    def of(self, ids: Sequence[int], spec: str = "") -> Array:
        """Those of ids, [token, embd], with other settings of llama.cpp."""
        with scratch_directory() as place:
            asked = Run(tokens=tuple(ids), settings=self.run.settings)
            request = text_request(self.file, asked, Path(place) / "r.safetensors")
            request = replace(varied(request, f"{PREFIX}{spec}") if spec else request, wanted=ROWS)
            _, trace = capture_run(self.engine, request, self.how.progress, self.child)
            return rows_in(trace, self.file)


def rows_in(trace: Trace, file: ModelFile) -> Array:
    """A run's last rows, [token, embd]. Raises UserError where there are none."""
    name = next((name for name in ROWS if name in trace), None)
    if name is None:
        raise UserError(
            f"{file.path}: llama.cpp has no {ROWS[0]} of it, which a vector is made of; it cannot be judged so"
        )
    return np.array(trace[name], np.float64)


def answered(
    model: Runnable, baseline: Trace, about: Mapping[str, str], what: str, said: tuple[str, tuple[str, ...], bool],
    steps: tuple[str, str],
) -> Comparison:  # fmt: skip
    """The result of one answer: ``said`` is the finding, its proof, and whether it is a mistake; ``steps`` are what to
    do where it is one, and where it is none.
    """
    headline, proof, is_mistake = said
    info = baseline.info
    sides = Sides(
        model=model.describe(info.model.get("sha256")), tokens=model.token_texts(info.tokens), n_prefill=info.n_prefill,
        prompt=info.prompt, baseline={"name": "the baseline", **info.producer}, candidate=dict(about),
    )  # fmt: skip
    check = Check(what, of_check(is_mistake), headline)
    ruling = of_answers(of_check(False), headline, is_mistake)
    return assemble(sides, Judged(rows=(), preflight=(check,)), ruling, Message(headline, proof),
                    (steps[0] if is_mistake else steps[1],))  # fmt: skip
