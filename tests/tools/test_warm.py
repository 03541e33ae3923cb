"""A warm process of llama.cpp is what a cold one is: it answers, dies and is killed in the same way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import warm

from llamadiff.llamacpp import child, session
from llamadiff.llamacpp.capture import capture
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.system import python_child, started
from llamadiff.system.errors import UserError
from llamadiff.system.progress import silent

TOKENS = (1, 17, 5, 80)


@contextmanager
def cold():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(started, "subprocess", subprocess)
        yield


def test_a_trace_is_the_same_to_the_bit(small_model, tmp_path):
    def captured(name: str):
        return capture(Request(str(small_model()), tokens=TOKENS, n_predict=2, output=str(tmp_path / name)))

    with cold():
        right = captured("cold.safetensors")
    again = captured("warm.safetensors")
    assert again.info.tokens == right.info.tokens
    for known in ("settings", "build", "weights_read"):
        assert again.info.producer[known] == right.info.producer[known]
    assert list(again) == list(right)
    assert all(np.array_equal(again[name], right[name]) for name in right)


def test_a_refusal_and_a_death_are_the_same(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    def refusal() -> str:
        with child.Child() as one, pytest.raises(UserError) as caught:
            one.ask(Request(str(tmp_path / "m.gguf"), tokens=TOKENS, output=str(tmp_path / "t")), silent)
        return str(caught.value)

    with cold():
        expected = refusal()
    assert refusal() == expected


def test_only_llama_cpps_own_process_is_warm():
    with child.Child() as one:
        assert isinstance(one._process, warm.Warm)
    with cold(), child.Child() as one:
        assert isinstance(one._process, subprocess.Popen)
    other = warm.popen(python_child.command("json"), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert isinstance(other, subprocess.Popen)
    assert other.wait() == 1  # json has no main


def test_what_is_killed_is_gone():
    with child.Child() as one:
        process = one._process
        assert process.poll() is None
        os.kill(process.pid, 0)
    assert process.returncode == -9
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_some_die_while_others_are_started():
    last = child.Child()
    for number in range(200):
        last._process.kill()
        time.sleep(number % 8 / 2000)  # it takes some time to die
        one = child.Child()
        with last:
            assert last._process.wait() == -9
        last = one
    with last:
        assert last._process.poll() is None


def test_its_end_is_told_to_each_of_several_threads():
    with child.Child() as one, ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(one._process.wait) for _ in range(4)]
        assert one._process.poll() is None
        one._process.kill()
        assert [each.result() for each in waiting] == [-9] * 4


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
    with cold():
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


def test_it_has_the_environment_and_the_folder_of_its_start(tmp_path):
    given, told = os.pipe()
    about = {"environment": {"TOLD": "so"}, "folder": str(tmp_path), "words": ["by", "words"]}
    one = os.fork()
    if not one:
        warm._become(about, (given, told, 2), lambda *words: print(*words, dict(os.environ), os.getcwd()))
    os.close(told)
    os.waitpid(one, 0)
    with os.fdopen(given) as words:
        assert words.read() == f"by words {{'TOLD': 'so'}} {tmp_path}\n"
