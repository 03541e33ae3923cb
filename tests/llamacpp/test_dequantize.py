"""ggml's decoding of weights in place of gguf-py's: only where both give the same bits."""

from __future__ import annotations

import threading

import gguf
import numpy as np
import pytest
from llamaref import Weights
from models.small import write_model

import llamadiff
from llamadiff.engines.run_spec import Run
from llamadiff.llamacpp import dequantize
from llamadiff.llamacpp.dequantize import Dequantizer
from llamadiff.system.errors import UserError

TYPES = [
    "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
    "Q1_0",
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # some bytes are scales that are not finite
NAME = "blk.0.ffn_down.weight"


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    """A model of the named type, any blocks of it: whatever the bytes, there is one right decoding."""

    def get(kind):
        number = gguf.GGMLQuantizationType[kind]
        values, size = gguf.GGML_QUANT_SIZES[number]
        rng, shape = np.random.default_rng(1), (256, 512 // values * size)
        if kind == "F16":
            data = rng.standard_normal((256, 512)).astype(np.float16)
        else:
            data = rng.integers(0, 256, shape, dtype=np.uint8), number
        return write_model(tmp_path_factory.mktemp("m") / f"{kind}.gguf", kind="F32", tensors={NAME: data})

    return get


@pytest.mark.parametrize("kind", TYPES)
def test_ggml_decodes_every_type_as_gguf_py_does(some, kind):
    weights = Weights(some(kind))
    dequantizer = Dequantizer(weights)
    decode = dequantizer.decoder(NAME)
    assert decode is not None
    assert dequantizer.trusted == {NAME}
    assert np.array_equal(decode(weights.read_raw(NAME)), weights.whole(NAME), equal_nan=True)


def test_a_decoder_that_is_off_by_one_bit_is_refused_and_named(some, monkeypatch):
    right = Dequantizer.of_type

    def wrong(self, kind):
        decode = right(self, kind)
        return None if decode is None else lambda rows: np.nextafter(decode(rows), np.float32(np.inf))

    path = some("Q8_0")
    before = llamadiff.compare(path, [1, 2, 3])
    monkeypatch.setattr(Dequantizer, "of_type", wrong)
    assert Dequantizer(Weights(path)).decoder(NAME) is None  # gguf-py decodes
    after = llamadiff.compare(path, [1, 2, 3])
    assert (before.decoding.by_ggml, before.decoding.refused) == (1, ())
    assert (after.decoding.by_ggml, after.decoding.refused) == (0, (NAME,))
    assert [row.verdict for row in after.rows] == [row.verdict for row in before.rows]


def test_without_the_library_gguf_py_decodes(some, monkeypatch):
    def missing(stem):
        raise UserError("not installed")

    monkeypatch.setattr(dequantize, "load", missing)
    weights = Weights(some("Q5_K"))  # of which nothing is compiled here either
    assert Dequantizer(weights).decoder(NAME) is None
    assert weights.product(NAME, np.ones((1, 512), np.float32)).shape == (1, 256)


def test_no_thread_outlives_a_run_that_is_refused(some, monkeypatch):
    """Python's exit while a thread is inside NumPy or ggml would abort the process."""
    right, begun, ends = Dequantizer._choose_decoder, threading.Event(), list[threading.Event]()

    class Begun(threading.Thread):
        def start(self):
            super().start()
            begun.wait()

    def event():
        ends.append(threading.Event())
        return ends[-1]

    def busy(self, name):
        """It is at work when its end is asked for."""
        begun.set()
        ends[-1].wait()
        return right(self, name)

    monkeypatch.setattr(dequantize, "Event", event)
    monkeypatch.setattr(dequantize, "Thread", Begun)
    monkeypatch.setattr(Dequantizer, "_choose_decoder", busy)
    before = threading.enumerate()
    with pytest.raises(UserError, match="out of range"):
        llamadiff.compare(some("Q8_0"), Run(tokens=(10**6,)))
    assert begun.is_set()
    assert set(threading.enumerate()) <= set(before)  # others may have ended meanwhile


def test_what_cannot_be_decoded_is_told_to_who_asks(some, monkeypatch, capfd):
    tried = threading.Event()

    def unable(self, name, data):
        tried.set()
        raise ValueError(name)

    monkeypatch.setattr(Weights, "decode_rows", unable)
    dequantizer = Dequantizer(Weights(some("Q8_0")))
    with dequantizer.checking_ahead():
        tried.wait()
    assert capfd.readouterr().err == ""
    with pytest.raises(ValueError, match=NAME):
        dequantizer.decoder(NAME)
