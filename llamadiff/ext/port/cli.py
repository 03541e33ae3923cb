"""The commands port and tiny."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.command import LLAMA_CPP, Command
from llamadiff.cli.inputs import RunOptions
from llamadiff.cli.options import LlamaCpp, Model, NPredict, Prompt, Tokens, finish
from llamadiff.cli.reports import Reports, with_files
from llamadiff.report.formats import Format
from llamadiff.system.collisions import refuse_collisions
from llamadiff.system.commands import quote

FORMATS = (Format("json", (".json",), "ext.port.page:as_json", plain=True),)


def port(
    model: Model,
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="The checkpoint of the file: a directory, or file.py:function, which builds a torch module.",
            metavar="CHECKPOINT",
        ),
    ],
    prompt: Prompt = None, tokens: Tokens = None, n_predict: NPredict = 0,
    image: Annotated[
        Path | None,
        typer.Option(help="Of a projector file (mmproj.gguf): the picture that both sides see.", metavar="FILE",
                     show_default=False),
    ] = None,
    audio: Annotated[
        Path | None,
        typer.Option(help="Of a projector file: the sound that both hear.", metavar="FILE", show_default=False),
    ] = None,
    llama_cpp: LlamaCpp = None,
    *, reports: Reports,
) -> None:  # fmt: skip
    """Compare llama.cpp's graph with the checkpoint's own code.

    The first ops that part, and why."""
    from llamadiff.engines.run_spec import How
    from llamadiff.ext.port.page import print_port
    from llamadiff.ext.port.projector_run import media_of, port_projector
    from llamadiff.ext.port.run import port as run_port
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    asked = RunOptions(prompt, tokens, n_predict=n_predict, llama_cpp=llama_cpp)
    media = media_of(image, audio, is_asked=bool(prompt or tokens or n_predict))
    seen = [] if media is None else [("the media file", media.path)]
    named = [("the model", model), ("the checkpoint", Path(checkpoint)), *seen, *asked.files]
    refuse_collisions(named, reports.output_files)
    with progress() as shown:
        how = How(progress=shown)
        found = (run_port(model, checkpoint, asked.run(), how) if media is None
                 else port_projector(model, checkpoint, media, asked.settings, how))  # fmt: skip
    reports.write(found, lambda each: print_port(each, make_console()))
    finish(found.verdict)


def tiny(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint's directory: its config.json and tokenizer are enough.", metavar="CHECKPOINT"
        ),
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
    """Make a small random model of a checkpoint's architecture.

    With its .gguf: for port, and for the CI of an engine."""
    from llamadiff.ext.port.tiny import tiny as make
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    with progress() as shown:
        made = make(checkpoint, output, converter, golden, seed, shown)
    size = made.gguf.stat().st_size / 1e6
    console = make_console()
    heads = f", {made.heads} more for drafts" if made.heads else ""
    console.print(
        f"{made.gguf}: {made.layers} layers{heads}, {made.parameters} parameters, {size:.1f} MB", markup=False
    )
    gguf, folder = quote(str(made.gguf)), quote(str(made.folder))
    console.print(f'Next: llamadiff port {gguf} {folder} "Once upon a time"', markup=False, soft_wrap=True)
    if made.converted:
        console.print(f'      llamadiff heads {gguf} "Once upon a time"', markup=False, soft_wrap=True)
    elif made.heads:
        console.print("      the converter left out what is for drafts (MTP)", markup=False)
    if made.golden is not None:
        line, engine = f"llamadiff check {quote(str(made.golden))} --model {gguf}", "cmd: ENGINE {model} {tokens} {out}"
        console.print(f'      {line} --candidate "{engine}"', markup=False, soft_wrap=True)
        console.print(
            "      ENGINE: what runs yours; it reads the ids in {tokens}, and writes taps to {out}", markup=False
        )


COMMANDS = (
    Command(
        LLAMA_CPP,
        with_files(port, FORMATS),
        (
            'llamadiff port model.gguf checkpoint/ "Once upon a time"',
            'llamadiff port model.gguf model.py:load "Once" --llama-cpp ../llama.cpp',
            "llamadiff port mmproj.gguf checkpoint/ --image cat.png --llama-cpp ../llama.cpp/build",
        ),
    ),
    Command(
        LLAMA_CPP,
        tiny,
        ("llamadiff tiny checkpoint/ -o tiny/ --converter ../llama.cpp/convert_hf_to_gguf.py --golden",),
    ),
)
