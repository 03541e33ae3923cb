"""What is done to a context, step by step: each is one call of llama.cpp's, with its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NEW, DECODE, CLEAR = "new", "decode", "clear"
REMOVE, COPY, SHIFT = "seq_rm", "seq_cp", "seq_add"
IN_F32, IN_F16 = 1, 2  # the cache of a new context, where it is not as the settings say
GET, SET, SAVE, LOAD = "get", "set", "save", "load"  # the state of a sequence: to memory or a file, and back

_WORDS: Mapping[str, str] = {
    NEW: "llama_init_from_model, n_ctx = {}, n_seq_max = {}, n_ubatch = {}",
    CLEAR: "llama_memory_clear(mem, false)",
    REMOVE: "llama_memory_seq_rm(mem, {}, {}, {})",
    COPY: "llama_memory_seq_cp(mem, {}, {}, {}, {})",
    SHIFT: "llama_memory_seq_add(mem, {}, {}, {}, {})",
    GET: "llama_state_seq_get_data of sequence {} into buffer {}",
    SET: "llama_state_seq_set_data of buffer {1} into sequence {0}",
    SAVE: "llama_state_seq_save_file of sequence {} into file {}",
    LOAD: "llama_state_seq_load_file of file {1} into sequence {0}",
}


@dataclass(frozen=True)
class Step:
    """One call, with its numbers: ``of``, in the call's own order (a state: the sequence, and where it is kept; a new
    context: also what its cache is in, where that is not as the settings say).

    A batch has ``tokens``, their ``positions`` and ``sequences``. Those at ``places`` are recorded, as the trace's rows
    from ``row`` on.
    """

    call: str
    of: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    row: int = 0

    def words(self) -> str:
        """The step as llama.cpp has it."""
        if self.call != DECODE:
            return _WORDS[self.call].format(*self.of)
        each = zip(self.tokens, self.positions, self.sequences, strict=True)
        said = ", ".join(f"{{{token}, {place}, {sequence}}}" for token, place, sequence in each)
        return f"llama_decode, tokens {{id, pos, seq_id}}: {said}"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Step:
        lists = {name: tuple(value) for name, value in data.items() if isinstance(value, (list, tuple))}
        return cls(data["call"], row=data["row"], **lists)
