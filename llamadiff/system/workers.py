"""The same work on many things, in processes side by side that live no longer than this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, TypeVar, cast

from llamadiff.system.errors import UserError
from llamadiff.system.leftovers import remove_own
from llamadiff.system.python_child import die_with_parent

Given = TypeVar("Given")
Made = TypeVar("Made")
Key = TypeVar("Key", bound=Hashable)


def cores() -> int:
    """How many processes can run at a time."""
    return os.cpu_count() or 1


def side_by_side(work: Callable[[Given], Made], things: Sequence[Given], processes: int) -> Iterator[Made]:
    """What ``work``, a function of a module, makes of each thing, in their order, as soon as it is there.

    One process, or one thing: the work is done here. Where the caller stops asking, or is stopped, the others end.
    Raises what the work raises, and UserError where one of the processes dies.
    """
    if min(processes, len(things)) <= 1:
        yield from map(work, things)
        return
    with _workers(work, min(processes, len(things))) as pipes:
        yield from _in_order(pipes, things)


@dataclass(frozen=True)
class Died:
    """In place of an answer: so many processes died of the thing."""

    times: int


def surviving(
    work: Callable[[tuple[Key, Given]], Made], things: Sequence[tuple[Key, Given]], processes: int, attempts: int = 3
) -> Iterator[tuple[Key, Made | Died]]:
    """What ``work`` makes of each thing with its key, in whatever order it is there, though processes may die.

    A process that dies is replaced, and its thing given to another one, ``attempts`` times in all. Raises what the work
    raises.
    """
    left, tried = deque(things), Counter[Key]()
    with ExitStack() as stack:
        idle = [stack.enter_context(_workers(work, 1))[0] for _ in range(min(processes, len(things)))]
        busy = dict[Connection, tuple[Key, Given]]()
        while left or busy:
            while idle and left:
                pipe, thing = idle.pop(), left.popleft()
                busy[pipe] = thing
                tried[thing[0]] += 1
                with suppress(OSError):  # one that is dead already: its pipe says so below
                    pipe.send(thing)
            for pipe in cast("list[Connection]", wait(list(busy))):
                thing = busy.pop(pipe)
                try:
                    failed, answer = pipe.recv()
                except (EOFError, OSError):
                    idle.append(stack.enter_context(_workers(work, 1))[0])
                    if tried[thing[0]] < attempts:
                        left.append(thing)
                    else:
                        yield thing[0], Died(attempts)
                    continue
                idle.append(pipe)
                if failed:
                    raise answer
                yield thing[0], answer


def _in_order(pipes: Sequence[Connection], things: Sequence[Given]) -> Iterator[Any]:
    """Each worker has one thing at a time; answers that come early wait for their turn."""
    left, busy, done = deque(enumerate(things)), dict[Connection, int](), dict[int, Any]()

    def give(pipe: Connection) -> None:
        if left:
            busy[pipe], thing = left.popleft()
            pipe.send(thing)

    for pipe in pipes:
        give(pipe)
    for number in range(len(things)):
        while number not in done:
            for pipe in cast("list[Connection]", wait(list(busy))):
                done[busy.pop(pipe)] = _answer(pipe)
                give(pipe)
        failed, answer = done.pop(number)
        if failed:
            raise answer
        yield answer


def _answer(pipe: Connection) -> Any:
    """Whether the work failed, and what came of it."""
    try:
        return pipe.recv()
    except EOFError:
        raise UserError("a process that worked beside this one was killed, perhaps for want of memory; with --jobs 1 "
                        "there is only one") from None  # fmt: skip


@contextmanager
def _workers(work: Callable[[Given], Made], count: int) -> Iterator[list[Connection]]:
    """So many processes, each at the other end of a pipe."""
    context = multiprocessing.get_context("spawn")  # a fork would share locks of threads that it does not have
    pipes, started = [], []
    try:
        with _deaf_to_interrupts():
            for _ in range(count):
                pipe, end = context.Pipe()
                process = context.Process(target=_serve, args=(work, end), daemon=True)
                process.start()
                end.close()
                pipes.append(pipe)
                started.append(process)
        yield pipes
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.join()


def _serve(work: Callable[[Any], Any], pipe: Connection) -> None:
    """In a worker: one thing after the other, until the pipe is closed."""
    die_with_parent()
    signal.signal(signal.SIGTERM, _leave)
    while True:
        try:
            thing = pipe.recv()
        except EOFError:
            return
        try:
            answer = False, work(thing)
        except Exception as error:  # raised again where the answer is read
            answer = True, error
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
