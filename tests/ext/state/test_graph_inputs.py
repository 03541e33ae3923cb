"""What a pass was given is read while it is there: llama.cpp's memory of an input is another's once it was copied."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

from llamadiff.ext.state.graph_inputs import MASK, GraphInputs


class Sent:
    """A feed that keeps what it is told."""

    def __init__(self) -> None:
        self.masks: list[tuple[dict[str, Any], bytes | None]] = []

    def send(self, event: dict[str, Any], data: bytes | None = None) -> None:
        if event["given"] == MASK:
            self.masks.append((event["tensor"], data))


def tensor(op: str, *sources: Any, name: str = "", address: int = 0, data: bytes = b"", base: Any = None) -> Any:
    return SimpleNamespace(op=op, sources=sources, name=name, address=address, data=data, base=base,
                           to_dict=lambda: {"name": name})  # fmt: skip


def test_a_mask_that_was_copied_is_told_as_it_was_then():
    """As releases up to llama-cpp-python 0.3.22 copy it for flash attention, once for all layers."""
    sent = Sent()
    given = GraphInputs(sent)
    right = struct.pack("4f", 0.0, float("-inf"), 0.0, 0.0)
    mask = tensor("NONE", name="attn_inp_kq_mask", address=1, data=right)
    copy = tensor("CPY", mask, name="attn_inp_kq_mask (copy)", address=2)
    for layer in range(2):
        cache = tensor("NONE", name=f"cache_k_l{layer}")
        keys, view = tensor("VIEW", cache, base=cache), tensor("VIEW", copy, address=copy.address)
        if not layer:
            given.tell(copy, 0, 2)
        given.tell(tensor("FLASH_ATTN_EXT", None, keys, None, view if layer else copy), 0, 2)
        mask.data = bytes(16)  # the memory is used again
    assert sent.masks == [({"name": "attn_inp_kq_mask"}, right), ({"name": "attn_inp_kq_mask"}, None)]  # None: the same
    given.begin()
    given.tell(tensor("FLASH_ATTN_EXT", None, keys, None, mask), 0, 2)
    assert sent.masks[-1] == ({"name": "attn_inp_kq_mask"}, bytes(16))  # of the next pass
