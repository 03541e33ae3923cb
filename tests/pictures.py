"""What README.md shows and is generated: the picture of a report, and the table of known bugs. ``make readme``."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from llamadiff.comparison import demo
from llamadiff.report.listing import bugs_as_markdown
from llamadiff.report.terminal.report import render
from llamadiff.system.progress import silent

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- generated: make readme -->\n", "<!-- end -->\n"


def with_bugs(readme: str) -> str:
    """README.md with its table of known bugs as it should be."""
    head, rest = readme.split(BEGIN)
    return f"{head}{BEGIN}{bugs_as_markdown()}{END}{rest.split(END)[1]}"


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(with_bugs(readme.read_text()))
    _, wrong = demo.run(silent)
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    render(wrong, console)
    name = "llamadiff compare tiny.F16.gguf --candidate mine.safetensors"
    console.save_svg(str(ROOT / ".github" / "report.svg"), title=name)


if __name__ == "__main__":
    main()
