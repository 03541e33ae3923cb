"""llama.cpp's run of a model's heads, made once for all candidates that are held against it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamadiff.candidates.opening import read_candidate
from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.graph.model import GraphModel
from llamadiff.ext.heads.compare import judge_heads, run_heads
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.result.comparison import Comparison
from llamadiff.trace.reader import Trace

TOKENS = (1, 17, 5, 80, 42, 9, 3, 77, 30, 12, 64, 100)


@dataclass(frozen=True)
class HeadRun:
    """The model, its graph of trunk and heads, and what llama.cpp recorded."""

    path: Path
    engine: GraphModel
    baseline: Trace

    @classmethod
    def of(cls, path: Path, tokens: Sequence[int] = TOKENS) -> HeadRun:
        file = ModelFile(path)
        with scratch_directory() as folder:
            request = text_request(file, Run(tokens=tokens), Path(folder) / "heads.safetensors")
            engine, baseline = run_heads(file, request, How(), None)
            return cls(path, engine, baseline.in_memory())

    def judged(self, taps: Mapping[str, np.ndarray] | None = None, **how: object) -> Comparison:
        """What is said of a candidate's taps; without any, of llama.cpp's."""
        brought = None if taps is None else read_candidate(lambda ids: taps, How(**how))
        return judge_heads(self.engine, self.baseline, brought, How(**how))


def of_head(taps: Mapping[str, np.ndarray], others: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Those of the head alone, and ``others``."""
    names = ("mtp_", "h_nextn", "result_output")
    return {name: values for name, values in taps.items() if name.startswith(names) or name in others}
