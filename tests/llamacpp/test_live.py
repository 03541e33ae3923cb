"""A prompt is judged while llama.cpp runs it, part by part; what is found is what is found of the whole, recorded."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from queue import Queue

import numpy as np
import pytest
from llamaref.engine import Silent
from models.options import OPTIONS
from models.small import write_model

from llamadiff import compare
from llamadiff.comparison import verbs
from llamadiff.engines.capture_request import request_for
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import USUAL, Run
from llamadiff.judge import by_parts
from llamadiff.judge.by_parts import judged_by_parts
from llamadiff.judge.coverage import BEGINNING, LEAST, free_tokens
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.feed import GROWTH, Feed, LetGoError, Voice
from llamadiff.llamacpp.live import listening
from llamadiff.numerics.extremes import extremes, joined
from llamadiff.system.errors import UserError
from llamadiff.system.progress import silent
from llamadiff.trace.reader import Trace

LONG = 600  # tokens: three parts
QUICK = ("llama", "gemma2", "moe")
ARCHITECTURES = [arch for arch in sorted(OPTIONS) if arch != "gpt2" and not arch.startswith("llama-")]


def tokens(n):
    return tuple(int(token) for token in np.random.default_rng(5).integers(3, 90, n))


def model(arch, folder, kind="F16"):
    options = dict(OPTIONS[arch])
    extra = {**options.pop("extra", {}), "context_length": 8192}
    return write_model(folder / "m.gguf", **{"arch": "llama", "kind": kind, **options, "extra": extra})


def request(path, n, output):
    return replace(request_for(Model(path), Run(tokens=tokens(n)), output), live=True)


def part_of(trace, first, last):
    """Some tokens of a trace of a prompt whose scores were not recorded."""
    info = trace.info
    cut = replace(info, tokens=info.tokens[first:last], positions=info.positions[first:last], n_prefill=last - first)
    return Trace(cut, {name: np.array(trace[name][first:last]) for name in trace}, trace.dtypes)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A model, and a run of three parts that was recorded whole."""
    folder = tmp_path_factory.mktemp("recorded")
    path = model("llama", folder)
    compare(path, tokens=tokens(LONG), save=folder / "kept")
    return path, Trace.open(folder / "kept" / "baseline.safetensors")


def parts_of(trace):
    return [part_of(trace, start, start + LONG // 3) for start in range(0, LONG, LONG // 3)]


def is_clear(path, parts):
    return judged_by_parts(Model(path), parts, LONG, USUAL) is not None


@pytest.mark.parametrize(
    "arch", [arch if arch in QUICK else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHITECTURES]
)
@pytest.mark.parametrize("n", [1, LEAST - 1, LEAST, 300, LONG])
def test_what_is_found_live_is_what_is_found_of_the_whole(arch, n, tmp_path, monkeypatch):
    path = model(arch, tmp_path)
    live = compare(path, tokens=tokens(n))
    monkeypatch.setattr(verbs, "_can_be_live", lambda *_: False)
    whole = compare(path, tokens=tokens(n))
    assert (live.verdict, live.headline, live.free_tokens) == (whole.verdict, whole.headline, whole.free_tokens)
    assert live.logits == whole.logits
    assert [row.tap for row in live.rows] == [row.tap for row in whole.rows]
    for a, b in zip(live.rows, whole.rows, strict=True):
        assert (a.verdict, a.shape, a.drift) == (b.verdict, b.shape, b.drift), a.tap
        assert len(a.local.per_token) == len(b.local.per_token)
        assert a.local.arithmetic == b.local.arithmetic or a.local.nmse == b.local.nmse  # both round alike there
        assert a.local.nmse == pytest.approx(b.local.nmse, rel=0.9, abs=1e-12)
        assert a.local.limit == pytest.approx(b.local.limit)
        assert a.baseline.rms == pytest.approx(b.baseline.rms, rel=1e-12)
        assert a.baseline.mean == pytest.approx(b.baseline.mean, abs=1e-12)
        assert (a.baseline.min, a.baseline.max) == (b.baseline.min, b.baseline.max)
        assert (a.baseline.extremes is None) == (b.baseline.extremes is None)


@pytest.mark.parametrize(("arch", "expected"), [("llama", True), ("gemma2", True), ("mamba2", False)])
def test_a_model_is_cut_where_taps_show_what_goes_on_from_part_to_part(arch, expected, small_model):
    assert Model(small_model(arch)).can_be_cut == expected


def test_parts_before_scores_are_many_have_taps_that_others_lack(tmp_path):
    """The engine makes scores whole while queries times keys are few."""
    path = write_model(tmp_path / "m.gguf", heads=1, kv_heads=1, layers=1, extra={"context_length": 8192})
    found = compare(path, tokens=tokens(4500))
    assert found.verdict == "match"
    assert len(found.rows[-1].local.per_token) == 4500


def test_a_right_run_is_clear_in_parts(recorded):
    path, trace = recorded
    assert is_clear(path, parts_of(trace))


class Reused(Trace):
    """A part whose room is used again at once, for what is wrong."""

    def done_with(self, names):
        for name in [name for name in names if name in self]:
            self[name].fill(np.nan if self[name].dtype.kind == "f" else -1)

    def head(self, n):
        return part_of(self, 0, n) if n < len(self.info.tokens) else super().head(n)


@pytest.mark.parametrize(
    ("arch", "n"),
    [("llama", LONG), ("gemma2", LONG), *((arch, LEAST - 1) for arch in QUICK),
     *(pytest.param(arch, LEAST - 1, marks=pytest.mark.slow) for arch in ARCHITECTURES if arch not in QUICK)],
)  # fmt: skip
def test_nothing_is_read_that_was_let_go(arch, n, tmp_path):
    path = model(arch, tmp_path)
    compare(path, tokens=tokens(n), save=tmp_path / "kept")
    trace = Trace.open(tmp_path / "kept" / "baseline.safetensors")
    reused = [
        Reused(part.info, {name: np.array(part[name]) for name in part}, part.dtypes)
        for part in (parts_of(trace) if n == LONG else [trace])
    ]
    assert judged_by_parts(Model(path), reused, n, USUAL) is not None
    assert all(np.isnan(part["l_out-0"]).all() for part in reused)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", ["embd", "Qcur_rope-0", "kqv_out-1", "ffn_gate-1", "l_out-0", "result_output"])
def test_a_value_that_is_wrong_in_any_part_is_not_clear(name, number, recorded):
    path, trace = recorded
    parts = parts_of(trace)
    values = parts[number].stored(name)
    values[(7, *(3 for _ in values.shape[1:]))] += 0.3 * np.sqrt(np.mean(values**2))
    assert not is_clear(path, parts)


def test_attention_that_lost_the_part_before_is_not_clear(recorded):
    """The second part's as if there were no first; all that comes after it follows from that."""
    path, trace = recorded
    alone = parts_of(trace)[1]
    arrays: dict[str, np.ndarray] = {}

    class Kept(Silent):
        def __call__(self, name, x):
            if name in alone:
                arrays[name] = np.array(x[0]).reshape(alone[name].shape)
            return x

    Model(path).engine.forward(alone.info.tokens, alone.info.positions, tap=Kept())
    forgetful = Trace(alone.info, arrays, dict.fromkeys(arrays, "F32"))
    first, _, third = parts_of(trace)
    assert is_clear(path, [forgetful])  # it is right in itself
    assert not is_clear(path, [first, forgetful, third])


def test_a_run_that_is_not_clear_is_judged_as_a_whole(tmp_path, monkeypatch):
    path = model("llama", tmp_path)
    monkeypatch.setattr(by_parts, "judged_by_parts", lambda *_: None)
    again = compare(path, tokens=tokens(40))
    monkeypatch.setattr(verbs, "_can_be_live", lambda *_: False)
    whole = compare(path, tokens=tokens(40))
    assert again.verdict == "match"
    assert again.rows == whole.rows


def test_whoever_has_read_enough_gets_it_all_once_more(recorded, tmp_path):
    path, trace = recorded
    with Child() as child, listening(request(path, LONG, tmp_path / "t"), silent, child, free_tokens) as run:
        assert [len(part.info.tokens) for part in run.parts] == [200, 200, 200]
        assert np.array_equal(run.parts[2]["l_out-1"], trace["l_out-1"][400:])
        whole = run.whole()
    assert set(whole) == set(trace)
    assert all(np.array_equal(whole[name], trace[name]) for name in trace)


def test_of_a_run_that_was_read_the_beginning_is_left(recorded, tmp_path):
    path, trace = recorded
    with Child() as child, listening(request(path, LONG, tmp_path / "t"), silent, child, free_tokens) as run:
        for part in run.parts:
            assert all(part[name].shape[0] == 200 for name in part)
            part.done_with(part)
        left = run.left()
    assert left.info.tokens == trace.info.tokens
    assert left.info.producer["weights_read"] == trace.info.producer["weights_read"]
    assert set(left) == set(trace)
    assert np.array_equal(left["result_output"], trace["result_output"][:BEGINNING])


def test_the_beginning_is_kept_until_it_was_read(recorded, tmp_path):
    path, trace = recorded
    with Child() as child, listening(request(path, LONG, tmp_path / "t"), silent, child, free_tokens) as run:
        head = run.parts[0].head(BEGINNING)
        assert [array.shape for array in run.parts[2].values()]  # the run has ended
        assert all(np.array_equal(head[name], trace[name][:BEGINNING]) for name in trace)


def test_who_waits_for_a_run_that_dies_is_told(recorded, tmp_path):
    path, _ = recorded
    with Child() as child, listening(request(path, LONG, tmp_path / "t"), silent, child, free_tokens) as run:
        child._process.kill()
        with pytest.raises(UserError, match=r"llama\.cpp's process was killed by signal 9"):
            [part[name] for part in run.parts for name in part]


class Reader:
    """What a Feed says, and what it is told; with shared memory, or without."""

    def __init__(self, path, is_shared=True):
        self.said, self.data, self.hear = [], [], Queue()
        self.path, self._file = path, path.open("w+b")
        self.feed = Feed(self, self.hear, self._file.fileno() if is_shared else None, once=True)

    def send(self, event, parts=()):
        """As Voice.send."""
        self.said.append(json.loads(json.dumps(event)))
        self.data.append([bytes(part) for part in parts])

    def tell(self, **words):
        self.hear.put(json.dumps(words))

    def values(self, number):
        place, size, is_shared = self.said[number]["blobs"][0]
        found = self.path.read_bytes()[place : place + size] if is_shared else self.data[number][0]
        return np.frombuffer(found, np.float32)

    def place(self, number):
        return self.said[number]["blobs"][0][0]

    def read(self, *numbers):
        self.tell(read=[self.place(number) for number in numbers])


def rows(number, count=4):
    return np.full((count, 1024), number, np.float32)


def put(feed, name, values):
    feed.tap({"tap": name, "start": 0}, values.tobytes())


def give(feed, name, values):
    """A tap, and that it is there."""
    put(feed, name, values)
    feed.tell()


@pytest.fixture(params=[True, False], ids=["shared", "behind the words"])
def reader(request, tmp_path):
    return Reader(tmp_path / "f", request.param)


def test_what_was_read_makes_room_for_what_comes(reader):
    size = rows(0).nbytes
    reader.feed._most = 3 * size
    for number in range(100):
        give(reader.feed, f"tap-{number}", rows(number))
        assert (reader.values(number) == number).all()
        if number >= 2:
            assert (reader.values(number - 1) == number - 1).all()  # it was not read yet
            reader.read(number - 2)
    assert max(reader.place(number) for number in range(100)) < 3 * size
    assert reader.path.stat().st_size in (0, GROWTH)


@pytest.mark.parametrize("seed", range(5))
def test_room_of_any_size_is_used_again_and_never_while_somebody_reads_it(reader, seed):
    reader.feed._most = 64 << 12
    drawn, unread = np.random.default_rng(seed), []
    for number in range(400):
        if sum(size for _, size in unread) + (8 << 12) > 32 << 12:
            for place in drawn.permutation(len(unread)):
                told = unread[place][0]
                assert (reader.values(told) == told).all()
                reader.read(told)
            unread = []
        count = int(drawn.integers(1, 9))
        give(reader.feed, f"tap-{number}", rows(number, count))
        unread.append((number, count << 12))
    assert max(place + size for place, size, _ in (said["blobs"][0] for said in reader.said)) <= 64 << 12
    while not reader.hear.empty():
        reader.feed._listen()
    left = sum(stop - start for start, stop in reader.feed._gaps)
    assert reader.feed._end == sum(reader.feed._sizes.values()) + left


def test_what_is_larger_than_any_gap_waits_for_one(reader):
    reader.feed._most = 4 * rows(0).nbytes
    for number in range(4):
        give(reader.feed, f"tap-{number}", rows(number))
    for number in (0, 2, 1):  # the last joins the first two
        reader.read(number)
    give(reader.feed, "large", rows(9, 12))
    assert (reader.place(-1), reader.feed._gaps) == (0, [])
    assert (reader.values(3) == 3).all()


def test_what_is_waited_for_has_room(reader):
    """Or else both would wait: the reader for a tap, the writer for the reader."""
    reader.feed._most = 0
    reader.tell(awaits=[0, "third"])
    for number, name in enumerate(("first", "second", "third")):
        put(reader.feed, name, rows(number))
    reader.feed.tell()
    reader.tell(awaits=[0, "second"])  # which was told meanwhile
    reader.tell(enough=True)
    with pytest.raises(LetGoError):
        put(reader.feed, "fourth", rows(3))
    assert [said["tap"] for said in reader.said] == ["first", "second", "third"]


def test_a_tap_of_several_nodes_is_told_when_another_comes(reader):
    for number, name in enumerate(("embd", "embd", "attn_norm-0")):
        put(reader.feed, name, rows(number))
    assert [said["tap"] for said in reader.said] == ["embd"]
    assert (reader.values(0) == 1).all()
    with pytest.raises(LetGoError):  # what was told was not all of it
        put(reader.feed, "embd", rows(3))


def test_bytes_behind_words_are_as_many_as_the_words_say():
    stream = io.BytesIO()
    told = Feed(Voice(stream), Queue(), None, once=False)
    told.send({"node": 1}, b"\n{", b"", b"abc")
    told.send({"node": 2})
    line, rest = stream.getvalue().split(b"\n", 1)
    assert [size for _, size, is_shared in json.loads(line)["blobs"] if not is_shared] == [2, 0, 3]
    assert rest == b"\n{abc" + b'{"node": 2}\n'


def test_extremes_of_parts_are_those_of_the_whole():
    values = np.random.default_rng(2).standard_normal((90, 40)) ** 3 + np.linspace(0, 9, 90)[:, None]
    counts = [20, 41, 29]
    parts = np.split(values, np.cumsum(counts)[:-1])
    found = joined([extremes(part, part.mean()) for part in parts], counts)
    whole = extremes(values, values.mean())
    assert found.kurtosis == pytest.approx(whole.kurtosis, rel=1e-12)
    assert (found.peak, found.token, found.channel, found.times) == (
        whole.peak, whole.token, whole.channel, whole.times
    )  # fmt: skip
