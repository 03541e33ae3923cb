"""Reports as they are shown and written, kept word for word in files that a reviewer reads.

``pytest tests/report tests/ext/page --snapshot-update`` writes them anew: look at the difference before you keep it.
"""

from __future__ import annotations

import io

from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from llamadiff.report.terminal.report import make_console, render
from llamadiff.result.comparison import Comparison


class Text(SingleFileSnapshotExtension):
    """A file for each report."""

    file_extension, _write_mode = "txt", WriteMode.TEXT


class Markdown(Text):
    file_extension = "md"


class Json(Text):
    file_extension = "json"


class Csv(Text):
    file_extension = "csv"


class Xml(Text):
    file_extension = "xml"


def printed(its: Comparison, width: int = 80, **options: bool) -> str:
    """What a terminal of this width shows."""
    file = io.StringIO()
    render(its, make_console(file, width), **options)
    return file.getvalue()
