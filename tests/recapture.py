"""Record captures/ anew: llama.cpp's traces of the shipped model. ``make capture``, a deliberate act."""

from __future__ import annotations

from pathlib import Path

from llamadiff.asking import request_for
from llamadiff.demo import PROMPT, shipped_model
from llamadiff.llamacpp.capture import capture
from llamadiff.llamacpp.request import Settings
from llamadiff.pipeline import open_model

FOLDER = Path(__file__).parent.parent / "captures"
RUNS = (("tiny.F16", False, 0), ("tiny.Q4_K_M", True, 0), ("tiny.Q4_K_M.decode", True, 2))


def main() -> None:
    for name, quantized, n_predict in RUNS:
        model = open_model(shipped_model(quantized), "f32", Settings())
        output = FOLDER / f"{name}.safetensors"
        trace = capture(request_for(model, PROMPT, (), False, n_predict, output, (), None, None))
        print(f"{output.name}: {len(trace)} taps of {len(trace.info.tokens)} tokens, {output.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
