"""The trace file: streamed, complete or absent, readable by safetensors itself, mapped and not copied."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llamadiff.system.errors import UserError
from llamadiff.trace.metadata import KEY, SCHEMA, Info
from llamadiff.trace.reader import Trace
from llamadiff.trace.writer import TraceWriter, restate

INFO = Info((1, 2, 3), (0, 1, 2), 2, "hello", {"name": "x"}, {"sha256": "0" * 64})


def ramp(*shape, dtype=np.float32):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def test_round_trip(tmp_path):
    path = tmp_path / "t.safetensors"
    with TraceWriter(path) as writer:
        writer.add("embd", ramp(3, 4))
        writer.add("ffn_moe_topk-0", ramp(3, 2, dtype=np.int32))
        writer.add("half", ramp(3, dtype=np.float16))
        assert not path.exists()
        writer.finish(INFO)
    trace = Trace.open(path)
    assert trace.info == INFO
    assert list(trace) == ["embd", "ffn_moe_topk-0", "half"]
    assert all(np.array_equal(trace[name], value) for name, value in load_file(path).items())
    assert np.array_equal(trace["embd"], ramp(3, 4))
    assert isinstance(trace["embd"], np.memmap)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows_may_come_in_several_calls(tmp_path, axis):
    whole = ramp(5, 5, 5)
    with TraceWriter(tmp_path / "t.safetensors") as writer:
        for start, stop in ((0, 3), (3, 4), (4, 5)):
            rows = np.take(whole, range(start, stop), axis=axis)
            writer.add("x", rows, axis, (5, 5, 5), start)
        writer.finish(INFO)
    assert np.array_equal(Trace.open(tmp_path / "t.safetensors")["x"], whole)


def test_scores_of_a_prefill_leave_room_for_later_keys(tmp_path):
    with TraceWriter(tmp_path / "t.safetensors") as writer:
        writer.add("kq-0", np.ones((2, 2, 2), np.float32), 1, (2, 3, 3))
        writer.add("kq-0", np.full((2, 1, 3), 7, np.float32), 1, (2, 3, 3), 2)
        writer.finish(INFO)
    expected = np.array([[1, 1, 0], [1, 1, 0], [7, 7, 7]])
    assert np.array_equal(Trace.open(tmp_path / "t.safetensors")["kq-0"], [expected, expected])


def test_a_header_larger_than_its_room_moves_the_data(tmp_path):
    with TraceWriter(tmp_path / "t.safetensors", expected_taps=0) as writer:
        for i in range(500):
            writer.add(f"l_out-{i}", np.full((2, 3), i, np.float32))
        writer.finish(INFO)
    trace = Trace.open(tmp_path / "t.safetensors")
    assert all((trace[f"l_out-{i}"] == i).all() for i in range(500))


def test_nothing_is_left_when_it_fails(tmp_path):
    def interrupted():
        with TraceWriter(tmp_path / "t.safetensors") as writer:
            writer.add("embd", ramp(3, 4))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_values_of_other_types_are_refused(tmp_path):
    with TraceWriter(tmp_path / "t.safetensors") as writer:
        with pytest.raises(UserError, match="complex64"):
            writer.add("x", ramp(3, dtype=np.complex64))
        writer.add("y", ramp(3, 2))
        with pytest.raises(UserError, match="do not fit"):
            writer.add("y", ramp(3, 2), start=1)


def stranger(path, tensors, **metadata):
    """A trace as somebody else's engine writes it, with safetensors' own library."""
    save_file(tensors, path, {KEY: json.dumps(metadata)})
    return path


def test_a_strangers_trace_needs_schema_and_tokens_only(tmp_path):
    path = stranger(tmp_path / "t.safetensors", {"embd": ramp(2, 4)}, schema=SCHEMA, tokens=[5, 6])
    info = Trace.open(path).info
    assert (info.tokens, info.positions, info.n_prefill) == ((5, 6), (0, 1), 2)


def test_bfloat16_is_widened(tmp_path):
    torch_bits = np.array([0x3F80, 0x4049, 0xC000], np.uint16)
    path = stranger(tmp_path / "t.safetensors", {"embd": torch_bits}, schema=SCHEMA, tokens=[5, 6, 7])
    raw = path.read_bytes().replace(b'"U16"', b'"BF16"')
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size + 1].rstrip(b" ")
    (tmp_path / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw[-6:])
    assert Trace.open(tmp_path / "b.safetensors")["embd"].tolist() == [1.0, 3.140625, -2.0]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"schema": SCHEMA}, "tokens"),
        ({"tokens": [1]}, "schema is None"),
        ({"schema": "other/9", "tokens": [1]}, "other/9"),
        ({"schema": SCHEMA, "tokens": []}, "no tokens"),
        ({"schema": SCHEMA, "tokens": ["a"]}, r"tokens\[0\] is .a.; expected a whole number"),
        ({"schema": SCHEMA, "tokens": [1, 2], "positions": [0]}, "1 positions for 2 tokens"),
        ({"schema": SCHEMA, "tokens": [1, 2], "n_prefill": 3}, "n_prefill"),
        ({"schema": SCHEMA, "tokens": [1, 2], "producer": [1]}, "producer"),
    ],
)
def test_metadata_is_checked(tmp_path, metadata, message):
    with pytest.raises(UserError, match=message):
        Trace.open(stranger(tmp_path / "t.safetensors", {"embd": ramp(2, 4)}, **metadata))


@pytest.mark.parametrize("more", [10, 100_000], ids=["in place", "anew"])
def test_words_about_a_run_are_replaced(more, tmp_path):
    path, info = tmp_path / "t.safetensors", Info((1, 2), (0, 1), 2, producer={"name": "llama.cpp"})
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    with TraceWriter(path, 1) as writer:
        writer.add("embd", values)
        writer.finish(info)
    restate(path, replace(info, producer={"name": "llama.cpp", "checked": {"engine": "x" * more}}))
    again = Trace.open(path)
    assert again.info.producer["checked"] == {"engine": "x" * more}
    assert np.array_equal(again["embd"], values)
    assert [file.name for file in tmp_path.iterdir()] == ["t.safetensors"]
