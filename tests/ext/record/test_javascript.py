"""Programs in JavaScript as they are: their files are rewritten as they are loaded, and log the arrays that change."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from optional import needs
from proof.strangers import programs
from proof.strangers.crossing import TOKENS, model_file, opened

from llamadiff import compare
from llamadiff.ext.record import javascript
from llamadiff.ext.record.log import Log
from llamadiff.ext.record.search import Memory, Search
from llamadiff.system import python_child

pytestmark = needs("node")
LANES, STEPWISE = (programs.SOURCES / "js" / name for name in ("lanes.js", "stepwise.mjs"))
SYNTAX = """#!/usr/bin/env node
'use strict'
let out = [`a${`b${1}`}`].map(x => /[/`'"]\\/}/.test(x) ? x : { x: 1 / 2 / 3 })
class A extends (class { static y = 2 }) { #rows = new Float32Array([1, 2, 3, 4, 5, 6, 7, 8]); z = 1
  get rows() { const rows = this.#rows; return rows.map((v) => v * 2) } }
const f = (a, b = (c) => c) => a ? (d) => d : b, twice = (v) => v + v
label: for (const v of [1, 2]) if (v > 1) continue label; else out.push(v)
do { var i = (i || 0) + 1 } while (i < 3)
switch (i) { case 3: { out.push(3); break } default: out.push(4) }
function* many() { yield* [1, 2]; return
  5 }
const total = () => { let sum = 0, rows = new A().rows; for (const v of rows) sum += v
  return sum, twice(sum) }
console.log(JSON.stringify(out), total(), [...many()], f(1)(2), f(0)(3), A.y)
if (process.argv[2]) Promise.reject(new RangeError('no tensor ' + process.argv[2]))
process.exitCode = 3
"""


def record(folder: Path, *words: str) -> tuple[Log, str]:
    """What a program logs, and what it prints."""
    place = folder / "log"
    place.mkdir()
    command = python_child.command(javascript.__name__, str(place), str(1 << 28), *words)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Log(place), done.stdout + done.stderr


@pytest.mark.parametrize("name", ["a.cjs", "a.mjs"])
def test_a_program_does_what_it_does_and_what_it_computes_is_found(name, tmp_path):
    program = tmp_path / name
    program.write_text(SYNTAX, encoding="utf-8")
    plain = subprocess.run(["node", str(program)], capture_output=True, text=True, check=False)
    log, printed = record(tmp_path, "node", str(program))
    assert (log.code, log.error, printed) == (plain.returncode, "", plain.stdout)
    assert plain.returncode == 3, plain.stderr
    search = Search(Memory(log))
    assert search.find(np.arange(2.0, 18, 2)) is not None
    assert search.find(np.arange(1.0, 9)) is not None
    assert search.find(np.arange(3.0, 27, 3)) is None


def test_an_error_is_said_at_its_line_as_it_was_written(tmp_path):
    program = tmp_path / "a.mjs"
    program.write_text(SYNTAX, encoding="utf-8")
    log, printed = record(tmp_path, "node", str(program), "7")
    lines = SYNTAX.splitlines()
    line = next(number for number, each in enumerate(lines) if "RangeError" in each)
    assert log.code == 1
    assert f"a.mjs:{line + 1}:{lines[line].index('new RangeError') + 1}" in printed
    assert javascript.AGENT.stem not in printed


def flat_file(folder: Path, count: int = 8) -> tuple[Path, Path, tuple[int, ...]]:
    model, flat, tokens = model_file(folder, "llama", "F32"), folder / "model.flat", TOKENS[:count]
    flat.write_bytes(b"".join(programs.flat(opened(model), tokens, raw=False)))
    return model, flat, tokens


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("", set()), ("norm-gain", {"attn_norm", "ffn_norm", "result_norm"}), ("rope-base", {"Qcur_rope", "Kcur_rope"}),
        ("heads-modulo", {"kqv_out"}), ("mask", {"kqv_out"}),
        ("scale", {"kqv_out"}), ("window", {"kqv_out"}), ("eps", {"attn_norm"}),
        ("transposed", {"Qcur_proj"}), ("swapped", {"Vcur_proj"}), ("no-residual", {"ffn_inp"}),
        ("gelu", {"ffn_swiglu"}), ("residual-lost", {"l_out"}),
    ],
)  # fmt: skip
def test_a_program_that_runs_token_by_token_is_judged(mistake, words, tmp_path):
    model, flat, tokens = flat_file(tmp_path)
    found = compare(model, tokens, candidate=f"record: {STEPWISE} {flat} {mistake}")
    assert found.verdict == ("wrong" if mistake else "match")
    assert {row.tap.partition("-")[0] for row in found.wrong} == words


@pytest.mark.parametrize("mistake", ["", "norm-gain"])
def test_a_token_that_comes_twice_has_its_values_twice(mistake, tmp_path):
    model, flat, tokens = flat_file(tmp_path, len(TOKENS))
    assert len({*tokens}) < len(tokens)
    found = compare(model, tokens, candidate=f"record: node {STEPWISE} {flat} {mistake}")
    assert {row.tap.partition("-")[0] for row in found.wrong} <= {"attn_norm", "ffn_norm", "result_norm"}
    assert bool(found.wrong) == bool(mistake)


@pytest.mark.parametrize(
    ("mistake", "verdict", "word"),
    [("", "match", None), ("truncated-index", "wrong", "ffn_swiglu"), ("end-inclusive", "unchecked", None)],
)
def test_a_program_with_lanes_of_its_own_is_judged(mistake, verdict, word, tmp_path):
    model, flat, tokens = flat_file(tmp_path)
    found = compare(model, tokens, candidate=f"record: node {LANES} {flat} {tmp_path / 'dump'} {mistake}")
    assert found.verdict == verdict
    assert {row.tap.partition("-")[0] for row in found.wrong} == ({word} if word else set())


def test_node_that_is_too_old_is_one_line(tmp_path):
    """The agent says so itself, before it rewrites anything."""
    agent = tmp_path / "agent.cjs"
    newer = javascript.AGENT.read_text("utf-8").replace("const OLDEST = 18;", "const OLDEST = 1000;")
    assert "OLDEST = 1000" in newer
    agent.write_text(newer, encoding="utf-8")
    asked = json.dumps({"folder": str(tmp_path), "most": 1, "options": None})
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LLAMADIFF_RECORD": asked}
    subprocess.run(["node", "--require", str(agent), "-e", "0"], env=environment, check=True)
    assert (tmp_path / "refused").read_text("utf-8").endswith("is too old: 1000 is needed, or newer")
