"""A port as a page of 80 columns, and as JSON. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from llamadiff.ext.port.alignment import name_of
from llamadiff.ext.port.places import Apart
from llamadiff.ext.port.run import KERNELS, Port
from llamadiff.ext.port.sides import FILE, GRAPH, MODEL
from llamadiff.ext.port.torch_ops import CodeLine
from llamadiff.judge.verdict import MATCH, UNCHECKED, WRONG
from llamadiff.report.json import in_json
from llamadiff.report.terminal.page import Page

SCHEMA = "llamadiff.extras.port/1"
OPINIONS = {
    GRAPH: "llama.cpp's logits: by its keys, and what is assumed beside them, it is another model",
    MODEL: "the model's logits",
}
MOST_IDS = 16  # that are shown
FEW = 4  # lines of the model's code


def print_port(found: Port, console: Console) -> None:
    """The verdict, each place with both sides, and what was lined up."""
    page = Page(console)
    page.paragraph(Text(f"{found.verdict.upper()}  ", page.style_of(found.verdict)), Text(headline(found)))
    for number, place in enumerate(found.places, 1):
        page.blank()
        _put_place(page, number, place)
    page.blank()
    for key in found.keys:
        page.paragraph("       the file   ", page.data(key))
    for name, value in found.unsaid.items():
        says = f"no key has {name} = {value:g} of config.json, which the model reads"
        page.paragraph("       the file   ", page.data(says))
    for line in found.concerns:
        page.paragraph("       ", page.data(line, 1000))
    if found.opinion is not None:
        page.paragraph("       ", f"a third reading of the file, llamadiff's own, has {OPINIONS[found.opinion]}")
    for line in _counted(found):
        page.paragraph("       ", page.data(line, 1000))
    if found.prompt is not None:
        page.paragraph("       prompt     ", page.quote(found.prompt, 60))
    if found.other_ids is not None:
        page.paragraph("       llama.cpp  ", page.data(_few([token for token, _ in found.tokens])))
        page.paragraph("       tokenizer  ", f"{page.data(_few(found.other_ids))} by the checkpoint's own")
    if found.unseen is not None and not found.places:
        left = "the tokenizer, special tokens and the chat template were not looked at"
        page.paragraph("       next       ", f"{left}:")
        page.print_unbroken(f"                  {found.unseen}")


def headline(found: Port) -> str:
    """The finding in a line."""
    code = found.code
    if found.places:
        first, more = found.places[0], len(found.places) - 1
        others = f"; {more} more {'places' if more > 1 else 'place'} below" if more else ""
        again = f"; convert {found.model['file']} again" if first.side == FILE else ""
        return f"{first.side}, {first.name}: {first.fault or f'{code} {first.says}'}{again}{others}"
    if found.other_ids is not None:
        return "the file, or llama.cpp's tokenizer: ids of the prompt are not those of the checkpoint's tokenizer"
    if found.verdict == WRONG and found.steps is not None:
        return f"llama.cpp's graph is right in one go, and not its decode steps: {found.steps.headline}"
    if found.verdict == MATCH:
        last = "logits agree" if found.fed is None else "what the text model is given agrees"
        agree = f"{found.end} agrees" if found.end is not None else last
        return f"llama.cpp computes what {code} does: {agree} to {_size(found.logits)}"
    if found.steps is not None and found.steps.verdict == UNCHECKED:
        return f"the graph is what {found.code} computes, and llama.cpp's decode steps were not all judged by it"
    which = "backend" if found.fed is None else "watch"
    kernel = f"llama.cpp's own run is not what its graph gives: a kernel is wrong, and llamadiff {which} says which"
    last = "logits" if found.fed is None else "its last values"
    rounding = f"no op of llama.cpp's parts from {code}, and yet {last} are off by {_size(found.logits)}"
    return kernel if found.own > KERNELS else rounding


def _put_place(page: Page, place_number: int, place: Apart) -> None:
    label = Text(f"{place_number:>4}   ")
    says = f"the model {place.says}"
    page.paragraph(label, f"{place.side}, {page.data(place.name)}: {page.data(place.fault or says, 1000)}")
    if place.fault is not None:
        page.paragraph("       shows so   ", page.data(says, 1000))
    if not math.isnan(place.error):
        page.paragraph(
            Text("       llama.cpp  "),
            Text(f"{page.data(name_of(place.nodes[0]))} is off by an NMSE of {_size(place.error)}"),
        )
    for word, lines in (("reads", place.reads), ("the model", [place.line] if place.line else place.code[:FEW])):
        for number, line in enumerate(lines[:FEW]):
            page.paragraph(f"       {word if number == 0 else '':9}  ", _code(page, line))


def _code(page: Page, line: CodeLine) -> str:
    return f"{page.data(line)}  {page.data(line.text)}"


def _counted(found: Port) -> Iterator[str]:
    lineup, file = found.lineup, found.model
    by = found.baseline.get("version") or found.baseline.get("name")
    tokens = f", {len(found.tokens)} tokens" if found.fed is None else ""
    yield f"{file['file']} ({file['architecture']}){tokens}, by {by}"
    if found.fed is not None:
        yield f"{found.fed}; whether that is right says llamadiff preprocess"
    what = "part, or follow in their layer" if lineup.departed else "were not lined up, and end as the model does"
    others = f"; {lineup.apart} {what}" if lineup.apart else ""
    yield (
        f"of llama.cpp's {lineup.nodes} nodes {lineup.aligned} have values that the model has too"
        f"{f', {lineup.inside} are steps between such' if lineup.inside else ''}{others}"
    )
    if found.end is not None:
        yield f"{found.code} ends with {found.end}: what llama.cpp computes of that is not compared"
    if found.quantized:
        yield (
            f"the model was given the file's matrices ({', '.join(found.quantized)}): what they cost is not looked at; "
            f"llamadiff weights {file['file']} CHECKPOINT says it"
        )
    if found.steps is not None:
        yield f"llama.cpp ran {found.decoded} tokens as decode steps: {found.steps.summary}"
    mended, parted = lineup.mended
    if parted:
        given = "given the model's values at these places, llama.cpp's graph gives"
        left = f"{parted - mended} of {parted} parts still give others"
        yield f"{given} the model's everywhere" if mended == parted else f"{given} the model's in some: {left}"
    own, wanted = lineup.sizes
    if own != wanted:
        yield f"llama.cpp's graph gives {own} values in the end, and {found.code} {wanted}"
    if not math.isnan(found.logits):
        yield f"the last values are off by an NMSE of {_size(found.logits)}"


def _few(ids: Sequence[int]) -> str:
    return f"[{', '.join(map(str, ids[:MOST_IDS]))}{', ...' if len(ids) > MOST_IDS else ''}]"


def _size(nmse: float) -> str:
    return f"{nmse:.1e}"


def as_json(found: Port) -> str:
    """Everything, machine-readable."""
    about: dict[str, Any] = {
        "schema": SCHEMA, "verdict": found.verdict, "headline": headline(found), "model": found.model,
        "code": found.code, "tokens": [{"id": token, "text": text} for token, text in found.tokens],
        "prompt": found.prompt, "checkpoint_ids": found.other_ids, "baseline": found.baseline,
        "nodes": {"all": found.lineup.nodes, "aligned": found.lineup.aligned, "inside": found.lineup.inside},
        "logits": found.logits, "own_logits": found.own,
        "end": found.end, "fed": found.fed, "quantized": found.quantized, "mended": found.lineup.mended,
        "steps": None if found.steps is None else {"verdict": found.steps.verdict, "headline": found.steps.headline},
        "keys": found.keys, "concerns": found.concerns, "unsaid": found.unsaid, "third_opinion": found.opinion,
        "places": [_place(place) for place in found.places],
    }  # fmt: skip
    return in_json(about)


def _place(place: Apart) -> dict[str, Any]:
    cause = place.cause
    return {
        "op": place.op, "side": place.side, "nodes": [name_of(node) for node in place.nodes], "layers": place.layers,
        "fault": place.fault, "nmse": place.error, "says": place.says, "line": place.line, "reads": place.reads,
        "code": place.code,
        "cause": None if cause is None else {"name": cause.name, "nmse": cause.nmse, "source": cause.source},
    }  # fmt: skip
