"""llama.cpp's process: it serves one request after another, gets ready ahead of them, and is gone when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llamadiff.llamacpp import child, session
from llamadiff.llamacpp.capture import capture
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.system import started
from llamadiff.system.errors import UserError
from llamadiff.system.progress import silent

TOKENS = (1, 17, 5, 80)


def test_what_is_killed_is_gone():
    with child.Child() as one:
        process = one._process
        assert process.poll() is None
        os.kill(process.pid, 0)
    assert process.returncode == -9
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_it_serves_one_request_after_another(small_model, tmp_path):
    asked = Request(str(small_model()), tokens=TOKENS)
    with child.Child() as one:
        with pytest.raises(UserError, match=r"cannot load the model.*it said"):
            one.ask(Request(str(tmp_path / "none.gguf"), tokens=TOKENS, output=str(tmp_path / "none")), silent)
        with pytest.raises(UserError, match="out of range") as caught:
            one.ask(replace(asked, tokens=(10_000,), output=str(tmp_path / "other")), silent)
        assert "none.gguf" not in str(caught.value)  # what it said of a request before
        first = capture(replace(asked, output=str(tmp_path / "a")), child=one)
        again = capture(replace(asked, output=str(tmp_path / "b")), child=one)
        assert one._process.poll() is None
    assert all(np.array_equal(again[name], first[name]) for name in first)


def test_a_model_may_be_loaded_before_it_is_asked_for(small_model, tmp_path):
    """The run is the same; what is asked for may be another model, or settings with which it is loaded otherwise."""
    asked = Request(str(small_model()), tokens=TOKENS)
    right = capture(replace(asked, output=str(tmp_path / "right")))
    none = Request(str(tmp_path / "none.gguf"))
    for ahead in (asked, replace(asked, settings=Settings(type_k="F16")), Request(str(small_model("qwen2"))), none):
        with child.Child() as one:
            one.ahead(ahead)
            found = capture(replace(asked, output=str(tmp_path / "found")), child=one)
            again = capture(replace(asked, output=str(tmp_path / "again")), child=one)
        assert all(np.array_equal(found[name], right[name]) for name in right)
        assert all(np.array_equal(again[name], right[name]) for name in right)
    with child.Child() as one:
        one.ahead(none)
        with pytest.raises(UserError, match=r"none.gguf.*cannot load the model.*it said"):
            one.ask(replace(none, tokens=TOKENS, output=str(tmp_path / "none")), silent)


def test_a_model_that_was_loaded_ahead_is_not_loaded_again(small_model, tmp_path):
    loads, asked = [], Request(str(small_model()), tokens=TOKENS)
    library = SimpleNamespace(lib=SimpleNamespace(llama_model_free=lambda model: loads.append(f"free {model}")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "Quiet", lambda library: nullcontext())
        patch.setattr(session, "load", lambda library, request: loads.append(request.model) or len(loads))
        loaded = session.Loaded(library, asked)
        assert loaded.taken_for(replace(asked, output="x")) == 1
        assert loaded.taken_for(asked) is None  # it was taken
        assert session.Loaded(library, asked).taken_for(replace(asked, settings=Settings(repack=True))) is None
    assert loads == [asked.model, asked.model, "free 2"]


def test_a_process_that_was_begun_is_the_next_one_that_is_needed():
    with started.all_ended():
        child.begin()
        (ended,) = (begun.process for begun in child._BEGUN)
    with child.Child() as one:
        assert one._process is not ended
    child.begin()
    (begun,) = (each.process for each in child._BEGUN)
    with child.Child(Settings(llama_cpp="/somewhere")) as other:
        assert other._process is not begun  # of another llama.cpp
    with child.Child() as one:
        assert one._process is begun
    with child.Child() as another:
        assert another._process is not begun
    assert child._BEGUN == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells it")
@pytest.mark.parametrize("words", [["no-model.gguf", "hi"], ["--no-such-option"], []])
def test_a_process_that_was_begun_and_is_not_needed_ends(words, tmp_path):
    begun = tmp_path / "begun"
    begun.write_text(
        "import sys\nfrom llamadiff import __main__\nfrom llamadiff.llamacpp import child\nbegin = child.begin\n"
        "def told():\n    begin()\n    print(child._BEGUN[0].process.pid, flush=True)\n"
        "child.begin = told\n"
        "sys.argv[:] = ['llamadiff', 'compare', *sys.argv[1:]]\n__main__.main()\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, str(begun), *words], capture_output=True, text=True, check=False, encoding="utf-8"
    )
    assert done.returncode == 2
    assert not Path(f"/proc/{int(done.stdout.split()[0])}").exists()


def test_it_ends_when_its_input_does():
    with child.Child() as one:
        one._process.stdin.close()
        assert one._process.wait() == 1


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_scores_are_the_tap_only_where_the_scale_is_on_the_side_that_is_meant(name, small_model, tmp_path):
    scales = name != "llama"
    asked = Request(str(small_model(name)), tokens=TOKENS)
    for meant in (scales, not scales, None):
        trace = capture(replace(asked, output=str(tmp_path / f"{meant}"), scales_queries=meant))
        assert any(tap.startswith("kq-") for tap in trace) == (meant in (scales, None))
        assert "Qcur_rope-0" in trace
