"""llama.cpp's heads by ctypes: models loaded with them, contexts of them, batches of tokens with hidden states."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from llamadiff.llamacpp.installed import Installed
from llamadiff.llamacpp.interface import Handle, Library
from llamadiff.llamacpp.layout import Address
from llamadiff.llamacpp.library import INSTALL, set_fields
from llamadiff.system.errors import UserError

OF_A_HEAD = 1  # LLAMA_CONTEXT_TYPE_MTP
_FLOATS = ctypes.POINTER(ctypes.c_float)
# llama-ext.h has them for C++ alone: the name as it is, as Itanium's ABI has it, and as Microsoft's.
_EXPORTED: dict[str, tuple[Any, Sequence[Any], tuple[str, ...]]] = {
    "llama_set_embeddings_nextn": (None, (Address, ctypes.c_bool, ctypes.c_bool), (
        "_Z26llama_set_embeddings_nextnP13llama_contextbb", "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
    )),
    "llama_get_embeddings_nextn": (_FLOATS, (Address,), (
        "_Z26llama_get_embeddings_nextnP13llama_context",
        "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
    )),
    "llama_set_nextn_layer_offset": (None, (Address, ctypes.c_int32), (
        "_Z28llama_set_nextn_layer_offsetP13llama_contexti",
        "?llama_set_nextn_layer_offset@@YAXPEAUllama_context@@H@Z",
    )),
    "llama_model_n_layer_nextn": (ctypes.c_int32, (Address,), ()),
    "llama_model_n_embd_out": (ctypes.c_int32, (Address,), ()),
}  # fmt: skip


class HeadLibrary:
    """What a head asks of a llama.cpp beside a Library's own. Raises UserError for one that has no heads."""

    def __init__(self, library: Library) -> None:
        if not isinstance(library, Installed):
            raise UserError(
                f"{library.name}: heads are run by an installed llama.cpp; leave out --llama-cpp DIR, "
                f"and pip install {INSTALL}"
            )
        self.functions = {name: _exported(library, name) for name in _EXPORTED}
        self.api = library.api = _HeadApi(library.api)

    def count(self, model: Handle) -> int:
        """How many heads a model has."""
        return int(self.functions["llama_model_n_layer_nextn"](model))

    def width(self, model: Handle) -> int:
        """How many values a hidden state has."""
        return int(self.functions["llama_model_n_embd_out"](model))

    def begin(self, of_a_head: bool, snapshots: int = 0) -> None:
        """The next context is a head's, or the trunk's, of whose recurrent states so many earlier ones are kept."""
        self.api.of_a_head, self.api.hidden, self.api.snapshots = of_a_head, None, snapshots

    def show_hidden(self, context: Handle, masked: bool) -> None:
        """Have a context keep its hidden states: of all tokens, or of those with logits (``masked``)."""
        self.functions["llama_set_embeddings_nextn"](context, True, masked)

    def hidden(self, context: Handle, count: int) -> bytes:
        """The hidden states, of so many values in all, that the last batch left: float32."""
        return ctypes.string_at(self.functions["llama_get_embeddings_nextn"](context), 4 * count)

    def choose(self, context: Handle, number: int) -> None:
        """The head that a context runs, of several."""
        self.functions["llama_set_nextn_layer_offset"](context, number)

    def pair_with(self, rows: bytes) -> None:
        """Hidden states, float32, one for each token of the next batches; none of them, if there are no rows."""
        self.api.hidden = (ctypes.c_float * (len(rows) // 4)).from_buffer_copy(rows) if rows else None


def _exported(library: Library, name: str) -> Any:
    """One of the functions above, under whichever name it is there."""
    result, arguments, others = _EXPORTED[name]
    function = next((found for each in (name, *others) if (found := getattr(library.lib, each, None))), None)
    if function is None:
        raise UserError(f"{library.name}: has no {name}, and so no heads; pip install {INSTALL}")
    function.restype, function.argtypes = result, list(arguments)
    return function


class _HeadApi:
    """An ``api`` of Installed's that loads heads, makes their contexts, and gives batches hidden states."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self.of_a_head, self.snapshots = False, 0
        self.hidden: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def llama_model_default_params(self) -> Any:
        params = self._api.llama_model_default_params()
        set_fields(params, load_mtp=True)
        return params

    def llama_context_default_params(self) -> Any:
        params = self._api.llama_context_default_params()
        kept = {"n_rs_seq": self.snapshots} if self.snapshots else {}
        set_fields(params, ctx_type=OF_A_HEAD * self.of_a_head, **kept)
        return params

    def llama_decode(self, context: Handle, batch: Any) -> int:
        """llama_decode; the hidden states are taken away again before the batch is freed: they are not malloc's."""
        if self.hidden is not None:
            batch.embd = ctypes.cast(self.hidden, dict(batch._fields_)["embd"])
        code = int(self._api.llama_decode(context, batch))
        batch.embd = None  # as llama_batch_init leaves it
        return code
