"""The GitHub action, the workflow to copy, the pre-commit hooks: what they say, and what the action runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from command import run
from places import ROOT

from llamadiff.verbs.demo import PROMPT

ACTION = yaml.safe_load((ROOT / ".github/actions/check/action.yml").read_text("utf-8"))
STEPS = {step.get("name", step.get("uses")): step for step in ACTION["runs"]["steps"]}
FAKE = '#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n'


def check_step(folder: Path, **given: str) -> list[str]:
    """The words that the action gives the command, with these inputs."""
    (folder / "llamadiff").write_text(FAKE, encoding="utf-8")
    (folder / "llamadiff").chmod(0o755)
    inputs = {name: entry["default"] for name, entry in ACTION["inputs"].items()} | given
    filled = {
        name: re.sub(r"\$\{\{ inputs\.(\S+) \}\}", lambda match: inputs[match[1]], value)
        for name, value in STEPS["Check"]["env"].items()
    }
    environment = {"PATH": f"{folder}:/usr/bin:/bin", **filled}
    done = subprocess.run(
        ["bash", "-e", "-c", STEPS["Check"]["run"]],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    )
    return done.stdout.splitlines()


def test_the_action_runs_check_with_what_it_is_given(tmp_path):
    assert check_step(tmp_path) == ["check", "captures"]
    candidate = 'cmd: ./engine --tokens {tokens} "a b" $(touch /tmp/no); `x`'
    words = check_step(tmp_path, captures="a b/c", candidate=candidate, model="my model.gguf", junit="r.xml",
                       markdown="r.md", arguments="--jobs 2")  # fmt: skip
    assert words[:7] == ["check", "a", "b/c", "--jobs", "2", "--candidate", candidate]
    assert words[7:] == ["--model", "my model.gguf", "-o", "junit:r.xml", "-o", "markdown:r.md"]


def test_every_option_that_is_named_exists():
    shown = run("check", "--help").stdout
    text = STEPS["Check"]["run"] + (ROOT / "docs/ci.md").read_text("utf-8")
    named = set(re.findall(r"(?<![\w-])--(?:jobs|candidate|model|annotate|update|fail-on|max-[\w-]+)", text))
    assert len(named) > 6
    assert named <= set(re.findall(r"--[\w-]+", shown))


def test_no_input_is_put_into_a_shell():
    """What a workflow is given must not become a command: it goes through the environment."""
    for name, step in STEPS.items():
        assert "${{" not in step.get("run", ""), name
        assert "shell" in step or "uses" in step, name


def test_scripts_are_shell():
    for step in STEPS.values():
        subprocess.run(["bash", "-n", "-c", step.get("run", "true")], check=True)


def test_the_action_and_the_hooks_bring_a_llama_cpp_that_nobody_compiles():
    (words,) = (step["run"].split() for step in STEPS.values() if "pip install" in step.get("run", ""))
    place = words[-1].strip('"').partition("[")
    assert (ROOT / ".github/actions/check" / place[0].removeprefix("$GITHUB_ACTION_PATH/")).resolve() == ROOT
    assert place[2] == "prebuilt]"
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert [hook["additional_dependencies"] for hook in hooks] == [[".[prebuilt]"]] * 2


@pytest.mark.parametrize("page", ["docs/llamadiff.yml", "docs/tutorials/my-ci.md"])
def test_the_workflow_gives_the_action_what_it_takes(page):
    text = (ROOT / page).read_text("utf-8")
    [workflow] = [yaml.safe_load(block) for block in re.findall("^```yaml\n(.*?)^```", text, re.M | re.S) or [text]]
    [step] = [step for step in workflow["jobs"]["captures"]["steps"] if "llamadiff/" in step.get("uses", "")]
    assert step["uses"].split("@")[0].split("llamadiff/")[1] == ".github/actions/check"
    assert set(step["with"]) <= set(ACTION["inputs"])
    assert workflow["permissions"] == {"contents": "read"}


def test_the_hooks_run(tmp_path):
    hooks = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))}
    assert set(hooks) == {"llamadiff-captures", "llamadiff-engine"}
    capture = ROOT / "captures" / "tiny.F16.safetensors"
    assert re.search(hooks["llamadiff-captures"]["files"], capture.name)
    for hook in hooks.values():
        words = hook["entry"].split()
        assert words[0] == "llamadiff"
        assert {"id", "name", "entry", "language"} <= set(hook)
    assert run(*hooks["llamadiff-captures"]["entry"].split()[1:], capture).stdout.startswith("MATCH")
    named = (ROOT / "docs/ci.md").read_text("utf-8")
    assert all(f"id: {name}" in named for name in hooks)
    assert PROMPT in named
