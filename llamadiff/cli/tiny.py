"""The command that makes a small model of a checkpoint's architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def tiny(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A checkpoint's directory: its config.json and tokenizer are enough.", metavar="CHECKPOINT",
                       exists=True, file_okay=False),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to make.", metavar="FOLDER", show_default=False)
    ],
    converter: Annotated[
        Path,
        typer.Option(help="llama.cpp's convert_hf_to_gguf.py, as you have it; it is run.", metavar="FILE",
                     show_default=False),
    ],
    golden: Annotated[
        bool, typer.Option("--golden", help="Record what the model's own code gives, for check.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the weights.", min=0, max=1 << 31)] = 1,
) -> None:  # fmt: skip
    """Make the same architecture, small and random, with its .gguf: for port, and for the CI of an engine."""
    from llamadiff.port.tiny import tiny as make
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    with progress() as shown:
        made = make(checkpoint, output, converter, golden, seed, shown)
    size = made.gguf.stat().st_size / 1e6
    console = make_console()
    console.print(f"{made.gguf}: {made.layers} layers, {made.parameters} parameters, {size:.1f} MB", markup=False)
    console.print(f'Next: llamadiff port {made.gguf} {made.folder} "Once upon a time" --llama-cpp BUILD', markup=False)
    if made.golden is not None:
        console.print(f"      llamadiff check {made.golden} --candidate YOUR_DUMP", markup=False)
