"""What is odd about a file's tokenizer, by its keys alone: lines for whoever compares something else."""

from __future__ import annotations

from collections.abc import Iterator

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.prompt.tokenizer.rules import BYTE_LEVEL

ASK = "llamadiff tokens {0} --candidate tokenizer.json (the checkpoint's), or llamadiff weights {0} CHECKPOINT"
PRE, EOS = "tokenizer.ggml.pre", "tokenizer.ggml.eos_token_id"


def concerns(model: ModelFile) -> Iterator[str]:
    """A line for each key that llama.cpp guesses, and that hardly any model has so."""
    fields = model.weights.fields
    if fields.get("tokenizer.ggml.model") != BYTE_LEVEL:
        return
    pre = fields.get(PRE)
    if pre in (None, "", "default"):
        says = f"is {pre!r}" if pre else "is not in the file"
        yield f"{PRE} {says}: llama.cpp cuts words as few models do; {ASK.format(model.path)}"
    if EOS not in fields:
        yield f"{EOS} is not in the file: llama.cpp takes token 11 for the end; {ASK.format(model.path)}"
