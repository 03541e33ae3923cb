"""The picture of a report in README.md. ``make docs``."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from llamadiff.comparison import demo
from llamadiff.report.terminal.report import render
from llamadiff.system.progress import silent

PICTURE = Path(__file__).parents[2] / ".github" / "report.svg"


def main() -> None:
    _, wrong = demo.run(silent)
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    render(wrong, console)
    console.save_svg(str(PICTURE), title="llamadiff compare tiny.F16.gguf --candidate mine.safetensors")


if __name__ == "__main__":
    main()
