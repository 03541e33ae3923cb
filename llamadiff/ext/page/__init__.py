"""The report as a page for a browser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.report.formats import Format


class Page(Slice):
    """The report as a page for a browser."""

    def formats(self) -> Sequence[Format]:
        from llamadiff.report.formats import Format

        several = "ext.page.page:checks_to_html"
        return (Format("html", (".html",), "ext.page.page:to_html", of_several=several, pictures=True),)


slice_ = Page()
