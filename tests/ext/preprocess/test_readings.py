"""What is read off two pictures or sounds, without a processor: numbers, curves, mixtures, places, filters."""

from __future__ import annotations

import numpy as np
import pytest
from ext.preprocess.strangers import photograph
from optional import needs

from llamadiff.ext.preprocess.changes import Change
from llamadiff.ext.preprocess.curves import curve_said, mixture_of, mixture_said, noise_said
from llamadiff.ext.preprocess.dials import Dial, turned
from llamadiff.ext.preprocess.filters import resized
from llamadiff.ext.preprocess.fitting import Fit
from llamadiff.ext.preprocess.lines import of_sound
from llamadiff.ext.preprocess.maps import cuts_of, made, map_of, turned_back
from llamadiff.ext.preprocess.sounds import factored


@pytest.mark.parametrize(("number", "whole"), [(0.37, False), (2.2, False), (41.0, True), (97.0, True)])
def test_a_number_is_found_in_as_few_digits_as_it_has(number, whole):
    dial = Dial("", str, lambda n: {"n": n}, (0.1, 1.0, 3.0, 60.0, 100.0), whole=whole)
    found = [change for _, change in turned([dial], lambda each: abs(np.log(each.request["n"] / number)), 9.0, 1)]
    assert [each.request["n"] for each in found] == [number]


def test_a_number_that_changes_nothing_is_none():
    dial = Dial("", str, lambda n: {"n": n}, (1.0, 2.0))
    assert list(turned([dial], lambda _: 1.0, 1.0, 1)) == []
    assert isinstance(dial.change(1.0), Change)


LEVELS = np.arange(256.0)
CURVES = {
    "the power 2.2 of it is taken (gamma)": 255 * (LEVELS / 255) ** 2.2,
    "20 to 235 are stretched to 0 to 255": np.clip((LEVELS - 20) * 255 / 215, 0, 255),
    "inverted, 255 less the level": 255 - LEVELS,
    "4 bits are kept of 8": LEVELS // 16 * 16,
    "0, 64, 128, 192, 255 become 0, 64, 100, 100, 100": np.minimum(LEVELS, 100),
}


@pytest.mark.parametrize("said", CURVES)
def test_a_curve_has_its_name(said):
    assert curve_said([np.rint(CURVES[said])], np.tile(LEVELS, (1, 1, 4, 1))) == said


MIXTURES = {
    "the picture is made grey, by the weights of the mean": np.full((3, 3), 1 / 3),
    "the picture is made grey by 0.500, 0.500, 0.000 of R, G and B": np.array([[0.5, 0.5, 0]] * 3),
    "saturation is 0.5 times as much": 0.5 * np.eye(3) + 0.5 * np.array([0.299, 0.587, 0.114]),
    "each level is 0.8 times itself, +0 (contrast, brightness)": 0.8 * np.eye(3),
    "channels are mixed: R = 0.900, 0.100, 0.000 of R, G, B; G = 0.000, 0.700, 0.300 of R, G, B; "
    "B = 0.000, 0.000, 1.000 of R, G, B": np.array([[0.9, 0.1, 0], [0, 0.7, 0.3], [0, 0, 1]]),
}


@pytest.mark.parametrize("said", MIXTURES)
def test_a_mixture_of_channels_has_its_name(said):
    run = np.random.default_rng(2).uniform(20, 230, (1, 3, 20, 20))
    dump = np.einsum("ij,tjrc->tirc", MIXTURES[said], run)
    assert mixture_said(*mixture_of(dump, run)) == said


def test_noise_goes_with_nothing():
    random = np.random.default_rng(4)
    run = np.cumsum(random.uniform(-4, 4, (1, 3, 40, 40)), -1)
    assert "noise of 2.98 levels" in noise_said(run + 3 * random.standard_normal(run.shape), run)
    assert noise_said(run + np.roll(run, 1, -1), run) is None
    assert noise_said(run * 1.2, run) is None


@needs("PIL")
@pytest.mark.parametrize("turn", [0, 5])
def test_a_part_of_a_picture_is_found_where_it_lies(turn):
    source = np.asarray(photograph(90, 65), np.float64).transpose(2, 0, 1)
    part = turned_back(resized(source, 40, 55, "bicubic", {})[:, 7:35, 11:47], turn)
    found = map_of(part, source)
    upright = (28, 36)
    fits = [cut for cut in cuts_of(found, upright, source.shape[1:])
            if (given := made(cut, source, upright, "bicubic", {})) is not None and given.shape == part.shape
            and np.array_equal(given, part)]  # fmt: skip
    assert [(each.size, each.place, each.turn) for each in fits[:1]] == [((40, 55), (7, 11), turn)]


def test_a_filter_is_read_off_its_response():
    weights = np.array([1.0, -1.4, 0.6])
    cosines = np.array([weights @ weights, *(2 * weights[n:] @ weights[:-n] for n in (1, 2))])
    assert np.allclose(factored(cosines), weights, atol=1e-9)


def test_a_floor_is_said_with_its_power():
    """llama.cpp's in 2026, of a quiet sound: 2^-24."""
    floor = Fit(False, True, np.ones(1), np.zeros(1), 0.5, 0.6)
    step, says = of_sound(floor, True, ((np.log10(2.0**-24) + 4) / 4, -1.41))
    assert (step, "as a power of 5.96e-08 is" in says, "the processor's at -1.41" in says) == ("clamp", True, True)
