"""The pickle of a .pt file, read as data: dicts, lists and tensors' places in a file. Nothing in it is called.

A pickle is a program for a machine with a stack. Of its instructions those are carried out here that ``torch.save``
needs for containers of tensors; what they would import stays a name, and what they would call is written down as a
``Call``. So a pickle that asks for another function is refused by that function's name, before anything of it ran.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_BYTES = 1 << 24  # of a pickle: that of a tensor takes about 150, its values lie outside
MAX_DEPTH = 16  # of dicts and lists in each other
MAX_ITEMS = 1 << 17  # of all containers: a list that holds another twice would double it

_ORDERED = "collections.OrderedDict"
_MARK = object()


class PickleError(Exception):
    """What is wrong with a pickle, in words that follow the file's name."""


@dataclass(frozen=True)
class Name:
    """What a pickle would import: ``torch.FloatStorage``."""

    name: str


@dataclass(frozen=True)
class Call:
    """What a pickle would call, and with what."""

    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Stored:
    """A reference to what lies outside the pickle: a storage of a tensor's values."""

    about: tuple[Any, ...]


@dataclass
class _Machine:
    """The stack, and what is left of the bytes; ``allowed`` says which functions a Call may have."""

    data: bytes
    allowed: Callable[[str], bool]
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self) -> Any:
        """What the pickle stands for."""
        while True:
            code = self.take(1)
            if code == b".":
                return self.pop()
            step = _STEPS.get(code)
            if step is None:
                raise PickleError(f"its pickle has the instruction {code!r}, which containers of tensors do not need")
            step(self)

    def take(self, count: int) -> bytes:
        """The next bytes."""
        found = self.data[self.at : self.at + count]
        if len(found) < count:
            raise PickleError("its pickle is cut off")
        self.at += count
        return found

    def number(self, kind: str) -> Any:
        """The next number, of a kind of the module struct."""
        (value,) = struct.unpack(kind, self.take(struct.calcsize(kind)))
        return value

    def text(self, kind: str) -> str:
        """A text behind its length."""
        return self.take(self.number(kind)).decode("utf-8", "replace")

    def line(self) -> str:
        """A text up to the end of its line."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise PickleError("its pickle is cut off")
        return self.take(end + 1 - self.at)[:-1].decode("utf-8", "replace")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise PickleError("its pickle takes more than it has")
        return self.stack.pop()

    def popped(self) -> list[Any]:
        """All above the last mark, which goes too."""
        found = []
        while self.stack and self.stack[-1] is not _MARK:
            found.append(self.stack.pop())
        if not self.stack:
            raise PickleError("its pickle takes more than it has")
        self.stack.pop()
        return found[::-1]

    def remember(self, place: int) -> None:
        value = self.pop()
        self.push(value)
        self.memo[place] = value

    def recall(self, place: int) -> None:
        if place not in self.memo:
            raise PickleError("its pickle takes more than it has")
        self.push(self.memo[place])

    def into(self, kind: type) -> Any:
        """The container on top, which stays there."""
        found = self.pop()
        if not isinstance(found, kind):
            raise PickleError(f"its pickle puts items into what is no {kind.__name__}")
        self.push(found)
        return found

    def join(self, parts: list[Any]) -> None:
        """Put parts into the list on top."""
        self.into(list).extend(parts)

    def put(self, parts: list[Any]) -> None:
        """Put keys and values, in turns, into the dict on top."""
        found = self.into(dict)
        for key, value in zip(parts[::2], parts[1::2], strict=False):
            if not isinstance(key, (str, int, bool, type(None))):
                raise PickleError("its dicts have keys that are neither texts nor numbers")
            found[key] = value

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise PickleError("its pickle calls what is no function")
        if function.name == _ORDERED and not arguments:
            self.push({})
            return
        if not self.allowed(function.name):
            raise PickleError(f"its pickle would call {function.name[:80]}, and none of it was run")
        self.push(Call(function.name, arguments))

    def join_names(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise PickleError("its pickle imports what has no name")
        self.push(Name(f"{module}.{name}"))

    def refer(self) -> None:
        about = self.pop()
        self.push(Stored(about if isinstance(about, tuple) else ()))

    def tuple_of(self, count: int) -> None:
        self.push(tuple([self.pop() for _ in range(count)][::-1]))

    def pair(self) -> list[Any]:
        value, key = self.pop(), self.pop()
        return [key, value]


_STEPS: Mapping[bytes, Callable[[_Machine], object]] = {
    b"\x80": lambda m: m.take(1), b"\x95": lambda m: m.take(8),  # the protocol, a frame's length
    b"(": lambda m: m.push(_MARK), b"0": lambda m: m.pop(),
    b"}": lambda m: m.push({}), b"]": lambda m: m.push([]), b")": lambda m: m.push(()),
    b"X": lambda m: m.push(m.text("<I")), b"\x8c": lambda m: m.push(m.text("<B")),
    b"K": lambda m: m.push(m.number("<B")), b"M": lambda m: m.push(m.number("<H")),
    b"J": lambda m: m.push(m.number("<i")), b"G": lambda m: m.push(m.number(">d")),
    b"\x8a": lambda m: m.push(int.from_bytes(m.take(m.number("<B")), "little", signed=True)),
    b"N": lambda m: m.push(None), b"\x88": lambda m: m.push(True), b"\x89": lambda m: m.push(False),
    b"q": lambda m: m.remember(m.number("<B")), b"r": lambda m: m.remember(m.number("<I")),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"h": lambda m: m.recall(m.number("<B")), b"j": lambda m: m.recall(m.number("<I")),
    b"c": lambda m: m.push(Name(f"{m.line()}.{m.line()}")), b"\x93": lambda m: m.join_names(),
    b"Q": lambda m: m.refer(), b"R": lambda m: m.call(),
    b"b": lambda m: m.pop(),  # what is set on an OrderedDict beside its items, which load_state_dict alone asks for
    b"t": lambda m: m.push(tuple(m.popped())), b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2), b"\x87": lambda m: m.tuple_of(3),
    b"a": lambda m: m.join([m.pop()]), b"e": lambda m: m.join(m.popped()),
    b"s": lambda m: m.put(m.pair()), b"u": lambda m: m.put(m.popped()),
}  # fmt: skip


def read_pickle(data: bytes, allowed: Callable[[str], bool]) -> Any:
    """What a pickle holds: dicts, lists, tuples, texts, numbers, Names, Calls and Stored. Raises PickleError."""
    return _Machine(data, allowed).run()


def items_of(whole: Any) -> Iterator[tuple[str, Any]]:
    """What containers in each other hold, by the keys and places on the way, joined by points."""
    left = MAX_ITEMS

    def walk(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_DEPTH:
            raise PickleError(f"holds more than {MAX_ITEMS} items, or containers deeper than {MAX_DEPTH}")
        if not isinstance(value, (dict, list, tuple)):
            yield name, value
            return
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in inside:
            yield from walk(f"{name}.{key}" if name else str(key), each, depth + 1)

    yield from walk("", whole, 0)
