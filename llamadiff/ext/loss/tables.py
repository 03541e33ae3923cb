"""What quantization costs, as cells of tables that every format has. Computes nothing."""

from __future__ import annotations

import math

from llamadiff.ext.loss.result import Contribution, Estimate, Loss, Statistic
from llamadiff.ext.loss.words import chosen, tidy, told
from llamadiff.report.tables import Table
from llamadiff.report.terminal.escape import tiny

TENSORS = 10  # that a table has


def loss_tables(loss: Loss | None, full: bool = True) -> list[Table]:
    """The tables that say anything; none where no two files were compared. ``full``: layers too, and statistics.

    Statistics are under llama-perplexity's names; without a text they are of little use.
    """
    if loss is None:
        return []
    tensors = ("tensor", "type", ">KL it costs", ">share", ">predicted", ">bytes to restore")
    tables: list[Table] = [
        ("Tensors that cost most", tensors, [_tensor(one, loss) for one in loss.contributions[:TENSORS]]),
        ("Bytes spent on", ("tensor", "type"), list(chosen(loss))),
    ]
    if full or loss.text is not None:
        statistics = [(each.name, *_estimate(each)) for each in loss.statistics]
        tables.append(("Statistics", ("statistic", ">value", ">error"), statistics))
    if full:
        layers = [(str(each.layer), tiny(each.made), each.at, tiny(each.total)) for each in loss.layers]
        tables.append(("Made in each layer", (">layer", ">made here", "at", ">with what is inherited"), layers))
    return [each for each in tables if each[-1]]


def _tensor(one: Contribution, loss: Loss) -> tuple[str, ...]:
    whole = loss.weighed.value
    measured = told(one.measured).removeprefix("KL ") if one.measured is not None else ""
    share = f"{100 * one.value / whole:.0f}%" if whole > 0 and one.measured is not None else ""
    return one.name, f"{one.kind} for {one.good}", measured, share, tidy(max(0.0, one.predicted)), f"{one.more:,}"


def _estimate(each: Statistic) -> tuple[str, str]:
    shown: Estimate = each.estimate.times(100) if each.percent else each.estimate
    digits, unit = (3, "%") if each.percent else (6, "")
    error = "" if math.isnan(shown.error) else f"{shown.error:.{digits}f}{unit}"
    return ("" if math.isnan(shown.value) else f"{shown.value:.{digits}f}{unit}"), error
