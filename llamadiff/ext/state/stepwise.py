"""An engine that carries out steps, as a server does: each token against the same one in a sequence that is alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np

from llamadiff.candidates import command, opening
from llamadiff.candidates.map_file import load_map
from llamadiff.candidates.name_map import identity_map
from llamadiff.candidates.opening import CandidateSpec
from llamadiff.candidates.source import Context
from llamadiff.engines.capture_request import request_for
from llamadiff.engines.model_file import ModelFile, Runnable
from llamadiff.engines.run_spec import How, Run
from llamadiff.engines.select import capture_run, in_engine
from llamadiff.ext.state.history import History, Row
from llamadiff.ext.state.schedule import alone
from llamadiff.ext.state.steps_file import FileStep, read_steps
from llamadiff.judge.verdict import MATCH, WRONG
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request
from llamadiff.result.comparison import Comparison
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.trace.last_row import in_last_row, is_last_row
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Array, Trace
from llamadiff.verbs.judging import judge

MOST_LIVES = 64  # sequences that are run alone


def compare_steps(
    model: str | Path, candidate: CandidateSpec | None, run: Run, how: How, folder: Path, child: Child
) -> Comparison:
    """Have a command carry out the steps of a file, and judge what it wrote of each.

    Every sequence is run alone by llama.cpp and by the engine, and its rows are judged as those of any run. What is
    wrong is told of the first step in which it is. Raises UserError.
    """
    steps_file = how.steps
    assert steps_file is not None
    if not isinstance(candidate, str) or not command.matches(candidate):
        raise UserError(f"{steps_file}: steps are carried out by --candidate 'cmd: ./engine {{steps}} {{out}}'")
    if run.prompt is not None or run.tokens or run.n_predict:
        raise UserError(f"{steps_file}: the steps have tokens of their own; leave out the prompt")
    steps, history = read_steps(steps_file)
    lives = [life.rows for life in alone(history)]
    if len(lives) > MOST_LIVES:
        raise UserError(f"{steps_file}: comes to {len(lives)} sequences; {MOST_LIVES} are judged at most")
    file = ModelFile(model, how.precision, run.settings)
    engine, used = in_engine(file, how)
    run = replace(run, tokens=[row.token for row in history.rows])
    request = replace(request_for(engine or file, run, folder / "baseline.safetensors"), text=None, n_predict=0)
    judged = _Lives(steps, history, engine, request, how, child)
    opened = judged.alone(max(lives, key=len))[0] if engine is None else engine
    judged.said = _carried_out(candidate, steps_file, steps, opened, how, run)
    return replace(judged.of(lives), engine=used)


def _carried_out(
    candidate: str, steps_file: Path, steps: Sequence[FileStep], model: Runnable, how: How, run: Run
) -> Mapping[int, Trace]:
    """What the command wrote of each step that has tokens, by its number."""
    mapping = load_map(how.name_map) if how.name_map is not None else identity_map()
    context = Context(model, (), 0, mapping, how.timeout, how.progress, place=run.settings.place)
    said = dict[int, Trace]()
    with scratch_directory() as scratch:
        out = Path(scratch) / "out"
        out.mkdir()
        command.carry_out(candidate, context, out, steps=str(steps_file.resolve()))
        for step in steps:
            if step.tokens:
                place = command.find_output(
                    out / str(step.number), f"step {step.number}, {step.words}", f"{{out}}/{step.number}"
                )
                said[step.number] = _read(place, step, replace(context, tokens=step.tokens, n_prefill=len(step.tokens)))
    return said


def _read(place: Path, step: FileStep, context: Context) -> Trace:
    try:
        trace = opening.resolve(str(place), context)
    except UserError as error:
        raise UserError(f"step {step.number}, {step.words}: {str(error).removeprefix(f'{place}: ')}") from None
    if trace.info.tokens != step.tokens:
        raise UserError(f"step {step.number}: its trace has tokens {list(trace.info.tokens)}, not {list(step.tokens)}")
    return trace.in_memory()


class _Lives:
    """Sequences alone, and what was recorded of them in company."""

    def __init__(
        self, steps: Sequence[FileStep], history: History, engine: Runnable | None, request: Request, how: How,
        child: Child,
    ) -> None:  # fmt: skip
        self.steps, self.history, self.engine = steps, history, engine
        self.request, self.how, self.child = request, how, child
        self.step_of = {row: step for step in steps for row in step.rows}
        self.said: Mapping[int, Trace] = {}
        self.left_out = dict[str, str]()  # tap -> why it is not judged

    def of(self, lives: Sequence[Sequence[int]]) -> Comparison:
        """Of all that are wrong, the one that is so first; else the longest."""
        found = [self._judged(life, diagnose=False).verdict for life in lives]
        wrong = [life for life, verdict in zip(lives, found, strict=True) if verdict == WRONG]
        if wrong:
            firsts = [(self._first_wrong(life), life) for life in wrong]
            (number, upto), life = min(firsts, key=lambda each: each[0])
            result = self._judged(life[:upto], diagnose=self.how.diagnose)
            result = replace(result, headline=f"{self._place(number, life[:upto])}: {result.headline}")
        else:
            unlike = [life for life, verdict in zip(lives, found, strict=True) if verdict != MATCH]
            result = self._judged(max(unlike or lives, key=len), diagnose=False)  # again: what is kept is of this one
        count = f"{len(self.said)} steps have tokens, of {len(lives)} sequences that were run alone"
        return replace(result, notes=(*result.notes, count, *self.left_out.values()))

    def alone(self, life: Sequence[int]) -> tuple[Runnable, Trace]:
        """llama.cpp's run of a sequence in the same batches, with nobody beside, and what goes through it again."""
        tokens, batches = tuple(self.history.rows[number].token for number in life), tuple(self._batches(life))
        request = replace(self.request, tokens=tokens, batches=batches, n_prefill=batches[0])
        return capture_run(self.engine, request, self.how.progress, self.child)

    def _first_wrong(self, life: Sequence[int]) -> tuple[int, int]:
        """The number of the step in which a sequence is wrong first, and how many rows it has then."""
        sizes = self._batches(life)
        for upto in accumulate(sizes):
            if upto == len(life) or self._judged(life[:upto], diagnose=False).verdict == WRONG:
                return self.step_of[life[upto - 1]].number, upto
        raise AssertionError

    def _place(self, number: int, life: Sequence[int]) -> str:
        """A step, whose tokens of it are meant, and what was done just before, if that was not tokens."""
        own = [row for row in life if self.step_of[row].number == number]
        what = "a token" if len(own) == 1 else "tokens"
        before = self.steps[number - 2] if number > 1 else None
        after = f" after {before.words}" if before is not None and not before.tokens else ""
        return f"in step {number}, {what} of sequence {self.history.rows[own[-1]].sequence}{after}"

    def _batches(self, life: Sequence[int]) -> list[int]:
        return [len(list(some)) for _, some in groupby(life, key=lambda row: self.step_of[row].number)]

    def _judged(self, life: Sequence[int], diagnose: bool) -> Comparison:
        opened, baseline = self.alone(life)
        trace = self._gathered(opened, [self.history.rows[number] for number in life], baseline.info)
        return judge(opened, baseline, trace, replace(self.how, diagnose=diagnose, partial=True))

    def _gathered(self, model: Runnable, rows: Sequence[Row], info: Info) -> Trace:
        """A sequence's rows from all steps, one trace; values of taps that some steps lack are not known."""
        arrays, known = dict[str, Array](), dict[str, Array]()
        shapes = {tap.name: taps.shape_of(tap, len(rows), model.sizes) for tap in model.taps if not tap.causal}
        for step, some in groupby(enumerate(rows), key=lambda each: self.step_of[each[1].number]):
            places, numbers = (list(each) for each in zip(*((place, row.number) for place, row in some), strict=True))
            own = [number - step.rows.start for number in numbers]
            for name, values, mask in self._of_step(step, shapes):
                if name not in arrays:
                    arrays[name], known[name] = np.zeros(shapes[name], np.float32), np.zeros(shapes[name], bool)
                arrays[name][places], known[name][places] = values[own], mask[own]
        known = {name: mask for name, mask in known.items() if not mask.all()}
        producer = next(iter(self.said.values())).info.producer
        return Trace(replace(info, producer=producer), arrays, dict.fromkeys(arrays, "F32"), known=known)

    def _of_step(self, step: FileStep, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Array, Array]]:
        """Taps of a step that have a row for each of its tokens, and which values are there."""
        said, count = self.said[step.number], len(step.tokens)
        for name in shapes.keys() & set(said):
            values, shape = said[name], (count, *shapes[name][1:])
            mask = said.known.get(name, np.ones(values.shape, bool))
            tap = taps.parse(name)
            if tap is not None and is_last_row(tap, values.size, shape):
                values, mask = in_last_row(values, shape)
            if values.shape == shape:
                yield name, values, mask
            else:
                self.left_out[name] = f"{name} has shape {list(values.shape)} in step {step.number}, not {list(shape)}"
