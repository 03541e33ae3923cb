"""How a program that uses a writer is made and run, in each of the writers' languages."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
from optional import needs, program

STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-O1"]


@dataclass(frozen=True)
class Tool:
    """How a driver is made, in a directory with the writer beside it, and run; and how it declares a tap's values."""

    driver: str
    build: tuple[str, ...]
    run: tuple[str, ...]
    declare: str
    needs: tuple[str, ...] = ()


TOOLS = {
    "c": Tool("driver.c", ("gcc", "-std=c99", *STRICT, "driver.c", "-o", "driver"), ("{folder}/driver",),
              "static float {word}[{count}];", ("gcc",)),
    "cpp": Tool("driver.cpp", ("g++", "-std=c++17", *STRICT, "-O0", "driver.cpp", "-o", "driver"), ("{folder}/driver",),
                "const std::vector<float> {word}({count});", ("g++",)),
    "rust": Tool("driver.rs", ("rustc", "--edition", "2021", "-D", "warnings", "driver.rs"), ("{folder}/driver",),
                 "#[allow(non_snake_case)] let {word} = vec![0f32; {count}];", ("rustc",)),
    "js": Tool("driver.js", (), ("node", "{folder}/driver.js"), "const {word} = new Float32Array({count});", ("node",)),
    "python": Tool("driver.py", (), (sys.executable, "-W", "error", "{folder}/driver.py"),
                   "{word} = array('f', bytes(4 * {count}))"),
    "java": Tool("Driver.java", ("javac", "-Xlint:all", "-Werror", "Driver.java", "TraceWriter.java"),
                 ("java", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-cp", "{folder}", "Driver"),
                 "float[] {word} = new float[{count}];", ("javac",)),
    "go": Tool("driver.go", (program("go") or "go", "build", "-o", "driver", "driver.go", "trace_writer.go"),
           ("{folder}/driver",),
               "{word} := make([]float32, {count})", ("go",)),
    "zig": Tool("driver.zig", (sys.executable, "-m", "ziglang", "build-exe", "driver.zig", "-lc"), ("{folder}/driver",),
                "const {word} = [_]f32{{0}} ** {count};", ("ziglang",)),
}  # fmt: skip


def if_installed(language: str):
    return pytest.param(language, marks=needs(*TOOLS[language].needs))
