"""What a file for CI says, word for word."""

from __future__ import annotations

from pathlib import Path

from report.made_up import REPORTS
from report.snapshots import Xml
from syrupy.assertion import SnapshotAssertion

from llamadiff.ext.page.junit import checks_to_junit
from llamadiff.report.formats import About


def test_junit(snapshot: SnapshotAssertion) -> None:
    about = About(refused=((Path("b<&>\x01.safetensors"), "not a readable trace"),))
    results = [(Path(name), REPORTS[name]) for name in ("right", "unchecked", "several causes", "hostile")]
    assert checks_to_junit(results, about) == snapshot(extension_class=Xml)
