"""No quick test knows time: it waits for what it has caused (waiting.py), and asserts of nothing how long it took."""

from __future__ import annotations

import ast
import re

from places import ROOT

CLOCKS = re.compile(r"\bsleep\(|monotonic|perf_counter|process_time|\btimeout=[0-9]")
TOOLS = re.compile(r"tests/tools/(?!test_)|/report\.py$")  # nobody's tests, but run by hand
ALLOWED = {  # where else clocks are, and why
    "tests/waiting.py": "this is how all others wait",
    "tests/house/test_time.py": "it names them",
    "tests/proof/test_kills.py": "an engine that writes on, at a pace, for kills at random moments, in slow tests; "
    "nothing is waited for that long",
    "tests/proof/fuzz/run.py": "seconds of computation, of which a case has hundreds of times as many as it takes",
    "tests/ext/server/proof/test_server_js.py": "a server's --delay is a time, of which at least so much must pass",
}


def clocks_of(text: str) -> list[int]:
    """The lines of a file on which a clock is, but for tests that are slow; what stands in a text is code, too."""
    tree = ast.parse(text)
    slow = [range(0)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node) == "pytestmark = pytest.mark.slow":
            return []
        if any(ast.unparse(each) == "pytest.mark.slow" for each in getattr(node, "decorator_list", [])):
            slow.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return [number for number, line in lines if CLOCKS.search(line) and not any(number in span for span in slow)]


def test_tests_that_are_quick_know_no_time() -> None:
    found = {}
    for path in (ROOT / "tests").rglob("*.py"):
        where = path.relative_to(ROOT).as_posix()
        if not TOOLS.search(where) and (lines := clocks_of(path.read_text("utf-8"))):
            found[where] = lines
    assert {where: lines for where, lines in found.items() if where not in ALLOWED} == {}
    assert set(ALLOWED) <= set(found)  # none that needs it no longer


def test_a_clock_is_found() -> None:
    quick = "def test_a():\n    time.sleep(1)\n\n\nCODE = 'import time; time.monotonic()'\n"
    slow = "@pytest.mark.slow\ndef test_b():\n    communicate(timeout=60)\n"
    assert clocks_of(quick + slow) == [2, 5]
    assert clocks_of(quick + slow.replace(".slow", ".quick")) == [2, 5, 8]
