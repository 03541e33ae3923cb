"""Temporary directories: what a dead process left goes, and what somebody has just made stays."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp

import pytest

from llamadiff.system import stale_files


@pytest.fixture
def place(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_directory_is_locked_as_long_as_it_is_being_swept(place, monkeypatch):
    """Whoever has just made it would lock it, and find it gone later."""
    folder, remove, taken = mkdtemp(prefix=stale_files._prefix(), dir=place), stale_files._remove, []

    def removed(path):
        taken.append(stale_files._lock(path))
        remove(path)

    monkeypatch.setattr(stale_files, "_remove", removed)
    stale_files.sweep()
    assert taken == [None]
    assert not list(place.iterdir()), folder


def test_a_living_directory_is_not_swept(place):
    with stale_files.temporary_directory() as folder:
        stale_files.sweep()
        assert folder.is_dir()
    assert not list(place.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows removes no file that is open")
def test_what_somebody_locks_while_it_is_swept_stays(place, monkeypatch):
    """Whoever has made it locks it anew when its lock is gone already, and it is not: it is theirs then."""
    folder, theirs = Path(mkdtemp(prefix=stale_files._prefix(), dir=place)), []

    def removed(path):
        (path / "lock").unlink()
        theirs.append(stale_files._lock(path))

    monkeypatch.setattr(stale_files, "_remove", removed)
    stale_files.sweep()
    assert theirs != [None]
    assert (folder / "lock").exists()
    theirs[0].release()
