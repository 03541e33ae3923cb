"""The writable memory of a process, as Linux shows it."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
_POINTER = ctypes.c_void_p
PAGE = mmap.PAGESIZE
_AT_ONCE = 1024  # vectors of one call: IOV_MAX


class Kind(Enum):
    """What a region is: the first thread's stack, the heap, a file's variables, or memory that was asked for."""

    STACK, HEAP, FILE, ANONYMOUS = range(4)


class Region(NamedTuple):
    """Writable memory without a gap: from ``start`` up to ``end``."""

    start: int
    end: int
    kind: Kind


class ProcessMemory:
    """What another process may write: its heap, its stacks, anonymous mappings, and its own files' variables."""

    def __init__(self, process: int, folder: str) -> None:
        """``folder``: of a file mapped from there, the variables are watched."""
        self._process, self._folder = process, folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._foreign = set[int]()  # where regions begin that are not the program's

    def leave_out(self) -> None:
        """What there is now, before the program has begun, but for its files and stack, is whoever records it."""
        self._foreign = {region.start for region in self.regions() if region.kind is Kind.ANONYMOUS}

    def size(self) -> int:
        """Pages that are mapped: another number says that memory was mapped or unmapped; of one that has ended, 0."""
        with suppress(OSError), open(f"/proc/{self._process}/statm", "rb", buffering=0) as sizes:
            return int(sizes.read().split()[0])
        return 0

    def regions(self) -> list[Region]:
        """Those that are now; of a process that has ended, none."""
        found, end_of_library = list[Region](), 0
        with suppress(OSError), open(f"/proc/{self._process}/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                addresses, access, _, _, inode, *name = line.split(None, 5)
                start, end = (int(address, 16) for address in addresses.split("-"))
                file = name[0].strip() if name else ""
                is_library = inode != "0" and not file.startswith(self._folder + "/")
                if is_library or (start == end_of_library and not file):  # and its variables that begin as zeros
                    end_of_library = end
                elif access.startswith("rw") and not file.startswith("[v") and start not in self._foreign:
                    known = {"[stack]": Kind.STACK, "[heap]": Kind.HEAP}
                    kind = Kind.FILE if inode != "0" else known.get(file, Kind.ANONYMOUS)
                    found.append(Region(start, end, kind))
        return found

    def present(self, addresses: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the page of each address was ever written: of what was only asked for, nothing need be compared."""
        pages = addresses // PAGE
        out = np.ones(len(pages), np.bool_)
        firsts = np.flatnonzero(np.diff(pages, prepend=-2) != 1) if len(pages) else pages
        with suppress(OSError), open(f"/proc/{self._process}/pagemap", "rb", buffering=0) as table:
            for first, last in zip(firsts, [*firsts[1:], len(pages)], strict=False):
                table.seek(8 * int(pages[first]))
                entries = np.frombuffer(table.read(8 * int(last - first)), np.uint64)
                out[first : first + len(entries)] = entries >> 62 > 0  # in memory, or swapped out
        return out

    def read(self, addresses: NDArray[np.int64], out: Words) -> None:
        """Fill each row of ``out`` [row, word] from its address; what cannot be read is left as it is."""
        size = out.shape[1] * out.itemsize
        firsts = np.flatnonzero(np.diff(addresses, prepend=-1) != size)  # of runs that follow one another
        counts = np.diff(firsts, append=len(addresses))
        for first in range(0, len(firsts), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            vectors = np.stack([addresses[firsts[part]], counts[part] * size], axis=1).astype(np.uint64)
            row, wanted = int(firsts[first]), int(counts[part].sum()) * size
            read = self._call(out[row:].ctypes.data, wanted, vectors)
            for number in range(row + max(0, read // size), row + wanted // size if read < wanted else 0):  # one by one
                self._call(out[number:].ctypes.data, size, np.array([[addresses[number], size]], np.uint64))

    def _call(self, here: int, size: int, there: NDArray[np.uint64]) -> int:
        local = np.array([here, size], np.uint64)  # struct iovec: an address, and bytes
        read = self._libc.process_vm_readv
        return int(
            read(self._process, local.ctypes.data_as(_POINTER), 1, there.ctypes.data_as(_POINTER), len(there), 0)
        )
