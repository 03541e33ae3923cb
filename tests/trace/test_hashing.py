"""A large file's hash is remembered, and never after the file was touched."""

from __future__ import annotations

import hashlib
import os

import pytest

from llamadiff.trace import hashing
from llamadiff.trace.hashing import LARGE, file_sha256


@pytest.fixture
def large(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hashing, "SETTLED", 0.0)
    path = tmp_path / "large"
    path.write_bytes(b"a")
    os.truncate(path, LARGE)
    return path


def remembered(tmp_path):
    folder = tmp_path / "cache" / "llamadiff" / "sha256"
    return sorted(folder.iterdir()) if folder.exists() else []


def test_the_second_time_it_is_read_from_memory(large, tmp_path):
    right = hashlib.sha256(large.read_bytes()).hexdigest()
    assert file_sha256(large) == right
    (kept,) = remembered(tmp_path)
    kept.write_text("0" * 64, encoding="utf-8")  # what shows that it is asked
    assert file_sha256(large) == "0" * 64


@pytest.mark.parametrize("how", ["written", "replaced", "dated back"])
def test_a_file_that_was_touched_is_hashed_again(how, large, tmp_path):
    before, about = file_sha256(large), large.stat()
    if how == "replaced":
        other = tmp_path / "other"
        other.write_bytes(b"b")
        os.truncate(other, LARGE)
        os.replace(other, large)
    else:
        with large.open("r+b") as file:
            file.write(b"b")
    if how != "written":
        os.utime(large, ns=(about.st_atime_ns, about.st_mtime_ns))
    after = file_sha256(large)
    assert after != before
    assert after == hashlib.sha256(large.read_bytes()).hexdigest()


def test_a_file_that_has_just_changed_is_not_remembered(large, tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "SETTLED", 60.0)
    file_sha256(large)
    assert remembered(tmp_path) == []


@pytest.mark.parametrize("text", ["", "no hash", "0" * 63, b"\xff\xfe"])
def test_nonsense_in_memory_is_not_believed(text, large, tmp_path):
    right = file_sha256(large)
    (kept,) = remembered(tmp_path)
    kept.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert file_sha256(large) == right


def test_where_nothing_can_be_written_it_still_works(large, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the directory should be", encoding="utf-8")
    assert file_sha256(large) == hashlib.sha256(large.read_bytes()).hexdigest()


def test_a_hundred_are_kept(large, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "llamadiff" / "sha256"
    folder.mkdir(parents=True)
    for number in range(150):
        (folder / f"{number}").write_text("0" * 64, encoding="utf-8")
    file_sha256(large)
    assert len(remembered(tmp_path)) == hashing.MOST
