"""What is said of a process that died, and of a prompt that llama.cpp's tokenizer died of."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from models.tokenized import with_tokenizer
from optional import needs_slices

from llamadiff.llamacpp import child
from llamadiff.llamacpp.request import TOKENIZING, Request, Settings
from llamadiff.system import exits
from llamadiff.system.errors import DiedError, UnrunnableError
from llamadiff.system.progress import silent
from llamadiff.system.python_child import how_it_ended
from llamadiff.trace.token_text import Vocabulary

PIECES = ["<unk>", "<s>", "<|end|>", "\u2581", *"abc"]
TYPES = [2, 3, 4, 1, 1, 1, 1]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-11, "died of SIGSEGV"),
        (-9, "was killed by signal 9 (SIGKILL)"),
        (-40, "was killed by signal 40 (a real-time signal)"),
    ],
)
def test_how_a_process_ended(code: int, words: str) -> None:
    assert how_it_ended(code) == words


def vocabulary(pieces: list[str], **more: object) -> Vocabulary:
    fields = {"model": "llama", "tokens": pieces, "token_type": TYPES + [6] * (len(pieces) - len(TYPES)), **more}
    return Vocabulary({f"tokenizer.ggml.{key}": value for key, value in fields.items()})


def test_what_a_vocabulary_lacks() -> None:
    assert vocabulary(PIECES).missing_from("a cab") == ()
    assert vocabulary(PIECES).missing_from("Ca\u00e9<|end|>b<s>C") == (
        "C",
        "\u00e9",
    )  # special tokens are found as such
    assert vocabulary([*PIECES, *BYTES]).missing_from("Ca\u00e9\U0001f642") == ()
    assert vocabulary([*PIECES, *BYTES[:0xA9]]).missing_from("C\u00e9") == (
        "\u00e9",
    )  # one of its two bytes is missing
    assert vocabulary(PIECES, model="gpt2").missing_from("C") == ()  # that tokenizer does not die of it


def test_the_space_before_a_prompt_is_a_character_too() -> None:
    pieces = [piece for piece in PIECES if piece != "\u2581"]
    assert vocabulary(pieces).missing_from("ab") == ("\u2581",)
    assert vocabulary(pieces, add_space_prefix=False).missing_from("ab") == ()
    assert vocabulary(pieces, add_space_prefix=False).missing_from("a b") == ("\u2581",)


def test_a_death_that_no_character_explains(tmp_path: Path) -> None:
    """It is known what llama.cpp was doing, and that is said."""
    request = Request(str(with_tokenizer(tmp_path / "m.gguf")), text="abc")
    error = child.death(-signal.SIGABRT, request, TOKENIZING, "GGML_ASSERT(bos) failed")
    assert not isinstance(error, UnrunnableError)  # of the prompt, not of the file
    assert str(error) == (
        f"{request.model}: llama.cpp died of SIGABRT while it tokenized this prompt "
        "(it said: GGML_ASSERT(bos) failed); give another prompt, or token ids with --tokens 1,2,3"
    )


def test_many_characters_are_counted(tmp_path: Path) -> None:
    request = Request(str(with_tokenizer(tmp_path / "m.gguf")), text="ABCDEFGHIJ")
    message = str(child.death(-signal.SIGABRT, request, TOKENIZING, ""))
    assert '"A" (U+0041), "B" (U+0042)' in message
    assert '"H" (U+0048) and 2 more, nor tokens for single bytes' in message


def test_a_fault_while_it_runs_is_its_own(tmp_path: Path) -> None:
    request = Request(str(tmp_path / "m.gguf"), text="abc")
    error = child.death(-signal.SIGSEGV, request, "running llama.cpp", "")
    assert isinstance(error, UnrunnableError)
    assert str(error).endswith("m.gguf: llama.cpp died of SIGSEGV: that is a fault in llama.cpp")


def test_a_process_that_signals_do_not_end_has_the_code_that_a_shell_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first process of a container."""
    monkeypatch.setattr(signal, "raise_signal", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)

    def stopped() -> None:
        raise exits.Stopped(signal.SIGINT)

    assert exits.run(stopped, lambda _: None) == 130


@pytest.mark.parametrize(
    ("build", "whose"),
    [("", "llama.cpp: "), pytest.param("/a/build", "--llama-cpp /a/build: ", marks=needs_slices("builds"))],
)
def test_a_library_that_its_process_dies_of_is_not_laid_to_the_model(
    build: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is cut off ends it by SIGBUS while it is opened, one for another CPU by SIGILL."""
    monkeypatch.setattr(child.process, "command", lambda *_: [sys.executable, "-c", "import os; os.abort()"])
    monkeypatch.setattr(child, "_BEGUN", [])
    with child.Child(Settings(llama_cpp=build)) as died, pytest.raises(DiedError) as caught:
        died.ask(Request("m.gguf"), silent)
    said = str(caught.value)
    assert said.startswith(f"{whose}cannot be loaded: the process that opened it died of SIGABRT; it is damaged")
    assert "m.gguf" not in said
