"""The report as a document: Markdown, a page for a browser, and JUnit's XML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.numerics.metrics import Rows
    from llamadiff.report.formats import Format


class Page(Slice):
    """The report as a document: Markdown, a page for a browser, and JUnit's XML."""

    def formats(self) -> Sequence[Format]:
        from llamadiff.report.formats import Format

        return (
            Format(
                "markdown", (".md", ".markdown"), "ext.page.markdown:to_markdown",
                of_several="ext.page.markdown:checks_to_markdown", also="GITHUB_STEP_SUMMARY",
            ),
            Format(
                "html", (".html",), "ext.page.page:to_html", of_several="ext.page.page:checks_to_html", pictures=True
            ),
            Format("junit", (".xml",), "ext.page.junit:to_junit", of_several="ext.page.junit:checks_to_junit"),
        )  # fmt: skip

    def closeup(self, recorded: Rows, right: Rows, axes: Sequence[str], index: Sequence[int]) -> object:
        from llamadiff.ext.page.closeup import closeup

        return closeup(recorded, right, axes, index)


slice_ = Page()
