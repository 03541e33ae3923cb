"""The same work on many things, in processes side by side that live no longer than this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import FrameType
from typing import Any, TypeVar, cast

from llamadiff.system.errors import UserError
from llamadiff.system.python_child import die_with_parent
from llamadiff.system.stale_files import remove_own

Given = TypeVar("Given")
Made = TypeVar("Made")


def cores() -> int:
    """How many processes can run at a time."""
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Died:
    """In place of an answer: so many processes died of the thing."""

    times: int


@dataclass(frozen=True)
class _Raised:
    """In place of an answer: what the work raised."""

    error: Exception


def side_by_side(work: Callable[[Given], Made], things: Sequence[Given], processes: int) -> Iterator[Made]:
    """What ``work``, a function of a module, makes of each thing, in their order, as soon as it is there.

    One process, or one thing: the work is done here. Where the caller stops asking, or is stopped, the others end.
    Raises what the work raises, and UserError where one of the processes dies.
    """
    if min(processes, len(things)) <= 1:
        yield from map(work, things)
        return
    early = dict[int, Made | _Raised]()  # answers that wait for their turn
    with closing(_answers(work, things, processes, attempts=1)) as answers:
        for number in range(len(things)):
            while number not in early:
                other, answer = next(answers)
                if isinstance(answer, Died):
                    raise UserError("a process that worked beside this one was killed, perhaps for want of memory; "
                                    "with --jobs 1 there is only one")  # fmt: skip
                early[other] = answer
            yield _unwrap(early.pop(number))


def map_surviving(
    work: Callable[[Given], Made], things: Sequence[Given], processes: int, attempts: int = 3
) -> Iterator[tuple[Given, Made | Died]]:
    """Each thing with what ``work`` makes of it, in whatever order it is there, though processes may die.

    A process that dies is replaced, and its thing given to another one, ``attempts`` times in all. Raises what the work
    raises.
    """
    with closing(_answers(work, things, processes, attempts)) as answers:
        for number, answer in answers:
            yield things[number], answer if isinstance(answer, Died) else _unwrap(answer)


def _unwrap(answer: Made | _Raised) -> Made:
    if isinstance(answer, _Raised):
        raise answer.error
    return answer


def _answers(
    work: Callable[[Given], Made], things: Sequence[Given], processes: int, attempts: int
) -> Generator[tuple[int, Made | _Raised | Died], None, None]:
    """The numbers of things and what came of them, as soon as it is there; each process has one thing at a time."""
    left, tried = deque(range(len(things))), Counter[int]()
    with ExitStack() as stack:
        idle = [stack.enter_context(_worker(work)) for _ in range(min(processes, len(things)))]
        busy = dict[Any, int]()
        while left or busy:
            while idle and left:
                pipe, number = idle.pop(), left.popleft()
                busy[pipe] = number
                tried[number] += 1
                with suppress(OSError):  # one that is dead already: its pipe says so below
                    pipe.send(things[number])
            for pipe in cast("list[Any]", wait(list(busy))):
                number = busy.pop(pipe)
                try:
                    answer = pipe.recv()
                except (EOFError, OSError):
                    if tried[number] < attempts:
                        left.append(number)
                    else:
                        yield number, Died(attempts)
                    idle.append(stack.enter_context(_worker(work)))
                    continue
                idle.append(pipe)
                yield number, answer


@contextmanager
def _worker(work: Callable[[Given], Made]) -> Iterator[Any]:
    """The pipe to a process (a multiprocessing.Connection)."""
    context = multiprocessing.get_context("spawn")  # a fork would share locks of threads that it does not have
    pipe, end = context.Pipe()
    process = context.Process(target=_serve, args=(work, end), daemon=True)
    with _deaf_to_interrupts():
        process.start()
    end.close()
    try:
        yield pipe
    finally:
        process.terminate()
        process.join()


def _serve(work: Callable[[Any], Any], pipe: Any) -> None:
    """In a worker: one thing after the other, until the pipe is closed."""
    die_with_parent()
    signal.signal(signal.SIGTERM, _leave)
    while True:
        try:
            thing = pipe.recv()
        except EOFError:
            return
        try:
            answer = work(thing)
        except Exception as error:  # raised again where the answer is read
            answer = _Raised(error)
        pipe.send(answer)


def _leave(number: int, frame: FrameType | None) -> None:
    """What a worker has made for the time being goes with it."""
    remove_own()
    os._exit(128 + number)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """What is started meanwhile does not heed Ctrl-C, which reaches every process of a terminal: its parent does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
