"""The commands that list: taps, and what is installed."""

from __future__ import annotations

from typing import Annotated

import typer

from llamadiff.cli.inputs import from_environment, settings_of
from llamadiff.cli.options import LlamaCpp, Model


def taps(
    model: Model,
    tokens: Annotated[int, typer.Option("--n-tokens", min=1, help="Shapes for this many.")] = 14,
    json: Annotated[bool, typer.Option("--json", help="Every tap as JSON.", metavar="")] = False,
) -> None:
    """List what an engine should write: names, shapes, order.

    The dozen that matter most are marked."""
    from llamadiff.engines.select import runnable
    from llamadiff.report import listing

    found = runnable(model, tokens)
    if json:
        typer.echo(listing.taps_as_json(found, tokens))
    else:
        listing.print_taps(found, tokens)


def doctor(llama_cpp: LlamaCpp = None) -> None:
    """Say what is installed, and what is wrong with it."""
    from llamadiff.llamacpp import doctor as examination
    from llamadiff.report import listing

    good = listing.print_checks(examination.examine(settings_of(llama_cpp).place, from_environment()))
    raise typer.Exit(0 if good else 2)
