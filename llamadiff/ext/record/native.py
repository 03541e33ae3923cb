"""A program under frida, whose memory is looked at at each call and return of its own functions.

Runs in a process of its own, which lives no longer than whoever wants the log (``supervise``).
"""

from __future__ import annotations

import os
import select
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from llamadiff.ext.record.changes import Changes
from llamadiff.ext.record.log import LogWriter
from llamadiff.ext.record.memory import ProcessMemory, Words

END = (1 << 32) - 1  # in place of a function's number: the program ends, with a code in place of the next
UNKNOWN = 255  # the code of one that ended without a word
USUAL = 2.0**-40, 2.0**40  # sizes of values
STOP = struct.Struct("<4I")  # agent.js: function, or END and the code; process
USELESS = 512, 1 << 13  # stops at a function in turn without a row's words: it is left alone; after some, later
ROW = 8  # words
FUNCTIONS = 1 << 16
# What a program calls between its ops: scalar maths, BLAS, OpenMP. Not copies, which C libraries enter in the middle,
# nor maths of vectors, whose arguments lie in registers that are not kept at a stop.
CALLED = r"^((exp|pow|sin|cos|sincos|tanh|erf|sqrt|log|fma|round)[0-9m]*[fl]?|cblas_\w+|[sdc]ge(mm|mv)_?|dnnl_\w+"
CALLED += r"|GOMP_\w+|omp_\w+|__kmpc_\w+)$"
SOON = 0.05  # seconds


def main(folder: str, most: str, *program: str) -> None:
    """Run a program, keep ``most`` bytes of what it writes in ``folder``."""
    import frida

    recorder = Recorder(Path(folder), int(most))
    cannot = (
        frida.ExecutableNotFoundError, frida.ExecutableNotSupportedError, frida.NotSupportedError, frida.TransportError,
        frida.PermissionDeniedError, frida.ProcessNotFoundError, frida.ProcessNotRespondingError, frida.TimedOutError,
    )  # fmt: skip
    try:
        recorder.log.close(recorder.run(program))
    except cannot as error:
        recorder.log.close(error=str(error))


class Recorder:
    """One run of one program."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self.log = LogWriter(folder)
        self._useless = dict[int, int]()  # function -> stops in turn at which nothing had been written
        self._useful = set[int]()  # functions at which something had

    def run(self, program: tuple[str, ...]) -> int:
        """Until the program has ended -> its return code. Raises what frida does where it cannot be started."""
        import frida

        device = frida.get_local_device()
        process = device.spawn([*program], stdio="inherit")
        path = Path(os.readlink(f"/proc/{process}/exe"))
        session = device.attach(process)
        script = session.create_script(Path(__file__).with_name("agent.js").read_text("utf-8"))
        script.load()
        agent: Any = script.exports_sync
        found = self._functions(agent, path)
        pipes = [self._folder / name for name in ("messages", "replies")]
        if sys.platform != "win32":
            for pipe in pipes:
                os.mkfifo(pipe, 0o600)
        self._messages, self._replies = (os.open(pipe, os.O_RDWR) for pipe in pipes)
        called = agent.imports(str(path.parent), CALLED)
        agent.stop_at(*map(str, pipes), [*found, *called][:FUNCTIONS], len(found))
        memory = ProcessMemory(process, str(path.parent))
        memory.leave_out()
        self._process, self._changes = process, Changes(memory)
        device.resume(process)
        return self._follow()

    def _functions(self, agent: Any, path: Path) -> list[str]:
        """Addresses of the program's own functions; of a stripped one, of those that can be unwound."""
        base, named = agent.functions(str(path.parent))
        return [*named, *([] if named else (hex(int(base, 16) + start) for start in unwound(path)))][:FUNCTIONS]

    def _follow(self) -> int:
        """Look at memory at each stop, until the program ends -> its return code."""
        code = UNKNOWN
        while True:
            ready, _, _ = select.select([self._messages], [], [], SOON)
            if ready:
                function, leaves, process, _ = STOP.unpack(os.read(self._messages, STOP.size))
                if function == END:
                    code = leaves
                    continue
                os.write(self._replies, self._stop(function) if process == self._process else b"m")
                continue
            ended = self._ended(code)
            if ended is not None:
                return ended

    def _ended(self, code: int) -> int | None:
        """The program's return code, or ``code`` where somebody else has waited for it; None while it runs."""
        if sys.platform != "win32":
            try:
                process, status = os.waitpid(self._process, os.WNOHANG)
            except ChildProcessError:
                return code
            if process:
                return os.waitstatus_to_exitcode(status)
        return None

    def _stop(self, function: int) -> bytes:
        spans = self._changes.look()
        self.log.add_stop(spans)
        wrote = any(not span.stack and len(span.words) >= ROW and _may_be_values(span.words) for span in spans)
        self._useless[function] = 0 if wrote else self._useless.get(function, 0) + 1
        self._useful |= {function} if wrote else set()
        most = USELESS[function in self._useful]
        return b"m" if self._useless[function] > most or self.log.bytes > self._most else b"g"


def _may_be_values(words: Words) -> bool:
    """Whether most look like floats, or like pairs of shorter ones, rather than like numbers and addresses."""
    size = np.abs(words.view(np.float32))
    return float(np.mean((size > USUAL[0]) & (size < USUAL[1]))) > 0.75


def unwound(path: Path) -> list[int]:
    """Where functions of an ELF file begin, by the table that unwinds them, which stripping leaves there."""
    from elftools.dwarf.callframe import FDE
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        elf = ELFFile(file)
        if not elf.has_dwarf_info(strict=False):
            return []
        entries = elf.get_dwarf_info(relocate_dwarf_sections=False).EH_CFI_entries()
        plt = [
            (each["sh_addr"], each["sh_addr"] + each["sh_size"]) for each in elf.iter_sections() if "plt" in each.name
        ]
        starts = {entry.header["initial_location"] for entry in entries if isinstance(entry, FDE)}
        return sorted(start for start in starts if not any(first <= start < last for first, last in plt))
