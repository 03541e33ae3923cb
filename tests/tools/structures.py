"""A release's row of llamadiff/ext/builds/structures.json, from its headers, by the C compiler.

    python tests/tools/structures.py DIR RELEASE...

DIR holds llama.h, ggml.h and what they include (a checkout, or an include folder). A RELEASE is what tells a library's
own: "xllamacpp 2026.10.11549" (package and version), or "ggml 0.26.0 (86a2835)" (its ggml_version and ggml_commit).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from places import ROOT  # noqa: E402

from llamadiff.ext.builds.structures import BATCH, STRUCTURES, structure_of  # noqa: E402

TABLE = ROOT / "llamadiff" / "ext" / "builds" / "structures.json"
INCLUDES = ("", "include", "ggml/include")
COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
FIELD = re.compile(r"\b(\w+)\s*$")
C = """
#include <stddef.h>
#include <stdio.h>
#include "llama.h"
#define POINTER(x) _Generic((x), int8_t *: "int8*", int32_t *: "int32*", int32_t **: "int32**", default: "pointer")
#define KIND(x) _Generic((x), bool: "bool", int32_t: "int32", uint32_t: "uint32", float: "float", \\
    size_t: "size_t", default: POINTER(x))
#define SHOW(s, f) printf("%s %s %zu %zu %s\\n", #s, #f, offsetof(struct s, f), sizeof(x_##s.f), KIND(x_##s.f));
int main(void) {
    DECLARED
    SHOWN
    return 0;
}
"""


def fields(header: str, structure: str) -> list[str]:
    """The names of a structure's fields, in their order."""
    (body,) = re.findall(rf"struct {structure} {{(.*?)\n    }}", COMMENTS.sub("", header), re.DOTALL)
    return [FIELD.search(line).group(1) for line in body.split(";") if line.strip()]


def layout(folder: Path) -> dict[str, dict[str, str]]:
    """Structure -> field -> type, as the compiler has them; what ctypes makes of that must lie where it says."""
    includes = [folder / name for name in INCLUDES if (folder / name).is_dir()]
    header = next(path / "llama.h" for path in includes if (path / "llama.h").is_file()).read_text("utf-8")
    shown = [f"SHOW({structure}, {field})" for structure in STRUCTURES for field in fields(header, structure)]
    declared = [f"struct {structure} x_{structure} = {{0}};" for structure in STRUCTURES]
    code = C.replace("DECLARED", "\n    ".join(declared)).replace("SHOWN", "\n    ".join(shown))
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "show"
        command = ["cc", *(f"-I{path}" for path in includes), "-x", "c", "-", "-o", program]
        subprocess.run(command, input=code, text=True, check=True, encoding="utf-8")
        lines = subprocess.run([program], capture_output=True, text=True, check=True, encoding="utf-8").stdout
    found: dict[str, dict[str, str]] = {}
    for structure, field, *_, kind in map(str.split, lines.splitlines()):
        found.setdefault(structure, {})[field] = kind
    for structure, field, offset, size, _ in map(str.split, lines.splitlines()):
        place = getattr(structure_of(structure, found[structure]), field)
        assert (place.offset, place.size) == (int(offset), int(size)), f"{structure}.{field}"
    assert "token" in found[BATCH]
    return found


def main(folder: str, *releases: str) -> None:
    """Add releases to the row of their layout, or make one."""
    rows, found = json.loads(TABLE.read_text("utf-8")) if TABLE.exists() else [], layout(Path(folder))
    for row in rows:
        row["releases"] = [name for name in row["releases"] if name not in releases]
    row = next((row for row in rows if row["structures"] == found), None)
    if row is None:
        rows.append(row := {"releases": [], "structures": found})
    row["releases"] = sorted({*row["releases"], *releases})
    TABLE.write_text(json.dumps([row for row in rows if row["releases"]], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
