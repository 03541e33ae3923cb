"""llama.cpp's process tells of its run through memory whose room is used again, or behind its words."""

from __future__ import annotations

import io
import json
from queue import Queue

import numpy as np
import pytest

from llamadiff.llamacpp.tensor_transport import GROWTH, Feed, Voice


class Reader:
    """What a Feed says, and what it is told; with shared memory, or without."""

    def __init__(self, path, is_shared=True):
        self.said, self.data, self.hear = [], [], Queue()
        self.path, self._file = path, path.open("w+b")
        self.feed = Feed(self, self.hear, self._file.fileno() if is_shared else None)

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


def test_a_tap_of_several_nodes_is_told_when_another_comes(reader):
    for number, name in enumerate(("embd", "embd", "attn_norm-0")):
        put(reader.feed, name, rows(number))
    assert [said["tap"] for said in reader.said] == ["embd"]
    assert (reader.values(0) == 1).all()


def test_bytes_behind_words_are_as_many_as_the_words_say():
    stream = io.BytesIO()
    told = Feed(Voice(stream), Queue(), None)
    told.send({"node": 1}, b"\n{", b"", b"abc")
    told.send({"node": 2})
    line, rest = stream.getvalue().split(b"\n", 1)
    assert [size for _, size, is_shared in json.loads(line)["blobs"] if not is_shared] == [2, 0, 3]
    assert rest == b"\n{abc" + b'{"node": 2}\n'
