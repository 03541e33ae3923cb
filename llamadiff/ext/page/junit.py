"""JUnit XML: a test case for each trace, a failure for what is wrong, an error for what could not be told."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from llamadiff.ext.page.failure import lines_of_failure
from llamadiff.judge.verdict import UNCHECKED, WRONG
from llamadiff.report.formats import About
from llamadiff.report.terminal.escape import escape_line
from llamadiff.result.comparison import Comparison

_LONG = 8000  # cells of a line


def to_junit(comparison: Comparison, about: About) -> str:
    """One comparison, as a test case that has the model's name."""
    return checks_to_junit([(Path(str(comparison.model.get("file") or "model")), comparison)], about)


def checks_to_junit(results: Sequence[tuple[Path, Comparison]], about: About) -> str:
    """All traces that were checked, and those that were refused."""
    suite = ET.Element("testsuite", name="llamadiff")
    for path, result in results:
        _add_case(suite, path, result, about.command)
    for refused, reason in about.refused:
        case = _case(suite, str(refused))
        ET.SubElement(case, "error", message=_text(reason), type="refused")
    counts = {"tests": "testcase", "failures": "testcase/failure", "errors": "testcase/error"}
    for name, place in counts.items():
        suite.set(name, str(len(suite.findall(place))))
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: ET.Element, path: Path, result: Comparison, command: Sequence[str]) -> None:
    case = _case(suite, str(path), result.timing.get("total_s", 0.0))
    kind = {WRONG: "failure", UNCHECKED: "error"}.get(result.verdict)
    if kind is None:
        ET.SubElement(case, "system-out").text = _text(result.summary)
        return
    failed = ET.SubElement(case, kind, message=_text(result.headline), type=result.verdict)
    failed.text = "\n".join(_text(f"{label}: {text}") for label, text in lines_of_failure(path, result, command))


def _case(suite: ET.Element, name: str, seconds: float = 0.0) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname="llamadiff", name=_text(name), time=f"{seconds:.3f}")


def _text(text: str) -> str:
    """What XML can hold: foreign control characters are escaped as on a terminal."""
    return escape_line(text, _LONG)
