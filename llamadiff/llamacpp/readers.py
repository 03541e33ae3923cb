"""Who reads what llama.cpp's process tells of a run (observer.py): as a trace; others read it node by node.

The process tells descriptions and bytes; all that is computed of them is computed here.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
from llamaref import Weights
from numpy.typing import NDArray

from llamadiff import plugins
from llamadiff.llamacpp.passes import NoCheck, PassCheck
from llamadiff.llamacpp.quantizing import EightBits
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.sent_tensor import BYTE_ORDERS, SentTensor
from llamadiff.llamacpp.steps import DECODE, Step
from llamadiff.numerics.cpu import UNKNOWN
from llamadiff.trace import taps
from llamadiff.trace.hashing import model_sha256
from llamadiff.trace.metadata import DEVICES, INPUTS, NAMED, UNSURE_INPUTS, Info
from llamadiff.trace.writer import TAP_ROOM, TraceWriter

if TYPE_CHECKING:
    from typing_extensions import Self

WORDS = ("began", "step", "given", "pass", "tap", "value", "node", "computed", "logits", "whole", "asks", "ended")
Array = NDArray[Any]
Tell = Callable[..., None]


class RunReader:
    """Reads answers of a run, one after the other; ``tell`` says something to the process meanwhile."""

    def __init__(self, request: Request, tell: Tell) -> None:
        self.request, self.tell = request, tell
        self.order = "<"
        self.began: Mapping[str, Any] = {}
        self.ended: Mapping[str, Any] = {}
        self.rows = self.start = 0
        self.devices: dict[str, str] = {}  # tap, or node -> what computes it
        self.passes: list[int] = []  # how many tokens were run at a time, one step after the other
        self.sha256 = _hash_of(request.files or (request.model,))
        self.adapter = _hash_of((request.settings.lora,)) if request.settings.lora else None
        self.open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.open.close()

    def writes(self, taps: int) -> TraceWriter:
        """The trace that the run becomes."""
        assert self.request.output is not None
        return self.open.enter_context(TraceWriter(self.request.output, expected_taps=taps))

    def read_answer(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        """One answer, and the bytes that came with it, which are gone afterwards."""
        if "pass" in answer:
            self.start, self.rows = answer["pass"]
            self.passes += [self.rows] if self.rows else []
            self._note_pass(answer)
        for word in WORDS:
            if word in answer:
                getattr(self, f"_{word}")(answer, data)
                return

    def _began(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        self.began = answer["began"]
        self.order = BYTE_ORDERS[self.began["order"]]
        self.inputs.set_window(self.began.get("window", 0))

    def _ended(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        self.ended = answer["ended"]

    def _note_pass(self, answer: Mapping[str, Any]) -> None:
        """Which tokens come next: of a batch in a way's steps, or the next ones of the only sequence."""
        if self.request.way.steps:
            self.inputs.run(answer["run"])
        else:
            places, first = range(self.start, self.start + self.rows), self.request.first
            self.inputs.do(Step(DECODE, (), (0,) * self.rows, tuple(first + n for n in places), (0,) * self.rows))
            self.inputs.run(range(self.rows))

    def _step(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        self.inputs.do(self.request.way.steps[answer["step"]])

    def _given(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        if not self.request.way.steps:
            self.inputs.run(range(answer["start"] - self.start, answer["start"] - self.start + answer["rows"]))
        self.inputs.check_node(answer, data, self.order)

    @cached_property
    def inputs(self) -> PassCheck:
        """What passes were given, held against what was run before."""
        return plugins.ask_first(lambda each: each.pass_check()) or NoCheck()

    def _pass(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        """Some tokens are run."""

    @property
    def in_steps(self) -> bool:
        """Whether the run has several passes."""
        return len(self.starting_info().edges) > 2 or bool(self.request.n_predict)

    @property
    def total(self) -> int:
        """How many tokens there will be."""
        return len(self.began["tokens"]) + self.request.n_predict

    def info(self) -> Info:
        """What there is to say at the end of a run."""
        begun = self.starting_info()
        ended = {"weights_read": self.ended["weights_read"]}
        found = {INPUTS: self.inputs.faults, UNSURE_INPUTS: self.inputs.unsure}
        ended |= {where: faults for where, faults in found.items() if faults}
        if len(devices := set(self.devices.values())) > 1 or self.began.get("named"):
            parts = {device: [name for name, on in self.devices.items() if on == device] for device in sorted(devices)}
            ended |= {DEVICES: parts, NAMED: self.began.get("named", {})}
        model = {**begun.model, "sha256": self.sha256.result()}
        batches = tuple(self.passes) if self.request.way.steps else begun.batches
        return replace(
            begun, tokens=tuple(self.ended["tokens"]), producer={**begun.producer, **ended}, model=model,
            batches=batches,
        )  # fmt: skip

    def starting_info(self) -> Info:
        """What there is to say when it begins."""
        request, began, first = self.request, self.began, self.request.first
        given = Info(
            tuple(began["tokens"]), (), request.n_prefill or len(began["tokens"]), batches=request.computed_batches
        )
        steps = (1,) * request.n_predict
        ran = {"n_ctx": began["n_ctx"], "threads": began["threads"], "q8": self.q8_way}
        ran |= {"lora_sha256": self.adapter.result()} if self.adapter else {}
        return Info(
            tokens=given.tokens,
            positions=tuple(range(first, first + self.total)),
            n_prefill=given.n_prefill,
            batches=(*given.batches, *steps) if given.batches else (),
            prompt=began["text"],
            producer={
                "name": "llama.cpp",
                "version": began["version"],
                "settings": {**request.settings.to_json(), **ran, **began.get("instead", {})},
                "build": began["build"],
                **({} if began["machine"] == platform.machine() else {"machine": began["machine"]}),
                **request.asked,
            },
            model=request.model_info,
        )

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.request.model)

    @property
    def q8(self) -> EightBits:
        """How its CPU rounds to eight bits."""
        return EightBits.from_answer(self.began, self.order)

    @property
    def q8_way(self) -> str:
        """The same of this model's types, in a word: UNKNOWN where it is not known of one of them."""
        settings, kinds = self.request.settings, {self.weights.type(name) for name in self.weights}
        return self.q8.way if self.q8.are_known(kinds | {settings.type_k, settings.type_v}) else UNKNOWN

    def finish(self) -> None:
        """The run is over."""


def _hash_of(files: Sequence[str]) -> Future[str]:
    """What tells a model, computed beside: by a thread that nobody waits for where the command ends before."""
    found: Future[str] = Future()

    def hash_it() -> None:
        try:
            found.set_result(model_sha256(files))
        except BaseException as error:  # whoever asks for it is told
            found.set_exception(error)

    Thread(target=hash_it, daemon=True).start()
    return found


class TapReader(RunReader):
    """The taps of a run as a trace."""

    def _began(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        super()._began(answer, data)
        said = 2 * len(self.starting_info().to_json())  # as JSON in JSON
        self.writer = self.writes(40 * (self.began["n_layer"] + 1) + said // TAP_ROOM)

    def _tap(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        name, values = answer["tap"], tap_values(self, answer, data)
        self.devices[name] = answer["node"].get("device", "")
        tap = taps.parse(name)
        assert tap is not None
        self.writer.add(name, values, tap.row_axis, whole_shape(tap, values, self.total), answer["start"])

    def _logits(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        rows, tap = np.frombuffer(data[0], f"{self.order}f4").reshape(answer["logits"]), taps.parse(taps.LOGITS)
        assert tap is not None
        self.writer.add(taps.LOGITS, rows, tap.row_axis, (self.total, rows.shape[1]), answer["start"])

    def finish(self) -> None:
        self.writer.finish(self.info())


def tap_values(reader: RunReader, answer: Mapping[str, Any], data: Sequence[Any]) -> Array:
    """The rows of a tap that were told, on the tap's own axes.

    A model that keeps nothing between passes is an encoder: its queries see all keys.
    """
    tap, rows, start = taps.parse(answer["tap"]), answer["rows"], answer["start"]
    assert tap is not None
    values = SentTensor(answer["node"], data=data[0], order=reader.order).view()
    if "taken" in answer:  # one row: what a scan puts out, shaped as what it takes in, then its states
        values = np.ascontiguousarray(values).reshape(-1)[: int(np.prod(answer["taken"]))].reshape(answer["taken"])
    values = in_axes(tap, values, answer.get("of", rows))
    if "places" in answer:  # rows of others are beside them
        values = values.take(answer["places"], tap.row_axis)
    if not tap.causal:
        return values
    values = _of_own_keys(values, answer["cells"], reader.total) if "cells" in answer else values[..., : reader.total]
    return seen_scores(values, start) if tap.kind.word == "kq" and reader.began["remembers"] else values


def _of_own_keys(values: Array, cells: Sequence[Sequence[int]], total: int) -> Array:
    """Scores of the cells of a cache as scores of rows: each one's cell is told; of others nothing is seen."""
    out = np.zeros((*values.shape[:-1], total), values.dtype)
    rows, places = np.array(cells, int).reshape(-1, 2).T
    out[..., rows] = values[..., places]
    return out


def seen_scores(values: Array, start: int) -> Array:
    """Raw scores [head, query, key] of queries from the ``start``-th on; those of hidden keys are arbitrary: zero."""
    queries = np.arange(start, start + values.shape[1])[:, None]
    return np.where(np.arange(values.shape[2]) <= queries, values, np.float32(0))


def whole_shape(tap: taps.Tap, values: Array, total: int) -> tuple[int, ...]:
    """The shape that a tap will have of all tokens."""
    shape = list(values.shape)
    shape[tap.row_axis] = total
    if tap.causal:
        shape[2] = total
    return tuple(shape)


def in_axes(tap: taps.Tap, values: Array, rows: int) -> Array:
    """ggml's four axes [ne3, ne2, ne1, ne0] as the tap's."""
    if tap.row_axis == 1:
        return values.reshape(values.shape[-3:])
    return values.reshape((rows, -1) if len(tap.kind.axes) == 2 else (rows, -1, values.shape[-1]))
