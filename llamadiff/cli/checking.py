"""What ``check`` tells while it goes on, and in the end: lines, annotations, reports, refusals, the verdict."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llamadiff.cli.complaint import complain
from llamadiff.cli.reports import Reports
from llamadiff.judge.verdict import SEVERITY

if TYPE_CHECKING:
    from llamadiff.result.comparison import Comparison
    from llamadiff.verbs.check_traces import Checked


@dataclass
class Tally:
    """What has come of the traces so far. ``annotate``: as GitHub Actions does, asked for or found there."""

    reports: Reports
    annotate: bool
    results: list[tuple[Path, Comparison]] = field(default_factory=list)
    refused: list[tuple[Path, str]] = field(default_factory=list)
    skipped: Sequence[Path] = ()

    def tell(self, checked: Checked) -> None:
        """Print what there is to say of one trace; what was refused is told in the end."""
        from llamadiff.report.check_lines import put_check
        from llamadiff.report.terminal.page import Page
        from llamadiff.report.terminal.report import make_console

        if checked.result is None:
            self.refused.append((checked.path, checked.refused))
            return
        self.results.append((checked.path, checked.result))
        if not self.reports.takes_standard_output:
            put_check(Page(make_console()), checked.path, checked.result)

    def finish(self) -> str:
        """Write reports and annotations, and say what was refused or skipped -> the verdict of all."""
        self.reports.write_several(self.results, self.refused)
        from llamadiff.result.comparison import verdict_of

        if self.annotate or os.environ.get("GITHUB_ACTIONS") == "true":
            self._put_annotations()
        found = Counter([*(result.verdict for _, result in self.results), *("refused" for _ in self.refused)])
        if found.total() > 1 and not self.reports.takes_standard_output:
            some = [f"{found[what]} {what}" for what in (*SEVERITY[:1:-1], "refused") if found[what]]
            typer.echo(f"{', '.join(some) or 'all right'}, of {found.total()}")
        for reason in (*(f"{path}: skipped, no .safetensors" for path in self.skipped), *dict(self.refused).values()):
            complain(reason)
        return verdict_of((result for _, result in self.results), self.refused)

    def _put_annotations(self) -> None:
        """To standard output, or to standard error where that is a report's."""
        from llamadiff.report.check_lines import annotations_of, refusal, shown_ten

        found = [one for path, result in self.results for one in annotations_of(_in_repository(path), 1, result)]
        found += [refusal(_in_repository(path), 1, reason) for path, reason in self.refused]
        for line in shown_ten(found):
            typer.echo(line, err=self.reports.takes_standard_output)


def _in_repository(path: Path) -> str:
    """A path as GitHub knows it: from the root of what was checked out."""
    root = os.environ.get("GITHUB_WORKSPACE")
    whole = path.resolve()
    if root and whole.is_relative_to(Path(root).resolve()):
        return whole.relative_to(Path(root).resolve()).as_posix()
    return path.as_posix()
