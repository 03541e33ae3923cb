"""Kernels are found on a device of our own, which says itself what it runs as one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from llamadiff.ext.fused.search import Found, Graph, Pass, Value, kernels
from llamadiff.ext.graph.check import NodeCheck
from llamadiff.llamacpp.sent_tensor import SentTensor

LAYER = 12  # nodes


def nodes(count):
    return [
        NodeCheck(f"n-{place // LAYER}", None, f"OP{place % LAYER}", None, None, "f32", (1, 1, 1, 3), (), 0, 0.0, "F32")
        for place in range(count)
    ]


def sent(values):
    data = np.asarray(values, np.float32)
    steps = [4, 12, 12, 12]
    return Value(SentTensor({"name": "n", "type": "f32", "ne": [3, 1, 1, 1], "nb": steps}, data.tobytes()))


class Device:
    """Each node adds to the one before; nodes of a kernel add otherwise, by a last digit or by far."""

    def __init__(self, count, fuses, off=1e-6, is_steady=True, worse_from=1 << 30, inner=0.0, reads=()):
        self.worse_from, self.inner = worse_from, inner
        self.graph = Graph(nodes(count), [frozenset(dict(reads).get(place, ())) for place in range(count)])
        self.count, self.fuses, self.off, self.is_steady = count, fuses, off, is_steady
        self.runs = 0

    def together(self, hidden):
        """The kernels of a pass: from the left, the longest that fits where nobody looks."""
        place, found = 0, []
        while place < self.count:
            fits = [
                last for first, last in self.fuses if first == place and all(n in hidden for n in range(first, last))
            ]
            found.append((place, max(fits, default=place)))
            place = found[-1][1] + 1
        return found

    def run(self, asked):
        self.runs += 1
        hidden = {n for first, last in asked.hidden for n in range(first, last + 1)}
        values, x = {}, np.ones(3, np.float32)
        for first, last in self.together(hidden):
            for place in range(first, last + 1):
                x = np.float32(1.01) * x + np.float32(place % 7)
                values[place] = x if last == first else x * np.float32(1 + self.inner)
            if last > first:
                x = x * np.float32(1 + (self.off if first < self.worse_from else 1e-2))
            values[last] = x
        if not self.is_steady:
            values = {place: x * np.float32(1 + 1e-3 * self.runs) for place, x in values.items()}
        if asked.judged is not None:
            return {asked.judged: ("judged", asked.judged, asked.value)}
        return {place: sent(values[place]) for place in (*asked.reported, *asked.left)}


def looked_for(device):
    found = list[Found]()

    def search():
        found.append((yield from kernels(device.graph)))

    asking = search()
    asked = next(asking, None)
    while asked is not None:
        answer = device.run(asked)
        with suppress(StopIteration):
            asked = asking.send(answer)
            continue
        asked = None
    return found[0]


@pytest.mark.parametrize("off", [1e-6, 1e-2])
@pytest.mark.parametrize(
    "fuses",
    [
        [(3, 4)],
        [(0, 2)],
        [(2, 3), (6, 9)],
        [(1, 2), (3, 4)],
        [(4, 5), (4, 8)],
        [(10, 12)],
        [(2, 3), (14, 16), (30, 34)],
    ],
    ids=str,
)
def test_what_runs_as_one_is_found(fuses, off):
    found = looked_for(Device(3 * LAYER, fuses, off))
    longest = {max(pair for pair in fuses if pair[0] == first) for first, _ in fuses}
    assert longest <= {(kernel.first, kernel.last) for kernel in found.kernels} <= {*fuses}
    assert found.steady


def test_kernels_of_the_same_nodes_are_judged_once():
    fuses = [(layer * LAYER + 3, layer * LAYER + 5) for layer in range(4)]
    assert [(kernel.first, kernel.last) for kernel in looked_for(Device(4 * LAYER, fuses)).kernels] == [(3, 5)]


def test_a_kernel_that_is_further_off_in_a_later_layer_is_judged_there_too():
    fuses = [(layer * LAYER + 3, layer * LAYER + 5) for layer in range(4)]
    found = looked_for(Device(4 * LAYER, fuses, worse_from=2 * LAYER))
    assert [(kernel.first, kernel.last) for kernel in found.kernels] == [(3, 5), (27, 29)]


@pytest.mark.parametrize("off", [1e-6, 1e-2])
def test_a_value_of_a_kernel_that_others_read_behind_it_is_judged_too(off):
    reads = {place: {place - 1} for place in range(1, LAYER)} | {9: {8, 4}}
    found = looked_for(Device(LAYER, [(3, 6)], off, inner=1e-3, reads=reads))
    assert [(kernel.first, kernel.last, kernel.place) for kernel in found.kernels] == [(3, 6, 6), (3, 6, 4)]
    values = {kernel.place: np.frombuffer(kernel.check[2], np.float32) for kernel in found.kernels}
    right = Device(LAYER, []).run(Pass(reported=(4,)))[4].tensor.values().ravel()
    assert np.allclose(values[4], right * np.float32(1.001), rtol=1e-6)


def test_a_value_of_a_kernel_that_is_what_its_nodes_give_is_judged_by_nobody():
    reads = {place: {place - 1} for place in range(1, LAYER)} | {9: {8, 4}}
    found = looked_for(Device(LAYER, [(3, 6)], reads=reads))
    assert [(kernel.first, kernel.last, kernel.place) for kernel in found.kernels] == [(3, 6, 6)]


def test_a_view_of_what_was_there_before_is_no_value_of_a_kernel():
    of_kernel, of_cache = (
        Graph([replace(each, op="VIEW" if place == 4 else each.op) for place, each in enumerate(nodes(LAYER))],
              [frozenset({4} if place == 9 else ()) for place in range(LAYER)], views)
        for views in ({4: 3}, {})
    )  # fmt: skip
    assert (of_kernel.outputs(3, 6), of_cache.outputs(3, 6)) == ((4,), ())


@pytest.mark.parametrize(("kind", "dtype"), [("i32", np.int32), ("f16", np.float16)])
def test_a_part_of_a_memory_goes_into_it(kind, dtype):
    whole, size = np.arange(8, dtype=dtype).reshape(2, 4), np.dtype(dtype).itemsize
    said = {"name": "whole", "type": kind, "ne": [4, 2, 1, 1], "nb": [size, 4 * size, 8 * size, 8 * size]}
    part = np.array([[30, 31, -1, -1], [32, 33, -1, -1]], dtype).tobytes()[: 6 * size]  # as far as its last value
    view = {**said, "name": "part", "ne": [2, 2, 1, 1], "view": [1, size]}
    both = Value(SentTensor(said, whole.tobytes())).with_view(Value(SentTensor(view, part)))
    assert both.tensor.values().reshape(2, 4).tolist() == [[0, 30, 31, 3], [4, 32, 33, 7]]


def test_nothing_is_found_where_nothing_runs_as_one():
    device = Device(3 * LAYER, [])
    assert looked_for(device) == Found()
    assert device.runs == 6


def test_the_judge_is_given_what_the_kernel_gave():
    device = Device(LAYER, [(3, 5)])
    _, place, value = looked_for(device).kernels[0].check
    alone = np.frombuffer(value, np.float32) / np.float32(1 + device.off)
    x = np.ones(3, np.float32)
    for n in range(place + 1):
        x = np.float32(1.01) * x + np.float32(n % 7)
    assert np.allclose(alone, x, rtol=1e-6)
    assert not np.array_equal(np.frombuffer(value, np.float32), x)


def test_a_device_that_gives_other_bits_each_time_is_said_to():
    assert not looked_for(Device(LAYER, [(3, 5)], is_steady=False)).steady
