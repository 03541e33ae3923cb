"""The picture in README.md: a real report, exported by rich. ``make readme``."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from llamadiff import demo
from llamadiff.report.terminal import render

FOLDER = Path(__file__).parent.parent / ".github"


def main() -> None:
    _, wrong = demo.run(lambda _: None)
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    render(wrong, console)
    console.save_svg(str(FOLDER / "report.svg"), title="llamadiff compare tiny.F16.gguf --candidate mine.safetensors")
    print(f"{FOLDER.name}/report.svg")


if __name__ == "__main__":
    main()
