"""Modules of SPIR-V as they lie in a library: found by their content, read, and changed in place."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

MAGIC, HEADER = struct.pack("<I", 0x07230203), 20
# Of the specification, "Binary Form": the opcodes that are looked at.
EXT_INST, CAPABILITY, FUNCTION, FUNCTION_END, VARIABLE = 12, 17, 54, 56, 59
LOAD, STORE, ACCESS_CHAIN, IN_BOUNDS_ACCESS_CHAIN, DECORATE = 61, 62, 65, 66, 71
F_CONVERT, BITCAST, I_ADD, F_ADD, I_SUB, F_SUB, F_MUL, U_DIV, F_DIV = (
    115, 124, 128, 129, 130, 131, 133, 134, 136
)  # fmt: skip
SPEC_ID, BINDING = 1, 33  # decorations
SUBGROUP_ARITHMETIC, SUBGROUP_SHUFFLE = 63, 65  # capabilities
EXP, SQRT, INVERSE_SQRT = 27, 31, 32  # of GLSL.std.450


@dataclass(frozen=True)
class Instruction:
    """One, with its words behind the opcode; ``at``: where it begins in its module."""

    at: int
    code: int
    words: tuple[int, ...]


@dataclass(frozen=True)
class Module:
    """A module's bytes, and where they begin in the library."""

    at: int
    data: bytes

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        return tuple(_read(self.data))

    @cached_property
    def bindings(self) -> dict[int, int]:
        """A variable's id -> the binding of its buffer."""
        return {each.words[0]: each.words[2] for each in self.of(DECORATE) if each.words[1] == BINDING}

    @cached_property
    def constants(self) -> set[int]:
        """Numbers of its specialization constants."""
        return {each.words[2] for each in self.of(DECORATE) if each.words[1] == SPEC_ID}

    @cached_property
    def capabilities(self) -> set[int]:
        return {each.words[0] for each in self.of(CAPABILITY)}

    @cached_property
    def functions(self) -> set[int]:
        """Functions of GLSL.std.450 that it calls."""
        return {each.words[3] for each in self.of(EXT_INST)}

    @cached_property
    def _sources(self) -> dict[int, int]:
        """A value's id -> the one that it is loaded, converted or reached from."""
        through = (LOAD, ACCESS_CHAIN, IN_BOUNDS_ACCESS_CHAIN, F_CONVERT, BITCAST)
        return {each.words[1]: each.words[2] for each in self.instructions if each.code in through}

    def of(self, code: int) -> list[Instruction]:
        return [each for each in self.instructions if each.code == code]

    def made_by(self, code: int, values: set[int]) -> list[Instruction]:
        """Instructions of an opcode that give one of these values."""
        return [each for each in self.of(code) if each.words[1] in values]

    def results(self, function: int) -> set[int]:
        """What a function of GLSL.std.450 gives, wherever it is called."""
        return {each.words[1] for each in self.of(EXT_INST) if each.words[3] == function}

    def binding(self, value: int) -> int | None:
        """The binding of the buffer that a value comes from."""
        while value in self._sources:
            value = self._sources[value]
        return self.bindings.get(value)

    def of_buffer(self, code: int, binding: int) -> list[Instruction]:
        """Instructions with a value of this buffer among their operands."""
        return [each for each in self.of(code) if binding in map(self.binding, each.words[2:])]


def modules(library: bytes) -> Iterator[Module]:
    """Every module in a library's data."""
    at = library.find(MAGIC)
    while at >= 0:
        end = _end(library, at)
        if end:
            yield Module(at, library[at:end])
        at = library.find(MAGIC, end or at + 4)


def _end(library: bytes, at: int) -> int | None:
    """Where a module ends: behind its last function; None where none begins."""
    place = at + HEADER
    while place + 4 <= len(library):
        code, count = struct.unpack_from("<2H", library, place)
        place += 4 * count
        if not count:
            return None
        if code == FUNCTION_END and struct.unpack_from("<H", library, place)[0] != FUNCTION:
            return place
    return None


def _read(data: bytes) -> Iterator[Instruction]:
    place = HEADER
    while place < len(data):
        code, count = struct.unpack_from("<2H", data, place)
        yield Instruction(place, code, struct.unpack_from(f"<{count - 1}I", data, place + 4))
        place += 4 * count
