"""A prompt is judged while llama.cpp runs it; what is found is what is found of its trace when that is whole."""

from __future__ import annotations

import os
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import astuple, replace

import numpy as np
import pytest
from models.options import OPTIONS, write_long
from optional import needs_slices

from llamadiff import compare
from llamadiff.engines.capture_request import request_for
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import Run
from llamadiff.engines.select import capture_run
from llamadiff.judge.coverage import LEAST
from llamadiff.judge.lanes import Source
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.readers import TapReader
from llamadiff.llamacpp.request import SCORES
from llamadiff.llamacpp.streaming import StreamingTrace, streamed_trace
from llamadiff.numerics.policies import F32
from llamadiff.system.errors import NoRoomError, UserError
from llamadiff.system.progress import silent
from llamadiff.trace import writer
from llamadiff.trace.reader import Trace
from llamadiff.verbs import verbs

LONG = 600  # tokens: llama.cpp runs them in three parts
QUICK = ("llama", "gemma2", "moe", "mamba2")
ARCHITECTURES = [arch for arch in sorted(OPTIONS) if arch != "gpt2" and not arch.startswith("llama-")]


def tokens(n):
    return tuple(int(token) for token in np.random.default_rng(5).integers(3, 90, n))


def model(arch, folder, kind="F16"):
    return write_long(folder / "m.gguf", arch, kind)


@contextmanager
def recorded_first(engine, request, progress, child):
    yield capture_run(engine, request, progress, child)


@pytest.fixture
def both(monkeypatch):
    """What is found meanwhile, and what is found of the whole."""

    def found(*args, **kwargs):
        meanwhile = compare(*args, **kwargs)
        with monkeypatch.context() as patched:
            patched.setattr(verbs, "stream_run", recorded_first)
            return meanwhile, compare(*args, **kwargs)

    return found


def assert_same(found, whole):
    assert (found.verdict, found.headline, found.free_tokens) == (whole.verdict, whole.headline, whole.free_tokens)
    rows = [[astuple(row) for row in side.rows] for side in (found, whole)]  # in which NaN, for unknown, is NaN
    assert rows[0] == rows[1]
    assert (found.logits, found.missing) == (whole.logits, whole.missing)
    assert (found.model, found.diagnosis, found.coverage) == (whole.model, whole.diagnosis, whole.coverage)
    said = [side.baseline for side in (found, whole)]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "arch", [arch if arch in QUICK else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHITECTURES]
)
@pytest.mark.parametrize("n", [1, LEAST - 1, LEAST, 300, LONG])
def test_what_is_found_meanwhile_is_what_is_found_of_the_whole(arch, n, tmp_path, both):
    found, whole = both(model(arch, tmp_path), tokens(n))
    assert found.verdict == "match"
    assert_same(found, whole)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A model, llama.cpp's run, and the engine's, in a folder."""
    folder = tmp_path_factory.mktemp("recorded")
    path = model("llama", folder, "Q8_0")
    compare(path, tokens(40), save=folder / "kept")
    return path, folder / "kept"


def altered(trace, folder, name):
    """The file of a run in which one value is wrong."""
    arrays = {each: np.array(trace[each]) for each in trace}
    values = arrays[name]
    values[(7, *(3 for _ in values.shape[1:]))] += 0.3 * np.sqrt(np.mean(values**2))
    with writer.TraceWriter(folder / "altered.safetensors") as written:
        for each, array in arrays.items():
            written.add(each, array)
        written.finish(trace.info)
    return folder / "altered.safetensors"


@pytest.mark.parametrize("name", ["embd", "Qcur_rope-0", "ffn_gate-1", "result_output"])
def test_a_candidate_is_judged_meanwhile_too(name, recorded, tmp_path, both):
    path, kept = recorded
    candidate = altered(Trace.open(kept / "engine.safetensors"), tmp_path, name)
    found, whole = both(path, tokens(40), candidate=candidate)
    assert next(row.tap for row in found.rows if row.verdict == "wrong") == name
    assert_same(found, whole)


@needs_slices("explain")
def test_a_wrong_op_of_llama_cpp_is_found_meanwhile(recorded, both, monkeypatch):
    path, _ = recorded
    right = TapReader._tap

    def wrong(self, answer, data):
        if answer["tap"] == "ffn_up-1":
            values = np.frombuffer(data[0], np.float32).copy()
            data = [memoryview(values * np.float32(1.2)).cast("B")]
        right(self, answer, data)

    monkeypatch.setattr(TapReader, "_tap", wrong)
    found, whole = both(path, tokens(40))
    assert [row.tap for row in found.rows if row.verdict == "wrong"] == ["ffn_up-1", "ffn_swiglu-1"]
    assert found.diagnosis
    assert_same(found, whole)


@pytest.mark.parametrize("gone", ["ffn_up-1", "l_out-0", "result_output"])
def test_a_tap_that_never_comes_is_missing(gone, recorded, both, monkeypatch):
    path, _ = recorded
    right = TapReader.read_answer
    monkeypatch.setattr(
        TapReader, "read_answer", lambda self, answer, data: answer.get("tap") != gone and right(self, answer, data)
    )
    found, whole = both(path, tokens(40))
    assert found.missing == (gone,)
    assert_same(found, whole)


def request(path, n, folder):
    return request_for(Model(path), Run(tokens=tokens(n)), folder / "t.safetensors")


@contextmanager
def begun(asked):
    with Child() as child, streamed_trace(asked, silent, child) as trace:
        yield trace


def go_on_after(monkeypatch, awaited):
    """A run is read on from its last layer only when ``awaited()`` has come."""
    right = TapReader._tap

    def waits(self, answer, data):
        if answer["tap"] == "l_out-1":
            awaited().result(60)
        right(self, answer, data)

    monkeypatch.setattr(TapReader, "_tap", waits)


def test_taps_are_read_before_the_run_is_over(recorded, tmp_path, monkeypatch):
    path, _ = recorded
    seen = Future()
    go_on_after(monkeypatch, lambda: seen)
    with begun(request(path, 40, tmp_path)) as trace:
        first = np.array(trace["l_out-0"])
        assert "sha256" not in trace.info.model
        assert not (tmp_path / "t.safetensors").exists()
        seen.set_result(None)
        trace.wait()
        whole = Trace.open(tmp_path / "t.safetensors")
        assert trace.info == whole.info
        assert np.array_equal(first, whole["l_out-0"])
        assert {name: trace.dtypes[name] for name in trace} == whole.dtypes


@pytest.mark.parametrize(("n", "growth"), [(LONG, 1 << 16), (40, 64 << 20)])
def test_what_was_read_meanwhile_is_what_is_in_the_file(n, growth, recorded, tmp_path, monkeypatch):
    path, _ = recorded
    monkeypatch.setattr(writer, "_GROWTH", growth)
    with begun(request(path, n, tmp_path)) as trace:
        read = {name: trace[name] for name in trace}
        trace.forget(read)
        trace.wait()
        whole = Trace.open(tmp_path / "t.safetensors")
        assert set(read) == set(whole)
        assert any(name.startswith(SCORES) for name in read) == (n == 40)
        assert all(np.array_equal(read[name], whole[name]) for name in whole)
        assert trace.head(3).info == whole.head(3).info


@pytest.mark.slow  # llama.cpp runs 8,000 tokens
def test_no_prompt_is_too_long_for_the_room_before_the_taps(recorded, tmp_path, monkeypatch):
    """What was mapped must not move."""
    path, _ = recorded
    monkeypatch.setattr(writer.TraceWriter, "_move_data", None)
    asked = replace(request(path, 8000, tmp_path), wanted=("embd",))
    with begun(asked) as trace:
        assert list(trace) == ["embd"]
        trace.wait()


def test_whoever_waits_for_a_run_that_dies_is_told(recorded, tmp_path, monkeypatch):
    """Killed at the first of its thirty parts, which it cannot have left behind it meanwhile."""
    path, _ = recorded
    dead = Future()
    go_on_after(monkeypatch, lambda: dead)
    with Child() as child, streamed_trace(request(path, 8000, tmp_path), silent, child) as trace:
        child._process.kill()
        dead.set_result(None)
        for wait in (trace.wait, lambda: trace["result_output"], lambda: "result_output" in trace):
            with pytest.raises(UserError, match=r"llama\.cpp's process was killed by signal 9"):
                wait()
    assert not [*tmp_path.iterdir()]


def test_a_refusal_is_told(recorded, tmp_path):
    path, _ = recorded
    asked = replace(request(path, 2, tmp_path), tokens=(1, 9999))
    with pytest.raises(UserError, match="token id 9999 is out of range"), begun(asked):
        pass
    assert not [*tmp_path.iterdir()]


def test_a_disk_that_fills_up_is_told_with_what_is_needed(recorded, tmp_path, monkeypatch):
    path, _ = recorded
    right, left = os.write, [10]

    def full(file, data):
        left[0] -= os.readlink(f"/proc/self/fd/{file}").startswith(str(tmp_path))
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return right(file, data)

    monkeypatch.setattr(os, "write", full)
    with begun(request(path, 40, tmp_path)) as trace:
        assert np.isfinite(trace["embd"]).all()  # what was written stays readable
        with pytest.raises(NoRoomError, match="are needed"):
            trace["result_output"]
    assert not [*tmp_path.iterdir()]


def test_whoever_goes_early_ends_the_run(recorded, tmp_path):
    path, _ = recorded

    def go(child):
        with streamed_trace(request(path, LONG, tmp_path), silent, child) as trace:
            assert trace["embd"].shape[0] == LONG
            raise KeyboardInterrupt

    with Child() as child, pytest.raises(KeyboardInterrupt):
        go(child)
    assert child._process.returncode == -9
    for path in tmp_path.iterdir():  # the run was over before: then its trace is whole
        assert Trace.open(path)["result_output"][LONG - 1].all()


def test_nothing_looks_at_all_taps_before_the_first_is_judged(recorded, tmp_path, monkeypatch):
    """In a run that goes on only when the first layer was judged, with and without a candidate."""
    path, kept = recorded
    judged = []

    def forget(self, names):
        if "l_out-0" in names and not judged[-1].done():
            judged[-1].set_result(None)

    go_on_after(monkeypatch, lambda: judged[-1])
    monkeypatch.setattr(StreamingTrace, "forget", forget)
    for candidate in (None, kept / "engine.safetensors"):
        judged.append(Future())
        assert compare(path, tokens(40), candidate=candidate).verdict == "match"


def test_a_run_that_comes_is_in_float32_without_a_look(recorded, tmp_path):
    path, _ = recorded
    with begun(request(path, 2, tmp_path)) as trace:
        assert trace.is_float32
        trace.wait()
        whole = Source.of("baseline", Trace.open(tmp_path / "t.safetensors"), {"F16"}, [F32])
        own = Source.of("baseline", trace, {"F16"}, [F32])
        assert (own.precision, own.products, own.halves) == (whole.precision, whole.products, whole.halves)
