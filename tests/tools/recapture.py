"""Record captures/ anew: llama.cpp's traces of the shipped model. ``make capture``, a deliberate act."""

from __future__ import annotations

from pathlib import Path

from llamadiff.engines.run_spec import Run
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.verbs.demo import PROMPT
from llamadiff.verbs.verbs import record

FOLDER = Path(__file__).parents[2] / "captures"
RUNS = (("tiny.F16", False, 0), ("tiny.Q4_K_M", True, 0), ("tiny.Q4_K_M.decode", True, 2))


def main() -> None:
    for name, quantized, n_predict in RUNS:
        output = FOLDER / f"{name}.safetensors"
        trace = record(shipped_model(quantized), Run(PROMPT, n_predict=n_predict), output)
        print(f"{output.name}: {len(trace)} taps of {len(trace.info.tokens)} tokens, {output.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
