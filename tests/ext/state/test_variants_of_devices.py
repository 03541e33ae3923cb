"""Variants of a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llamadiff.ext.state import variants
from llamadiff.llamacpp.request import CPU, GPU, HELPER, Request


@pytest.mark.parametrize("kind", [CPU, HELPER, GPU])
def test_variants_are_run_on_gpus_alone(kind, monkeypatch):
    monkeypatch.setattr(variants, "probe", lambda settings: SimpleNamespace(devices=(("X1", "of tests", kind),)))
    assert ("device=X1" in variants.variants_of(Request("m.gguf", tokens=(1, 2)))) == (kind == GPU)
