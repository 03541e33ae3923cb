"""The servers that tests start: they answer, they end, and why one does not start is said."""

from __future__ import annotations

import json
import urllib.request

import pytest
from llama_server import ServerError, started, started_python
from places import ROOT
from waiting import HANG

pytestmark = pytest.mark.slow
MODEL = ROOT / "llamadiff/shipped/tiny.Q4_K_M.gguf"


def asked(address, path, **body):
    request = urllib.request.Request(f"{address}{path}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=HANG) as answer:
        return json.load(answer)


@pytest.mark.parametrize("server", [started, started_python])
def test_it_answers_until_it_is_left(server):
    with server(MODEL) as address:
        answer = asked(address, "/v1/completions", prompt="Once upon a time", max_tokens=1, logprobs=3)
        assert answer["choices"][0]["logprobs"]
        assert answer["usage"]["prompt_tokens"] == 5
    with pytest.raises(OSError, match="refused"):
        asked(address, "/v1/completions")


def test_it_ends_with_a_failing_test():
    def failing():
        with started(MODEL) as address:
            raise ZeroDivisionError(address)

    with pytest.raises(ZeroDivisionError) as error:
        failing()
    with pytest.raises(OSError, match="refused"):
        asked(str(error.value), "/health")


def test_several_have_ports_of_their_own():
    with started(MODEL) as one, started(MODEL) as other:
        assert one != other


def test_flags_win():
    with started(MODEL, "-c", "256", "-np", "1") as address, urllib.request.urlopen(f"{address}/props") as answer:
        props = json.load(answer)
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert props["total_slots"] == 1


@pytest.mark.parametrize("server", [started, started_python])
def test_why_it_does_not_start_is_said(server, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(ServerError, match=r"the server ended with [\s\S]*bad\.gguf"), server(tmp_path / "bad.gguf"):
        pass
