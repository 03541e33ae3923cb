"""A run that is recorded on one machine and judged on another: the same report; files that are none are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from command import run

TOKENS = ["--tokens", "1,17,5,40,9"]
OF_THE_CALL = ("timing", "llamadiff")  # seconds, and the words of the command


@pytest.fixture(scope="module")
def recorded(small_model, tmp_path_factory):
    """A model, and a run of it with decode steps."""
    model, path = small_model("llama", "Q8_0"), tmp_path_factory.mktemp("recorded") / "run.nodes"
    done = run("capture", model, *TOKENS, "--n-predict", 2, "--nodes", "-o", path)
    assert done.returncode == 0, done.stderr
    assert f"backend MODEL --recorded {path}" in done.stdout
    return model, path


def report(*words: object) -> dict[str, object]:
    done = run("backend", *words, "-o", "json:-")
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    return {key: value for key, value in found.items() if key not in OF_THE_CALL}


def test_the_report_is_that_of_a_run(recorded):
    model, path = recorded
    assert report(model, "--recorded", path) == report(model, *TOKENS, "--n-predict", 2)


def test_wrong_ops_are_kept_and_the_exit_code_is_that_of_a_run(recorded, tmp_path):
    model, path = recorded
    strict = tmp_path / "strict.toml"
    strict.write_text('[[rule]]\nop = "MUL_MAT"\nmatch = 0.0\n', encoding="utf-8")
    codes = [
        run("backend", model, *words, "--tolerance", strict, "--keep", tmp_path / name, "--full").returncode
        for name, words in (("live", [*TOKENS, "--n-predict", 2]), ("later", ["--recorded", path]))
    ]
    kept = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("live", "later")]
    assert codes == [1, 1]
    assert kept[0] == kept[1]


def sealed(lines: bytes) -> bytes:
    """With an end that fits what is before it."""
    return lines + json.dumps({"sha256": hashlib.sha256(lines).hexdigest()}).encode() + b"\n"


def without_end(path: Path) -> bytes:
    return path.read_bytes().rstrip(b"\n").rpartition(b"\n")[0] + b"\n"


def larger(data: bytes) -> bytes:
    """A tensor that says it has more values than bytes."""
    lines = data.split(b"\n", 3)
    at = data.index(b'"ne": [')
    end = data.index(b"]", at)
    assert lines
    return data[:at] + b'"ne": [1000000, 1000000, 1, 1' + data[end:]


DAMAGE = {
    "cut off": (lambda data: data[: len(data) // 2], "is cut off"),
    "altered": (lambda data: data.replace(b"RMS_NORM", b"RMS_MORN", 1), "was altered"),
    "empty": (lambda data: b"", "is cut off"),
    "another schema": (lambda data: data.replace(b"llamadiff.nodes/1", b"llamadiff.nodes/9", 1), "not a recorded run"),
    "no file of ours": (lambda data: bytes(4) + data, "not a recorded run"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_whole_is_refused_in_a_line(damage, recorded, tmp_path):
    model, path = recorded
    change, expected = DAMAGE[damage]
    bad = tmp_path / "bad.nodes"
    bad.write_bytes(change(path.read_bytes()))
    done = run("backend", model, "--recorded", bad)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert expected in done.stderr or "not a recorded run" in done.stderr


FORGED = {
    "sizes": lambda data: data.replace(b'"sizes": [', b'"sizes": [99999999999999, ', 1),
    "a size below zero": lambda data: data.replace(b'"sizes": [', b'"sizes": [-1, ', 1),
    "values": larger,
    "axes": lambda data: data.replace(b'"ne": [', b'"ne": [1, ', 1),
    "no op": lambda data: data.replace(b'"op": ', b'"po": ', 1),
    "a type": lambda data: data.replace(b'"type": "f32"', b'"type": "f99"'),
    "a pass": lambda data: data.replace(b'{"pass": [', b'{"pass": ["', 1),
    "order": lambda data: data.replace(b'"order": "little"', b'"order": "middle"', 1),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_a_file_that_somebody_made_up_is_refused_in_a_line(forgery, recorded, tmp_path):
    """Its end fits: whoever changes a file can do that, too."""
    model, path = recorded
    before = without_end(path)
    after = FORGED[forgery](before)
    assert after != before
    bad = tmp_path / "bad.nodes"
    bad.write_bytes(sealed(after))
    done = run("backend", model, "--recorded", bad)
    assert "Traceback" not in done.stderr
    assert "a fault in llamadiff" not in done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stdout[:300]


def test_another_model_is_told(recorded, small_model):
    done = run("backend", small_model("llama", "F16"), "--recorded", recorded[1])
    assert done.returncode == 2
    assert "was recorded with another model" in done.stderr


def test_what_was_run_is_not_to_be_given_again(recorded):
    model, path = recorded
    done = run("backend", model, *TOKENS, "--recorded", path)
    assert done.returncode == 2
    assert "says what was run" in done.stderr


def test_nothing_is_overwritten(recorded):
    model, path = recorded
    before = path.read_bytes()
    assert run("capture", model, *TOKENS, "--nodes", "-o", model).returncode == 2
    assert run("backend", model, "--recorded", path, "-o", f"json:{path}").returncode == 2
    assert path.read_bytes() == before
