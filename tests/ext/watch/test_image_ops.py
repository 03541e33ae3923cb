"""Ops of vision and image models, by ggml's own API."""

from __future__ import annotations

import numpy as np
import pytest
from one_op import BOOL, FLOAT, INT, LONG, PLAIN, SAME, Graph, Input, check, normal

from llamadiff.ext.graph.op import Array

POOL_MAX, POOL_AVG = 0, 1
NEAREST, BILINEAR, BICUBIC, ALIGN_CORNERS, ANTIALIAS = 0, 1, 2, 1 << 8, 1 << 9


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graph()


PLACES = [(1, 1, 0, 0, 1, 1), (2, 1, 1, 2, 1, 1), (1, 3, 2, 1, 2, 1), (2, 2, 0, 3, 1, 2)]


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("places", PLACES)
def test_im2col(graph: Graph, places: tuple[int, ...], kind: int) -> None:
    inputs = [normal(4, 3, 3, 2), normal(2, 3, 7, 8)]
    check(graph, "im2col", inputs, [*[INT] * 6, BOOL, INT], [*places, True, kind], SAME)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2)])
def test_im2col_of_signals(graph: Graph, stride: int, padding: int, dilation: int, kind: int) -> None:
    inputs = [normal(1, 5, 3, 3), normal(1, 2, 3, 9)]
    places = [stride, 0, padding, 0, dilation, 0]
    check(graph, "im2col", inputs, [*[INT] * 6, BOOL, INT], [*places, False, kind], SAME)


@pytest.mark.parametrize("kernels", [np.float32, np.float16])
@pytest.mark.parametrize("channels_inside", [False, True])
@pytest.mark.parametrize("places", PLACES)
def test_conv_2d_dw(graph: Graph, places: tuple[int, ...], channels_inside: bool, kernels: type) -> None:
    kernel, image = normal(5, 1, 3, 2).astype(kernels), normal(2, 5, 7, 8)
    inputs: list[Input] = [kernel, image]
    if channels_inside:
        inputs = [(kernel.transpose(2, 3, 1, 0), (3, 2, 0, 1)), (image.transpose(0, 2, 3, 1), (2, 0, 1, 3))]
    check(graph, "conv_2d_dw_direct", inputs, [INT] * 6, list(places), PLAIN)


@pytest.mark.parametrize("pool", [POOL_MAX, POOL_AVG])
@pytest.mark.parametrize(("size", "stride", "padding"), [(2, 2, 0), (3, 1, 1), (4, 3, 2)])
def test_pool_1d(graph: Graph, pool: int, size: int, stride: int, padding: int) -> None:
    check(graph, "pool_1d", [masked(normal(2, 3, 4, 11), pool)], [INT] * 4, [pool, size, stride, padding], PLAIN)


@pytest.mark.parametrize("pool", [POOL_MAX, POOL_AVG])
@pytest.mark.parametrize("window", [(2, 2, 2, 2, 0, 0), (3, 1, 3, 1, 0, 0), (2, 3, 1, 2, 1, 1), (4, 3, 3, 1, 2, 1)])
def test_pool_2d(graph: Graph, pool: int, window: tuple[int, ...]) -> None:
    types = [*[INT] * 5, FLOAT, FLOAT]
    check(graph, "pool_2d", [masked(normal(2, 3, 6, 9), pool)], types, [pool, *window], PLAIN)


def masked(x: Array, pool: int) -> Array:
    """Windows of nothing but -inf, for maxima."""
    if pool == POOL_MAX:
        x[..., :4, :5] = -np.inf
    return x


MODES = {
    "nearest": NEAREST,
    "nearest aligned": NEAREST | ALIGN_CORNERS,
    "bilinear": BILINEAR,
    "bilinear aligned": BILINEAR | ALIGN_CORNERS,
    "bilinear smoothed": BILINEAR | ANTIALIAS,
    "bilinear smoothed aligned": BILINEAR | ANTIALIAS | ALIGN_CORNERS,
    "bicubic": BICUBIC,
    "bicubic aligned": BICUBIC | ALIGN_CORNERS,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2, 3, 10, 14), (2, 3, 3, 4), (2, 3, 8, 2), (4, 6, 1, 9), (2, 3, 5, 7)])
def test_upscale(graph: Graph, mode: str, shape: tuple[int, ...]) -> None:
    check(graph, "interpolate", [normal(2, 3, 5, 7)], [*[LONG] * 4, INT], [*reversed(shape), MODES[mode]], PLAIN)


@pytest.mark.parametrize(("height", "width", "window"), [(4, 4, 2), (5, 7, 3), (2, 3, 4), (6, 9, 3)])
def test_windows_parted_and_joined(graph: Graph, height: int, width: int, window: int) -> None:
    check(graph, "win_part", [normal(1, height, width, 5)], [INT], [window], SAME)
    count = -(-height // window) * -(-width // window)
    check(graph, "win_unpart", [normal(count, window, window, 5)], [INT] * 3, [width, height, window], SAME)
