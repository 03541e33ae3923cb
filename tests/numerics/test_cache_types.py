"""The types that a KV cache may have: one table, which options, documents and diagnosis hold to."""

from __future__ import annotations

import re
from functools import partial

import gguf
import numpy as np
import pytest
from llamaref import Engine
from llamaref.weights import type_number
from optional import needs_slices
from places import ROOT
from proof.injected.attention import keeping, reading
from proof.injected.base import TOKENS
from proof.injected.runs import record_faulty
from proof.strangers.engine import Bug

from llamadiff.candidates.reference import record
from llamadiff.llamacpp.settings_words import settings_of
from llamadiff.numerics.arithmetic import ROUNDINGS
from llamadiff.numerics.types import CACHE_TYPES
from llamadiff.system.errors import UserError
from llamadiff.verbs.verbs import diff

FEWER = CACHE_TYPES[1:]
BLOCKS = [kind for kind in FEWER if kind.startswith("Q")]


def test_llama_cpp_has_them_by_these_numbers():
    numbers = {"F32": 0, "F16": 1, "BF16": 30, "Q8_0": 8, "Q5_0": 6, "Q4_0": 2}  # enum ggml_type, ggml.h
    assert {kind: type_number(kind) for kind in CACHE_TYPES} == numbers


def test_every_type_of_fewer_bits_has_its_rounding():
    assert CACHE_TYPES[0] == "F32"
    assert set(FEWER) <= set(ROUNDINGS)


def test_the_trace_format_names_them_all():
    line = next(
        line for line in (ROOT / "docs/trace-format.md").read_text("utf-8").splitlines() if "settings.type_k" in line
    )
    assert re.findall(r"`(\w+)`", re.search(r"`type_v` \((.*?)\)", line)[1]) == list(CACHE_TYPES)


def test_the_option_names_them_all():
    with pytest.raises(UserError, match=f"--llama-cpp kv=f17: expected one of {', '.join(CACHE_TYPES).lower()}"):
        settings_of(["kv=f17"])


@needs_slices("explain")
@pytest.mark.parametrize("kind", FEWER)
def test_products_that_read_a_cache_of_fewer_bits_name_its_type(kind, small_model):
    _assert_named(small_model, reading(partial(quantized, kind)), "cache-rounded", f"a cache of type {kind}")


@needs_slices("explain")
@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_of_a_cache_of_blocks_name_its_type(kind, small_model):
    _assert_named(small_model, keeping(partial(quantized, kind)), "cache-rows-rounded", f"keeps its rows as {kind}")


def quantized(kind, x):
    """Values through the blocks of a type."""
    to = gguf.GGMLQuantizationType[kind]
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])
    return gguf.quants.dequantize(gguf.quants.quantize(rows, to), to).reshape(x.shape)


def _assert_named(small_model, edits, cause, says):
    path = small_model("llama", "F16")
    result = diff(record(Engine(path), TOKENS, "engine"), record_faulty(Bug("of fewer bits", edits), path), path)
    assert (result.verdict, result.wrong) == ("noise", ())
    assert [found.causes[0].name for found in result.diagnosis] == [cause]
    assert says in result.summary
