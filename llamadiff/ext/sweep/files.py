"""A sweep's rows for other programs: JSON, and JUnit's XML with a test case for each case. Computes nothing."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import asdict

from llamadiff.ext.sweep.case import SweepRow
from llamadiff.ext.sweep.page import headline, name_of
from llamadiff.ext.sweep.run import Sweep
from llamadiff.judge.verdict import WRONG, is_right
from llamadiff.report.json import in_json
from llamadiff.report.terminal.escape import escape_line, quote

SCHEMA = "llamadiff.sweep/1"
_LONG, _PROMPT = 8000, 120  # cells of a line, and of a prompt


def sweep_to_json(sweep: Sweep) -> str:
    """Everything, machine-readable; a number that is not finite is null."""
    about = {"schema": SCHEMA, "verdict": sweep.verdict, "headline": headline(sweep), "kept": sweep.kept}
    return in_json({**about, "concerns": sweep.concerns, "cases": [asdict(row) for row in sweep.rows]})


def sweep_to_junit(sweep: Sweep) -> str:
    """A failure for what is WRONG, an error for what could not be told."""
    suite = ET.Element("testsuite", name="llamadiff")
    for row in sweep.rows:
        _add_case(suite, row)
    if sweep.kept == len(sweep.rows):
        _add_failed(
            ET.SubElement(suite, "testcase", classname="llamadiff", name="sweep"), "error", headline(sweep), "kept"
        )
    counts = {"tests": "testcase", "failures": "testcase/failure", "errors": "testcase/error"}
    for name, place in counts.items():
        suite.set(name, str(len(suite.findall(place))))
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: ET.Element, row: SweepRow) -> None:
    name = f"{escape_line(name_of(row), _LONG)} {quote(row.prompt, _PROMPT)}"
    case = ET.SubElement(suite, "testcase", classname="llamadiff", name=name, time=f"{row.seconds:.3f}")
    if is_right(row.verdict):
        ET.SubElement(case, "system-out").text = escape_line(row.headline, _LONG)
    else:
        what = "failure" if row.verdict == WRONG else "error"
        _add_failed(case, what, row.refused or row.headline, "refused" if row.refused else row.verdict)


def _add_failed(case: ET.Element, what: str, message: str, kind: str) -> None:
    ET.SubElement(case, what, message=escape_line(message, _LONG), type=kind)
