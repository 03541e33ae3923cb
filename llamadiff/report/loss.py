"""What quantization costs, as cells of tables that every format has. Computes nothing."""

from __future__ import annotations

import math

from llamadiff.loss.result import Contribution, Loss
from llamadiff.loss.said import chosen, tidy, told
from llamadiff.loss.statistics import Estimate, Statistic
from llamadiff.report.terminal.escape import tiny

Cells = list[tuple[str, ...]]
TENSORS = 10  # that a table has
TENSOR_TITLES = ("tensor", "type", ">KL it costs", ">share", ">predicted", ">bytes to restore")
LAYER_TITLES = (">layer", ">made here", "at", ">with what is inherited")
STATISTIC_TITLES = ("statistic", ">value", ">error")
CHOICE_TITLES = ("tensor", "type")


def loss_tables(loss: Loss | None) -> list[tuple[str, tuple[str, ...], Cells]]:
    """Every table with its name and titles; none where no two files were compared."""
    if loss is None:
        return []
    tables = [
        ("Tensors that cost most", TENSOR_TITLES, tensor_cells(loss)),
        ("Bytes spent on", CHOICE_TITLES, choice_cells(loss)),
        ("Statistics", STATISTIC_TITLES, statistic_cells(loss)),
        ("Made in each layer", LAYER_TITLES, layer_cells(loss)),
    ]
    return [(name, titles, cells) for name, titles, cells in tables if cells]


def tensor_cells(loss: Loss) -> Cells:
    """The tensors that cost most."""
    return [_tensor(one, loss) for one in loss.contributions[:TENSORS]]


def _tensor(one: Contribution, loss: Loss) -> tuple[str, ...]:
    whole = loss.weighed.value
    measured = told(one.measured).removeprefix("KL ") if one.measured is not None else ""
    share = f"{100 * one.value / whole:.0f}%" if whole > 0 and one.measured is not None else ""
    return one.name, f"{one.kind} for {one.good}", measured, share, tidy(max(0.0, one.predicted)), f"{one.more:,}"


def layer_cells(loss: Loss) -> Cells:
    """What each layer adds, and what there is at its end."""
    return [(str(each.layer), tiny(each.made), each.at, tiny(each.total)) for each in loss.layers]


def statistic_cells(loss: Loss) -> Cells:
    """The statistics under llama-perplexity's names."""
    return [(each.name, *_estimate(each)) for each in loss.statistics]


def _estimate(each: Statistic) -> tuple[str, str]:
    shown: Estimate = each.estimate.times(100) if each.percent else each.estimate
    digits, unit = (3, "%") if each.percent else (6, "")
    error = "" if math.isnan(shown.error) else f"{shown.error:.{digits}f}{unit}"
    return ("" if math.isnan(shown.value) else f"{shown.value:.{digits}f}{unit}"), error


def choice_cells(loss: Loss) -> Cells:
    """The types that a budget buys."""
    return list(chosen(loss))
