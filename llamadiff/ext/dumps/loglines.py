"""Parses the lines of a debug log: names, lists of values, single values, statistics, logits. One linear scan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from llamadiff.trace.reader import Number

MAX_LINES, MAX_LINE, MAX_DIGITS, MAX_VALUES = 1 << 20, 1 << 16, 40, 1 << 22
FEW = 3  # lines that were not understood, and are shown
STATISTICS = {"rms": "rms", "mean": "mean", "avg": "mean", "min": "min", "max": "max", "norm": "norm", "l2": "norm"}

_NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?:nan|inf(?:inity)?)\b"
_NUMBERS = re.compile(rf"(?<![A-Za-z0-9_.])(?:{_NUMBER})|\.\.\.", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./@-]*")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TAG = re.compile(r"^\s*\[[A-Za-z ]{1,20}\]")  # of a logger: [DEBUG]
_SHAPE = re.compile(r"\b(?:shape|dims?|ne|nb|size|strides?)\s*[=:]?\s*[\[({][0-9,x ]*[\])}]", re.IGNORECASE)
_PAIR = re.compile(rf"\b([A-Za-z_][A-Za-z0-9_]{{0,20}})\s*[=:]\s*({_NUMBER})", re.IGNORECASE)
_INDEXED = re.compile(rf"\[\s*([0-9]{{1,12}})\s*\]\s*[=:]\s*({_NUMBER})\s*[,;]?\s*$", re.IGNORECASE)
_ROW = re.compile(r"\b(?:token|tok|row|pos|position)\s*[=:#]?\s*(-?[0-9]{1,7})\b", re.IGNORECASE)
_END = re.compile(r"\b(first|last)\s+(?:token|row|position)\b", re.IGNORECASE)
_BACK = re.compile(r"\blast\s+[0-9]{0,7}\s*(?:values|elements|columns|entries)\b", re.IGNORECASE)
TOKENS = re.compile(r"\b(?:tokens|token_ids|token ids|input_ids|ids)\s*[=:]?\s*\[([0-9, ]+)\]", re.IGNORECASE)
_PLAIN = {"first", "last", "values", "value", "vals", "val", "data", "elements", "output", "out", "row", "token", "tok",
          "pos", "position", "tensor", "array", "sample", "head", "of", "the", "n", "top", "f32", "float32", "x", "sum",
          "shape", "columns", "entries", "np", "torch", "vec", "debug", "info"}  # fmt: skip


@dataclass(frozen=True)
class Listed:
    """Values of one row: the first ones, then the last ones (``tail``); or those at ``places``."""

    head: tuple[Number, ...]
    tail: tuple[Number, ...] = ()
    places: tuple[int, ...] = ()
    row: int | None = None
    from_end: bool = False  # whether rows were left out between this one and those before it


@dataclass
class Block:
    """What stands under one mention of a name."""

    name: str
    row: int | None = None
    lists: list[Listed] = field(default_factory=list)
    statistics: dict[str, Number] = field(default_factory=dict)
    gap: bool = False

    def add(self, listed: Listed) -> None:
        """One more row, or one more value of the row at hand."""
        last = self.lists[-1] if self.lists else None
        if listed.places and last is not None and last.places:
            more = Listed((*last.head, *listed.head), (), (*last.places, *listed.places), last.row, last.from_end)
            self.lists[-1] = more
        elif last is not None and listed.tail and not listed.head and not last.tail:  # "Last 3 values" of the same row
            self.lists[-1] = replace(last, tail=listed.tail)
        else:
            self.lists.append(listed)


@dataclass
class Log:
    """All that was read. ``unknown`` are names that stand for nothing; ``others`` the first lines not understood."""

    blocks: list[Block] = field(default_factory=list)
    logits: dict[int, Number] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)
    lines: int = 0
    understood: int = 0
    others: list[str] = field(default_factory=list)


def number_of(text: str) -> Number | None:
    """A number and half a unit of its last digit; None for one of more digits than anybody prints."""
    if len(text) > MAX_DIGITS:
        return None
    mantissa, _, exponent = text.lower().partition("e")
    if "n" in mantissa:  # nan, inf
        return Number(float(text), 0.0)
    decimals = len(mantissa.partition(".")[2])
    power = int(exponent or 0) - decimals
    return Number(float(text), 0.5 * 10.0**power if abs(power) < 300 else 0.0)


def read_lines(lines: Iterable[str], is_name: Callable[[str], bool]) -> Log:
    """A log, line by line; ``is_name`` tells the words that name a tensor."""
    log, block, values = Log(), None, 0
    for line in lines:
        text = _SHAPE.sub(" ", _COLOUR.sub("", line)).strip()
        if not text:
            continue
        log.lines += 1
        if TOKENS.search(text):
            log.understood += 1
            continue
        name = next((word for word in _words(text) if is_name(word)), None)
        if name is not None:
            block = Block(name, _row_of(text.replace(name, " ", 1)))
            log.blocks.append(block)
            text = text.replace(name, " ", 1)
        found = _takes(log, block, text) if values < MAX_VALUES else False
        values += found
        if found or name is not None:
            log.understood += 1
            continue
        if len(log.others) < FEW:
            log.others.append(line.strip())
        if any(word.lower() not in {*_PLAIN, *STATISTICS} for word in _words(text)):
            block = None  # what follows may be of something else
    return log


def _words(text: str) -> Iterator[str]:
    for match in _WORD.finditer(text):
        yield match[0].rstrip(".:/-")


def _takes(log: Log, block: Block | None, text: str) -> int:
    """What a line without its name adds: how many numbers, 0 if it is not understood."""
    pairs = {match[1].lower(): match[2] for match in _PAIR.finditer(text)}
    if "logit" in pairs and pairs.get("token", pairs.get("id", "")).isdigit():
        token, logit = pairs.get("token", pairs.get("id", "")), number_of(pairs["logit"])
        if logit is not None and len(token) < 10:
            log.logits.setdefault(int(token), logit)
        return int(logit is not None)
    stated = {STATISTICS[key]: number for key, word in pairs.items()
              if key in STATISTICS and (number := number_of(word)) is not None}  # fmt: skip
    if block is None:
        _is_strangers(log, text)
        return 0
    if stated:
        block.statistics.update(stated)
        return len(stated)
    if set(text) <= set(". ,[](){}"):  # brackets of a tensor's print; rows left out
        block.gap |= "..." in text
        return 1
    return _values(log, block, text)


def _values(log: Log, block: Block, text: str) -> int:
    indexed = _INDEXED.search(text)
    if indexed and not text[: indexed.start()].strip(" =:,"):
        number = number_of(indexed[2])
        if number is not None:
            block.add(Listed((number,), (), (int(indexed[1]),), block.row))
        return int(number is not None)
    before, inside = _split(_TAG.sub("", text))
    head, tail = _listed(inside)
    if not (head or tail) or _is_strangers(log, before + "["):
        return 0
    row = _row_of(before)
    if _BACK.search(before):
        head, tail = (), (*head, *tail)
    block.add(Listed(head, tail, (), block.row if row is None else row, block.gap))
    return len(head) + len(tail)


def _is_strangers(log: Log, text: str) -> bool:
    """Whether values in brackets are called by a name that is no tap's; it is noted."""
    before, bracket, _ = _TAG.sub("", text).partition("[")
    stranger = next((word for word in _words(before) if word.lower() not in _PLAIN), None)
    if bracket and stranger is not None:
        log.unknown.setdefault(stranger)
    return bool(bracket) and stranger is not None


def _split(text: str) -> tuple[str, str]:
    """What is said of values, and the values: in brackets, or after the last colon, or as all there is."""
    before, bracket, inside = text.partition("[")
    if bracket:
        return before, inside
    said = " ".join(match[0] for match in (_ROW.search(text), _END.search(text)) if match)
    rest = _END.sub(" ", _ROW.sub(" ", text)).replace("()", " ").strip(" ,()=")
    before, _, inside = rest.rpartition(":")
    return f"{before} {said}", inside.strip(" ()")


def _listed(text: str) -> tuple[tuple[Number, ...], tuple[Number, ...]]:
    """The numbers of a list before and after its "..."; none if there is anything else in it."""
    inside = text.lstrip("[( ").partition("]")[0]
    parts: list[list[Number]] = [[], []]
    which, rest = 0, 0
    for match in _NUMBERS.finditer(inside):
        if inside[rest : match.start()].strip(" ,;|\t"):
            return (), ()
        rest = match.end()
        if match[0] == "...":
            which = 1
            continue
        number = number_of(match[0])
        if number is None:
            return (), ()
        parts[which].append(number)
    if inside[rest:].strip(" ,;|\t)…"):
        return (), ()
    return tuple(parts[0]), tuple(parts[1])


def _row_of(text: str) -> int | None:
    """The token that a line speaks of."""
    end = _END.search(text)
    if end is not None:
        return 0 if end[1].lower() == "first" else -1
    match = _ROW.search(text)
    return int(match[1]) if match else None
