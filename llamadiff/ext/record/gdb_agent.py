"""In gdb's own Python: stops a program at its functions, and waits there until the recorder has looked at its memory.

For programs that frida cannot enter, such as those that are linked statically. It says what agent.js says.
"""

from __future__ import annotations

import os
import struct

import gdb  # type: ignore[import-untyped, import-not-found, unused-ignore]  # only gdb has it

STOP = struct.Struct("<4I")
END = (1 << 32) - 1  # in place of a function's number: the program ended, with a code in place of the next
START = END - 1  # the program has been started
SIGNAL = 1 << 8  # added to the number of the signal that it died of
FUNCTIONS = 1 << 16  # numbers of functions; where they return has the same, and this more
QUIET = (
    "set pagination off", "set confirm off", "set breakpoint always-inserted on",
    "handle all nostop noprint pass", "handle SIGTRAP stop noprint nopass",
)  # fmt: skip


class Follower:
    """One run of the program that gdb was given."""

    def __init__(self, messages: str, replies: str) -> None:
        self._messages, self._replies = os.open(messages, os.O_WRONLY), os.open(replies, os.O_RDONLY)
        self._breakpoints: dict[int, gdb.Breakpoint] = {}  # by address
        self._numbers: dict[int, int] = {}  # address -> the number of a function, or of its return
        self._calls, self._repeats, self._newest = [0] * 4, [0] * 4, 0
        self._process = 0

    def run(self, starts: list[int], main: int) -> None:
        """``starts``: where functions begin in the file; ``main``: where the one does that it is known by, or 0."""
        for line in QUIET:
            gdb.execute(line, to_string=True)
        gdb.execute("starti", to_string=True)
        inferior = gdb.selected_inferior()
        self._process = inferior.pid
        self._say(START, 0)
        base = self._loaded_at()
        home = self._folder_of(base + main) if main else ""
        own = [start for start in starts if self._folder_of(base + start).startswith(home)] if home else starts
        for number, start in enumerate(own):
            self._stop_at(base + start, number)
        while inferior.pid:
            gdb.execute("continue", to_string=True)
            if inferior.pid:
                self._stopped()
        code, signal = (gdb.convenience_variable(name) for name in ("_exitcode", "_exitsignal"))
        self._say(END, int(code) if code is not None else SIGNAL + int(signal or 0))

    def _loaded_at(self) -> int:
        """Where a file that may lie anywhere does; 0 for one that has its place."""
        path = os.readlink(f"/proc/{self._process}/exe")
        with open(path, "rb") as file:
            is_fixed = file.read(18)[16] == 2  # ET_EXEC
        with open(f"/proc/{self._process}/maps", encoding="utf-8") as maps:
            return (
                0
                if is_fixed
                else next(int(line.partition("-")[0], 16) for line in maps if line.rstrip().endswith(path))
            )

    def _folder_of(self, address: int) -> str:
        """Where the source of a function lies, as the compiler was told: libraries' own is elsewhere."""
        table = gdb.find_pc_line(address).symtab
        return os.path.dirname(table.fullname()) if table is not None else ""

    def _stop_at(self, address: int, number: int) -> None:
        if address not in self._breakpoints:
            self._breakpoints[address] = breakpoint = gdb.Breakpoint(f"*{address:#x}", internal=True)
            breakpoint.silent = True
            self._numbers[address] = number

    def _stopped(self) -> None:
        """A function is called, or has returned."""
        frame = gdb.newest_frame()
        address = frame.pc()
        number = self._numbers.get(address)
        if number is None:
            return
        caller = self._caller(frame) if number < FUNCTIONS else address
        if self._is_loop(2 * caller + number // FUNCTIONS):
            return
        if self._say(number % FUNCTIONS, number // FUNCTIONS) == b"m":
            self._breakpoints[address].enabled = False
        elif number < FUNCTIONS and self._is_behind_call(caller):
            self._stop_at(caller, number + FUNCTIONS)

    def _caller(self, frame: gdb.Frame) -> int:
        """Where a function that was just called returns to."""
        return int.from_bytes(gdb.selected_inferior().read_memory(int(frame.read_register("rsp")), 8), "little")

    def _is_behind_call(self, address: int) -> bool:
        """Whether the instruction before it calls: a breakpoint anywhere else would change the program."""
        code = bytes(gdb.selected_inferior().read_memory(address - 7, 7))
        return code[2] == 0xE8 or any(code[-size] == 0xFF and code[1 - size] >> 3 & 7 == 2 for size in (2, 3, 6, 7))

    def _is_loop(self, call: int) -> bool:
        """Whether it was among the last four: a loop is looked at in its first turns, then ever more seldom."""
        if call in self._calls:
            place = self._calls.index(call)
            self._repeats[place] += 1
            return self._repeats[place] > 4 and self._repeats[place] & (self._repeats[place] - 1) != 0
        self._repeats = [0] * 4
        self._calls[self._newest % 4] = call
        self._newest += 1
        return False

    def _say(self, number: int, leaves: int) -> bytes:
        os.write(self._messages, STOP.pack(number, leaves, self._process, 0))
        return b"" if number == END else os.read(self._replies, 1)
