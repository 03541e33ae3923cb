"""Real vocabularies: those that llama.cpp's sources carry, in the source package of llama-cpp-python."""

from __future__ import annotations

import struct
from importlib.metadata import version
from pathlib import Path

import pytest
from once import once
from tools.parts import PACKAGE, MissingPartError, sources

NAMES = (
    "aquila", "baichuan", "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2",
    "gpt-neox", "llama-bpe", "llama-spm", "mpt", "nomic-bert-moe", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip
WITH_TEXTS = tuple(name for name in NAMES if name not in {"aquila", "baichuan", "gpt-neox", "nomic-bert-moe"})
PRE = struct.pack("<Q", 18) + b"tokenizer.ggml.pre" + struct.pack("<I", 8)  # key, type: text


def folder(temporary: pytest.TempPathFactory) -> Path:
    """Where ``ggml-vocab-<name>.gguf`` are, with texts and ids beside them; no test that needs them is run without."""

    def make(made: Path) -> None:
        (made / "models").symlink_to(sources(version(PACKAGE)) / "models")

    try:
        return once(temporary, "vocabularies", make) / "models"
    except MissingPartError as error:
        pytest.skip(f"no source package of {PACKAGE} here: {error}; make backends")


def expected(path: Path) -> list[tuple[str, list[int]]]:
    """The texts beside a vocabulary, each with its ids."""
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = [[*map(int, line.split())] for line in Path(f"{path}.out").read_text("utf-8").split("\n")]
    return [*zip(texts, ids[: len(texts)], strict=True)]


def with_pre(path: Path, to: Path, pre: str) -> Path:
    """The same vocabulary with another name of a pre-tokenizer."""
    data = path.read_bytes()
    at = data.index(PRE) + len(PRE)
    end = at + 8 + struct.unpack_from("<Q", data, at)[0]
    to.write_bytes(data[:at] + struct.pack("<Q", len(pre)) + pre.encode() + data[end:])
    return to
