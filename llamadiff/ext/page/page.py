"""Comparison -> one HTML file that is opened from disk and asks nothing of a network.

What matters is there without a script. The script draws the rest, from data in the file. A policy in the file's head
lets nothing run but that script and asks for nothing, whatever else might get into the page.
"""

from __future__ import annotations

import hashlib
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamadiff import __version__
from llamadiff.ext.page.data import data_of, side_names
from llamadiff.judge.verdict import MATCH, NOISE, SEVERITY, UNCHECKED, WRONG, worst_of
from llamadiff.report.facts import decode_steps, mistakes, model_facts, run_fact, settings_of, side_facts
from llamadiff.report.formats import About, command_line
from llamadiff.report.tables import tables_of
from llamadiff.report.terminal.escape import escape_line, quote, times, tiny
from llamadiff.report.terminal.tap_lines import over_limit
from llamadiff.result.comparison import Comparison
from llamadiff.result.diagnosis import Diagnosis
from llamadiff.words import diagnosis_text as say
from llamadiff.words.advice import fix_step
from llamadiff.words.blame import headline, proof

if TYPE_CHECKING:
    import jinja2

HERE = Path(__file__).parent
SCRIPTS = (
    "draw.js",
    "map.js",
    "closeup.js",
    "curves.js",
    "tokens.js",
    "page.js",
)  # in the order in which they are read
MOST = 5_500_000  # bytes of a page
# How many close-ups a report has, and of what share of the reports there are pictures: the first that is small enough.
SIZES = ((72, 1.0), (24, 1.0), (8, 1.0), (1, 1.0), (0, 1.0), (0, 0.25), (0, 0.06), (0, 0.0))
MANY, HEAD, TAIL = 120, 80, 24  # tokens shown of a long prompt
WRONG_TAPS, CLOSEST = 16, 7  # taps that are listed
GLYPHS = {MATCH: "✓", NOISE: "≈", WRONG: "✗", UNCHECKED: "?"}


@dataclass(frozen=True)
class Chip:
    """One token: its number in the run, id, text; whether it was decoded by itself."""

    number: int
    id: int
    text: str
    decoded: bool


def to_html(comparison: Comparison, about: About) -> str:
    """The page of one comparison."""
    return _page([(None, comparison)], about)


def checks_to_html(results: Sequence[tuple[Path, Comparison]], about: About) -> str:
    """One page for several runs: a list of them, and the page of the one that is chosen."""
    return _page([(path.as_posix(), result) for path, result in results], about)


def _page(results: Sequence[tuple[str | None, Comparison]], about: About) -> str:
    """The page, with as many pictures as it has room for: those of the worst reports first."""
    sheets = [_sheet(number, name, result) for number, (name, result) in enumerate(results)]
    verdicts = [result.verdict for _, result in results]
    refused = [(escape_line(path.as_posix(), 200), escape_line(reason, 1000)) for path, reason in about.refused]
    order = sorted(range(len(results)), key=lambda number: -SEVERITY.index(verdicts[number]))
    text = ""
    for closeups, share in SIZES:
        drawn = set(order[: math.ceil(share * len(results))])
        text = _template().render(
            sheets=sheets, refused=refused, command=command_line(about.command),
            verdict=worst_of(verdicts, refused),
            data=[data_of(c, closeups) if number in drawn else None for number, (_, c) in enumerate(results)],
            version=__version__, style=_file("page.css"), script=_script(), policy=_policy(),
        )  # fmt: skip
        if len(text.encode("utf-8", "backslashreplace")) <= MOST:
            break
    return text


@cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.from_string(_file("page.html.j2"))


@cache
def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """All scripts as one, within a scope of its own."""
    return '"use strict";\n(() => {\n' + "\n".join(map(_file, SCRIPTS)) + "\n})();\n"


def _policy() -> str:
    """What a browser may do with the page: run this script, apply this style, and no more."""
    script, style = (_digest(text) for text in (_script(), _file("page.css")))
    return (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _sheet(number: int, name: str | None, c: Comparison) -> dict[str, Any]:
    """What is said of one comparison in words."""
    model = escape_line(str(c.model.get("file") or "no model"), 80)
    return {
        "number": number,
        "name": None if name is None else escape_line(name, 200),
        "verdict": c.verdict,
        "glyph": GLYPHS[c.verdict],
        "headline": escape_line(c.headline, 1000),
        "proof": [escape_line(clause, 2000) for clause in c.proof],
        "model": (model, ", ".join(escape_line(fact, 60) for fact in model_facts(c.model, full=False))),
        "sides": [_side(role, side) for role, side in (("baseline", c.baseline), ("candidate", c.candidate))],
        "names": side_names(c),
        "run": run_fact(c),
        "chips": _chips(c),
        "left_out": max(0, len(c.tokens) - HEAD - TAIL) if len(c.tokens) > MANY else 0,
        "before": [
            (check.verdict, escape_line(check.name, 60), escape_line(check.found, 1000))
            for check in c.preflight
            if check.verdict != MATCH
        ],
        "causes": [_cause(d, c) for d in c.diagnosis[:12]],
        "steps": [
            escape_line(step, 1000) for step in c.next_steps[:8] if step not in {fix_step(d) for d in mistakes(c)}
        ],
        "tables": [
            (name, titles, [[escape_line(cell, 80) for cell in line] for line in cells])
            for name, titles, cells in tables_of(c)
        ],
        "wrong": [escape_line(row.tap, 60) for row in c.wrong[:WRONG_TAPS]],
        "more_wrong": max(0, len(c.wrong) - WRONG_TAPS),
        "tiles": _tiles(c),
        "closest": _closest(c),
        "sha256": escape_line(str(c.model.get("sha256") or ""), 80),
        "seconds": f"{c.timing['total_s']:.1f} s" if "total_s" in c.timing else "",
    }


def _tiles(c: Comparison) -> list[tuple[str, str]]:
    """The few figures that tell of the run as a whole."""
    judged = sum(row.verdict != UNCHECKED for row in c.rows)
    tiles = [("ops judged", f"{judged} / {len(c.rows)}")] if c.rows else []
    if c.wrong:
        tiles.append(("wrong", str(len(c.wrong))))
    elif closest := _closest(c):
        tiles.append(("least headroom below a limit", closest[0][-1]))
    if c.rows and c.rows[-1].ratio_to_noise is not None:
        tiles.append((f"drift / rounding at {escape_line(c.rows[-1].tap, 40)}", times(c.rows[-1].ratio_to_noise)))
    if c.logits is not None and c.logits.rows:
        tiles.append(("next tokens agree", f"{c.logits.agreeing} / {c.logits.rows}"))
    return tiles


def _closest(c: Comparison) -> list[tuple[str, str, str, str]]:
    """Where nothing is wrong: the taps nearest to their limits, with own error, limit, and how much room is between."""
    rows = [] if c.wrong else c.rows
    judged = [(over, row.tap, row.local) for row in rows if row.local and (over := over_limit(row))]
    return [
        (escape_line(tap, 60), tiny(local.nmse), tiny(local.limit), times(1 / over))
        for over, tap, local in sorted(judged, key=lambda each: -each[0])[:CLOSEST]
    ]


def _side(role: str, producer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "role": role,
        "name": escape_line(str(producer.get("name") or "unnamed"), 60),
        "version": escape_line(str(producer.get("version") or ""), 120),
        "unusual": ", ".join(escape_line(fact, 60) for fact in side_facts(producer, full=False)),
        "settings": [escape_line(setting, 80) for setting in settings_of(producer)[:40]],
    }


def _cause(d: Diagnosis, c: Comparison) -> dict[str, Any]:
    known = d.known
    return {
        "name": escape_line(say.names(d.causes), 120) if known else "unknown",
        "harmless": d.harmless,
        "says": escape_line(headline(d, c.rows), 1000),
        "proof": [escape_line(clause, 1000) for clause in proof(d, c.rows)]
        if known
        else [escape_line(say.nearest(d), 1000)],
        "fix": escape_line(say.fix(d), 1000) if known else "",
        "source": escape_line(d.causes[0].source, 200) if known else "",
        "tap": escape_line(d.tap, 60),
    }


def _chips(c: Comparison) -> list[Chip]:
    """The tokens; of many, the first and the last."""
    decoded = len(c.tokens) - decode_steps(c)
    chips = [
        Chip(number, token, quote(text, 24)[1:-1] if text is not None else str(token), number >= decoded)
        for number, (token, text) in enumerate(c.tokens)
    ]
    return chips if len(chips) <= MANY else [*chips[:HEAD], *chips[-TAIL:]]
