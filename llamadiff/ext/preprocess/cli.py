"""The command preprocess."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.command import MODEL, Command
from llamadiff.cli.options import finish
from llamadiff.cli.reports import Reports, with_files
from llamadiff.report.formats import Format
from llamadiff.system.collisions import refuse_collisions
from llamadiff.system.errors import UserError

FORMATS = (Format("json", (".json",), "ext.preprocess.page:as_json", plain=True),)


def preprocess(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A directory with the checkpoint's preprocessor_config.json.", metavar="CHECKPOINT"),
    ],
    file: Annotated[Path, typer.Argument(help="The picture, or the .wav file, that the engine read.", metavar="FILE")],
    candidate: Annotated[
        Path,
        typer.Option(
            "--candidate",
            help="What your engine fed its encoder, or with --prompt its text model: .npy, .npz, .safetensors, .f32.",
            metavar="FILE", show_default=False,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", help="The tensor, where the file holds several.", metavar="NAME", show_default=False),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", help="Look behind the encoder: its rows among this text, their positions, their mask.",
            metavar="TEXT", show_default=False,
        ),
    ] = None,
    *, reports: Reports,
) -> None:  # fmt: skip
    """Compare an encoder's input with the checkpoint's own processor.

    Pictures and sound: which step is wrong, from the resize to the order of patches, and how."""
    from llamadiff.ext.preprocess.inserted import judge_inserted
    from llamadiff.ext.preprocess.judge import judge_preprocessing
    from llamadiff.ext.preprocess.page import print_inserted, print_preprocessed
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    refuse_collisions(
        [("the checkpoint", checkpoint), ("the file", file), ("the candidate", candidate)], reports.output_files
    )
    if prompt is not None:
        if name is not None:
            raise UserError("preprocess: give --name or --prompt; what a text model is fed has names of its own")
        with progress() as shown:
            inserted = judge_inserted(checkpoint, file, prompt, candidate, shown)
        reports.write(inserted, lambda each: print_inserted(each, make_console()))
        finish(inserted.verdict)
    with progress() as shown:
        found = judge_preprocessing(checkpoint, file, candidate, name, shown)
    reports.write(found, lambda each: print_preprocessed(each, make_console()))
    finish(found.verdict)


COMMANDS = (
    Command(
        MODEL,
        with_files(preprocess, FORMATS),
        (
            "llamadiff preprocess checkpoint/ cat.png --candidate pixels.npy",
            "llamadiff preprocess checkpoint/ speech.wav --candidate mel.f32",
            'llamadiff preprocess checkpoint/ cat.png --prompt "What is this?" --candidate inputs.npz',
        ),
    ),
)
