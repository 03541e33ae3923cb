"""Many cases: every one is judged once, whatever is killed meanwhile, here and on a Dask cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from command import run as command
from optional import needs, needs_slices
from places import ROOT
from waiting import HANG, eventually

import llamadiff
from llamadiff.ext.sweep import run, store
from llamadiff.ext.sweep.case import SweepRow, run_case, unjudged
from llamadiff.ext.sweep.content import contents_of
from llamadiff.ext.sweep.files import sweep_to_json, sweep_to_junit
from llamadiff.ext.sweep.page import line_of, print_sweep, sweep_to_markdown
from llamadiff.ext.sweep.plan import SweepCase, read_plan
from llamadiff.ext.sweep.run import Sweep
from llamadiff.report.terminal.report import make_console
from llamadiff.system.errors import UserError
from llamadiff.verbs.workers import Died, map_surviving

SHIPPED = Path(llamadiff.__file__).parent / "shipped"
MODEL = SHIPPED / "tiny.F16.gguf"
PROMPTS = ("Once upon a time", "The little fox", "A storm came", "Her name was Lily", "One day", "The frog", "He had")

# In whatever runs cases: two of them have a ticket, the others wait for a file.
HELD = """
import os
from pathlib import Path
from llamadiff.ext.sweep import case, cluster
from waiting import HANG, eventually
judged, cluster.PATIENCE, place = case._judged, HANG, Path(os.environ["TICKETS"])
def has_ticket(number):
    try:
        (place / f"ticket-{number}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
def held(*words):
    if not any(map(has_ticket, range(2))):
        eventually((place / "go-on").exists)
    return judged(*words)
case._judged = held
"""


def plan(folder: Path, **changed: object) -> Path:
    """A sweep's file."""
    path = folder / "sweep.toml"
    given = {"models": [str(MODEL)], "prompts": list(PROMPTS), **changed}
    path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in given.items()), encoding="utf-8")
    return path


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(each)}' for key, each in value.items())} }}"
    return str(value).lower() if isinstance(value, (bool, int, float)) else f'"{value}"'


def rows_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))


def environment(folder: Path) -> dict[str, str]:
    """Of processes that stay in their third case, until there is a file go-on."""
    (folder / "path").mkdir(exist_ok=True)
    (folder / "path" / "sitecustomize.py").write_text(HELD, encoding="utf-8")
    path = (folder / "path", ROOT, ROOT / "reference", ROOT / "tests")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "TICKETS": str(folder)}


def started(folder: Path, *words: object) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "llamadiff", "sweep", *map(str, words)]
    return subprocess.Popen(
        arguments,
        env=environment(folder),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def each_once(folder: Path) -> None:
    """Every case has its row, and one."""
    import pyarrow.parquet as pq

    found = [pq.ParquetFile(path).read().to_pylist() for path in rows_of(folder)]
    assert all(len(rows) == 1 for rows in found)
    assert sorted(rows[0]["prompt"] for rows in found) == sorted(PROMPTS)
    assert {rows[0]["verdict"] for rows in found} == {"match"}
    assert not list(folder.glob("*.part"))


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_a_plan_is_every_combination(tmp_path):
    path = plan(tmp_path, candidates=["", "llama.cpp:kv=f16"], settings=[{}, {"kv_type": "f16"}, {"n_predict": 2}])
    cases = read_plan(path)
    assert len(cases) == len(PROMPTS) * 2 * 3
    assert len({case.key for case in cases}) == len(cases)
    assert {case.n_predict for case in cases} == {0, 2}
    assert [case.key for case in cases] == [case.key for case in read_plan(path)]


def test_the_same_case_twice_is_one(tmp_path):
    assert len(read_plan(plan(tmp_path, prompts=["a", "a", "b"]))) == 2


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"modles": ["a"]}, "modles is no key of it; a sweep has models"),
        ({"models": []}, r"models is \[\]; expected a list of length >= 1"),
        ({"prompts": "Once"}, "expected a list"),
        ({"prompts": [1]}, "expected text"),
        ({"models": ["none.gguf"]}, "no such model file"),
        ({"candidates": ["none.gguf"]}, "no such model file"),
        ({"settings": [{"flash": True}]}, "settings 1: flash=on: expected KEY=VALUE, with a key of kv"),
        ({"settings": [{"flash_attn": 1}]}, "settings 1: flash_attn=1: expected on or off"),
        ({"settings": [{"kv_type": "q9"}]}, "expected one of f32"),
        ({"n_predict": "four"}, "n_predict is 'four'; expected a whole number"),
        ({"n_predict": -1}, "n_predict is -1; expected a whole number >= 0"),
        ({"prompts": [""]}, "prompts 1 is empty; expected a text"),
        ({"prompts": ["a", "@none.txt"]}, "prompts 2: .*none.txt: cannot be read"),
        ({"timeout": -0.5}, "timeout is -0.5; expected a number >= 0"),
        ({"settings": [{"n_predict": -2}]}, "settings 1: n_predict is -2; expected a whole number >= 0"),
        ({"settings": [{"flash_attn": 1.5}]}, r"settings\[0\] is {'flash_attn': 1.5}; expected of its entries "),
        ({"chat": 1}, "expected true or false"),
    ],
)
def test_a_plan_that_is_none_is_a_line(changed, says, tmp_path):
    with pytest.raises(UserError, match=says):
        read_plan(plan(tmp_path, **changed))


def test_a_plan_that_is_no_toml_is_a_line(tmp_path):
    (tmp_path / "s.toml").write_text("models = [", encoding="utf-8")
    with pytest.raises(UserError, match="not TOML"):
        read_plan(tmp_path / "s.toml")


# -- a case ------------------------------------------------------------------------------------------------------------


def test_a_case_is_a_row_whatever_becomes_of_it(tmp_path):
    assert run_case(SweepCase(str(MODEL), "Once")).verdict == "match"
    refused = run_case(SweepCase(str(MODEL), "Once", settings={"device": "no-such-device"}))
    assert refused.verdict == "unchecked"
    assert "device" in refused.refused
    two_files = run_case(SweepCase(str(MODEL), "Once upon a time", str(SHIPPED / "tiny.Q4_K_M.gguf")))
    assert two_files.loss > 0
    assert two_files.headline.startswith("Q4_K_M costs KL")


# -- processes that die ------------------------------------------------------------------------------------------------


def dies_once(given: tuple[int, str]) -> int:
    number, marks = given
    mark = Path(marks) / str(number)
    if number % 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def dies_always(number: int) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_what_a_process_died_of_is_tried_again(tmp_path):
    things = [(number, str(tmp_path)) for number in range(6)]
    assert dict(map_surviving(dies_once, things, 2)) == {thing: thing[0] ** 2 for thing in things}


def test_what_every_process_dies_of_is_told_and_the_others_go_on():
    assert dict(map_surviving(dies_always, range(5), 2)) == {0: 0, 1: 1, 2: Died(3), 3: 3, 4: 4}


# -- the command -------------------------------------------------------------------------------------------------------


@needs("pyarrow")
def test_a_sweep_is_summed_up_and_not_done_twice(tmp_path):
    path = plan(tmp_path, prompts=["Once", "The fox"], settings=[{}, {"device": "none"}])
    out, page = tmp_path / "rows", tmp_path / "page.md"
    first = command("sweep", path, "--out", out, "--jobs", "2", "-o", f"markdown:{page}")
    assert first.returncode == 2
    assert len(rows_of(out)) == 4
    assert first.stderr.count("/4  ") == 4
    assert "2 of 4 cases are right" in first.stdout
    assert "**Not right**" in page.read_text("utf-8")
    again = command("sweep", path, "--out", out)
    assert again.stderr.count("/4  UNCHECKED") == again.stderr.count("/4  ") == 2  # what was refused is asked again
    assert "2 of them were there before" in " ".join(again.stdout.split())


@needs("pyarrow")
def test_a_case_of_which_a_file_has_changed_is_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_rows", lambda cases, *_: (replace(unjudged(case), verdict="match") for case in cases))
    monkeypatch.setattr(run, "_concerns", lambda file: ())
    model, engine, beside = tmp_path / "m.gguf", tmp_path / "engine.py", tmp_path / "ops.py"
    model.write_bytes(MODEL.read_bytes())
    for file in (engine, beside):
        file.write_text("right", encoding="utf-8")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The fox\n", encoding="utf-8")
    command_line, server = f"cmd: python {engine} {{tokens}} {{out}}", "http://127.0.0.1:1"
    path = plan(tmp_path, models=["m.gguf"], prompts=["@prompt.txt"], candidates=["", command_line, server])

    def again() -> tuple[list[str], str]:
        ran = list[str]()
        found = run.run_sweep(path, tmp_path / "rows", lambda row, *_: ran.append(row.candidate))
        assert {row.prompt for row in found.rows} == {prompt.read_text("utf-8").strip()}
        return ran, found.verdict

    every = ["", command_line, server]
    assert again() == (every, "match")
    assert again()[0] == [server]  # nothing tells what a server runs
    for file, ran in ((engine, every[1:]), (beside, every[1:]), (model, every)):
        with file.open("ab") as written:
            written.write(bytes(64))
        assert again()[0] == ran, file
    prompt.write_text("The wolf", encoding="utf-8")
    assert again()[0] == every
    plan(tmp_path, models=["m.gguf"], prompts=["@prompt.txt"])
    assert again() == ([], "unchecked")  # nothing was run


@pytest.mark.parametrize(
    ("words", "tells"),
    [
        ("python engine.py {tokens} {out}", True),
        ("./engine {tokens} {out}", True),
        ("python -m engine model.gguf {tokens} {out}", False),  # the module is not named
        ("./run.sh {tokens} {out}", False),  # what it runs is not
        ("./run {tokens} {out}", False),
        ("an-engine-that-is-nowhere {tokens} {out}", False),
    ],
)
def test_of_a_command_it_is_known_what_it_runs_or_it_is_run_again(words, tells, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("engine.py", ""), ("engine", "\x7fELF"), ("run.sh", ""), ("run", "#!/bin/sh\n./engine\n")):
        Path(name).write_text(text, encoding="utf-8")
    Path("model.gguf").touch()
    case = SweepCase("model.gguf", "Once", f"cmd: {words}")
    assert bool(contents_of([case])[case.key]) == tells


@needs("pyarrow")
def test_a_row_of_a_release_that_did_not_state_its_files_is_judged_again(tmp_path, monkeypatch):
    whole = store._schema()
    monkeypatch.setattr(store, "_schema", lambda: whole.remove(whole.get_field_index("made_of")))
    case = SweepCase(str(MODEL), "Once")
    store.Store(tmp_path).add(unjudged(case))
    monkeypatch.undo()
    assert [row.made_of for row in store.Store(tmp_path).done([case.key])] == [""]


@needs("pyarrow")
@needs_slices("file")
@pytest.mark.parametrize("odd", [True, False])
def test_what_is_odd_about_a_file_is_said_once_a_file(odd, tmp_path, monkeypatch, capsys):
    asked = []

    def concerns(model):
        asked.append(model.path)
        return ["rows 3 to 8 are zero"] * odd

    monkeypatch.setattr("llamadiff.ext.file.concerns.concerns", concerns)
    monkeypatch.setattr(run, "_rows", lambda cases, *_: (unjudged(case) for case in cases))
    found = run.run_sweep(plan(tmp_path, candidates=["", str(SHIPPED / "tiny.Q4_K_M.gguf")]), tmp_path, lambda *_: None)
    assert sorted(asked) == [MODEL, SHIPPED / "tiny.Q4_K_M.gguf"]
    print_sweep(found, make_console())
    for page in (capsys.readouterr().out, sweep_to_markdown(found)):
        assert page.count("rows 3 to 8 are zero") == 2 * odd


@needs("pyarrow")
def test_a_row_that_is_none_is_a_line(tmp_path):
    path = plan(tmp_path, prompts=["Once"])
    out = tmp_path / "rows"
    out.mkdir()
    (out / f"{read_plan(path)[0].key}.parquet").write_bytes(b"PAR1 and no more")
    found = command("sweep", path, "--out", out)
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert "is not a row of this sweep; remove it" in found.stderr


@needs("pyarrow")
def test_a_row_comes_back_as_it_was_stored(tmp_path):
    case = SweepCase(str(MODEL), "Once")
    row = SweepRow(case.key, case.model, case.prompt, "", "", 0, "match", kl=0.5, worst=1e-13, same_first=True,
                   loss=0.25, seconds=1.5, worker="here:1", headline="all is right")  # fmt: skip
    kept = store.Store(tmp_path)
    kept.add(row)
    assert kept.done([case.key, "another"]) == [row]


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install pyarrow"):
        store.Store(tmp_path)


@needs("pyarrow")
def test_a_sweep_that_was_killed_goes_on_where_it_was(tmp_path):
    path, out = plan(tmp_path), tmp_path / "rows"
    running = started(tmp_path, path, "--out", out, "--jobs", "2")
    eventually(lambda: len(rows_of(out)) == 2, running)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate(timeout=HANG)
    before = {row: row.stat().st_mtime_ns for row in rows_of(out)}
    assert len(before) == 2
    (tmp_path / "go-on").touch()
    again = started(tmp_path, path, "--out", out, "--jobs", "2")
    said, _ = again.communicate(timeout=HANG)
    assert again.returncode == 0
    assert f"{len(before)} of them were there before" in " ".join(said.split())
    assert {row: row.stat().st_mtime_ns for row in before} == before
    each_once(out)


@needs("pyarrow")
def test_a_worker_that_is_killed_loses_nothing(tmp_path):
    path, out = plan(tmp_path), tmp_path / "rows"
    running = started(tmp_path, path, "--out", out, "--jobs", "2")
    eventually(lambda: len(rows_of(out)) == 2, running)
    workers = [
        int(child) for child in Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text("utf-8").split()
    ]
    workers = [child for child in workers if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text("utf-8")]
    os.kill(workers[0], signal.SIGKILL)
    (tmp_path / "go-on").touch()
    said, trouble = running.communicate(timeout=HANG)
    assert running.returncode == 0, said + trouble
    each_once(out)


def rows(verdict: str, count: int, **more: object) -> list[SweepRow]:
    return [
        SweepRow(str(at), "/m/a.gguf", f"prompt {at}", "", "kv_type=f16", 0, verdict, **more) for at in range(count)
    ]  # type: ignore[arg-type]


def test_the_summary_has_a_line_for_each_way_and_one_for_each_reason(capsys):
    found = Sweep(Path("out"), (*rows("match", 3, worst=1e-13), *rows("unchecked", 4, refused="/m/a.gguf: no such")), 2)
    print_sweep(found, make_console(width=100))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["a.gguf", "llama.cpp", "kv_type=f16", "7", "3", "0", "4", "1.0e-13", "0.0"]
    assert sum("no such" in line for line in lines) == 1
    assert any('"prompt 0" and 3 more cases' in line for line in lines)
    page = sweep_to_markdown(found)
    assert page.startswith("### UNCHECKED: 3 of 7 cases are right, 2 of them were there before")
    assert page.count("no such") == 1
    assert line_of(found.rows[0], 1, 7).startswith('1/7  MATCH     a.gguf llama.cpp kv_type=f16 "prompt 0"  0.0 s')


def test_other_programs_read_every_case_and_what_became_of_it():
    found = Sweep(
        Path("out"),
        (*rows("match", 1), *rows("wrong", 2, headline="RoPE <&"), *rows("unchecked", 1, refused="no such")),
        0,
    )
    suite = ET.fromstring(sweep_to_junit(found))
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["4", "2", "1"]
    assert suite[0].get("name") == 'a.gguf llama.cpp kv_type=f16 "prompt 0"'
    assert [(each.tag, each.get("message")) for each in suite[1]] == [("failure", "RoPE <&")]
    kept = ET.fromstring(sweep_to_junit(replace(found, rows=found.rows[:1], kept=1)))
    assert "nothing was run" in kept.find("testcase/error").get("message")
    report = json.loads(sweep_to_json(found))
    assert (report["verdict"], [case["prompt"] for case in report["cases"]][:2]) == ("wrong", ["prompt 0", "prompt 0"])
    assert report["cases"][0]["kl"] is None


# -- a cluster ---------------------------------------------------------------------------------------------------------


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and two workers, each a process of its own that nobody starts again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    words = {"scheduler": ["--host", "127.0.0.1", "--port", str(port)],
             "worker": [address, "--no-nanny", "--nthreads", "1", "--local-directory", str(folder)]}  # fmt: skip
    processes = []
    with (folder / "log").open("wb") as log:
        for name in ("scheduler", "worker", "worker"):
            script = [sys.executable, "-m", f"distributed.cli.dask_{name}", "--no-dashboard", *words[name]]
            processes.append(subprocess.Popen(script, env=environment(folder), stdout=log, stderr=log))
        try:
            yield address, processes[1:]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def wait_for_workers(address: str, count: int) -> None:
    from distributed import Client

    with Client(address, timeout=HANG, set_as_default=False) as client:
        client.wait_for_workers(count, timeout=HANG)


@needs("distributed", "pyarrow")
def test_on_a_cluster_of_which_a_worker_is_killed_nothing_is_lost_or_counted_twice(tmp_path):
    path, out = plan(tmp_path), tmp_path / "rows"
    with cluster(tmp_path) as (address, workers):
        wait_for_workers(address, 2)
        running = started(tmp_path, path, "--out", out, "--scheduler", address)
        eventually(lambda: len(rows_of(out)) == 2, running)
        workers[0].kill()
        (tmp_path / "go-on").touch()
        said, trouble = running.communicate(timeout=HANG)
        assert running.returncode == 0, said + trouble
        each_once(out)


@pytest.mark.slow
@needs("distributed", "pyarrow")
def test_a_sweep_on_a_cluster_that_was_killed_goes_on(tmp_path):
    path, out = plan(tmp_path), tmp_path / "rows"
    with cluster(tmp_path) as (address, _):
        wait_for_workers(address, 2)
        running = started(tmp_path, path, "--out", out, "--scheduler", address)
        eventually(lambda: len(rows_of(out)) == 2, running)
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate(timeout=HANG)
        kept = len(rows_of(out))
        (tmp_path / "go-on").touch()
        again = started(tmp_path, path, "--out", out, "--scheduler", address)
        said, trouble = again.communicate(timeout=HANG)
        assert again.returncode == 0, said + trouble
        assert f"{kept} of them were there before" in " ".join(said.split())
        each_once(out)


@needs("distributed", "pyarrow")
def test_a_scheduler_that_does_not_answer_is_a_line(tmp_path, monkeypatch):
    from llamadiff.ext.sweep import cluster as clusters

    monkeypatch.setattr(clusters, "PATIENCE", 1.0)
    with pytest.raises(UserError, match="no Dask scheduler answers there"), clusters.connected("tcp://127.0.0.1:9"):
        pass
    with pytest.raises(UserError, match="no Dask scheduler answers there"), clusters.connected("nonsense://x"):
        pass
