"""llamadiff in a project's own tests: the fixture ``llamadiff_check``.

def test_my_engine(llamadiff_check):
    llamadiff_check("captures/tiny.safetensors", candidate=run_my_engine)

What it is of is imported when a test asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from llamadiff.result.comparison import Comparison

SAID = "llamadiff"  # the key of what a test's report carries to the end, from another process too
CAUSE = "llamadiff cause"
NO_CANDIDATE = (
    "llamadiff: llamadiff_check(capture) asks no engine; give candidate=run_my_engine, or candidate=None to check the "
    "capture itself"
)
FINDING = "llamadiff_finding"  # the attribute of what ends a test


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that records captures anew."""
    group = parser.getgroup("llamadiff")
    words = "record llamadiff's captures anew, by llama.cpp, and say what changed"
    group.addoption("--llamadiff-update", action="store_true", default=False, help=words)


@pytest.fixture
def llamadiff_check(request: pytest.FixtureRequest) -> Callable[..., Comparison]:
    """A function that checks a candidate on what a capture is of, and fails the test where it is not right.

    ``llamadiff_check(capture, candidate, model=None, partial=False, max_mean_kl=None, max_p99_kl=None)``: the
    capture's path is taken from the test's own directory. ``candidate``: a function of the token ids (and, if it has
    such a parameter, ``n_prefill``) that returns arrays by the names of taps; or what --candidate takes; None: the
    capture itself is checked. ``model``: the file, if it does not lie beside the capture. Returns the comparison.
    """

    def check(
        capture: str | Path,
        candidate: Any = ...,
        *,
        model: str | Path | None = None,
        partial: bool = False,
        max_mean_kl: float | None = None,
        max_p99_kl: float | None = None,
    ) -> Comparison:
        __tracebackhide__ = True
        from llamadiff.ext.captures.one_capture import checked
        from llamadiff.system.errors import UserError

        path = _found(capture, request.path.parent)
        if candidate is ...:  # what is left out by mistake would pass
            _fail(NO_CANDIDATE, NO_CANDIDATE)
        try:
            if request.config.getoption("--llamadiff-update"):
                _note(request, SAID, _updated(path, model))
            result = checked(path, candidate, model, partial, (max_mean_kl, max_p99_kl))
        except UserError as error:
            _fail(f"llamadiff: {error}", f"llamadiff: {error}")
        if result.verdict not in ("match", "noise"):
            _fail_wrong(request, path, result)
        return result

    return check


def _found(capture: str | Path, folder: Path) -> Path:
    """A capture's path: beside the test, or as it is."""
    beside = folder / capture
    return beside if beside.exists() else Path(capture)


def _updated(path: Path, model: str | Path | None) -> str:
    from llamadiff.ext.captures.changed import update_line
    from llamadiff.ext.captures.one_capture import updated

    return update_line(updated(path, model))


def _fail_wrong(request: pytest.FixtureRequest, path: Path, result: Comparison) -> None:
    """End the test with the report: the sentence and the table, and where the capture is from."""
    __tracebackhide__ = True
    from llamadiff.ext.captures.one_capture import report_text
    from llamadiff.report.check_lines import annotations_of
    from llamadiff.report.terminal.escape import escape_line

    file, line, _ = request.node.location
    for one in annotations_of(_in_repository(request, file), (line or 0) + 1, result):
        _note(request, CAUSE, [one.file, one.line, one.title, one.message])
    _fail(report_text(path, result), escape_line(result.headline, 1000))


def _fail(text: str, finding: str) -> NoReturn:
    """End the test with a text, of which the finding is what stands on one line."""
    __tracebackhide__ = True
    failed = pytest.fail.Exception(text, pytrace=False)
    setattr(failed, FINDING, finding)
    raise failed from None


def _in_repository(request: pytest.FixtureRequest, file: str) -> str:
    """A file as GitHub knows it: from the root of what was checked out."""
    root, whole = os.environ.get("GITHUB_WORKSPACE"), (request.config.rootpath / file).resolve()
    inside = root is not None and whole.is_relative_to(Path(root).resolve())
    return whole.relative_to(Path(root).resolve()).as_posix() if inside and root is not None else file


def _note(request: pytest.FixtureRequest, key: str, value: object) -> None:
    """Leave word for the end of the session: a test's properties travel with its report, whichever process ran it."""
    request.node.user_properties.append((key, value))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(call: Any) -> Iterator[None]:
    """Put the finding where pytest shows a failure on one line: its summary, ``--tb=line``, a message of JUnit's."""
    outcome: Any = yield
    finding = getattr(call.excinfo.value, FINDING, None) if call.excinfo is not None else None
    crash = getattr(outcome.get_result().longrepr, "reprcrash", None)
    if finding is not None and crash is not None:
        crash.message = finding


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was recorded anew; and on GitHub, one annotation for each cause."""
    updates = list(_said(terminalreporter, SAID))
    if updates:
        terminalreporter.section("llamadiff captures recorded anew")
        for text in updates:
            terminalreporter.write_line(text)
    causes = list(_said(terminalreporter, CAUSE))
    if causes and os.environ.get("GITHUB_ACTIONS") == "true":
        from llamadiff.report.check_lines import Annotation, shown_ten

        for line in shown_ten(Annotation(*cause) for cause in causes):
            terminalreporter.write_line(line)


def _said(terminalreporter: Any, key: str) -> Iterator[Any]:
    """What tests left word of."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                yield from (value for name, value in report.user_properties if name == key)
