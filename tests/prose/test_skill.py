"""The skill for agents: its commands run, the fields and codes that it names are real, and its manifests lead to it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command import run
from places import REPORT_SCHEMA, ROOT, TESTS

from llamadiff.cli.app import app
from llamadiff.ext.writers import writers
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.system.exits import OWN_FAULT

SKILL = ROOT / "skills/llamadiff/SKILL.md"
TEXT = SKILL.read_text("utf-8")
COMMANDS = [shlex.split(line, comments=True)[1:] for line in re.findall(r"^ {4}(llamadiff .*)$", TEXT, re.MULTILINE)]
REPAIR = REPORT_SCHEMA["properties"]["repairs"]["items"]["properties"]
ROPE = ("self.base ** (", "500000.0 ** (")  # a right line of the sample engine, and a wrong one


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> Iterator[list[str]]:
    """The cells of a section's table, without its head."""
    for line in [line for line in section(title).splitlines() if line.startswith("|")][2:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def codes(text: str) -> list[str]:
    return re.findall("`([^`]+)`", text)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model and an engine that has a bug, as the skill's commands name them."""
    text = (TESTS / "ext/captures/sample/engine.py").read_text("utf-8")
    assert ROPE[0] in text
    (tmp_path / "engine.py").write_text(text.replace(*ROPE), encoding="utf-8")
    shutil.copy(shipped_model(), tmp_path / "model.gguf")
    words = '"$2" "$6"  # --tokens {tokens} --n-prefill {n_prefill} --dump {out}'
    script = f"#!/bin/sh\nexec {shlex.quote(sys.executable)} engine.py model.gguf {words}\n"
    (tmp_path / "engine").write_text(script, encoding="utf-8")
    (tmp_path / "engine").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_its_commands_run_and_its_loop_ends(engine: Path) -> None:
    """From a bug to its page, to the mended engine."""
    compare, explain, taps, writer = COMMANDS
    assert (explain[-1], writer[1]) == ("ID", "LANGUAGE")
    report = asked(compare, 1)
    assert report["verdict"] == "wrong"
    repair = report["repairs"][0]
    assert repair["tap"] in report["wrong"]
    assert repair["explain"] == ["llamadiff", "explain", repair["id"]]
    assert "rope.freq_base" in repair["fix"]
    assert "rope.freq_base" in run(*explain[:-1], repair["id"]).stdout
    assert "Qcur_rope-0" in json.dumps(json.loads(run(*taps).stdout))
    for language in writers.LANGUAGES:
        done = run(writer[0], language, *writer[2:])
        assert (done.returncode, "Qcur_rope" in done.stdout) == (0, True), done.stderr
    (engine / "engine.py").write_bytes((TESTS / "ext/captures/sample/engine.py").read_bytes())
    assert asked(compare, 0)["wrong"] == []


def asked(words: list[str], code: int) -> dict[str, Any]:
    done = run(*words)
    assert done.returncode == code, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(Path(words[-1]).read_text("utf-8"))
    jsonschema.validate(report, REPORT_SCHEMA)
    assert {"next_steps", "verdict", "repairs", "wrong"} <= set(report)
    return report


def test_other_commands_that_it_names_exist() -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(re.findall("`llamadiff ([a-z]+)", TEXT)) <= known
    assert {"check", "capture", "doctor"} <= known
    assert set(codes(TEXT.split("this prints the code that does")[1].split("\n\n")[0])) == set(writers.LANGUAGES)


def test_the_fields_of_a_repair_are_all_named() -> None:
    table = {key: what for keys, what in rows("What an entry of `repairs` says") for key in codes(keys)}
    assert set(table) == set(REPAIR) - {"nmse"}
    assert set(codes(table["confidence"])) == set(REPAIR["confidence"]["enum"])
    assert set(codes(table["place"])) == set(REPAIR["place"]["required"]) - {"tap"}
    assert set(codes(table["settle"])) - {"code"} == set(REPAIR["settle"]["required"])
    words = {"compare", "report.json", "llamadiff capture", "llamadiff check", "-h", "next_steps", "tap"}
    assert set(codes(section("The loop"))) - words <= set(REPORT_SCHEMA["properties"])


def test_the_codes_are_those_of_the_command() -> None:
    assert [code for code, _ in rows("Exit codes")] == ["0", "1", "2", str(OWN_FAULT)]


def test_its_head_has_the_form_of_a_skill() -> None:
    """https://agentskills.io/specification"""
    begin, head, body = TEXT.split("---\n", 2)
    stated = dict(line.split(": ", 1) for line in head.splitlines())
    assert begin == ""
    assert set(stated) == {"name", "description", "license"}
    assert stated["name"] == SKILL.parent.name
    assert 1 <= len(stated["description"]) <= 1024
    assert ": " not in stated["description"]  # YAML would read a mapping
    assert len(body.splitlines()) < 500
    assert "](" not in body  # it is read where nothing lies beside it


def test_the_manifests_lead_to_it() -> None:
    folder = ROOT / ".claude-plugin"
    plugin, market = (json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("plugin", "marketplace"))
    (entry,) = market["plugins"]
    assert (market["name"], entry["name"], plugin["name"]) == ("llamadiff",) * 3
    assert entry["description"] == plugin["description"]
    assert f'description = "{plugin["description"]}"' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert isinstance(market["owner"]["name"], str)
    assert SKILL in (ROOT / entry["source"]).resolve().glob("skills/*/SKILL.md")
    assert "llamadiff@llamadiff" in (ROOT / "docs/agents.md").read_text("utf-8")
