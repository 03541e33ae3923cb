"""What each device computed of a run that several shared, and whether what is wrong lies on one of them alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from llamadiff.ext.devices.partial_sums import TOGETHER, is_split
from llamadiff.judge.verdict import WRONG, is_right
from llamadiff.llamacpp.tensors import SPLIT
from llamadiff.report.tables import Table
from llamadiff.result.comparison import Comparison
from llamadiff.result.rows import Row, stem
from llamadiff.trace.metadata import DEVICES, NAMED
from llamadiff.words.diagnosis_text import layers_of

MOST = 64  # devices of a trace that are heeded
_LONGEST = 120  # characters of a device's name
_FEW = 3  # ops that are named
_WHOLE = ("ADD", "NORM", "RMS_NORM", "GET_ROWS")  # ops of the residual stream
_CHOOSING = ("ffn_moe_logits", "ffn_moe_probs", "ffn_moe_topk", "ffn_moe_weights")
_HEAD_NORMS = (".attn_q_norm.", ".attn_k_norm.")  # in names of weights of norms of each head

Op = tuple[str, str | None, tuple[str, ...]]  # its name, its weights' type, the taps that it answers for


@dataclass(frozen=True)
class Part:
    """What one device computed: its rows, and the layers that these are of.

    ``shared``: it is what reads tensors that several devices hold, each some of their rows.
    """

    device: str
    rows: tuple[Row, ...]
    shared: bool = False

    @property
    def layers(self) -> list[int]:
        return sorted({row.layer for row in self.rows if row.layer is not None})

    @property
    def judged(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.local is not None)

    @property
    def right(self) -> tuple[Row, ...]:
        return tuple(row for row in self.judged if is_right(row.verdict))

    @property
    def wrong(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict == WRONG)

    @property
    def beside(self) -> list[str]:
        """Its taps that are of no layer."""
        return [row.tap for row in self.rows if row.layer is None]

    @property
    def place(self) -> str:
        """Where its rows are, for a sentence."""
        where = f"on {self.device}" if not self.shared else f"where a tensor is split ({self.device})"
        return where + (f", {layers_of(self.layers)}" if self.layers else "")

    def to_json(self) -> dict[str, Any]:
        """What a report in JSON has of it."""
        return {
            "device": self.device, "split": self.shared, "layers": self.layers, "beside": self.beside,
            "judged": len(self.judged), "wrong": [row.tap for row in self.wrong],
            "taps": [row.tap for row in self.rows],
        }  # fmt: skip


def add_parts(result: Comparison) -> Comparison:
    """A result with each device's part, and what is said of the wrong ones; as it is where one device did it all."""
    producer = result.baseline if result.is_engine else result.candidate
    parts = parts_of(result.rows, producer)
    if len(parts) < 2:
        return result
    said = explain(parts)
    more = {**result.more, DEVICES: [part.to_json() for part in parts]}
    if said is None:
        return replace(result, more=more)
    of_taps = all(check.verdict != WRONG for check in result.preflight)  # that is what the headline is about
    headline = result.headline + said[0] * of_taps
    return replace(result, more=more, headline=headline, proof=(said[1], *result.proof))


def parts_of(rows: Sequence[Row], producer: Mapping[str, Any]) -> list[Part]:
    """The parts of a run, as far as its trace says which device computed what, in the order of the run."""
    stated, named = producer.get(DEVICES), producer.get(NAMED)
    lists, words = (each if isinstance(each, dict) else {} for each in (stated, named))
    named_lists = ((str(device), names) for device, names in islice(lists.items(), MOST) if isinstance(names, list))
    homes = {str(name): device for device, names in named_lists for name in names}
    found: dict[str, list[Row]] = {}
    for row in rows:
        home = homes.get(row.tap) or homes.get(_name_of(row.tap))
        if home:
            found.setdefault(home + SPLIT * (home.startswith(TOGETHER) and _is_of_split(row)), []).append(row)
    return [_part(home, rows, words) for home, rows in found.items()]


def _is_of_split(row: Row) -> bool:
    """Whether devices that are one to llama.cpp shared a row's work, each with some of a weight, heads or channels.

    Each has all of the residual stream, its norms, and what chooses experts.
    """
    if row.span or is_split(row.weight or ""):
        return True
    is_whole = row.op in _WHOLE or row.tap.startswith(_CHOOSING)
    return not is_whole or any(norm in (row.weight or "") for norm in _HEAD_NORMS)


def _name_of(tap: str) -> str:
    """llama.cpp's name of a node, without what tells it from others of that name."""
    return tap.partition(" (")[0].partition("#")[0]


def _part(home: str, rows: Iterable[Row], words: Mapping[str, Any]) -> Part:
    device = home.removesuffix(SPLIT)
    return Part(str(words.get(device, device))[:_LONGEST], tuple(rows), home != device)


def explain(parts: Sequence[Part]) -> tuple[str, str] | None:
    """What ends the headline, and what the proof begins with; None where nothing is wrong, or one part has the layers.

    An op is the same elsewhere if it multiplies by weights of the same type, and answers for the same ones before it.
    """
    wrong = [part for part in parts if part.wrong]
    if not wrong or sum(bool(part.layers) for part in parts) < 2:
        return None
    if len(wrong) > 1:
        counts = (f"{len(part.wrong)} of {len(part.judged)} {part.place}" for part in wrong)
        return "", f"wrong on more than one device: {'; '.join(counts)}"
    (part,) = wrong
    ops = {_op(row) for row in part.wrong}
    bad = replace(part, rows=part.wrong)
    right = [each for each in parts if each is not part and not ops.isdisjoint(map(_op, each.right))]
    if not right:
        return "", f"all that is wrong is {bad.place}; nothing else computed {_names(ops)}"
    same = ops.intersection(_op(row) for each in right for row in each.right)
    others = "; ".join(_right_part(each, same) for each in right)
    return f", only {_short(part)}", f"wrong only {bad.place}: {_names(same)} {_is(same)} right {others}"


def _right_part(part: Part, ops: set[Op]) -> str:
    return replace(part, rows=tuple(row for row in part.right if _op(row) in ops)).place


def _short(part: Part) -> str:
    return "where a tensor is split" if part.shared else f"on {part.device}"


def _op(row: Row) -> Op:
    return row.op, row.weight_type, tuple(map(stem, row.span))


def _names(ops: set[Op]) -> str:
    names = sorted(
        f"{op}{f' by {kind}' if kind else ''}{f' with {span[-1]}' if span else ''}" for op, kind, span in ops
    )
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")


def _is(ops: set[Op]) -> str:
    return "is" if len(ops) == 1 else "are"


def parts_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """A line a device: what it computed, how much was judged of that, and how much is wrong."""
    cells = [
        (
            part["device"] + ", split tensors" * part["split"],
            _extent(part),
            str(part["judged"]),
            str(len(part["wrong"])),
        )
        for part in found
    ]
    return "Devices", ("device", "computed", ">judged", ">wrong"), cells


def _extent(part: Mapping[str, Any]) -> str:
    """Its layers, and the first of what is beside them."""
    names = part["beside"]
    more = [f"{len(names) - _FEW} more"] * (len(names) > _FEW)
    return ", ".join((*[layers_of(part["layers"])] * bool(part["layers"]), *names[:_FEW], *more))
