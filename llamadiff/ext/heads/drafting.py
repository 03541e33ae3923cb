"""llama.cpp's speculative decoding with a model's own head, greedy; then parts of it alone. In its process.

As common/speculative.cpp (draft-mtp) and tools/server/server-context.cpp have it. A round: the head drafts behind the
last token, each draft with the head's own hidden state; its keys are taken out again; the trunk runs the last token and
the drafts; the head gets the same batch with the trunk's hidden states; what is refused is taken out of both caches.
"""

from __future__ import annotations

import array
import ctypes
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any

from llamadiff.ext.heads.head_library import HeadLibrary
from llamadiff.ext.heads.head_observer import no_head
from llamadiff.llamacpp.interface import Handle, Library, Room
from llamadiff.llamacpp.layout import Address, declare
from llamadiff.llamacpp.observer import Observer
from llamadiff.llamacpp.request import Request, Say
from llamadiff.llamacpp.session import Quiet, ask_model, load
from llamadiff.llamacpp.tensor_transport import Feed
from llamadiff.system.errors import UserError

AT_ONCE = 512  # tokens of a prompt that are run together: llama.cpp's own n_ubatch
PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
STATES = ("llama_model_is_recurrent", "llama_model_is_hybrid")
ZEROS = ""  # the name of hidden states that are none
_SIZE = ctypes.c_size_t
_CALLS: dict[str, tuple[Any, ...]] = {
    "llama_memory_seq_pos_max": (ctypes.c_int32, Address, ctypes.c_int32),
    "llama_n_rs_seq": (ctypes.c_uint32, Address),
    "llama_state_seq_get_size_ext": (_SIZE, Address, ctypes.c_int32, ctypes.c_uint32),
    "llama_state_seq_get_data_ext": (_SIZE, Address, Address, _SIZE, ctypes.c_int32, ctypes.c_uint32),
    "llama_state_seq_set_data_ext": (_SIZE, Address, Address, _SIZE, ctypes.c_int32, ctypes.c_uint32),
}


def run_drafting(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """An errand: a speculative run; then whatever is asked for of trunk and head alone, until nothing is."""
    carry_out(Drafter, library, request, say, feed)


def carry_out(kind: type[Drafter], library: Library, request: Request, say: Say, feed: Feed) -> None:
    """The errand, by a kind of drafter."""
    heads = HeadLibrary(library)
    declare(library.lib, _CALLS, "llama.cpp")
    say(phase="loading the model into llama.cpp")
    with Quiet(library):
        model = load(library, request)
        count = heads.count(model)
        if not count:
            raise no_head(request.model)
        drafter = kind(library, model, request, list(request.tokens), feed)
        drafter.heads, drafter.count = heads, count
        drafter.run(say)
        drafter.close()
        library.lib.llama_model_free(model)


@dataclass(frozen=True)
class Row:
    """A token that a head runs: where, and with which hidden state (float32)."""

    token: int
    position: int
    hidden: bytes


class RefusedError(Exception):
    """llama.cpp would not go on."""


class Context:
    """One of llama.cpp's: the trunk's, or a head's."""

    def __init__(self, drafter: Drafter, of_a_head: bool, snapshots: int = 0) -> None:
        self.heads, self.library, self.lib = drafter.heads, drafter.library, drafter.lib
        self.n_vocab, self.width = drafter.n_vocab, drafter.heads.width(drafter.model)
        self.name = "the head's context" if of_a_head else "the trunk's context"
        self.heads.begin(of_a_head, snapshots)
        self.handle: Handle = drafter._make_context(drafter.request.settings)
        self.heads.show_hidden(self.handle, masked=of_a_head)
        self.memory = self.lib.llama_get_memory(self.handle)

    def run(self, rows: Sequence[Row], first: int = 0, ends: bool = False) -> None:
        """Decode rows, with logits from the row number ``first`` on; a head takes their hidden states, and of those
        that have logits it ``ends`` with its own.
        """
        hidden = b"".join(row.hidden for row in rows)
        assert len(hidden) in (0, 4 * self.width * len(rows))  # llama.cpp reads as many
        self.heads.pair_with(hidden)
        with_logits = [int(number >= first) for number in range(len(rows))]
        tokens, positions = [row.token for row in rows], [row.position for row in rows]
        code = self.library.decode(self.handle, tokens, positions, [0] * len(rows), with_logits)
        self.heads.pair_with(b"")
        if code > 0:
            raise UserError(f"llama_decode failed with code {code} in {self.name}")
        if code:
            raise RefusedError(f"llama_decode failed with code {code} in {self.name}, at position {positions[0]}")
        self.count = len(rows) - first if ends else len(rows)

    def logits(self, place: int) -> bytes:
        """Those of the last batch's row."""
        return ctypes.string_at(self.lib.llama_get_logits_ith(self.handle, place), 4 * self.n_vocab)

    def hidden(self) -> bytes:
        """The hidden states that the last batch left."""
        return self.heads.hidden(self.handle, self.count * self.width)

    def remove(self, start: int) -> None:
        """Take what is there from a position on out of the cache."""
        if not self.lib.llama_memory_seq_rm(self.memory, 0, start, -1):
            raise RefusedError(f"llama_memory_seq_rm(mem, 0, {start}, -1) is refused in {self.name}")

    def end(self) -> int:
        """The last position that the cache has; -1: it is empty."""
        return int(self.lib.llama_memory_seq_pos_max(self.memory, 0))

    def save(self) -> Any:
        """What no part can be taken out of: recurrent states."""
        size = int(self.lib.llama_state_seq_get_size_ext(self.handle, 0, PARTIAL))
        buffer = ctypes.create_string_buffer(size)
        self.lib.llama_state_seq_get_data_ext(self.handle, buffer, size, 0, PARTIAL)
        return buffer

    def restore(self, saved: Any) -> None:
        if not self.lib.llama_state_seq_set_data_ext(self.handle, saved, len(saved), 0, PARTIAL):
            raise RefusedError(f"llama_state_seq_set_data_ext is refused in {self.name}")


class Drafter(Observer):
    """A speculative run, in one sequence. Each method is a step, which a mistake may replace."""

    heads: HeadLibrary
    count: int  # how many heads there are

    def run(self, say: Say) -> None:
        """The run; then questions, each answered by logits."""
        say(phase="drafting and verifying in llama.cpp")
        try:
            self.speculate(*self.request.way.steps[0].of)
        except RefusedError as error:
            self.feed.send({"refused": str(error)})
        self._leave()
        say(phase="running trunk and head alone")
        self.named: dict[str, bytes] = {ZEROS: bytes(4 * self.heads.width(self.model))}
        self.feed.send({"asks": True})
        while asked := self.feed.await_word("asked"):
            try:
                logits = (self._run_trunk if asked["of"] == "trunk" else self._run_head)(asked)
                self.feed.send({"answer": len(logits)}, b"".join(logits))
            except RefusedError as error:
                self.feed.send({"answer": 0, "refused": str(error)}, b"")
            self._leave()

    def _leave(self) -> None:
        self.heads.begin(False)
        self.close()
        self.contexts.clear()

    def _room(self, settings: Any) -> Room:
        room = super()._room(settings)
        return replace(room, n_batch=AT_ONCE, n_ubatch=AT_ONCE, n_ctx=max(256, self.total + 64))

    # -- the speculative run -------------------------------------------------------------------------------------------

    def speculate(self, drafts: int, wanted: int) -> None:
        """Run the prompt, then rounds of so many drafts until so many tokens are there."""
        recurs = any(ask_model(self.lib, name, self.model, ctypes.c_bool) for name in STATES)
        self.trunk = Context(self, False, drafts if recurs else 0)
        self.by_state = recurs and not self.lib.llama_n_rs_seq(self.trunk.handle)
        self.head = Context(self, True)
        self.text, self.most = list(self.tokens), min(drafts, self.count) if self.count > 1 else drafts
        self.pending = bytes(4 * self.trunk.width)  # the hidden state before the next token: zeros before the first
        self.drafted = self.accepted = 0
        for start in range(0, len(self.tokens), AT_ONCE):
            tokens = self.tokens[start : start + AT_ONCE]
            hidden = self.verify(tokens, start, len(tokens) - 1)
            self.feed_head(tokens, start, hidden)
            self.pending = self.row_of(hidden, len(tokens) - 1)
        logits = self.trunk.logits(len(tokens) - 1)
        self.text.append(self.chosen(logits))
        about = {"order": sys.byteorder, "vocabulary": self.n_vocab, "heads": self.count}
        self.feed.send({"prompt": {"chosen": self.text[-1], **about}}, logits)
        while len(self.text) < len(self.tokens) + wanted:
            self.round()
        self.feed.send({"counted": {"drafted": self.drafted, "accepted": self.accepted}})

    def round(self) -> None:
        position = len(self.text) - 1
        saved, before = self.trunk.save() if self.by_state else None, self.pending
        drafts, logits = self.draft(position)
        self.take_back(self.head, position)
        ends = [self.head.end()]
        run = [self.text[-1], *drafts]
        chosen, row_logits, hidden = self._verified(run, position)
        accepted = self.count_accepted(drafts, chosen)
        if saved is not None and accepted < len(drafts):  # from its state on, what was accepted is run once more
            self.trunk.restore(saved)
            self.take_back(self.trunk, position)
            self.take_back(self.head, position)
            self.pending = before
            again, logits_again, hidden = self._verified(run[: accepted + 1], position)
            chosen[: accepted + 1], row_logits[: accepted + 1] = again, logits_again
        self.drafted, self.accepted = self.drafted + len(drafts), self.accepted + self.counted(accepted)
        self.text += [*drafts[:accepted], chosen[accepted]]
        self.pending = self.row_of(hidden, accepted)
        for context in (self.trunk, self.head):
            self.take_back(context, position + accepted + 1)
            ends.append(context.end())
        record = {"position": position, "drafts": drafts, "chosen": chosen, "accepted": accepted, "ends": ends}
        self.feed.send({"round": record}, b"".join(logits), b"".join(row_logits))

    def _verified(self, tokens: Sequence[int], position: int) -> tuple[list[int], list[bytes], bytes]:
        """What the trunk goes on with behind each of some tokens, its logits, and its hidden states."""
        hidden = self.verify(tokens, position)
        row_logits = [self.trunk.logits(place) for place in range(len(tokens))]
        self.feed_head(tokens, position, hidden)
        return [self.chosen(each) for each in row_logits], row_logits, hidden

    def draft(self, position: int) -> tuple[list[int], list[bytes]]:
        """Tokens behind the last one, one behind the other, and the logits of each.

        Of several heads each drafts one, from its own keys of all tokens since the last one.
        """
        drafts, row_logits, rows = list[int](), list[bytes](), [self.first_row(position)]
        for number in range(self.most):
            if self.count > 1:
                self.take_back(self.head, position)
                self.choose(number)
            self.run_head(rows if self.count > 1 else rows[-1:], last=True)
            row_logits.append(self.head.logits(-1))
            drafts.append(self.chosen(row_logits[-1]))
            rows.append(self.next_row(rows[-1], drafts, self.head.hidden()))
        self.choose(0)
        return drafts, row_logits

    def first_row(self, position: int) -> Row:
        """The last token, and the trunk's hidden state of the one before."""
        return Row(self.text[-1], position, self.pending)

    def next_row(self, row: Row, drafts: Sequence[int], hidden: bytes) -> Row:
        """A draft, and the head's own hidden state of the row before."""
        return Row(drafts[-1], row.position + 1, hidden)

    def verify(self, tokens: Sequence[int], start: int, first: int = 0) -> bytes:
        """The trunk's hidden states of tokens."""
        self.trunk.run([Row(token, start + n, b"") for n, token in enumerate(tokens)], first)
        return self.trunk.hidden()

    def feed_head(self, tokens: Sequence[int], start: int, hidden: bytes) -> None:
        """The tokens that the trunk ran go into the head, each with the trunk's hidden state of the token before."""
        before = [self.pending, *(self.row_of(hidden, n) for n in range(len(tokens) - 1))]
        rows = [Row(token, start + n, row) for n, (token, row) in enumerate(zip(tokens, before, strict=True))]
        for number in range(self.count):
            if self.count > 1:
                self.take_back(self.head, start)
                self.choose(number)
            self.run_head(rows)
        self.choose(0)

    def run_head(self, rows: Sequence[Row], last: bool = False) -> None:
        """A batch of the head's, with logits of the last row or of none."""
        self.head.run(rows, len(rows) - last, ends=True)

    def choose(self, number: int) -> None:
        if self.count > 1:
            self.heads.choose(self.head.handle, number)

    def take_back(self, context: Context, start: int) -> None:
        context.remove(start)

    def chosen(self, logits: bytes) -> int:
        """The first of the largest logits."""
        row = array.array("f", logits)
        return row.index(max(row))

    def count_accepted(self, drafts: Sequence[int], chosen: Sequence[int]) -> int:
        """How many drafts the trunk goes on with, up to the first that it does not."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, chosen, strict=False)))

    def counted(self, accepted: int) -> int:
        """What a round adds to the number of accepted drafts."""
        return accepted

    def row_of(self, hidden: bytes, number: int) -> bytes:
        size = 4 * self.heads.width(self.model)
        return hidden[size * number : size * (number + 1)]

    def _hidden(self, name: str, number: int) -> bytes:
        """A row of those under a name; ``name@kind``: rounded."""
        name, _, kind = name.partition("@")
        row = self.row_of(self.named[name], number)
        return rounded(row, kind) if kind else row

    # -- alone ---------------------------------------------------------------------------------------------------------

    def _run_trunk(self, asked: dict[str, Any]) -> list[bytes]:
        """Tokens in a context of their own, one by one from ``alone`` on: logits from row ``first`` on. Their hidden
        states are kept under the ``name``.
        """
        context, tokens, row_logits, hidden = Context(self, False), asked["tokens"], list[bytes](), list[bytes]()
        for start, stop in batches(len(tokens), asked["alone"]):
            first = max(0, min(asked["first"], stop - 1) - start)
            context.run([Row(token, start + n, b"") for n, token in enumerate(tokens[start:stop])], first)
            row_logits += [context.logits(row - start) for row in range(start, stop) if row >= asked["first"]]
            hidden.append(context.hidden())
        self.named[asked["name"]] = b"".join(hidden)
        return row_logits

    def _run_head(self, asked: dict[str, Any]) -> list[bytes]:
        """Rows [token, position, name, number] in a context of the head ``part``'s own: the last one's logits. The
        hidden state that it gives of that row is kept under the ``name``.
        """
        context = Context(self, True)
        if self.count > 1:
            self.heads.choose(context.handle, asked["part"])
        rows = [Row(token, place, self._hidden(name, number)) for token, place, name, number in asked["rows"]]
        for start, stop in batches(len(rows), asked["alone"]):
            context.run(rows[start:stop], stop - start - (stop == len(rows)), ends=True)
        self.named[asked["name"]] = context.hidden()
        return [context.logits(-1)]


def rounded(row: bytes, kind: str) -> bytes:
    """A row of float32 as a kind has it: f16, bf16, or i8 with the row's own scale."""
    values = array.array("f", row)
    if kind == "f16":
        return array.array("f", struct.unpack(f"{len(values)}e", struct.pack(f"{len(values)}e", *values))).tobytes()
    if kind == "bf16":
        bits = (number + 0x7FFF + (number >> 16 & 1) & 0xFFFF0000 for number in array.array("I", row))
        return array.array("I", bits).tobytes()
    scale = max(map(abs, values)) / 127 or 1.0
    return array.array("f", (scale * round(value / scale) for value in values)).tobytes()


def batches(count: int, alone: int) -> list[tuple[int, int]]:
    """Where batches begin and end: together up to ``alone``, the first one being the short one; then one by one."""
    together = min(alone, count)
    edges = [*range(together, 0, -AT_ONCE), 0][::-1]
    return [*pairwise([*edges, *range(together + 1, count + 1)])]
