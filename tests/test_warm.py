"""A warm process of llama.cpp is what a cold one is: it answers, dies and is killed in the same way."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import warm

from llamadiff.llamacpp import child
from llamadiff.llamacpp.capture import capture
from llamadiff.llamacpp.request import Request
from llamadiff.system import python_child
from llamadiff.system.errors import UserError
from llamadiff.system.progress import silent

TOKENS = (1, 17, 5, 80)


@contextmanager
def cold():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "subprocess", subprocess)
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


def test_it_ends_when_its_input_does():
    with child.Child() as one:
        one._process.stdin.close()
        assert one._process.wait() == 1


def test_it_has_the_environment_and_the_folder_of_its_start(tmp_path):
    given, told = os.pipe()
    about = {"environment": {"TOLD": "so"}, "folder": str(tmp_path)}
    one = os.fork()
    if not one:
        warm._become(about, (given, told, 2), lambda: print(dict(os.environ), os.getcwd()))
    os.close(told)
    os.waitpid(one, 0)
    with os.fdopen(given) as words:
        assert words.read() == f"{{'TOLD': 'so'}} {tmp_path}\n"
