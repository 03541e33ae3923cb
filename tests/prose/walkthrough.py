"""A page of docs/ is carried out line by line: files are written, commands run, what they print is held to the page.

A fenced block whose first line is a remark with a file's name is that file. A ``console`` block has commands (``$ x``)
and what they print, as far as a line ``...``, and of a line that ends in `` ...`` as much as is there.

``cd tests; python -m prose.walkthrough PAGE ...`` puts what is printed today into pages.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from places import ROOT

FENCE = re.compile(r"^```([a-z]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^(?:#|//|/\*) ([\w./-]+\.\w+)(?= \*/\n|\n)")
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*\n)", re.MULTILINE)
FIGURES = re.compile(r"\d+(?:\.\d+)?e[+-]?\d+|(?<=\()\d+\.\d+(?= s\))|(?<![\w.])\d+\.\d+x|\b0\.0\d+")  # of this machine
MORE, CUT = "...\n", " ...\n"


def carry_out(page: Path, folder: Path, replaced: Mapping[str, str] = {}) -> str:
    """The page's text with what its commands print now, cut where the page cuts it.

    ``replaced``: words of the page, and what takes their place in commands.
    """

    def block(match: re.Match[str]) -> str:
        language, text = match[1], match[2]
        named = FILE.match(text)
        if language == "console":
            text = COMMAND.split(text)[0] + "".join(map(shown, *[iter(COMMAND.split(text)[1:])] * 2))
        elif named:
            path = folder / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return f"```{language}\n{text}```"

    def shown(command: str, expected: str) -> str:
        printed = run(command, folder, replaced)
        if same(printed, expected):
            return f"$ {command}{expected}"
        if expected.endswith(MORE):
            printed = "".join(printed.splitlines(keepends=True)[: expected.count("\n") - 1]) + MORE
        return f"$ {command}{printed}"

    return FENCE.sub(block, page.read_text("utf-8"))


def run(command: str, folder: Path, replaced: Mapping[str, str]) -> str:
    """What a line of a shell prints, on both streams, in a terminal of a hundred columns."""
    line = command.replace("\\\n", " ")
    for word, instead in replaced.items():
        line = line.replace(word, instead)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    path = os.pathsep.join([str(ROOT), str(ROOT / "reference"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PATH": programs, "PYTHONPATH": path, "COLUMNS": "100", "NO_COLOR": "1"}
    environment.pop("GITHUB_ACTIONS", None)
    done = subprocess.run(
        ["sh", "-c", line], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    printed = done.stdout.decode("utf-8", "replace")
    return "".join(f"{each.rstrip()}\n" for each in printed.splitlines())


def same(printed: str, expected: str) -> bool:
    """Whether a page shows what was printed, but for figures that differ by machine."""
    lines = FIGURES.sub("#", expected).splitlines(keepends=True)
    whole = "".join(
        re.escape(line.removesuffix(CUT)) + (".*\n" if line.endswith(CUT) else "") for line in lines if line != MORE
    )
    return re.fullmatch(whole + ("(?s:.*)" if MORE in lines else ""), FIGURES.sub("#", printed)) is not None


def difference(page: Path, now: str) -> str:
    """What a page says otherwise than it is now; empty where it is right."""
    lines = difflib.unified_diff(
        page.read_text("utf-8").splitlines(), now.splitlines(), page.name, "now", n=1, lineterm=""
    )
    return "\n".join(lines)


def main() -> None:
    from prose import scenes

    for name in sys.argv[1:]:
        page = Path(name).resolve()
        with tempfile.TemporaryDirectory() as folder, scenes.prepared(page.stem, Path(folder)) as replaced:
            now = carry_out(page, Path(folder), replaced)
        print(difference(page, now))
        page.write_text(now, encoding="utf-8")


if __name__ == "__main__":
    main()
