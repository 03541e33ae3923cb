"""What is done to the memory of a context between batches, by llama.cpp's own calls."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from llamadiff.llamacpp.interface import Handle, Library, Room
from llamadiff.llamacpp.layout import Address, declare
from llamadiff.llamacpp.request import Request, Say
from llamadiff.llamacpp.session import Quiet, ask_model, load, made_context
from llamadiff.llamacpp.steps import CLEAR, COPY, GET, LOAD, REMOVE, SAVE, SET, SHIFT, Step
from llamadiff.llamacpp.tensor_transport import Feed
from llamadiff.system.errors import UserError
from llamadiff.system.stale_files import temporary_directory

NO_ROPE = -1  # LLAMA_ROPE_TYPE_NONE
_KNOWN = ("llama_model_rope_type", "llama_model_n_swa")  # what a schedule cannot do without
STATES = ("llama_model_is_recurrent", "llama_model_is_hybrid")


class Memory:
    """The memory of a context, and the states of sequences that were taken from it."""

    def __init__(self, library: Library, context: Handle, kept: dict[int, bytes]) -> None:
        self.lib, self.context, self.kept = library.lib, context, kept
        self.handle = self.lib.llama_get_memory(context)
        self._calls: Mapping[str, Callable[..., bool]] = {
            CLEAR: self._clear, REMOVE: self._remove, COPY: self._copy, SHIFT: self._shift, GET: self._get,
            SET: self._set, SAVE: self._save, LOAD: self._load,
        }  # fmt: skip

    def perform(self, step: Step) -> None:
        """One step. Raises UserError for what llama.cpp refuses, and for a memory that cannot do it."""
        if not self.handle:
            raise UserError("the model keeps nothing between batches")
        if not self._calls[step.call](*step.of):
            raise UserError(f"llama.cpp refuses: {step.words()}")

    def _clear(self) -> bool:
        self.lib.llama_memory_clear(self.handle, False)
        return True

    def _remove(self, sequence: int, start: int, stop: int) -> bool:
        return bool(self.lib.llama_memory_seq_rm(self.handle, sequence, start, stop))

    def _copy(self, source: int, target: int, start: int, stop: int) -> bool:
        self.lib.llama_memory_seq_cp(self.handle, source, target, start, stop)
        return True

    def _shift(self, sequence: int, start: int, stop: int, by: int) -> bool:
        if not self.lib.llama_memory_can_shift(self.handle):
            return False
        self.lib.llama_memory_seq_add(self.handle, sequence, start, stop, by)
        return True

    def _get(self, sequence: int, place: int) -> bool:
        # the last of each is for forks, where it is flags; others do not look at it
        size = int(self.lib.llama_state_seq_get_size(self.context, sequence, 0))
        buffer = ctypes.create_string_buffer(size)
        count = int(self.lib.llama_state_seq_get_data(self.context, buffer, size, sequence, 0))
        self.kept[place] = buffer.raw[:count]
        return count == size

    def _set(self, sequence: int, place: int) -> bool:
        held = self.kept[place]
        return bool(self.lib.llama_state_seq_set_data(self.context, held, len(held), sequence, 0))

    def _save(self, sequence: int, place: int) -> bool:
        with temporary_directory() as folder:
            path = folder / "state"
            count = self.lib.llama_state_seq_save_file(self.context, os.fsencode(path), sequence, None, 0)
            self.kept[place] = path.read_bytes() if count else b""
        return bool(count)

    def _load(self, sequence: int, place: int) -> bool:
        count, tokens = ctypes.c_size_t(), (ctypes.c_int32 * 1)()  # without room for tokens, it reads nothing else
        with temporary_directory() as folder:
            path = Path(folder) / "state"
            path.write_bytes(self.kept[place])
            given = os.fsencode(path), sequence, tokens, 1, ctypes.byref(count)
            return bool(self.lib.llama_state_seq_load_file(self.context, *given))


def tell_memory(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """What the memory of a model's contexts is (schedule.py: Abilities)."""
    library.lib.llama_backend_init()
    with Quiet(library):
        model = load(library, request)
        kind = library.ggml.number(request.settings.type_k), library.ggml.number(request.settings.type_v)
        context = made_context(library, model, request, Room(256, 32, 32, 2, *kind, request.settings.flash_attn, 1))
        memory = library.lib.llama_get_memory(context)
        shifts = bool(memory) and bool(library.lib.llama_memory_can_shift(memory))
        states = any(ask_model(library.lib, name, model, ctypes.c_bool) for name in STATES)
        declare(library.lib, dict.fromkeys(_KNOWN, (ctypes.c_int32, Address)), "llama.cpp")
        rope, window = (getattr(library.lib, name)(model) for name in _KNOWN)
        say(states=states, window=window, shifts=shifts, turns=rope != NO_ROPE)
        library.lib.llama_free(context)
        library.lib.llama_model_free(model)
