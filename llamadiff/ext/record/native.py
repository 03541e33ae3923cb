"""A program under frida, whose memory is looked at at each call and return of its own functions.

Runs in a process of its own, which lives no longer than whoever wants the log (``supervise``).
"""

from __future__ import annotations

import os
import queue
import shutil
import struct
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamadiff.ext.record.changes import Changes
from llamadiff.ext.record.log import NO_CODE, LogWriter
from llamadiff.ext.record.memory import ProcessMemory, Words

END = (1 << 32) - 1  # in place of a function's number: the program ends, with a code in place of the next
USUAL = 2.0**-40, 2.0**40  # sizes of values
STOP = struct.Struct("<4I")  # agent.js: function, or END; whether it returns, or the code; process; at END, if it waits
USELESS = 512, 1 << 13  # stops at a function in turn without a row's words: it is left alone; after some, later
ROW = 8  # words
FUNCTIONS = 1 << 16
# What a program calls between its ops: scalar maths, BLAS, OpenMP. Not copies, which C libraries enter in the middle,
# nor maths of vectors, whose arguments lie in registers that are not kept at a stop.
CALLED = r"^((exp|pow|sin|cos|sincos|tanh|erf|sqrt|log|fma|round)[0-9m]*[fl]?|cblas_\w+|[sdc]ge(mm|mv)_?|dnnl_\w+"
CALLED += r"|GOMP_\w+|omp_\w+|__kmpc_\w+)$"
AT_ONCE = 1  # linux/wait.h: WNOHANG
SIGNAL = 1 << 8  # added to the number of the signal that a program in gdb died of
SOON, SLOW = 0.05, 60.0  # seconds: between two looks at whether a program runs, and until gdb has started it


def main(folder: str, most: str, *program: str) -> None:
    """Run a program, keep ``most`` bytes of what it writes in ``folder``."""
    environment = dict(os.environ)
    os.environ["TMPDIR"] = folder  # for what frida writes there, and leaves if it is killed
    import frida
    from elftools.common.exceptions import ELFError

    recorder = Recorder(Path(folder), int(most), environment)
    cannot = (
        frida.ExecutableNotFoundError, frida.ExecutableNotSupportedError, frida.NotSupportedError, frida.TransportError,
        frida.PermissionDeniedError, frida.ProcessNotFoundError, frida.ProcessNotRespondingError, frida.TimedOutError,
    )  # fmt: skip
    try:
        recorder.log.close(recorder.run(program))
    except (*cannot, ELFError, CannotError) as error:
        recorder.log.close(error=str(error))


class CannotError(Exception):
    """A program cannot be recorded, and why."""


class Recorder:
    """One run of one program, with an environment."""

    def __init__(self, folder: Path, most: int, environment: Mapping[str, str]) -> None:
        self._folder, self._most, self._environment = folder, most, environment
        self.log = LogWriter(folder)
        self._useless = dict[int, int]()  # function -> stops in turn at which nothing had been written
        self._useful = set[int]()  # functions at which something had
        self._messages = queue.Queue[bytes]()

    def run(self, program: tuple[str, ...]) -> int:
        """Until the program has ended -> its return code. Raises CannotError, or what frida does, if it cannot."""
        heard, messages = os.pipe()
        replies, self._replies = os.pipe()
        threading.Thread(target=self._listen, args=(heard,), daemon=True).start()
        start = self._start_in_gdb if is_static(Path(program[0])) else self._start_with_frida
        self._waited = start(program, [f"/proc/{os.getpid()}/fd/{pipe}" for pipe in (messages, replies)])
        return self._follow()

    def _listen(self, heard: int) -> None:
        while True:
            self._messages.put(os.read(heard, STOP.size))

    def _start_with_frida(self, program: tuple[str, ...], pipes: list[str]) -> int:
        """Start it -> the process to wait for."""
        import frida

        device = frida.get_local_device()
        process = device.spawn([*program], stdio="inherit", env={**self._environment})
        path = Path(os.readlink(f"/proc/{process}/exe"))
        session = device.attach(process)
        script = session.create_script(Path(__file__).with_name("agent.js").read_text("utf-8"))
        script.load()
        agent: Any = script.exports_sync
        base, named = agent.functions(str(path.parent))
        starts = [*named, *([] if named else (hex(int(base, 16) + start) for start in unwound(path)))][:FUNCTIONS]
        called = agent.imports(str(path.parent), CALLED)
        agent.stop_at(*pipes, [*starts, *called][:FUNCTIONS], len(starts))
        self._watch(process, path)
        device.resume(process)
        return int(process)

    def _start_in_gdb(self, program: tuple[str, ...], pipes: list[str]) -> int:
        """Start it where frida cannot enter it -> the process to wait for."""
        gdb = shutil.which("gdb")
        if gdb is None:
            raise CannotError("it is linked statically: that needs gdb; apt install gdb")
        path = Path(os.path.realpath(program[0]))
        named = own_functions(path)
        starts = sorted({*named.values()} or unwound(path))[:FUNCTIONS]
        main = named.get("main.main", named.get("main", 0))
        agent = str(Path(__file__).with_name("gdb_agent.py"))
        run = f"gdb.execute('source ' + {agent!r})\nFollower(*{pipes!r}).run({starts!r}, {main})\n"
        script = self._folder / "gdb.py"
        script.write_text(f"import gdb\n{run}", "utf-8")
        words = [gdb, "-nx", "-q", "-batch", "-iex", "set auto-load off", "-x", str(script), "--args", *program]
        followed = subprocess.Popen(words, stdin=subprocess.DEVNULL, env={**self._environment})  # noqa: S603
        try:
            _, _, process, _ = STOP.unpack(self._messages.get(timeout=SLOW))
        except queue.Empty:
            raise CannotError("gdb did not start it") from None
        self._watch(process, path)
        os.write(self._replies, b"g")
        return followed.pid

    def _watch(self, process: int, path: Path) -> None:
        memory = ProcessMemory(process, str(path.parent))
        memory.leave_out()
        self._process, self._changes = process, Changes(memory)

    def _follow(self) -> int:
        """Look at memory at each stop, until the program ends -> its return code."""
        code = NO_CODE
        while True:
            try:
                function, leaves, process, waits = STOP.unpack(self._messages.get(timeout=SOON))
            except queue.Empty:
                if (ended := self._ended(code)) is not None:
                    return ended
                continue
            if function != END:
                os.write(self._replies, self._stop(function) if process == self._process else b"m")
                continue
            code = leaves if leaves < SIGNAL else SIGNAL - leaves
            if waits:
                self.log.add_stop(self._changes.look(everything=True) if process == self._process else [])
                os.write(self._replies, b"g")

    def _ended(self, code: int) -> int | None:
        """The program's return code, or ``code`` where somebody else has waited for it; None while it runs."""
        try:
            process, status = os.waitpid(self._waited, AT_ONCE)
        except ChildProcessError:
            return code
        if not process:
            return None
        return os.waitstatus_to_exitcode(status) if self._waited == self._process else code

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


def is_static(path: Path) -> bool:
    """Whether an ELF file needs no linker to be loaded."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        return all(segment["p_type"] != "PT_INTERP" for segment in ELFFile(file).iter_segments())


def own_functions(path: Path) -> dict[str, int]:
    """Where the functions of an ELF file begin, by its symbols."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        table: Any = ELFFile(file).get_section_by_name(".symtab")
        symbols = list(table.iter_symbols()) if table is not None else []
        return {
            each.name: each["st_value"] for each in symbols
            if each["st_info"]["type"] == "STT_FUNC" and each["st_size"] > 0 and not each.name.startswith("_")
        }  # fmt: skip


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
