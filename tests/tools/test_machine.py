"""Another machine: what llama.cpp cannot do there is found out once, said in its own words, and skipped."""

from __future__ import annotations

import sys

import pytest
from machine import Machine

from llamadiff.llamacpp import doctor
from llamadiff.llamacpp.doctor import NOTE, OK, Examined
from llamadiff.llamacpp.request import Settings
from llamadiff.system import python_child

REPACKED = Settings(repack=True)

# llama.cpp on a CPU whose repacked kernels crash: it is opened, reads the request, and dies of them
DIES = """
import json, os, signal, sys
print(json.dumps({"opened": True}), flush=True)
request = json.loads(sys.stdin.readline())
if request["settings"]["repack"]:
    os.kill(os.getpid(), signal.SIGSEGV)
print(json.dumps({"error": "it would have decoded"}))
"""


def probe(found: list[tuple[Settings, bool]], good: bool):
    def decodes(name: str, settings: Settings, quantized: bool) -> Examined:
        found.append((settings, quantized))
        return Examined(name, OK if good else NOTE, "llama.cpp survives it" if good else "llama.cpp died of SIGSEGV")

    return decodes


def test_where_repacked_kernels_die_what_needs_them_is_skipped_for_that_reason(small_model):
    asked: list[tuple[Settings, bool]] = []
    machine = Machine(probe(asked, good=False))
    for kind in ("Q8_0", "Q4_0"):
        with pytest.raises(pytest.skip.Exception, match=r"^llama\.cpp died of SIGSEGV$"):
            machine.needs(REPACKED, small_model("llama", kind))
    assert asked == [(REPACKED, True)]  # once


def test_where_they_survive_nothing_is_skipped(small_model):
    asked: list[tuple[Settings, bool]] = []
    machine = Machine(probe(asked, good=True))
    for kind in ("F16", "Q8_0", "Q4_0"):
        machine.needs(REPACKED, small_model("llama", kind))
    assert asked == [(REPACKED, False), (REPACKED, True)]


def test_what_llama_cpp_has_to_do_is_never_skipped(small_model):
    machine = Machine(probe([], good=False))
    for settings in (Settings(), Settings("F16", "F16"), Settings(flash_attn=True), Settings("Q8_0", "Q8_0")):
        machine.needs(settings, small_model("llama", "Q8_0"))


def test_the_probe_says_what_a_crash_was(monkeypatch):
    monkeypatch.setattr(python_child, "command", lambda module, *words: [sys.executable, "-c", DIES])
    check = doctor.decodes("repacked", REPACKED, True)
    assert check == Examined("repacked", NOTE, "llama.cpp died of SIGSEGV: its repacked kernels crash on some CPUs; "
                          "this is off unless you ask for it: leave it so")  # fmt: skip
    assert Machine().lacks(REPACKED, quantized=True) == check.found
    assert doctor.decodes("plain", Settings()).found == "it would have decoded"


def test_this_machine_answers_for_itself(machine):
    """Whichever it is: llama.cpp survives, or the reason is its death."""
    reason = machine.lacks(REPACKED, quantized=True)
    assert reason is None or "llama.cpp died of" in reason
