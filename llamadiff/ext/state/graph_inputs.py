"""What a pass over llama.cpp's graph was given besides tokens, as its nodes read it: masks, positions, rows to write,
and the recurrent states that it reads, moves and writes.

It is told by how nodes use it, whatever it is called, and only where it is another than was told before.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping
from typing import Any

from llamadiff.llamacpp.tensor_transport import Feed
from llamadiff.llamacpp.tensors import Tensor

CACHE = "cache_"  # how llama.cpp's names of caches begin
MASK, ROWS, POSITIONS, SHIFT = "mask", "rows", "positions", "shift"
CLEARED, READ, MOVED, WRITTEN = "cleared", "read", "moved", "written"  # what is done to recurrent states
STATES = (f"{CACHE}r_", f"{CACHE}s_", f"{CACHE}ple_r_")  # how the names of their caches begin
_IDS: Mapping[str, int] = {"GET_ROWS": 1, "SSM_SCAN": 6}  # op -> which of its sources says the states that it reads
_MASKS: Mapping[str, int] = {"SOFT_MAX": 1, "FLASH_ATTN_EXT": 3}  # op -> which of its sources the mask is
_PLAIN = ("VIEW", "RESHAPE", "PERMUTE", "CONT", "CPY")  # what passes values on


class GraphInputs:
    """What is told of a run's passes."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.sizes = dict[str, int]()  # cache of states -> bytes of one
        self.begin()

    def begin(self) -> None:
        """A pass begins, or a context."""
        self.keys = ""  # the cache that scores were made of last
        self._told: dict[int, int] = {}  # address -> what was told of it
        self._copied: dict[int, tuple[Tensor, bytes]] = {}  # a copy's address -> the input that it is made of

    def tell(self, node: Tensor, start: int, rows: int) -> None:
        """What a node is given, before it runs."""
        if node.op == "MUL_MAT":
            self._note_keys(node.sources[0])
        elif node.op in _MASKS:
            self._tell_mask(node, start, rows)
        elif node.op == "SET_ROWS" and node.base is not None and node.base.name.startswith(CACHE):
            self._say(ROWS, node.base.name, node.sources[1], start, rows, node.base.shape)
        elif node.op == "ROPE" and len(node.sources) > 1:
            cache = _cache_behind(node.sources[0])
            self._say(SHIFT if cache else POSITIONS, cache, node.sources[1], start, rows)
        elif node.op in ("SCALE", "CPY", *_IDS):
            self._note_copy(node)
            self._tell_states(node, {"start": start, "rows": rows})

    def _tell_states(self, node: Tensor, whose: Mapping[str, int]) -> None:
        """What is done to rows of a cache of states: some are set to zero, read by number, moved, or written."""
        ids = node.sources[_IDS[node.op]] if node.op in _IDS and len(node.sources) > _IDS[node.op] else None
        cache = _states_of(node if ids is None else node.sources[0])
        if not cache:
            return
        whole = node.base or node.sources[0].base or node.sources[0]
        self.sizes[cache] = size = _bytes_of_a_state(node) or self.sizes.get(cache, whole.row)
        if ids is not None and not ids.offset:
            self._say_states(READ, cache, whose, ids=ids)
        elif ids is None and (place := _rows_of(node, size))[1]:
            got = _plain(node.sources[0])
            if node.op == "SCALE":
                self._say_states(CLEARED if not any(node.parameters[:4]) else READ, cache, whose, place)
            elif got.op == "GET_ROWS" and _states_of(got.sources[0]) == cache:
                self._say_states(MOVED, cache, whose, place, got.sources[1])
            else:
                self._say_states(WRITTEN, cache, whose, place)

    def _say_states(
        self,
        what: str,
        cache: str,
        whose: Mapping[str, int],
        place: tuple[int, int] = (0, 0),
        ids: Tensor | None = None,
    ) -> None:
        numbers = array("i", bytes(ids.data)).tolist() if ids is not None else []
        self.feed.send({"given": what, "cache": cache, "place": place, "ids": numbers, **whose})

    def _note_keys(self, keys: Tensor) -> None:
        base = keys.base
        if base is not None and base.name.startswith(f"{CACHE}k"):
            self.keys = base.name

    def _note_copy(self, node: Tensor) -> None:
        """An input that is copied for several layers: once it is, its own memory may be another's."""
        source = _plain(node.sources[0])
        if node.op == "CPY" and source.op == "NONE" and not source.name.startswith(CACHE):
            self._copied[node.address] = source, bytes(source.data)

    def _tell_mask(self, node: Tensor, start: int, rows: int) -> None:
        place = _MASKS[node.op]
        if node.op == "FLASH_ATTN_EXT":
            self._note_keys(node.sources[1])
        if len(node.sources) > place and self.keys:
            self._say(MASK, self.keys, node.sources[place], start, rows)

    def _say(self, what: str, cache: str, source: Tensor, start: int, rows: int, shape: tuple[int, ...] = ()) -> None:
        source, data = self._copied.get(source.address) or (_plain(source), None)  # what it is made of is there already
        if source.op != "NONE":
            return
        data = source.data if data is None else data
        told = zlib.crc32(data)
        is_same = self._told.get(source.address) == told
        if is_same and what == POSITIONS:
            return
        self._told[source.address] = told
        event: dict[str, Any] = {"given": what, "cache": cache, "start": start, "rows": rows, "shape": [*shape],
                                 "tensor": source.to_dict()}  # fmt: skip
        self.feed.send(event, *([] if is_same else [data]))


def _plain(tensor: Tensor) -> Tensor:
    """What values are passed on from."""
    while tensor.op in _PLAIN and tensor.sources:
        tensor = tensor.sources[0]
    return tensor


def _states_of(tensor: Tensor) -> str:
    """The cache of states that a tensor is, or looks into."""
    name = (tensor.base or tensor).name
    return name if name.startswith(STATES) else ""


def _bytes_of_a_state(node: Tensor) -> int:
    """Of a cache that is read by number, or set to zero: as what it is taken for has rows; 0: another node."""
    if node.op not in ("GET_ROWS", "SCALE"):
        return 0
    shown = node.sources[0]
    while shown.op == "VIEW" and shown.sources:
        shown = shown.sources[0]
    return shown.row


def _rows_of(tensor: Tensor, size: int) -> tuple[int, int]:
    """The first row of its cache, each of so many bytes, that a view reaches, and how many it does."""
    if not size or not tensor.reach:
        return 0, 0
    first = tensor.offset // size
    return first, -(-(tensor.offset + tensor.reach) // size) - first


def _cache_behind(tensor: Tensor) -> str:
    """The cache whose rows are moved: a quantized one is decoded for that, and perhaps turned."""
    while tensor.op in (*_PLAIN, "MUL_MAT") and tensor.sources:
        base = tensor.base
        if base is not None and base.name.startswith(CACHE):
            return base.name
        tensor = tensor.sources[-1 if tensor.op == "MUL_MAT" else 0]
    return ""
